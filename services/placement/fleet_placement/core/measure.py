"""Telemetry made usable: nonsense dropped with a reason, service time smoothed, silence noticed."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import msgspec

from fleet_contracts.control import Telemetry, WorkerInfo

#: Figures above these are taken for broken clocks and counters, not for load.
MAX_SERVICE_S = 3600.0
MAX_QUEUED = 1_000_000
MAX_SLOTS = 100_000


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a worker's load.

    Attributes:
        report: the latest report, cleaned.
        received_s: when it arrived.
        service_s: seconds per item, smoothed; 0 = not measured yet.
        progressed_s: last time an item was finished, or nothing was running.
    """

    report: Telemetry
    received_s: float
    service_s: float
    progressed_s: float

    def service_now_s(self) -> float:
        """Seconds per item, counting what is running: an item cannot be faster than it already took."""
        if self.report.in_flight == 0:
            return self.service_s
        return max(self.service_s, self.received_s - self.progressed_s)

    @property
    def queued(self) -> int:
        """Items waiting at the worker, all classes."""
        return sum(self.report.queued.values())


def clean(report: Telemetry, info: WorkerInfo) -> tuple[Telemetry | None, tuple[str, ...]]:
    """Drop what cannot be true.

    Returns:
        The report with impossible figures replaced by "unknown" (None when it is not this worker's at all), and one
        reason per thing dropped.
    """
    if (report.stage, report.pool) != (info.stage, info.pool):
        return None, (f"speaks for {report.stage.value}/{report.pool}, registered in {info.stage.value}/{info.pool}",)
    reasons: list[str] = []
    changes: dict[str, object] = {}
    for name, limit in (("service_s", MAX_SERVICE_S), ("queue_wait_s", MAX_SERVICE_S), ("utilisation_ratio", 1.5)):
        value = {"service_s": report.service_s, "queue_wait_s": report.queue_wait_s}.get(name, report.utilisation_ratio)
        if not _is_within(value, limit):
            reasons.append(f"{name} of {value:g} is impossible")
            changes[name] = 0.0
    if not 0 < report.slots <= MAX_SLOTS:
        reasons.append(f"slots of {report.slots} is impossible")
        changes["slots"] = info.slots
    for name, count in (("in_flight", report.in_flight), ("completed_total", report.completed_total)):
        if count < 0:
            reasons.append(f"{name} of {count} is impossible")
            changes[name] = 0
    if any(not 0 <= count <= MAX_QUEUED for count in report.queued.values()):
        reasons.append(f"queue of {dict(sorted(report.queued.items()))} is impossible")
        changes["queued"] = {}
    return (msgspec.structs.replace(report, **changes) if changes else report), tuple(reasons)


def _is_within(value: float, limit: float) -> bool:
    return isfinite(value) and 0.0 <= value <= limit


def observe(before: Measured | None, report: Telemetry, now_s: float, half_life_s: float) -> Measured:
    """Take a cleaned report in.

    Args:
        half_life_s: after this long, half of the smoothed service time comes from reports since.
    """
    if before is None or report.completed_total < before.report.completed_total:
        return Measured(report=report, received_s=now_s, service_s=report.service_s, progressed_s=now_s)
    has_progressed = report.in_flight == 0 or report.completed_total > before.report.completed_total
    return Measured(
        report=report,
        received_s=now_s,
        service_s=_smoothed(before.service_s, report.service_s, now_s - before.received_s, half_life_s),
        progressed_s=now_s if has_progressed else before.progressed_s,
    )


def _smoothed(old_s: float, new_s: float, elapsed_s: float, half_life_s: float) -> float:
    if new_s <= 0.0:
        return old_s
    if old_s <= 0.0:
        return new_s
    keep: float = 0.5 ** (max(0.0, elapsed_s) / half_life_s)
    return keep * old_s + (1.0 - keep) * new_s
