"""One worker: asks the protocol what is next, and does it.

Owns the main thread. Everything that happens elsewhere (a frame, a mean, an order) lies in one
inbox; the thread takes it out between two computations and waits only when there is nothing to
compute. Invariants: what arrived during a computation is told to the protocol before the
computation's own end, so a mean that came during an update merges right after it; all decisions are
`protocol`'s and all numbers `engine`'s, as in the simulator.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncmesh.config import Config
from asyncmesh.engine import Engine, digest_of, wire_dtype
from asyncmesh.errors import DivergedError, WireError
from asyncmesh.observe.events import (
    Backward,
    Digest,
    Event,
    Forward,
    Loss,
    Memory,
    Merge,
    Message,
    Skip,
    Snapshot,
    Update,
)
from asyncmesh.protocol.events import (
    ActivationReceived,
    BackwardFinished,
    Finish,
    ForwardFinished,
    GradientReceived,
    Input,
    MeanReceived,
    MergeRound,
    RunBackward,
    RunForward,
    RunUpdate,
    SendActivation,
    SendGradient,
    SkipRound,
    Started,
    StartRound,
    StopAt,
    StopRequested,
    UpdateFinished,
)
from asyncmesh.protocol.worker import Worker
from asyncmesh.runtime.control import Deferred
from asyncmesh.runtime.edges import Edge
from asyncmesh.runtime.emulated import EmulatedEngine
from asyncmesh.runtime.frames import Frame, Kind
from asyncmesh.runtime.messages import FINAL
from asyncmesh.runtime.rounds import Mean, Offer, Rounds
from asyncmesh.runtime.staging import Staging
from asyncmesh.runtime.stopwatch import Stopwatch
from asyncmesh.runtime.validation import Validation

Batches = Callable[[int, int], tuple[Tensor, Tensor]]
_VALIDATIONS_UNDER_WAY = 2  # a replica that is ahead leaves further ones out


@dataclass(frozen=True)
class Surroundings:
    """What a worker talks to. None: it is at an end of the pipeline, or alone on the data axis."""

    upstream: Edge | None
    downstream: Edge | None
    rounds: Rounds | None
    evaluations: Rounds | None
    staging: Staging
    stopwatch: Stopwatch
    emit: Callable[[Event | Deferred], None]


@dataclass(frozen=True)
class _WantedState:
    """A peer is late and wants this worker's state as it is after `round`."""

    round: int
    answer: queue.SimpleQueue[tuple[dict[str, Tensor], int]]


