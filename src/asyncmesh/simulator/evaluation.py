"""Losses as a run goes on: training losses without waiting for the device, validation of the mean.

Owns what a run reports about its quality. What is validated is the mean of the replicas' weights
after the same update, because that is the model a run ends with; at the end each replica is
validated too, so that it shows how much of the result the averaging of the end makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncmesh.algorithm.correction import mean_in_order
from asyncmesh.config import Config
from asyncmesh.engine import StageProgram
from asyncmesh.errors import DivergedError
from asyncmesh.observe.events import Evaluation, Loss, Sink
from asyncmesh.simulator.mesh import Observer, VirtualWorker

Batch = tuple[Tensor, Tensor]
Progress = Callable[[int, float], None]  # update, loss

_LOSSES_KEPT_ON_DEVICE = (
    64  # reading one would stop the GPU's queue; a divergence may wait that long
)
# Uneven replicas drift apart in time. Weights that wait for a slow one's may take this much memory
# (but four validations may always wait); then a validation is given up rather than the machine.
_HELD_BYTES = 2**30
_HELD_AT_LEAST = 4


@dataclass(frozen=True)
class PendingLoss:
    time_s: float
    stage: int
    replica: int
    microbatch: int
    loss: Tensor


@dataclass
class RunObserver(Observer):
    """Records losses and validates; raises `DivergedError` on the first loss that is not finite."""

    config: Config
    emit: Sink
    programs: Sequence[StageProgram]
    validation: Sequence[Batch]
    tokens: Callable[[int], int]  # in so many microbatches
    progress: Progress | None = None
    _pending: list[PendingLoss] = field(default_factory=list)
    _collected: dict[int, dict[tuple[int, int], Tensor]] = field(default_factory=dict)
    _latest_s: dict[int, float] = field(default_factory=dict)
    _given_up: set[int] = field(default_factory=set)
    _constants: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # of replica 0

    def loss(self, time_s: float, worker: VirtualWorker, microbatch: int, loss: Tensor) -> None:
        self._pending.append(
            PendingLoss(time_s, worker.stage, worker.replica, microbatch, loss.detach())
        )
        if not loss.is_cuda or len(self._pending) >= _LOSSES_KEPT_ON_DEVICE:
            self.flush()

    def flush(self) -> None:
        """Read the pending losses, in one transfer, and record them."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        values = torch.stack([p.loss for p in pending]).double().tolist()
        for p, value in zip(pending, values, strict=True):
            self.emit(Loss(p.time_s, p.stage, p.replica, p.microbatch, value))
            self._check_finite(p, value)
        if self.progress is not None:
            self.progress(
                pending[-1].microbatch // self.config.pipeline.accumulation + 1, values[-1]
            )

    def _check_finite(self, pending: PendingLoss, value: float) -> None:
        if not math.isfinite(value):
            update = pending.microbatch // self.config.pipeline.accumulation + 1
            raise self._divergence(
                f"the training loss of replica {pending.replica} became {value} before update"
                f" {update}"
            )

    def _divergence(self, what: str) -> DivergedError:
        return DivergedError.at(self.config.optimizer.learning_rate, what)

    # -- validation -------------------------------------------------------------------------------
    def boundary(self, time_s: float, worker: VirtualWorker, update: int) -> None:
        mesh, last = self.config.mesh, update == self.config.train.updates
        if worker.engine is None or not (self.validation or last):
            return
        if update not in self._collected and not last and not self._has_room():
            self._given_up.add(update)
        if update in self._given_up:
            return
        collected = self._collected.setdefault(update, {})
        collected[worker.stage, worker.replica] = worker.engine.newest_weights()
        self._latest_s[update] = max(time_s, self._latest_s.get(update, 0.0))
        if worker.replica == 0:
            self._constants[worker.stage] = worker.engine.constants
        if len(collected) == mesh.stages * mesh.replicas:
            self.flush()
            del self._collected[update]
            self._evaluate(self._latest_s.pop(update), update, last, collected)

    def _has_room(self) -> bool:
        """Whether the weights of one more validation may wait for the slowest replica."""
        held = sum(flat.nbytes for waiting in self._collected.values() for flat in waiting.values())
        return held < _HELD_BYTES or len(self._collected) < _HELD_AT_LEAST

    def _evaluate(
        self, time_s: float, update: int, last: bool, weights: Mapping[tuple[int, int], Tensor]
    ) -> None:
        mesh = self.config.mesh
        replicas = [[weights[s, r] for s in range(mesh.stages)] for r in range(mesh.replicas)]
        means = [mean_in_order([row[s] for row in replicas]) for s in range(mesh.stages)]
        loss: float | None = None
        of_replicas: tuple[float, ...] = ()
        if self.validation:
            loss = self._validation_loss(means)
            if last:
                of_replicas = tuple(self._validation_loss(row) for row in replicas)
        microbatches = update * self.config.pipeline.accumulation * mesh.replicas
        distance = consensus_distance(replicas, means)
        tokens = self.tokens(microbatches)
        self.emit(Evaluation(time_s, update, tokens, loss, of_replicas, distance))
        if not math.isfinite(distance) or (loss is not None and not math.isfinite(loss)):
            what = "the validation loss" if loss is not None else "a weight"
            raise self._divergence(f"{what} is not finite after update {update}")

    def _validation_loss(self, weights: Sequence[Tensor]) -> float:
        """Mean over the validation batches, by their targets, of the loss of a whole model."""
        total, targets = torch.zeros((), dtype=torch.float64), 0
        for batch, target in self.validation:
            x = batch
            for stage, (program, flat) in enumerate(zip(self.programs, weights, strict=True)):
                x = program.evaluate(flat, self._constants[stage], x, target)
            total += x.double().cpu() * target.numel()
            targets += target.numel()
        return float(total) / targets


def consensus_distance(replicas: Sequence[Sequence[Tensor]], means: Sequence[Tensor]) -> float:
    """√(mean over replicas of Σ_s ‖w_{r,s} - w̄_s‖²) / √(Σ_s ‖w̄_s‖²)."""
    apart = sum(
        float((flat - mean).double().square().sum())
        for row in replicas
        for flat, mean in zip(row, means, strict=True)
    )
    norm = sum(float(mean.double().square().sum()) for mean in means)
    return math.sqrt(apart / len(replicas) / norm) if norm else 0.0
