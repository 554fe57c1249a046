"""Tensor references: where bytes are, never the bytes (except small values carried inline)."""

from __future__ import annotations

from fleet_contracts.base import Contract


class InlinePlace(Contract, frozen=True, kw_only=True, tag="inline"):
    """The tensor is small enough to travel in the message itself (below `shm_threshold_bytes`)."""

    data: bytes


class MemoryPlace(Contract, frozen=True, kw_only=True, tag="memory"):
    """A key of the in-process store: unit tests only."""

    key: str


class ArenaPlace(Contract, frozen=True, kw_only=True, tag="arena"):
    """A slot of a shared-memory segment on one host.

    Attributes:
        boot_id: identifies the host's boot, so a reader knows whether it can map the segment.
        segment: name of the segment file, without its folder.
        slot: slot index in the segment.
        generation: even, 64-bit, never reused: a slot written again has another one.
    """

    boot_id: str
    segment: str
    slot: int
    generation: int


class NetworkPlace(Contract, frozen=True, kw_only=True, tag="network"):
    """A key of a network connector.

    Attributes:
        connector: registered name of the connector (`redis`, later `mooncake`, `yuanrong`).
        key: opaque to everyone but the connector; write-once.
    """

    connector: str
    key: str


Place = InlinePlace | MemoryPlace | ArenaPlace | NetworkPlace


class TensorRef(Contract, frozen=True, kw_only=True, tag="tensor_ref.v1"):
    """A typed reference to one immutable, C-contiguous tensor.

    Attributes:
        place: where the bytes are.
        dtype: numpy name (`float32`, `uint8`, ...) or `bfloat16` (stored as uint16 bits).
        shape: sizes of the axes; () for a scalar.
        nbytes: bytes of the tensor.
        content_hash: hex digest that identifies the content (for images: decoded pixels, shape, mode, settings and
            model revision), or "" where nobody needs it.
        expires_unix_s: wall-clock second after which the store may forget it.
    """

    place: Place
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content_hash: str = ""
    expires_unix_s: float = 0.0


class SpillRequest(Contract, frozen=True, kw_only=True, tag="spill_request.v1"):
    """A reader on another host asks the owner of an arena slot to copy it to the network store."""

    ref: TensorRef


class SpillReply(Contract, frozen=True, kw_only=True, tag="spill_reply.v1"):
    """`ref` is the copy in the network store; None when the slot no longer holds that tensor (a miss)."""

    ref: TensorRef | None = None
