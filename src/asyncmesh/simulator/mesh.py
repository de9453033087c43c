"""The virtual mesh: every worker of a mesh in one process, in virtual time.

Owns the clock and what each action of a worker's state machine does in this world: computations
take virtual time (and, with engines, happen), messages cross virtual links, rounds meet in a group.
All decisions are `protocol`'s. Without engines the mesh is hollow: the same protocol with message
sizes and no numbers, for meshes that no machine could compute.

Invariant: what happens is a function of the configuration; ties in time are broken by the order in
which things were caused.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor

from asyncmesh.algorithm.correction import mean_in_order
from asyncmesh.config import Config
from asyncmesh.engine import Engine, over_the_wire, wire_width
from asyncmesh.errors import ProtocolError
from asyncmesh.observe.events import (
    Backward,
    Forward,
    Memory,
    Merge,
    Message,
    Sink,
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
    UpdateFinished,
)
from asyncmesh.protocol.worker import Worker
from asyncmesh.simulator.links import Link, RingLink, pipeline_links
from asyncmesh.timing import ComputeTimes

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sizes:
    """What a hollow mesh needs to know of the stages."""

    activation_bytes: Sequence[int]  # of a microbatch, by pipeline edge
    coordinates: Sequence[int]  # by stage
    weight_width: int = 4  # bytes of a coordinate


@dataclass(eq=False, slots=True)
class VirtualWorker:
    """A worker and everything it touches."""

    stage: int
    replica: int
    machine: Worker
    times: ComputeTimes
    forward_link: Link | None
    backward_link: Link | None
    group: RoundGroup
    engine: Engine | None = None
    downstream: VirtualWorker | None = None
    upstream: VirtualWorker | None = None
    free_s: float = 0.0
    boundary_s: float = 0.0  # when its newest version was ready
    finished: bool = False
    evaluate_after: int | None = None
    activations: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor | None] = field(default_factory=dict)
    outgoing: dict[int, Tensor | None] = field(default_factory=dict)


@dataclass(eq=False)
class OpenRound:
    """A round that not all have joined yet. It begins when the last one has."""

    coordinates: int
    size: int
    latest_s: float = 0.0
    offers: dict[int, Tensor | None] = field(default_factory=dict)  # by replica


@dataclass(eq=False)
class RoundGroup:
    """The replicas of one stage, where their rounds meet. Who has finished takes part no more."""

    link: RingLink
    coordinates: int
    width: int
    workers: list[VirtualWorker] = field(default_factory=list)
    open: dict[int, OpenRound] = field(default_factory=dict)
    # The mean, whose contributions are in it, and how many have yet to merge it.
    means: dict[int, tuple[Tensor | None, tuple[int, ...], int]] = field(default_factory=dict)


class Observer:
    """What a mesh tells while it runs, besides events. The default ignores it all."""

    def loss(self, time_s: float, worker: VirtualWorker, microbatch: int, loss: Tensor) -> None:
        """The last stage has computed a microbatch's loss."""

    def boundary(self, time_s: float, worker: VirtualWorker, update: int) -> None:
        """A worker's weights after `update` are final, merges included."""


