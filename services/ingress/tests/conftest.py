"""What the tests of the ingress share."""

from __future__ import annotations

import pytest

from fleet_ingress import dispatcher
from fleet_ingress.jobs import driver, run
from fleet_ingress.pipelines import shelf


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines, jobs and files are looked at twenty times a second, so that no test waits for the next look."""
    monkeypatch.setattr(dispatcher, "_TICK_S", 0.05)
    monkeypatch.setattr(run, "_PAUSE_S", 0.05)
    for module in (driver, run, shelf):
        monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.05)
