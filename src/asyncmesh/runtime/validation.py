"""Validation of the replicas' mean, in the pipeline that trains.

Owns one worker's part of it. After every `train.eval_every` updates the replicas of a stage average
copies of their weights in the background; with its stage's mean, each replica sends its share of
the validation batches down its pipeline, without gradients, between two computations of the
training. No machine ever holds the whole model, and nobody waits. At the end each replica also
validates its own weights. Invariants: what is validated is the mean of weights after the same
update, in the order of the replicas, as in the simulator; the first stage alone decides which
batches a replica sees, and says with each how many they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncmesh.engine import Engine
from asyncmesh.runtime.frames import Frame, Kind
from asyncmesh.runtime.messages import FINAL, DistancePart, ValidationPart
from asyncmesh.runtime.rounds import Mean

Batch = tuple[Tensor, Tensor]
_BATCHES = 2**20  # a frame's number is (validation · _BATCHES + batch)


@dataclass
class _Weights:
    """What is validated, and what has come of it."""

    flat: Tensor
    loss_sum: float = 0.0
    targets: int = 0
    done: int = 0


@dataclass(frozen=True)
class _Task:
    """A batch to compute, one of `count`. Without `x` there is none: a share may be empty."""

    key: int  # (2 · update + own)
    batch: int
    count: int
    x: Tensor | None


class Validation:
    """One worker's share. `send` hands a frame to the next stage, `tell` a result to the run."""

    def __init__(
        self,
        engine: Engine,
        stage: int,
        stages: int,
        replica: int,
        batches: Sequence[Batch],
        send: Callable[[Frame], None],
        tell: Callable[[ValidationPart | DistancePart], None],
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._stage, self._replica = engine, stage, replica
        self._is_first, self._is_last = stage == 0, stage == stages - 1
        self._batches, self._send, self._tell, self._clock = batches, send, tell, clock
        self._weights: dict[int, _Weights] = {}
        self._waiting: list[_Task] = []  # whose weights are not there yet
        self._tasks: deque[_Task] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._tasks)

    @property
    def is_done(self) -> bool:
        """Nothing is under way here."""
        return not (self._tasks or self._waiting or self._weights)

    def mean_arrived(self, mean: Mean, own: Tensor, reached: int) -> None:
        """The replicas' mean is there; `own` is what this worker gave for it."""
        apart = float((own - mean.mean).double().square().sum())
        norm = float(mean.mean.double().square().sum())
        self._tell(
            DistancePart(
                update=mean.number,
                reached=reached,
                stage=self._stage,
                replica=self._replica,
                parts=len(mean.replicas),
                apart=apart,
                norm=norm,
                time_s=self._clock(),
            )
        )
        share = range(mean.replicas.index(self._replica), len(self._batches), len(mean.replicas))
        self._begin(2 * mean.number, mean.mean, share)
        if mean.number == FINAL:
            self._begin(2 * FINAL + 1, own, range(len(self._batches)))

    def _begin(self, key: int, flat: Tensor, share: range) -> None:
        self._weights[key] = _Weights(flat)
        if self._is_first:
            count = len(share)
            tasks = [_Task(key, batch, count, self._batches[batch][0]) for batch in share]
            self._tasks += tasks or [_Task(key, 0, 0, None)]
        self._tasks += [task for task in self._waiting if task.key == key]
        self._waiting = [task for task in self._waiting if task.key > key]

    def frame_arrived(self, frame: Frame) -> None:
        """The stage before has computed a batch."""
        key, batch = divmod(frame.number, _BATCHES)
        task = _Task(key, batch, frame.last_update, frame.payload)
        # Frames come in order, so nothing more will come for an earlier one: it was left out there.
        under_way = {other.key for other in self._tasks}
        for left_out in [k for k in self._weights if k < key and k not in under_way]:
            del self._weights[left_out]
        if key in self._weights:
            self._tasks.append(task)
        else:
            self._waiting.append(task)

    def step(self) -> None:
        """Compute one batch."""
        task = self._tasks.popleft()
        weights = self._weights[task.key]
        output = self._compute(task, weights) if task.x is not None else None
        if not self._is_last:
            number = task.key * _BATCHES + task.batch
            dtype = output.dtype if output is not None else torch.float32
            now_s = self._clock()
            self._send(Frame(Kind.EVALUATION, number, task.count, now_s, output, dtype))
        weights.done += task.x is not None
        if weights.done == task.count:
            del self._weights[task.key]
            self._finish(task.key, weights)

    def _compute(self, task: _Task, weights: _Weights) -> Tensor:
        """The stage's output; on the last stage the loss, which is also added up."""
        assert task.x is not None
        target = self._batches[task.batch][1] if self._is_last else None
        output = self._engine.program.evaluate(weights.flat, self._engine.constants, task.x, target)
        if target is not None:
            weights.loss_sum += float(output) * target.numel()
            weights.targets += target.numel()
        return output

    def _finish(self, key: int, weights: _Weights) -> None:
        if self._is_last and self._batches:
            update, own = divmod(key, 2)
            self._tell(
                ValidationPart(
                    update=update,
                    replica=self._replica,
                    loss_sum=weights.loss_sum,
                    targets=weights.targets,
                    own=bool(own),
                )
            )


def in_microbatches(batches: Sequence[Batch], size: int) -> list[Batch]:
    """The same sequences in batches that fit where a microbatch fits."""
    return [
        pair
        for x, target in batches
        for pair in zip(torch.split(x, size), torch.split(target, size), strict=True)
    ]
