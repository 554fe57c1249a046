"""Work queues of the memory bus: delivery counts, ack timers, dead items."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fleet_common.bus.port import ConsumerBacklog, WorkMessage
from fleet_common.errors import BusError, QueueFullError
from fleet_contracts.base import PriorityClass, Stage

_DUPLICATE_WINDOW_S = 120.0
_TELL_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """Limits of every queue; the defaults are those of `fleet bus apply`, `max_msgs` is per stage."""

    ack_wait_s: float = 6.0
    max_deliver: int = 5
    max_msgs: int = 100_000


@dataclass(slots=True, eq=False)
class _Item:
    subject: str
    stage: Stage
    payload: bytes
    expires_s: float
    delivery: int = 0
    due_s: float | None = None
    is_settled: bool = False
    is_dead: bool = False


class _Queue:
    """What a durable consumer sees: items of one subject."""

    def __init__(self) -> None:
        self.waiting: deque[_Item] = deque()
        self.again: deque[_Item] = deque()
        self.out: list[_Item] = []
        self.pulls: deque[MemoryPull] = deque()

    def pop(self) -> _Item | None:
        for queue in (self.again, self.waiting):
            while queue:
                item = queue.popleft()
                if not item.is_settled:
                    return item
        return None

    def next_pull(self) -> MemoryPull | None:
        for _ in range(len(self.pulls)):
            pull = self.pulls[0]
            self.pulls.rotate(-1)
            if pull.outstanding > 0:
                return pull
        return None


class MemoryWorkMessage:
    """A delivery of an item. A stale delivery settles the item too, as on the real server."""

    def __init__(self, queues: WorkQueues, item: _Item) -> None:
        self._queues = queues
        self._item = item
        self._delivery = item.delivery

    @property
    def payload(self) -> bytes:
        return self._item.payload

    @property
    def subject(self) -> str:
        return self._item.subject

    @property
    def delivery(self) -> int:
        return self._delivery

    async def ack(self) -> None:
        self._queues.check_up()
        self._queues.settle(self._item)

    async def nak(self, delay_s: float = 0.0) -> None:
        self._queues.check_up()
        self._queues.again_after(self._item, delay_s)

    async def in_progress(self) -> None:
        if self._queues.is_up:
            self._queues.extend(self._item)

    async def term(self, reason: str) -> None:
        self._queues.check_up()
        self._queues.settle(self._item)


class MemoryPull:
    """A pull on the queue of one subject."""

    def __init__(self, queues: WorkQueues, subject: str, on_message: Callable[[WorkMessage], None]) -> None:
        self.outstanding = 0
        self._is_stopped = False
        self._queues = queues
        self._subject = subject
        self._on_message = on_message

    def want(self, count: int) -> None:
        if self._is_stopped:
            return
        self.outstanding = max(0, count)
        self._queues.dispatch(self._subject)

    async def stop(self) -> None:
        self._is_stopped = True
        self.outstanding = 0
        self._queues.remove(self._subject, self)

    def hand_over(self, item: _Item, message: WorkMessage) -> None:
        """Give a message to the owner."""
        if self._is_stopped:
            self._queues.again_after(item, 0.0)
        else:
            self._on_message(message)


class MemoryDeadDelivery:
    """An item that reached `max_deliver`."""

    def __init__(self, queues: WorkQueues, item: _Item) -> None:
        self._queues = queues
        self.item = item

    @property
    def stage(self) -> Stage:
        return self.item.stage

    @property
    def payload(self) -> bytes:
        return self.item.payload

    @property
    def subject(self) -> str:
        return self.item.subject

    @property
    def num_delivered(self) -> int:
        return self.item.delivery

    async def settle(self) -> None:
        self._queues.check_up()
        self._queues.settle(self.item)


class WorkQueues:
    """All queues of a memory broker."""

    def __init__(self, limits: WorkLimits, now_s: Callable[[], float], alarm: Callable[[float], None]) -> None:
        """`alarm(delay_s)` is told when `tick` has something to do."""
        self.is_up = True
        self.dead: deque[MemoryDeadDelivery] = deque()
        self.on_dead: Callable[[], None] = lambda: None
        self._limits = limits
        self._now_s = now_s
        self._alarm = alarm
        self._queues: dict[str, _Queue] = {}
        self._items: dict[Stage, set[_Item]] = {}
        self._seen: dict[tuple[Stage, str], float] = {}

    def check_up(self) -> None:
        """Raise BusError while the broker is down."""
        if not self.is_up:
            raise BusError("the memory broker is down")

    def publish(self, stage: Stage, subject: str, payload: bytes, message_id: str, ttl_s: float) -> bool:
        """Store an item; False when its id was seen within two minutes."""
        now_s = self._now_s()
        seen_s = self._seen.get((stage, message_id))
        if seen_s is not None and now_s - seen_s < _DUPLICATE_WINDOW_S:
            return False
        items = self._items.setdefault(stage, set())
        if len(items) >= self._limits.max_msgs:
            raise QueueFullError(f"the work stream of {stage.value} is full")
        self._seen[(stage, message_id)] = now_s
        item = _Item(subject, stage, payload, now_s + ttl_s)
        items.add(item)
        self._queue(subject).waiting.append(item)
        self._alarm(ttl_s)
        self.dispatch(subject)
        return True

    def pull(self, subject: str, on_message: Callable[[WorkMessage], None]) -> MemoryPull:
        pull = MemoryPull(self, subject, on_message)
        self._queue(subject).pulls.append(pull)
        return pull

    def remove(self, subject: str, pull: MemoryPull) -> None:
        """Forget a pull."""
        pulls = self._queue(subject).pulls
        if pull in pulls:
            pulls.remove(pull)

    def take(self, subject: str, limit: int) -> list[WorkMessage]:
        """Deliver up to `limit` waiting items at once."""
        queue = self._queue(subject)
        taken: list[WorkMessage] = []
        while len(taken) < limit and (item := queue.pop()) is not None:
            taken.append(self._deliver(queue, item))
        return taken

    def dispatch(self, subject: str) -> None:
        """Hand waiting items to pulls that want some, soon (never from within this call)."""
        queue = self._queue(subject)
        while self.is_up and (pull := queue.next_pull()) is not None:
            item = queue.pop()
            if item is None:
                return
            pull.outstanding -= 1
            asyncio.get_running_loop().call_soon(pull.hand_over, item, self._deliver(queue, item))

    def dispatch_all(self) -> None:
        """Hand out whatever waits."""
        for subject in list(self._queues):
            self.dispatch(subject)

    def settle(self, item: _Item) -> None:
        """The item is over."""
        item.is_settled = True
        self._items[item.stage].discard(item)
        queue = self._queue(item.subject)
        if item in queue.out:
            queue.out.remove(item)

    def extend(self, item: _Item) -> None:
        """Restart the ack timer."""
        if item.due_s is not None:
            item.due_s = self._now_s() + self._limits.ack_wait_s
            self._alarm(self._limits.ack_wait_s)

    def again_after(self, item: _Item, delay_s: float) -> None:
        """Deliver again once `delay_s` has passed."""
        if item.due_s is None:
            return
        item.due_s = self._now_s() + delay_s
        self.tick()
        self._alarm(delay_s)

    def tick(self, *, force: bool = False) -> None:
        """Do what time has brought: ack timers (`force`: all of them at once), expiry of items."""
        now_s = self._now_s()
        for items in self._items.values():
            for item in [item for item in items if item.expires_s <= now_s]:
                self.settle(item)
        for subject, queue in list(self._queues.items()):
            for item in [item for item in queue.out if force or (item.due_s or 0.0) <= now_s]:
                queue.out.remove(item)
                self._time_out(queue, item)
            self.dispatch(subject)
        if self.dead:
            self.on_dead()

    def tell_dead_again(self) -> None:
        """Tell of dead items that are not settled once more, in a second."""
        self._alarm(_TELL_AGAIN_S)

    def backlog(self) -> list[ConsumerBacklog]:
        """The backlog of every queue that was ever used."""
        return [_backlog(subject, queue) for subject, queue in sorted(self._queues.items())]

    def payloads(self, stages: Iterable[Stage]) -> list[bytes]:
        """Payloads stored and not settled."""
        return [item.payload for stage in stages for item in self._items.get(stage, set())]

    def _queue(self, subject: str) -> _Queue:
        return self._queues.setdefault(subject, _Queue())

    def _deliver(self, queue: _Queue, item: _Item) -> MemoryWorkMessage:
        item.delivery += 1
        item.due_s = self._now_s() + self._limits.ack_wait_s
        queue.out.append(item)
        self._alarm(self._limits.ack_wait_s)
        return MemoryWorkMessage(self, item)

    def _time_out(self, queue: _Queue, item: _Item) -> None:
        item.due_s = None
        if item.delivery < self._limits.max_deliver:
            queue.again.append(item)
            return
        item.is_dead = True
        self.dead.append(MemoryDeadDelivery(self, item))


def _backlog(subject: str, queue: _Queue) -> ConsumerBacklog:
    _, _, stage, pool, priority_class, lane = subject.split(".")
    return ConsumerBacklog(
        stage=Stage(stage),
        pool=pool,
        priority_class=PriorityClass(priority_class),
        lane=lane,
        num_pending=sum(not item.is_settled for item in queue.waiting),
        num_ack_pending=len(queue.out) + sum(not item.is_settled for item in queue.again),
    )