class VirtualMesh:
    """All workers, the clock, and the meaning of every action."""

    def __init__(
        self,
        config: Config,
        emit: Sink,
        *,
        sizes: Sizes,
        engines: Sequence[Sequence[Engine]] | None = None,
        batches: Callable[[int, int], Batch] | None = None,
        stage_costs: Sequence[float] | None = None,
        observer: Observer | None = None,
        digests: bool = False,
    ) -> None:
        self._config, self._emit, self._sizes = config, emit, sizes
        self._batches, self._digests = batches, digests
        self._observer = observer or Observer()
        self._queue: list[tuple[float, int, VirtualWorker, Input]] = []
        self._caused = 0
        self.inputs = 0  # handled by state machines so far
        self._targets: dict[tuple[int, int], Tensor] = {}
        self.workers = self._build(engines, stage_costs)
        self._meaning: dict[type, Callable[[VirtualWorker, Any, float], float]] = {
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

    def _build(
        self,
        engines: Sequence[Sequence[Engine]] | None,
        stage_costs: Sequence[float] | None,
    ) -> list[VirtualWorker]:
        config = self._config
        stages, replicas = config.mesh.stages, config.mesh.replicas
        width = wire_width(config.averaging.wire_dtype, self._sizes.weight_width)
        groups = [RoundGroup(RingLink(config), n, width) for n in self._sizes.coordinates]
        workers = []
        for replica in range(replicas):
            forward = pipeline_links(config, replica, "forward")
            backward = pipeline_links(config, replica, "backward")
            row = [
                VirtualWorker(
                    stage=stage,
                    replica=replica,
                    machine=Worker.of(config, stage),
                    times=ComputeTimes(config, stage, replica, stage_costs),
                    forward_link=forward[stage] if stage < stages - 1 else None,
                    backward_link=backward[stage - 1] if stage > 0 else None,
                    group=groups[stage],
                    engine=engines[replica][stage] if engines else None,
                )
                for stage in range(stages)
            ]
            for left, right in pairwise(row):
                left.downstream, right.upstream = right, left
            for worker in row:
                worker.group.workers.append(worker)
            workers += row
        return workers

    # -- the clock --------------------------------------------------------------------------------
    def run(self) -> None:
        """Until every worker has finished. Raises whatever the observer raises."""
        for worker in self.workers:
            self._cause(0.0, worker, Started())
        queue, meaning, pop = self._queue, self._meaning, heapq.heappop
        while queue:
            now_s, _, worker, happened = pop(queue)
            self.inputs += 1
            at_s = worker.free_s if worker.free_s > now_s else now_s
            for action in worker.machine.on_event(happened):
                at_s = meaning[type(action)](worker, action, at_s)
            if worker.evaluate_after is not None and not worker.machine.is_updating:
                self._observer.boundary(worker.boundary_s, worker, worker.evaluate_after)
                worker.evaluate_after = None
        unfinished = [w for w in self.workers if not w.finished]
        if unfinished:
            raise ProtocolError(
                f"nothing left to happen, but {len(unfinished)} workers are not done: the first is"
                f" stage {unfinished[0].stage} of replica {unfinished[0].replica}"
            )

    def _cause(self, at_s: float, worker: VirtualWorker, happening: Input) -> None:
        self._caused += 1
        heapq.heappush(self._queue, (at_s, self._caused, worker, happening))

    # -- what each action does; returns when the worker goes on -----------------------------------
    def _run_forward(self, worker: VirtualWorker, action: RunForward, at_s: float) -> float:
        n, digest = action.microbatch, None
        end_s = at_s + worker.times.drawn(worker.times.forward_s)
        if worker.engine is not None:
            self._compute_forward(worker, worker.engine, n, end_s)
            digest = worker.engine.digest(n) if self._digests else None
        stage, replica = worker.stage, worker.replica
        self._emit(Forward(at_s, end_s, stage, replica, n, action.version, digest))
        self._cause(end_s, worker, ForwardFinished(n))
        worker.free_s = end_s
        return end_s

    def _compute_forward(self, worker: VirtualWorker, engine: Engine, n: int, end_s: float) -> None:
        target = None
        if worker.upstream is None:
            assert self._batches is not None  # engines come with data
            x, self._targets[worker.replica, n] = self._batches(worker.replica, n)
        else:
            x = worker.activations.pop(n)
        if worker.downstream is None:
            target = self._targets.pop((worker.replica, n))
        output = engine.forward(n, x, target)
        if worker.downstream is None:
            self._observer.loss(end_s, worker, n, output)
        else:
            worker.outgoing[n] = output

    def _run_backward(self, worker: VirtualWorker, action: RunBackward, at_s: float) -> float:
        n, version, update, delay = action
        end_s, digest = at_s + worker.times.drawn(worker.times.backward_s), None
        if worker.engine is not None:
            digest = worker.engine.digest(n) if self._digests else None
            gradient = worker.gradients.pop(n) if worker.downstream is not None else None
            worker.outgoing[n] = worker.engine.backward(n, gradient)
            if worker.upstream is None:
                del worker.outgoing[n]
        stage, replica = worker.stage, worker.replica
        self._emit(Backward(at_s, end_s, stage, replica, n, version, update, delay, digest))
        self._cause(end_s, worker, BackwardFinished(n))
        worker.free_s = end_s
        return end_s

    def _run_update(self, worker: VirtualWorker, action: RunUpdate, at_s: float) -> float:
        end_s = at_s + worker.times.drawn(worker.times.update_s)
        lr = worker.engine.update() if worker.engine is not None else 0.0
        self._emit(Update(at_s, end_s, worker.stage, worker.replica, action.update, lr))
        train = self._config.train
        if action.update % train.eval_every == 0 or action.update == train.updates:
            worker.evaluate_after = action.update
        self._cause(end_s, worker, UpdateFinished(action.update))
        worker.free_s = worker.boundary_s = end_s
        return end_s

    def _send_activation(self, worker: VirtualWorker, action: SendActivation, at_s: float) -> float:
        n, to, link = action.microbatch, worker.downstream, worker.forward_link
        assert to is not None and link is not None  # noqa: PT018 - the protocol knows the ends
        size = self._sizes.activation_bytes[worker.stage]
        if worker.engine is not None:
            to.activations[n], size = self._over_the_wire(worker.outgoing.pop(n))
        arrival_s = link.send(at_s, size)
        message = (worker.stage, worker.replica, "pipeline", "activation", n, size)
        self._emit(Message(at_s, arrival_s, *message))
        self._cause(arrival_s, to, ActivationReceived(n))
        return at_s

    def _send_gradient(self, worker: VirtualWorker, action: SendGradient, at_s: float) -> float:
        n, to, link = action.microbatch, worker.upstream, worker.backward_link
        assert to is not None and link is not None  # noqa: PT018 - the protocol knows the ends
        size = self._sizes.activation_bytes[worker.stage - 1]
        if worker.engine is not None:
            to.gradients[n], size = self._over_the_wire(worker.outgoing.pop(n))
        arrival_s = link.send(at_s, size)
        message = (worker.stage, worker.replica, "pipeline", "gradient", n, size)
        self._emit(Message(at_s, arrival_s, *message))
        self._cause(arrival_s, to, GradientReceived(n))
        return at_s

    def _over_the_wire(self, tensor: Tensor | None) -> tuple[Any, int]:
        """A tensor as the receiver gets it, and the bytes that it took."""
        if tensor is None:
            return None, 0
        return over_the_wire(tensor, self._config.pipeline.wire_dtype)

    def _start_round(self, worker: VirtualWorker, action: StartRound, at_s: float) -> float:
        number, group = action.round, worker.group
        coordinates = -(-group.coordinates // self._config.classes)
        size, offer = coordinates * group.width, None
        if worker.engine is not None:
            offer = worker.engine.snapshot(number)
            coordinates, size = offer.numel(), offer.numel() * offer.element_size()
        stage, replica = worker.stage, worker.replica
        self._emit(Snapshot(at_s, stage, replica, number, action.update, coordinates))
        opened = group.open.setdefault(number, OpenRound(coordinates, size))
        opened.offers[replica] = offer
        opened.latest_s = max(opened.latest_s, at_s)
        self._complete_rounds(group)
        return at_s

    def _complete_rounds(self, group: RoundGroup) -> None:
        """Every open round that all have joined who still run; one alone has nobody to ask."""
        for number, opened in list(group.open.items()):
            joined = opened.offers.keys()
            if len(joined) > 1 and all(w.finished or w.replica in joined for w in group.workers):
                del group.open[number]
                self._complete_round(group, number, opened)

    def _complete_round(self, group: RoundGroup, number: int, opened: OpenRound) -> None:
        offers = [offer for _, offer in sorted(opened.offers.items()) if offer is not None]
        members = [w for w in group.workers if w.replica in opened.offers]
        mean = mean_in_order(offers) if offers else None
        contributors = tuple(sorted(opened.offers))
        group.means[number] = (mean, contributors, sum(not w.finished for w in members))
        arrival_s = group.link.reduce(opened.latest_s, opened.size, len(members))
        sent = group.link.bytes_sent(opened.size, len(members))
        for peer in members:
            message = (peer.stage, peer.replica, "data", "average", number, sent)
            self._emit(Message(opened.latest_s, arrival_s, *message))
            if not peer.finished:
                self._cause(arrival_s, peer, MeanReceived(number))

    def _skip_round(self, worker: VirtualWorker, action: SkipRound, at_s: float) -> float:
        self._emit(Skip(at_s, worker.stage, worker.replica, action.update))
        return at_s

    def _merge_round(self, worker: VirtualWorker, action: MergeRound, at_s: float) -> float:
        number, update, delay = action
        mean, contributors, needed_by = worker.group.means.pop(number)
        if needed_by > 1:
            worker.group.means[number] = (mean, contributors, needed_by - 1)
        if worker.engine is not None and mean is not None:
            worker.engine.merge(number, mean, update)
        merged = (worker.stage, worker.replica, number, update, delay, contributors)
        self._emit(Merge(at_s, *merged))
        worker.boundary_s = at_s
        return at_s

    def _finish(self, worker: VirtualWorker, _: Finish, at_s: float) -> float:
        worker.finished = True
        self._complete_rounds(worker.group)
        return at_s

    def report_memory(self) -> None:
        """Emit what every worker's weights and state took so far."""
        for worker in self.workers:
            engine = worker.engine
            if engine is not None:
                held = (engine.pool.buffers, engine.buffer_bytes, engine.optimizer_bytes)
                self._emit(Memory(worker.stage, worker.replica, *held, engine.averaging_bytes))
