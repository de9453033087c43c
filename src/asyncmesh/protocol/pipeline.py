"""What a stage computes next: one rule for asynchronous 1F1B, flushed 1F1B and GPipe.

Owns the order of forwards and backwards of one worker. A stage may forward its next microbatch if
fewer than c are in flight and, where the schedule flushes, if that microbatch belongs to the update
now being made. Then

    strict order:  forward if it may, else backward; if the input is not there yet, wait for it.
    eager order:   backward if its input is there, else forward if it may and its input is there.

With c = 1 + Σ (1 + h) over the downstream edges and no flush, the strict order is asynchronous 1F1B
(c - 1 forwards, then one forward, one backward, in turn); with a flush and c = P - s it is 1F1B;
with a flush and c = k it is GPipe.

Invariant: the strict order is a fixed sequence, whatever the timing; the eager one never has more
in flight, so its delays are never larger.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from asyncmesh.algorithm import staleness
from asyncmesh.config import Config
from asyncmesh.errors import ProtocolError
from asyncmesh.protocol.events import RunBackward, RunForward


@dataclass(frozen=True)
class PipelinePlan:
    """The constants of one worker's pipeline axis."""

    stage: int
    stages: int
    updates: int
    accumulation: int
    capacity: int
    flush: bool
    eager: bool

    @classmethod
    def of(cls, config: Config, stage: int) -> PipelinePlan:
        pipeline, stages = config.pipeline, config.mesh.stages
        capacity = {
            "async": staleness.capacity(stage, stages, pipeline.extra_depth),
            "1f1b": stages - stage,
            "gpipe": pipeline.accumulation,
        }[pipeline.schedule]
        return cls(
            stage=stage,
            stages=stages,
            updates=config.train.updates,
            accumulation=pipeline.accumulation,
            capacity=capacity,
            flush=pipeline.schedule != "async",
            eager=pipeline.order == "eager" and pipeline.schedule == "async",
        )

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def mean_delay(self) -> float:
        """δ_s in updates, in the steady state (eager order: at the most)."""
        return 0.0 if self.flush else staleness.mean_delay(self.capacity, self.accumulation)


class Pipeline:
    """Counters of one worker's pipeline axis, and the rule above."""

    def __init__(self, plan: PipelinePlan, first_update: int = 0) -> None:
        """With `first_update`, as if so many updates had been made."""
        self.plan = plan
        self.version = first_update
        self.forwarded = self.backwarded = first_update * plan.accumulation
        self.last_update = plan.updates
        every = plan.updates * plan.accumulation
        self._activations = every if plan.is_first else self.forwarded  # that have arrived
        self._gradients = self.forwarded  # likewise; the last stage makes its own
        self._versions: deque[int] = deque()  # of the microbatches in flight, oldest first

    def activation_received(self, microbatch: int) -> None:
        self._expect("activation", microbatch, self._activations)
        self._activations += 1

    def gradient_received(self, microbatch: int) -> None:
        self._expect("gradient", microbatch, self._gradients)
        self._gradients += 1

    def forward_finished(self, microbatch: int) -> None:
        self._expect("forward", microbatch, self.forwarded)
        self.forwarded += 1
        if self.plan.is_last:
            self._gradients += 1

    def backward_finished(self, microbatch: int) -> bool:
        """True if this was the last of an update's k microbatches."""
        self._expect("backward", microbatch, self.backwarded)
        self.backwarded += 1
        self._versions.popleft()
        return self.backwarded % self.plan.accumulation == 0

    def stop_soon(self) -> None:
        """End after the update that the next microbatch to be forwarded belongs to.

        So at least one more activation goes down the pipeline, and can take the news along.
        """
        self.stop_at(self.forwarded // self.plan.accumulation + 1)

    def stop_at(self, update: int) -> None:
        self.last_update = min(self.last_update, update)

    def _expect(self, what: str, microbatch: int, expected: int) -> None:
        if microbatch != expected:
            raise ProtocolError(
                f"stage {self.plan.stage}: {what} of microbatch {microbatch}, expected {expected}"
            )

    def next(self) -> RunForward | RunBackward | None:
        """What to compute now; None if its input is missing (or everything is done)."""
        plan, n = self.plan, self.forwarded
        last = min(self.last_update, self.version + 1) if plan.flush else self.last_update
        limit = last * plan.accumulation
        may_forward = n < limit and n - self.backwarded < plan.capacity
        if plan.eager and self.backwarded < self._gradients:
            may_forward = False
        if may_forward and (n < self._activations or not plan.eager):
            return self._forward(n) if n < self._activations else None
        return self._backward(self.backwarded) if self.backwarded < self._gradients else None

    def _forward(self, microbatch: int) -> RunForward:
        self._versions.append(self.version)
        return RunForward(microbatch, self.version)

    def _backward(self, microbatch: int) -> RunBackward:
        # The gradient is applied to the newest version: all earlier updates have been made.
        version = self._versions[0]
        return RunBackward(microbatch, version, self.version, self.version - version)
