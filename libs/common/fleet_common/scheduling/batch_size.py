"""How long to hold a batch open. (Sizing batches from memory and latency comes with C3.)"""

from __future__ import annotations


def linger_s(batch_timeout_s: float, service_s: float, last_batch_size: int) -> float:
    """Longest useful wait for a fuller batch, 0 to `batch_timeout_s`.

    A wait can pay only when others come at the same time (the last batch had company) and never more than what one
    engine call costs: a lone request on an idle worker starts at once.

    Args:
        service_s: mean seconds of an engine call, 0 when unknown.
        last_batch_size: items of the engine call before.
    """
    if last_batch_size < 2:
        return 0.0
    return min(batch_timeout_s, service_s / 2)