class MeshWorker:
    """The (stage, replica) of this process."""

    def __init__(
        self,
        config: Config,
        stage: int,
        replica: int,
        engine: Engine | EmulatedEngine,
        batches: Batches,
    ) -> None:
        self.config, self.stage, self.replica = config, stage, replica
        self._engine, self._batches = engine, batches
        self._machine = Worker.of(config, stage)
        self._is_first, self._is_last = stage == 0, stage == config.mesh.stages - 1
        self._inbox: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._done: Input | None = None  # the end of a computation, not yet told to the machine
        self._finished = False
        self.validation: Validation | None = None
        self._activations: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor | None] = {}
        self._outgoing: dict[int, Tensor | None] = {}
        self._means: dict[int, Mean] = {}
        self._validated: dict[int, tuple[Tensor, int]] = {}  # copies given away, with the update
        self._evaluate_after: int | None = None
        self._wanted: list[_WantedState] = []
        self.updates = 0
        self.mean_of_the_end: Mean | None = None
        self._meaning: dict[type, Callable[[Any], None]] = {
            RunForward: self._run_forward,
            RunBackward: self._run_backward,
            RunUpdate: self._run_update,
            SendActivation: self._send_activation,
            SendGradient: self._send_gradient,
            StartRound: self._start_round,
            SkipRound: self._skip_round,
            MergeRound: self._merge_round,
            Finish: self._finish,
        }

    # -- what other threads call --------------------------------------------------------------
    def on_frame(self, frame: Frame) -> None:
        self._inbox.put((self._frame_arrived, frame))

    def on_mean(self, mean: Mean) -> None:
        self._inbox.put((self._mean_arrived, mean))

    def on_evaluation_mean(self, mean: Mean) -> None:
        self._inbox.put((self._evaluation_mean_arrived, mean))

    def on_stop(self) -> None:
        self._inbox.put((self._tell, StopRequested()))

    def state_after(self, round_: int) -> tuple[dict[str, Tensor], int]:
        """This worker's state once that round (counted from 1) is merged. Waits for the loop."""
        wanted = _WantedState(round_ - 1, queue.SimpleQueue())
        self._inbox.put((self._state_wanted, wanted))
        return wanted.answer.get()

    def on_failure(self, error: Exception) -> None:
        self._inbox.put((_raise, error))

    def begin_late(self, state: dict[str, Tensor], update: int, rounds: int) -> None:
        """Go on from a peer's state, before `run`."""
        assert isinstance(self._engine, Engine)
        self._engine.resume(state, update)
        self._machine = Worker.of(self.config, self.stage, update, rounds)
        self.updates = update

    # -- the loop -----------------------------------------------------------------------------
    def run(self, surroundings: Surroundings) -> None:
        """Until all updates are made and validated. Raises what went wrong in any thread."""
        self._around, self._clock = surroundings, surroundings.stopwatch.clock
        self._tell(Started())
        while not (self._finished and self._is_validated()):
            if self._done is not None:
                self._drain()
                event, self._done = self._done, None
                self._tell(event)
                if self.validation is not None and self.validation.has_work:
                    self.validation.step()
            elif self.validation is not None and self.validation.has_work:
                self._drain()
                if self._done is None and self.validation.has_work:
                    self.validation.step()
            else:
                handler, item = self._inbox.get()
                handler(item)

    def _drain(self) -> None:
        while not self._inbox.empty():
            handler, item = self._inbox.get()
            handler(item)

    def _tell(self, event: Input) -> None:
        for action in self._machine.on_event(event):
            self._meaning[type(action)](action)
        if self._evaluate_after is not None and not self._machine.is_updating:
            update, self._evaluate_after = self._evaluate_after, None
            self._boundary(update)
        self._answer_who_wants_the_state()

    def _is_validated(self) -> bool:
        if self.validation is None:
            return True
        return self.mean_of_the_end is not None and self.validation.is_done

    # -- what arrives -------------------------------------------------------------------------
    def _frame_arrived(self, frame: Frame) -> None:
        if frame.kind is Kind.EVALUATION:
            if self.validation is not None:
                self.validation.frame_arrived(frame)
            return
        self._emit_message(frame)
        if frame.kind is Kind.ACTIVATION:
            if frame.payload is None:
                raise WireError(
                    f"the activation of microbatch {frame.number} came without a tensor"
                )
            self._activations[frame.number] = frame.payload
            if frame.last_update < self._machine.last_update:
                self._tell(StopAt(frame.last_update))
            self._tell(ActivationReceived(frame.number))
        else:
            self._gradients[frame.number] = frame.payload
            self._tell(GradientReceived(frame.number))

    def _emit_message(self, frame: Frame) -> None:
        forward = frame.kind is Kind.ACTIVATION
        sender = self.stage - 1 if forward else self.stage + 1
        what = "activation" if forward else "gradient"
        self._around.emit(
            Message(
                frame.sent_s,
                self._clock(),
                sender,
                self.replica,
                "pipeline",
                what,
                frame.number,
                frame.size,
            )
        )

    def _mean_arrived(self, mean: Mean) -> None:
        self._means[mean.number - 1] = mean
        self._around.emit(
            Message(
                mean.began_s,
                mean.ended_s,
                self.stage,
                self.replica,
                "data",
                "average",
                mean.number - 1,
                mean.bytes_sent,
            )
        )
        self._tell(MeanReceived(mean.number - 1))

    def _evaluation_mean_arrived(self, mean: Mean) -> None:
        assert self.validation is not None
        own, reached = self._validated.pop(mean.number)
        for left_out in [number for number in self._validated if number < mean.number]:
            del self._validated[left_out]
        if mean.number == FINAL:
            self.mean_of_the_end = mean
        self.validation.mean_arrived(mean, own, reached)

    def _state_wanted(self, wanted: _WantedState) -> None:
        self._wanted.append(wanted)
        self._answer_who_wants_the_state()

    def _answer_who_wants_the_state(self) -> None:
        """Between two computations; a mean that lies here is not merged yet."""
        for wanted in self._wanted[:]:
            if wanted.round not in self._means or self._finished:
                assert isinstance(self._engine, Engine)
                wanted.answer.put((self._engine.state(), self.updates))
                self._wanted.remove(wanted)

    # -- what each action does ----------------------------------------------------------------
    def _run_forward(self, action: RunForward) -> None:
        n, target = action.microbatch, None
        if self._is_first:
            x, drawn = self._batches(self.replica, n)
            target = drawn if self._is_last else None
        else:
            x = self._activations.pop(n)
            if self._is_last:
                target = self._batches(self.replica, n)[1]
        span = self._around.stopwatch.begin()
        output = self._engine.forward(n, x, target)
        stage, replica = self.stage, self.replica
        self._around.emit(
            self._around.stopwatch.end(
                span, lambda b, e: Forward(b, e, stage, replica, n, action.version)
            )
        )
        if self._is_last:
            self._record_loss(n, output)
        else:
            self._outgoing[n] = output
        self._done = ForwardFinished(n)

    def _record_loss(self, microbatch: int, loss: Tensor) -> None:
        if isinstance(self._engine, EmulatedEngine):
            return

        def known() -> Loss:
            value = float(loss)
            if not math.isfinite(value):
                self.on_failure(self._diverged(microbatch, value))
            return Loss(self._clock(), self.stage, self.replica, microbatch, value)

        # A GPU's loss is read by the thread that reports: reading it waits for the GPU.
        self._around.emit(_DeferredLoss(known) if loss.is_cuda else known())

    def _diverged(self, microbatch: int, value: float) -> DivergedError:
        update = microbatch // self.config.pipeline.accumulation + 1
        return DivergedError.at(
            self.config.optimizer.learning_rate,
            f"the training loss of replica {self.replica} became {value} before update {update}",
        )

    def _run_backward(self, action: RunBackward) -> None:
        n, version, update, delay = action
        gradient = None if self._is_last else self._gradients.pop(n)
        span = self._around.stopwatch.begin()
        of_input = self._engine.backward(n, gradient)
        stage, replica = self.stage, self.replica
        self._around.emit(
            self._around.stopwatch.end(
                span, lambda b, e: Backward(b, e, stage, replica, n, version, update, delay)
            )
        )
        if not self._is_first:
            self._outgoing[n] = of_input
        self._done = BackwardFinished(n)

    def _run_update(self, action: RunUpdate) -> None:
        span = self._around.stopwatch.begin()
        rate = self._engine.update()
        stage, replica, update = self.stage, self.replica, action.update
        self._around.emit(
            self._around.stopwatch.end(
                span, lambda b, e: Update(b, e, stage, replica, update, rate)
            )
        )
        self.updates = update
        if update % self.config.train.eval_every == 0 or update == self._machine.last_update:
            self._evaluate_after = update
        self._done = UpdateFinished(update)

    def _send_activation(self, action: SendActivation) -> None:
        assert self._around.downstream is not None  # the protocol knows the ends
        self._send(self._around.downstream, Kind.ACTIVATION, action.microbatch)

    def _send_gradient(self, action: SendGradient) -> None:
        assert self._around.upstream is not None  # the protocol knows the ends
        self._send(self._around.upstream, Kind.GRADIENT, action.microbatch)

    def _send(self, edge: Edge, kind: Kind, microbatch: int) -> None:
        payload = self._outgoing.pop(microbatch)
        dtype = payload.dtype if payload is not None else torch.float32
        wire = None
        if payload is not None and payload.is_floating_point():
            setting = self.config.pipeline.wire_dtype
            narrow = setting == "auto" and payload.is_cuda  # a GPU outruns its network
            wire = wire_dtype("bfloat16" if narrow else setting, dtype)
        last = self._machine.last_update
        frame = Frame(kind, microbatch, last, self._clock(), payload, dtype)
        edge.send(frame, wire, self._around.staging.ready())

    def _start_round(self, action: StartRound) -> None:
        offer = self._engine.snapshot(action.round)
        self._around.emit(
            Snapshot(
                self._clock(),
                self.stage,
                self.replica,
                action.round,
                action.update,
                offer.numel(),
            )
        )
        assert self._around.rounds is not None  # the protocol knows who is alone
        # Counted from 1 among the replicas, who are at 0 before they begin.
        self._around.rounds.offer(Offer(action.round + 1, offer, self._around.staging.ready()))

    def _skip_round(self, action: SkipRound) -> None:
        self._around.emit(Skip(self._clock(), self.stage, self.replica, action.update))

    def _merge_round(self, action: MergeRound) -> None:
        mean = self._means.pop(action.round)
        self._engine.merge(action.round, mean.mean, action.update)
        self._around.emit(Merge(self._clock(), self.stage, self.replica, *action, mean.replicas))

    def _finish(self, _: Finish) -> None:
        self._finished = True
        if self._around.rounds is not None:
            self._around.rounds.finish()
        if isinstance(self._engine, Engine):
            engine = self._engine
            held = (engine.pool.buffers, engine.buffer_bytes, engine.optimizer_bytes)
            self._around.emit(Memory(self.stage, self.replica, *held, engine.averaging_bytes))

    # -- validation ---------------------------------------------------------------------------
    def _boundary(self, update: int) -> None:
        """The weights after `update` are final, merges included."""
        if self.validation is None or not isinstance(self._engine, Engine):
            return
        last = update == self._machine.last_update
        if not last and len(self._validated) >= _VALIDATIONS_UNDER_WAY:
            return
        weights = self._engine.newest_weights()
        self._around.emit(
            Digest(self._clock(), self.stage, self.replica, update, digest_of(weights))
        )
        number = FINAL if last else update
        self._validated[number] = weights, update
        if self._around.evaluations is None:
            now_s = self._clock()
            self.on_evaluation_mean(Mean(number, weights, (self.replica,), 0, now_s, now_s))
        else:
            ready = self._around.staging.ready()
            self._around.evaluations.offer(Offer(number, weights, ready))


@dataclass(frozen=True)
class _DeferredLoss:
    known: Callable[[], Loss]

    def is_known(self) -> bool:
        return True  # reading it waits, and only the reporting thread does

    def value(self) -> Loss:
        return self.known()


def _raise(error: Exception) -> None:
    raise error
