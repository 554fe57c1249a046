"""Whether a name can be asked now."""

from __future__ import annotations

from fleet_common.errors import DependencyError
from fleet_contracts.control import ModelCard
from fleet_contracts.models import ModelState
from fleet_ingress.core.catalog import Catalog
from fleet_ingress.errors import model_not_found, model_not_ready


def served(catalog: Catalog, model: str) -> tuple[ModelCard, str]:
    """The card of a model that serves, and its parent when it is an adapter. Raises DependencyError, ApiError."""
    standing = catalog.standing(model)
    if standing is None and not catalog.cards():
        # The first worker is still loading: which models there will be is not known yet.
        raise DependencyError("no model is served yet")
    if standing is None:
        raise model_not_found(model)
    if standing.state is not ModelState.READY or standing.card is None:
        raise model_not_ready(standing)
    return standing.card, standing.parent
