"""Features of images seen before: least recently used out first, counted in bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: [num_tokens, hidden_size], float32 or bfloat16 bits as uint16.
Features = npt.NDArray[np.float32] | npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class FeatureKey:
    """What a cached entry belongs to. Tenants share nothing: a hit's speed would tell what others have sent.

    Attributes:
        content_hash: the whole hex digest, never a part of it.
    """

    tenant: str
    content_hash: str


class FeatureCache:
    """Arrays by key, at most `capacity_bytes` together; 0 keeps nothing."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[FeatureKey, Features] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries."""
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: FeatureKey) -> Features | None:
        """The entry, which counts as used now; None when there is none."""
        features = self._entries.get(key)
        if features is not None:
            self._entries.move_to_end(key)
        return features

    def put(self, key: FeatureKey, features: Features) -> None:
        """Keep an array that nobody will write to any more; evicts the longest unused until it fits."""
        if features.nbytes > self._capacity_bytes:
            return
        self._drop(key)
        self._entries[key] = features
        self._used_bytes += features.nbytes
        while self._used_bytes > self._capacity_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: FeatureKey) -> None:
        dropped = self._entries.pop(key, None)
        if dropped is not None:
            self._used_bytes -= dropped.nbytes
