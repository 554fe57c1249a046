"""What happened to one request, step by step: the answer of `GET /v1/requests/{id}`."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet_contracts.base import Stage, StepId
from fleet_contracts.events import Attempt, StepDone
from fleet_contracts.preprocess import MediaItem
from fleet_ingress.api.timeline import MediaReport, StepReport

_Key = tuple[StepId, int, int]


@dataclass(slots=True)
class Timeline:
    """One row per attempt of a step, in order of arrival; media items merged by the part they stood in."""

    rows: dict[_Key, StepReport] = field(default_factory=dict)
    media: dict[str, MediaReport] = field(default_factory=dict)

    def started(self, attempt: Attempt, now_unix_s: float) -> None:
        """An attempt runs; the row is completed by its `StepDone`."""
        self.rows.setdefault(
            _key(attempt),
            StepReport(
                step=attempt.step_id,
                stage=attempt.stage,
                worker=attempt.worker_id,
                epoch=attempt.epoch,
                delivery=attempt.delivery,
                started_unix_s=now_unix_s,
            ),
        )

    def done(self, event: StepDone) -> None:
        """An attempt ended; its own clock readings replace ours."""
        attempt = event.attempt
        self.rows[_key(attempt)] = StepReport(
            step=attempt.step_id,
            stage=attempt.stage,
            pool=event.pool,
            worker=attempt.worker_id,
            epoch=attempt.epoch,
            delivery=attempt.delivery,
            queued_unix_s=event.queued_unix_s,
            started_unix_s=event.started_unix_s,
            finished_unix_s=event.finished_unix_s,
            batch_size=event.batch_size,
            bytes_in=event.bytes_in,
            bytes_out=event.bytes_out,
            outcome=event.outcome,
        )
        for item in event.media:
            self._merge(item, attempt.stage)

    def _merge(self, item: MediaItem, stage: Stage) -> None:
        known = self.media.get(item.part)
        # Only the encoder knows about its cache; preprocess may run again (repair) after it reported.
        cache_hit = item.cache_hit if stage is not Stage.PREPROCESS or known is None else known.cache_hit
        self.media[item.part] = MediaReport(
            part=item.part,
            kind=item.kind,
            width=item.width,
            height=item.height,
            mode=item.mode,
            sha256=item.sha256,
            num_tokens=item.num_tokens,
            source_width=item.source_width,
            source_height=item.source_height,
            cache_hit=cache_hit,
            duration_s=item.duration_s,
            sample_rate_hz=item.sample_rate_hz,
            num_channels=item.num_channels,
            grid=item.grid,
        )


def _key(attempt: Attempt) -> _Key:
    return (attempt.step_id, attempt.epoch, attempt.delivery)
