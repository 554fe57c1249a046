"""After which steps a picture is shown on its way. Pure."""

from __future__ import annotations


def partial_steps(num_steps: int, num_partial: int) -> tuple[int, ...]:
    """Counts of finished steps, rising, after which a partial picture is shown: evenly spread, never the last step.

    Fewer than `num_partial` when there are not that many steps in between.
    """
    wanted = {round(num_steps * (number + 1) / (num_partial + 1)) for number in range(num_partial)}
    return tuple(sorted(step for step in wanted if 0 < step < num_steps))
