"""Which pictures take their next denoising step together: a pure state machine, (state, now) -> decision.

    waiting ──slot──► running ──last step──► gone
       ▲                 │
       └──── parked ◄────┘  a more urgent class needs the slot

A step is the unit of scheduling: pictures join, leave and change places between steps, whatever step each is at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

#: Pictures of one shape share a forward pass: (width, height) in pixels.
Shape = tuple[int, int]

#: Share of a new measurement in the running mean of seconds per step.
_NEW_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Job:
    """One picture to be made.

    Attributes:
        key: unique among the jobs held.
        rank: of its class, 0 = most urgent.
        deadline_unix_s: after it the picture is worthless.
        enqueued_unix_s: its age counts from here.
        num_steps: denoising steps from noise to picture, as far as is known before it begins.
    """

    key: str
    shape: Shape
    rank: int
    deadline_unix_s: float
    enqueued_unix_s: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """
    Attributes:
        slots: pictures in work at once: those whose latents are on the device.
        max_batch: pictures per forward pass.
        aging_s: a job older than this counts as of the most urgent class.
    """

    slots: int
    max_batch: int
    aging_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Tick:
    """What to do before and in the next step. `park` first: it makes the room that `admit` takes.

    Attributes:
        park: keys whose latents leave the device.
        admit: keys that start, or come back.
        step: keys of one shape that take their next step together.
    """

    park: tuple[str, ...] = ()
    admit: tuple[str, ...] = ()
    step: tuple[str, ...] = ()


@dataclass(slots=True)
class _Held:
    job: Job
    num_steps: int
    num_done: int = 0
    is_running: bool = False

    @property
    def num_left(self) -> int:
        return self.num_steps - self.num_done


@dataclass(slots=True)
class StepScheduler:
    """The pictures of one worker, by key in order of arrival."""

    policy: StepPolicy
    _held: dict[str, _Held] = field(default_factory=dict)
    _step_s: dict[Shape, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, job: Job) -> None:
        """A picture is wanted."""
        if job.key in self._held:
            raise ValueError(f"{job.key} is held already")
        self._held[job.key] = _Held(job, job.num_steps)

    def remove(self, key: str) -> None:
        """Finished, failed or cancelled; an unknown key is fine."""
        self._held.pop(key, None)

    def begun(self, key: str, num_steps: int) -> None:
        """It starts with the first of `num_steps` steps, for the first time or once more."""
        held = self._held[key]
        held.num_done = 0
        held.num_steps = num_steps

    def tick(self, now_unix_s: float) -> Tick:
        """The next decision; what it says counts as done."""
        order = sorted(self._held.values(), key=lambda held: self._urgency(held, now_unix_s))
        park, admit = self._places(order, now_unix_s)
        return Tick(park=tuple(park), admit=tuple(admit), step=tuple(self._next_pass(order)))

    def advanced(self, keys: Iterable[str], took_s: float) -> tuple[str, ...]:
        """These took one step together; returns those that took their last. Each is held until it is removed."""
        finished = []
        shape: Shape | None = None
        for key in keys:
            held = self._held.get(key)
            if held is None:
                continue
            held.num_done += 1
            shape = held.job.shape
            if held.num_left <= 0:
                finished.append(key)
        if shape is not None:
            known_s = self._step_s.get(shape)
            self._step_s[shape] = took_s if known_s is None else known_s + _NEW_SHARE * (took_s - known_s)
        return tuple(finished)

    def num_running(self) -> int:
        """Pictures that hold a slot."""
        return sum(held.is_running for held in self._held.values())

    def _places(self, order: list[_Held], now_unix_s: float) -> tuple[list[str], list[str]]:
        """Who leaves a slot and who gets one; changes them."""
        park: list[str] = []
        admit: list[str] = []
        num_free = self.policy.slots - self.num_running()
        # Least urgent first: those that have to leave.
        running = [held for held in reversed(order) if held.is_running]
        for held in order:
            if held.is_running:
                continue
            if num_free <= 0:
                # A slot changes hands between classes only: within one, parking would cost more than it gains.
                victim = running[0] if running else None
                if victim is None or self._rank(victim, now_unix_s) <= self._rank(held, now_unix_s):
                    break
                running.pop(0)
                victim.is_running = False
                park.append(victim.job.key)
                num_free += 1
            held.is_running = True
            admit.append(held.job.key)
            num_free -= 1
        return park, admit

    def _next_pass(self, order: list[_Held]) -> list[str]:
        """The most urgent running picture, and others of its shape."""
        running = [held for held in order if held.is_running and held.num_left > 0]
        if not running:
            return []
        shape = running[0].job.shape
        return [held.job.key for held in running if held.job.shape == shape][: self.policy.max_batch]

    def _rank(self, held: _Held, now_unix_s: float) -> int:
        is_old = now_unix_s - held.job.enqueued_unix_s >= self.policy.aging_s
        return 0 if is_old else held.job.rank

    def _urgency(self, held: _Held, now_unix_s: float) -> tuple[int, bool, float, float, str]:
        """Class, then the time that may be lost before the deadline is. What is late anyway lets the others pass."""
        job = held.job
        left_s = held.num_left * self._step_s.get(job.shape, 0.0)
        slack_s = job.deadline_unix_s - now_unix_s - left_s
        return (self._rank(held, now_unix_s), slack_s < 0, slack_s, job.enqueued_unix_s, job.key)
