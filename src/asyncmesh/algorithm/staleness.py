"""How stale the pipeline axis is: every count follows from (stages, accumulation, extra depth).

Owns the capacity c_s of strict asynchronous 1F1B, from which the rest follows: microbatch n is
forwarded at version max(0, ⌊(n - (c_s - 1)) / k⌋), its gradient goes into update ⌊n / k⌋, and the
difference is its delay. Invariant: in the strict order these are the exact values of every
microbatch of any run, whatever its timing.
"""

from __future__ import annotations

from collections.abc import Sequence


def edge_depths(stages: int, extra_depth: int | Sequence[int]) -> list[int]:
    """h for every edge between neighbouring stages."""
    if isinstance(extra_depth, int):
        return [extra_depth] * (stages - 1)
    return list(extra_depth)


def capacity(stage: int, stages: int, extra_depth: int | Sequence[int]) -> int:
    """c_s = 1 + Σ_{edges downstream of s} (1 + h_edge): most microbatches in flight at a stage."""
    return 1 + sum(1 + depth for depth in edge_depths(stages, extra_depth)[stage:])


def mean_delay(capacity: int, accumulation: int) -> float:
    """δ_s = (c_s - 1) / k: the mean over k consecutive microbatches, once the pipeline is full."""
    return (capacity - 1) / accumulation
