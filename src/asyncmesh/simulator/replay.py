"""A real run once more, from its events: the same bits, or where they first differ.

Owns the replay. The events of a real run say what every worker did and in which order; the state
machines are told what they must have been told for that, one input at a time, and have to answer
with what is recorded; the engines compute it. So one replay checks the protocol, the engine, the
network and the record against each other. Invariant: nothing is taken from the record but the order
of things and which replicas a mean is of; every number is computed anew.

What happens next at a worker is settled by its record; between workers only data decide (an
activation, a gradient, the offers of a round), so no clock is needed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from asyncmesh.algorithm.correction import mean_in_order
from asyncmesh.config import Config
from asyncmesh.engine import Engine, digest_of, over_the_wire
from asyncmesh.errors import ReplayError
from asyncmesh.observe.events import (
    Backward,
    Digest,
    Event,
    Forward,
    Joined,
    Merge,
    Skip,
    Snapshot,
    Update,
)
from asyncmesh.protocol.events import (
    Action,
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
    UpdateFinished,
)
from asyncmesh.protocol.worker import Worker

Batch = tuple[Tensor, Tensor]
_Recorded = Forward | Backward | Update | Snapshot | Merge | Skip | Digest
_RECORDED = (Forward, Backward, Update, Snapshot, Merge, Skip, Digest)


@dataclass(frozen=True)
class Compared:
    """One digest of the record beside the replay's."""

    stage: int
    replica: int
    update: int
    recorded: str
    replayed: str

    @property
    def is_equal(self) -> bool:
        return self.recorded == self.replayed


