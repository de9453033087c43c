"""What a computation costs in virtual time.

Owns the compute model: base times of the configuration, times the stage's share of the model's
cost, times the slowdowns of stage and replica, times a log-normal jitter. Invariant: a worker's
times are a function of (seed, stage, replica) and of how many it has drawn, so they do not depend
on other workers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from asyncmesh.config import Config


class ComputeTimes:
    """Durations of one worker, in seconds."""

    __slots__ = ("_jitter", "_random", "backward_s", "forward_s", "update_s")

    def __init__(
        self, config: Config, stage: int, replica: int, stage_costs: Sequence[float] | None
    ) -> None:
        compute = config.compute
        factor = stage_costs[stage] if stage_costs else 1.0
        if compute.stage_slowdown:
            factor *= compute.stage_slowdown[stage]
        if compute.replica_slowdown:
            factor *= compute.replica_slowdown[replica]
        self.forward_s = compute.forward_ms / 1e3 * factor
        self.backward_s = compute.backward_ms / 1e3 * factor
        self.update_s = compute.update_ms / 1e3 * factor
        self._jitter = compute.jitter
        self._random = random.Random(f"{config.seed}/{stage}/{replica}/compute")

    def drawn(self, base_s: float) -> float:
        """A duration around `base_s`."""
        if not self._jitter:
            return base_s
        return base_s * self._random.lognormvariate(0.0, self._jitter)
