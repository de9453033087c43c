"""The state machine of one worker: `on_event(event) -> actions`.

Owns every decision of a worker: both axes, and how they meet at an update. It has no clock, socket,
thread or randomness, so the simulator and the runtime drive this very code. Invariant: at most one
of RunForward, RunBackward and RunUpdate is outstanding, and it is always the last action of an
answer. What merges at an update's boundary is decided when the update is done, not when it begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncmesh.config import Config
from asyncmesh.protocol.averaging import Averaging, AveragingPlan
from asyncmesh.protocol.events import (
    Action,
    ActivationReceived,
    BackwardFinished,
    Finish,
    ForwardFinished,
    GradientReceived,
    Input,
    MeanReceived,
    RunUpdate,
    SendActivation,
    SendGradient,
    Started,
    StopAt,
    StopRequested,
    UpdateFinished,
)
from asyncmesh.protocol.pipeline import Pipeline, PipelinePlan


class Worker:
    """One (stage, replica): pipeline and averaging put together."""

    def __init__(
        self,
        pipeline: PipelinePlan,
        averaging: AveragingPlan,
        first_update: int = 0,
        first_round: int = 0,
    ) -> None:
        self.plan = pipeline
        self._pipeline = Pipeline(pipeline, first_update)
        self._averaging = Averaging(averaging, first_update, first_round)
        self._computing = False  # a forward, a backward or an update
        self._updating = False
        # What a mean that is waited for lets go on: the rest of an update. None: nothing waits.
        self._resume: Callable[[list[Action]], None] | None = None
        self._handlers: dict[type, Callable[[Any], list[Action]]] = {
            Started: self._on_started,
            ActivationReceived: self._on_activation,
            GradientReceived: self._on_gradient,
            ForwardFinished: self._on_forward_finished,
            BackwardFinished: self._on_backward_finished,
            UpdateFinished: self._on_update_finished,
            MeanReceived: self._on_mean,
            StopRequested: self._on_stop_requested,
            StopAt: self._on_stop_at,
        }

    @classmethod
    def of(cls, config: Config, stage: int, first_update: int = 0, first_round: int = 0) -> Worker:
        """One that comes late goes on after `first_update` updates and `first_round` rounds."""
        plans = PipelinePlan.of(config, stage), AveragingPlan.of(config)
        return cls(*plans, first_update, first_round)

    @property
    def is_updating(self) -> bool:
        """True while the newest version is being made or is held up by a round."""
        return self._updating or self._resume is not None

    @property
    def last_update(self) -> int:
        """The update after which this worker ends. Whoever sends its activations tells the next
        stage with them, so that all stages of a replica end after the same one.
        """
        return self._pipeline.last_update

    def on_event(self, event: Input) -> list[Action]:
        """Take note of what happened; answer what to do, in order."""
        return self._handlers[type(event)](event)

    def _on_started(self, _: Started) -> list[Action]:
        return self._compute_next([])

    def _on_activation(self, event: ActivationReceived) -> list[Action]:
        self._pipeline.activation_received(event.microbatch)
        return self._compute_next([])

    def _on_gradient(self, event: GradientReceived) -> list[Action]:
        self._pipeline.gradient_received(event.microbatch)
        return self._compute_next([])

    def _on_forward_finished(self, event: ForwardFinished) -> list[Action]:
        self._computing = False
        self._pipeline.forward_finished(event.microbatch)
        actions: list[Action] = []
        if not self.plan.is_last:
            actions.append(SendActivation(event.microbatch))
        return self._compute_next(actions)

    def _on_backward_finished(self, event: BackwardFinished) -> list[Action]:
        self._computing = False
        update_is_due = self._pipeline.backward_finished(event.microbatch)
        actions: list[Action] = []
        if not self.plan.is_first:
            actions.append(SendGradient(event.microbatch))
        if not update_is_due:
            return self._compute_next(actions)
        if self._averaging.of_gradients:
            actions.append(self._averaging.start(self._pipeline.version + 1))
            self._resume = self._merge_gradient
        else:
            self._update(actions)
        return actions

    def _on_update_finished(self, event: UpdateFinished) -> list[Action]:
        self._computing = self._updating = False
        self._pipeline.version = event.update
        actions: list[Action] = []
        self._boundary(actions)
        return actions

    def _on_mean(self, event: MeanReceived) -> list[Action]:
        self._averaging.mean_received(event.round)
        actions: list[Action] = []
        if self._resume is not None:
            self._resume(actions)
        return actions

    def _on_stop_requested(self, _: StopRequested) -> list[Action]:
        if self.plan.is_first:
            self._pipeline.stop_soon()
        return []

    def _on_stop_at(self, event: StopAt) -> list[Action]:
        self._pipeline.stop_at(event.update)
        return []

    def _merge_gradient(self, actions: list[Action]) -> None:
        merge = self._averaging.merge_gradient(self._pipeline.version + 1)
        if merge is not None:
            actions.append(merge)
            self._update(actions)

    def _update(self, actions: list[Action]) -> None:
        self._resume = None
        self._computing = self._updating = True
        actions.append(RunUpdate(self._pipeline.version + 1))

    def _boundary(self, actions: list[Action]) -> None:
        self._resume = None
        if not self._averaging.at_boundary(self._pipeline.version, actions):
            self._resume = self._boundary
        elif self._pipeline.version == self._pipeline.last_update:
            actions.append(Finish())
        else:
            self._compute_next(actions)

    def _compute_next(self, actions: list[Action]) -> list[Action]:
        if not self._computing and self._resume is None:
            action = self._pipeline.next()
            if action is not None:
                self._computing = True
                actions.append(action)
        return actions
