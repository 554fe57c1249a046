"""`/v1/models`: what can be asked for."""

from __future__ import annotations

import msgspec
from litestar import Request, Response, get
from litestar.datastructures import State
from litestar.params import FromPath

from fleet_contracts.control import ModelCard
from fleet_contracts.models import ModelState
from fleet_ingress.api.responses import ModelList, ModelReport
from fleet_ingress.context import Ingress, ingress_of
from fleet_ingress.core.catalog import Standing
from fleet_ingress.core.pipeline_standing import needs_unknown, standing_of
from fleet_ingress.core.reason import public_reason
from fleet_ingress.errors import model_not_found

#: One that is being taken off is no longer among them.
_LISTED = frozenset({ModelState.READY, ModelState.LOADING, ModelState.FAILED})


@get("/v1/models")
async def list_models(request: Request[None, None, State]) -> Response[bytes]:
    """All models and adapters, those that are loading or failed to included."""
    ingress = ingress_of(request.scope)
    standings = [one for one in ingress.view.catalog.standings() if one.state in _LISTED]
    reports = [*map(_report, standings), *_pipelines(ingress)]
    body = msgspec.json.encode(ModelList(data=sorted(reports, key=lambda one: one.id)))
    return Response(body, media_type="application/json")


@get("/v1/models/{model_id:path}")
async def get_model(request: Request[None, None, State], model_id: FromPath[str]) -> Response[bytes]:
    """One model; its name may hold slashes and dots."""
    name = model_id.removeprefix("/")
    ingress = ingress_of(request.scope)
    standing = ingress.view.catalog.standing(name) or _pipeline(ingress, name)
    if standing is None or standing.state not in _LISTED:
        raise model_not_found(name)
    return Response(msgspec.json.encode(_report(standing)), media_type="application/json")


def _pipeline(ingress: Ingress, name: str) -> Standing | None:
    shelf = ingress.pipelines.shelf
    found = shelf.pipelines().get(name)
    if found is not None:
        return standing_of(*found, ingress.view.catalog)
    fault = shelf.refused().get(name)
    return Standing(name, ModelState.FAILED, error=fault) if fault is not None else None


def _pipelines(ingress: Ingress) -> list[ModelReport]:
    """Files that are wrong included; those that need a model which this fleet does not have are not offered."""
    catalog, shelf = ingress.view.catalog, ingress.pipelines.shelf
    offered = [name for name, (found, _) in shelf.pipelines().items() if not needs_unknown(found, catalog)]
    standings = [_pipeline(ingress, name) for name in {*offered, *shelf.refused()} if catalog.standing(name) is None]
    return [_report(one) for one in standings if one is not None]


def _report(standing: Standing) -> ModelReport:
    # Until a worker says more, all that is known is that somebody wants it.
    card = standing.card or ModelCard(model=standing.name, input_modalities=(), output_modalities=())
    return ModelReport(
        id=standing.name,
        state=standing.state.value,
        error=public_reason(standing.error) or None,
        parent=standing.parent or None,
        created=int(card.created_unix_s),
        input_modalities=[modality.value for modality in card.input_modalities],
        output_modalities=[modality.value for modality in card.output_modalities],
        context_tokens=card.context_tokens,
        max_images=card.max_images,
        max_audios=card.max_audios,
        voices=list(card.voices),
    )
