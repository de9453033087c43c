"""A worker that sleeps instead of computing: `compute.emulated`.

Owns the stand-in for an engine. It sends activations, gradients and averaged coordinates of the
right sizes at the times that `[compute]` names, so a mesh far larger than a machine can be run
there to see what the runtime itself costs. Invariant: no number in it means anything, and a run
made with it has no loss.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from asyncmesh.config import Config
from asyncmesh.engine import wire_dtype
from asyncmesh.timing import ComputeTimes


class EmulatedEngine:
    """The interface of `engine.Engine`, without numbers."""

    def __init__(
        self,
        config: Config,
        stage: int,
        replica: int,
        coordinates: int,
        stage_costs: Sequence[float] | None,
    ) -> None:
        self._times = ComputeTimes(config, stage, replica, stage_costs)
        self._is_last = stage == config.mesh.stages - 1
        model = config.model
        self._output = torch.zeros(config.pipeline.microbatch_size, model.context, model.width)
        per_round = -(-coordinates // config.classes)
        self._offer = torch.zeros(
            per_round, dtype=wire_dtype(config.averaging.wire_dtype, torch.float32)
        )

    def forward(self, microbatch: int, x: Tensor | None, target: Tensor | None = None) -> Tensor:
        time.sleep(self._times.drawn(self._times.forward_s))
        return torch.zeros(()) if self._is_last else self._output

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        time.sleep(self._times.drawn(self._times.backward_s))
        return self._output

    def update(self) -> float:
        time.sleep(self._times.drawn(self._times.update_s))
        return 0.0

    def snapshot(self, round_: int) -> Tensor:
        return self._offer

    def merge(self, round_: int, mean: Tensor, update: int) -> None:
        """There is nothing to merge."""