@dataclass(eq=False)
class _ReplayedWorker:
    """A worker's record, what has been replayed of it, and what lies ready for it."""

    stage: int
    replica: int
    machine: Worker
    engine: Engine
    record: deque[_Recorded] = field(default_factory=deque)
    threads: int = 1
    actions: deque[Action] = field(default_factory=deque)
    owed: Input | None = None  # the end of a computation
    activations: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor | None] = field(default_factory=dict)
    outgoing: dict[int, Tensor | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"stage {self.stage} of replica {self.replica}"


class Replay:
    """All workers of a recorded run."""

    def __init__(
        self,
        config: Config,
        events: Iterable[Event],
        engines: Sequence[Sequence[Engine]],
        batches: Callable[[int, int], Batch],
    ) -> None:
        self._config, self._batches = config, batches
        self._offers: dict[tuple[int, int], dict[int, Tensor]] = {}  # by (stage, round)
        self._merges: Counter[tuple[int, int]] = Counter()  # of each round, yet to come
        self.compared: list[Compared] = []
        self.workers = {
            (stage, replica): _ReplayedWorker(
                stage, replica, Worker.of(config, stage), engines[replica][stage]
            )
            for replica in range(config.mesh.replicas)
            for stage in range(config.mesh.stages)
        }
        for event in events:
            if isinstance(event, Joined):
                self.workers[event.stage, event.replica].threads = event.threads
            elif isinstance(event, _RECORDED):
                self.workers[event.stage, event.replica].record.append(event)
                if isinstance(event, Merge):
                    self._merges[event.stage, event.round] += 1
        self._meaning: dict[type, Callable[[_ReplayedWorker, Any], bool]] = {
            RunForward: self._run_forward,
            RunBackward: self._run_backward,
            RunUpdate: self._run_update,
            SendActivation: self._send_activation,
            SendGradient: self._send_gradient,
            StartRound: self._start_round,
            SkipRound: self._skip_round,
            MergeRound: self._merge_round,
            Finish: lambda worker, action: True,
        }

    def run(self) -> list[Compared]:
        """To the end of the record; answers all digests that it holds."""
        if not any(worker.record for worker in self.workers.values()):
            raise ReplayError("the record is empty: was this run a real one, and did it begin?")
        for worker in self.workers.values():
            done = [event.update for event in worker.record if isinstance(event, Update)]
            self._tell(worker, StopAt(max(done, default=0)))
            self._tell(worker, Started())
        threads = torch.get_num_threads()
        try:
            while any(self._advance(worker) for worker in self.workers.values()):
                pass
        finally:
            torch.set_num_threads(threads)
        for worker in self.workers.values():
            if worker.record:
                raise ReplayError(
                    f"{worker.name} cannot go on to {worker.record[0]}: what it needs for that was"
                    " never recorded"
                )
        return self.compared

    # -- one worker -----------------------------------------------------------------------------
    def _advance(self, worker: _ReplayedWorker) -> bool:
        """As far as it gets; whether that is anywhere."""
        torch.set_num_threads(worker.threads)
        moved = False
        while self._step(worker):
            moved = True
        return moved

    def _step(self, worker: _ReplayedWorker) -> bool:
        if worker.record and isinstance(worker.record[0], Digest):
            self._compare(worker, worker.record.popleft())
            return True
        if worker.actions:
            action = worker.actions[0]
            if not self._meaning[type(action)](worker, action):
                return False
            worker.actions.popleft()
            return True
        if worker.owed is not None:
            for mean in self._merged_at_once(worker):
                self._tell(worker, MeanReceived(mean))
            if not self._tell(worker, worker.owed):
                return False
            worker.owed = None
            return True
        return self._tell_what_comes_next(worker)

    def _known_gradient(self, worker: _ReplayedWorker, happened: Input) -> int | None:
        """The eager order prefers a backward whose gradient is there. If the record has one where
        the machine, not knowing of it, would go forward, it was there.
        """
        if self._config.pipeline.order == "strict":
            return None
        comes = next((e for e in worker.record if isinstance(e, Forward | Backward)), None)
        if not isinstance(comes, Backward):
            return None
        would = deepcopy(worker.machine).on_event(happened)
        return comes.microbatch if any(isinstance(a, RunForward) for a in would) else None

    def _merged_at_once(self, worker: _ReplayedWorker) -> list[int]:
        """The rounds whose means must have been there when an update ended."""
        merged: list[int] = []
        if isinstance(worker.owed, UpdateFinished) and self._config.averaging_delay is None:
            for event in worker.record:
                if not isinstance(event, Merge):
                    break
                merged.append(event.round)
        return merged

    def _tell_what_comes_next(self, worker: _ReplayedWorker) -> bool:
        """An idle machine waits for the input of what the record has next."""
        if not worker.record:
            return False
        comes = worker.record[0]
        if isinstance(comes, Forward) and comes.microbatch in worker.activations:
            return self._tell(worker, ActivationReceived(comes.microbatch))
        if isinstance(comes, Backward) and comes.microbatch in worker.gradients:
            return self._tell(worker, GradientReceived(comes.microbatch))
        if isinstance(comes, Merge) and self._offers_of(worker, comes) is not None:
            return self._tell(worker, MeanReceived(comes.round))
        return False

    def _tell(self, worker: _ReplayedWorker, happened: Input) -> bool:
        """False if the machine must first be told of a gradient that is not there yet."""
        gradient = self._known_gradient(worker, happened)
        if gradient is not None:
            if gradient not in worker.gradients:
                return False
            worker.actions.extend(worker.machine.on_event(GradientReceived(gradient)))
        worker.actions.extend(worker.machine.on_event(happened))
        return True

    def _compare(self, worker: _ReplayedWorker, recorded: Event) -> None:
        assert isinstance(recorded, Digest)
        replayed = digest_of(worker.engine.pool.newest.flat)
        self.compared.append(
            Compared(worker.stage, worker.replica, recorded.update, recorded.digest, replayed)
        )

    # -- what each action does: False if its data are not there yet -------------------------------
    def _next(self, worker: _ReplayedWorker, action: Action) -> Any:
        """The record's next entry, which must be what the state machine wants."""
        expected = {
            RunForward: Forward,
            RunBackward: Backward,
            RunUpdate: Update,
            StartRound: Snapshot,
            SkipRound: Skip,
            MergeRound: Merge,
        }[type(action)]
        recorded = worker.record[0] if worker.record else None
        same = isinstance(recorded, expected) and all(
            getattr(recorded, name) == value for name, value in action._asdict().items()
        )
        if not same:
            raise ReplayError(f"{worker.name}: recorded is {recorded}, but {action} is due")
        return recorded

    def _run_forward(self, worker: _ReplayedWorker, action: RunForward) -> bool:
        self._next(worker, action)
        n, last = action.microbatch, self._config.mesh.stages - 1
        batch = self._batches(worker.replica, n) if worker.stage in (0, last) else None
        x = batch[0] if batch is not None and worker.stage == 0 else worker.activations.pop(n)
        target = batch[1] if batch is not None and worker.stage == last else None
        output = worker.engine.forward(n, x, target)
        if worker.stage != last:
            worker.outgoing[n] = output
        return self._computed(worker, ForwardFinished(n))

    def _run_backward(self, worker: _ReplayedWorker, action: RunBackward) -> bool:
        self._next(worker, action)
        n = action.microbatch
        is_last = worker.stage == self._config.mesh.stages - 1
        gradient = None if is_last else worker.gradients.pop(n)
        of_input = worker.engine.backward(n, gradient)
        if worker.stage > 0:
            worker.outgoing[n] = of_input
        return self._computed(worker, BackwardFinished(n))

    def _run_update(self, worker: _ReplayedWorker, action: RunUpdate) -> bool:
        self._next(worker, action)
        worker.engine.update()
        return self._computed(worker, UpdateFinished(action.update))

    def _computed(self, worker: _ReplayedWorker, end: Input) -> bool:
        worker.record.popleft()
        worker.owed = end
        return True

    def _send_activation(self, worker: _ReplayedWorker, action: SendActivation) -> bool:
        output = worker.outgoing.pop(action.microbatch)
        assert output is not None  # a stage's output
        to = self.workers[worker.stage + 1, worker.replica]
        to.activations[action.microbatch] = self._over_the_wire(output)
        return True

    def _send_gradient(self, worker: _ReplayedWorker, action: SendGradient) -> bool:
        gradient = worker.outgoing.pop(action.microbatch)
        to = self.workers[worker.stage - 1, worker.replica]
        sent = self._over_the_wire(gradient) if gradient is not None else None
        to.gradients[action.microbatch] = sent
        return True

    def _over_the_wire(self, tensor: Tensor) -> Tensor:
        return over_the_wire(tensor, self._config.pipeline.wire_dtype)[0]

    def _start_round(self, worker: _ReplayedWorker, action: StartRound) -> bool:
        self._next(worker, action)
        worker.record.popleft()
        offers = self._offers.setdefault((worker.stage, action.round), {})
        offers[worker.replica] = worker.engine.snapshot(action.round)
        return True

    def _skip_round(self, worker: _ReplayedWorker, action: SkipRound) -> bool:
        self._next(worker, action)
        worker.record.popleft()
        return True

    def _merge_round(self, worker: _ReplayedWorker, action: MergeRound) -> bool:
        recorded: Merge = self._next(worker, action)
        offers = self._offers_of(worker, recorded)
        if offers is None:
            return False
        worker.record.popleft()
        worker.engine.merge(action.round, mean_in_order(offers), action.update)
        round_ = (worker.stage, action.round)
        self._merges[round_] -= 1
        if not self._merges[round_]:
            del self._offers[round_]
        return True

    def _offers_of(self, worker: _ReplayedWorker, merge: Merge) -> list[Tensor] | None:
        """What the contributors of a mean gave, in their order; None until all are there."""
        offers = self._offers.get((worker.stage, merge.round), {})
        if not all(replica in offers for replica in merge.contributors):
            return None
        return [offers[replica] for replica in sorted(merge.contributors)]
