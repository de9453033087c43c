"""How stale the pipeline axis is: every count follows from (stages, accumulation, extra depth).

Owns capacity, version and delay of strict asynchronous 1F1B. Invariant: in the strict order these
are the exact values of every microbatch of any run, whatever its timing.
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


def forward_version(microbatch: int, capacity: int, accumulation: int) -> int:
    """max(0, ⌊(n - (c_s - 1)) / k⌋): the version at which microbatch n is forwarded."""
    return max(0, (microbatch - (capacity - 1)) // accumulation)


def update_of(microbatch: int, accumulation: int) -> int:
    """⌊n / k⌋: the version that n's gradient is applied to."""
    return microbatch // accumulation


def delay(microbatch: int, capacity: int, accumulation: int) -> int:
    """Updates between the version of n's gradient and the version it is applied to."""
    return update_of(microbatch, accumulation) - forward_version(microbatch, capacity, accumulation)


def mean_delay(capacity: int, accumulation: int) -> float:
    """δ_s = (c_s - 1) / k: the mean over k consecutive microbatches, once the pipeline is full."""
    return (capacity - 1) / accumulation
