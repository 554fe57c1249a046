"""Ids: unguessable, usable as one token of a subject, and telling whose they are."""

from __future__ import annotations

import secrets

from fleet_contracts.base import IngressId, RequestId

_SEPARATOR = "_"


def new_ingress_id() -> IngressId:
    """8 random hex characters."""
    return IngressId(secrets.token_hex(4))


def new_request_id(ingress_id: IngressId) -> RequestId:
    """`<ingress>_<32 hex>`: any ingress can tell from it whom to ask about the request."""
    return RequestId(f"{ingress_id}{_SEPARATOR}{secrets.token_hex(16)}")


def ingress_of(request_id: str) -> IngressId | None:
    """The ingress a request id names, None when it is not one of our ids."""
    ingress, separator, rest = request_id.rpartition(_SEPARATOR)
    return IngressId(ingress) if separator and ingress and rest else None


def new_nonce() -> str:
    """16 random hex characters: the last token of a request's event subject."""
    return secrets.token_hex(8)
