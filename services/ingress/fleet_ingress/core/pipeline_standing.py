"""Where a pipeline stands: as far as the models it needs. Pure."""

from __future__ import annotations

from fleet_contracts.control import ModelCard
from fleet_contracts.models import ModelState
from fleet_ingress.core.catalog import Catalog, Standing, speaks
from fleet_ingress.core.pipeline_file import Pipeline


def needs_unknown(pipeline: Pipeline, catalog: Catalog) -> bool:
    """Whether it needs a model that nobody serves, or is about to."""
    return any(catalog.standing(model) is None for model in pipeline.models)


def standing_of(pipeline: Pipeline, fault: str, catalog: Catalog) -> Standing:
    """A pipeline as clients see it: ready when all its models are.

    Args:
        fault: what is wrong with its file now, while an earlier one is served; "" for nothing.
    """
    state, error = ModelState.READY, fault
    for model in pipeline.models:
        found = catalog.standing(model)
        if found is None or found.state in (ModelState.DRAINING, ModelState.GONE):
            state, error = ModelState.FAILED, f"it needs the model {model}, which is not served"
            break
        if found.state is ModelState.FAILED:
            state, error = ModelState.FAILED, f"it needs the model {model}, which failed: {found.error}"
            break
        if found.state is not ModelState.READY:
            state = ModelState.LOADING
    card = ModelCard(
        model=pipeline.name,
        input_modalities=pipeline.input_modalities,
        output_modalities=pipeline.output_modalities,
        voices=_voices(pipeline, catalog),
    )
    return Standing(pipeline.name, state, card, error=error)


def speech_model(catalog: Catalog) -> str | None:
    """The model that reads answers aloud: the first by name of those that speak and serve."""
    names = (card.model for card in catalog.cards() if speaks(card))
    ready = (name for name in sorted(names) if (found := catalog.standing(name)) and found.state is ModelState.READY)
    return next(ready, None)


def _voices(pipeline: Pipeline, catalog: Catalog) -> tuple[str, ...]:
    source = pipeline.outputs.get("audio")
    step = next((step for step in pipeline.steps if source is not None and step.id == source.step), None)
    card = catalog.card(step.model) if step is not None else None
    return card.voices if card is not None else ()
