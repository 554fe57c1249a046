"""The OpenAPI document tells of every route, and of nothing else."""

from __future__ import annotations

import json

from litestar.handlers import HTTPRouteHandler

from fleet_ingress.app import ROUTES, openapi_schema


def test_every_route_is_documented() -> None:
    served = {
        (method.lower(), path.replace(":path", "").replace(":str", ""))
        for route in ROUTES
        if isinstance(route, HTTPRouteHandler)
        for method in route.http_methods
        for path in route.paths
        if method != "OPTIONS"
    }

    paths = openapi_schema()["paths"]

    assert isinstance(paths, dict)
    assert served == {(method, path) for path, item in paths.items() for method in item}


def test_document_is_json_and_its_references_resolve() -> None:
    document = json.loads(json.dumps(openapi_schema()))

    text = json.dumps(document)
    names = {reference.split('"')[0] for reference in text.split('"#/components/schemas/')[1:]}
    assert names <= set(document["components"]["schemas"])
    assert {"ChatRequest", "ChatCompletion", "ErrorEnvelope"} <= names
