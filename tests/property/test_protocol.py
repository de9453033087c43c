"""The state machine under any timing: it never deadlocks, and what is promised holds for all of
them.

The driver here is neither the simulator nor the runtime: it hands the machines of one replica their
events in an order that Hypothesis chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmesh.config import Config
from asyncmesh.errors import ProtocolError
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
    Started,
    StartRound,
    UpdateFinished,
)
from asyncmesh.protocol.worker import Worker


@dataclass
class Replica:
    """One replica's machines. `pending`: by worker and source, in order, what may happen next."""

    machines: Sequence[Worker]
    random: Random
    log: list[list[Action]] = field(init=False)
    pending: dict[tuple[int, str], list[Input]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log = [[] for _ in self.machines]
        for stage in range(len(self.machines)):
            self.handle(stage, Started())

    def handle(self, stage: int, happened: Input) -> None:
        for action in self.machines[stage].on_event(happened):
            self.log[stage].append(action)
            self.consequences(stage, action)

    def consequences(self, stage: int, action: Action) -> None:
        if isinstance(action, RunForward):
            self.later(stage, "own", ForwardFinished(action.microbatch))
        elif isinstance(action, RunBackward):
            self.later(stage, "own", BackwardFinished(action.microbatch))
        elif isinstance(action, RunUpdate):
            self.later(stage, "own", UpdateFinished(action.update))
        elif isinstance(action, SendActivation):
            self.later(stage + 1, "upstream", ActivationReceived(action.microbatch))
        elif isinstance(action, SendGradient):
            self.later(stage - 1, "downstream", GradientReceived(action.microbatch))
        elif isinstance(action, StartRound):
            self.later(stage, f"round {action.round}", MeanReceived(action.round))

    def later(self, stage: int, source: str, happening: Input) -> None:
        self.pending.setdefault((stage, source), []).append(happening)

    def run(self) -> None:
        while self.pending:
            key = self.random.choice(sorted(self.pending))
            happened = self.pending[key].pop(0)
            if not self.pending[key]:
                del self.pending[key]
            self.handle(key[0], happened)


def replica(config: Config, order_seed: int) -> Replica:
    machines = [Worker.of(config, stage) for stage in range(config.mesh.stages)]
    built = Replica(machines, Random(order_seed))
    built.run()
    return built


@st.composite
def configs(draw: st.DrawFn, schedule: str | None = None, order: str = "strict") -> Config:
    stages = draw(st.integers(1, 6))
    schedule = schedule or draw(st.sampled_from(["async", "1f1b", "gpipe"]))
    depths = st.lists(st.integers(0, 3), min_size=stages - 1, max_size=stages - 1)
    method = draw(st.sampled_from(["none", "allreduce", "sparta", "async-ema"]))
    averaging: dict[str, object] = {"method": method, "interval": draw(st.integers(1, 3))}
    if method == "async-ema":
        averaging["delay"] = draw(st.sampled_from([0, 1, 4, "emergent"]))
    if method == "allreduce":
        del averaging["interval"]
    return Config.from_dict(
        {
            "train": {"updates": draw(st.integers(1, 8))},
            "mesh": {"stages": stages, "replicas": 2},
            "pipeline": {
                "schedule": schedule,
                "accumulation": draw(st.integers(1, 4)),
                "extra_depth": draw(depths) if schedule == "async" else 0,
                "order": order,
            },
            "averaging": averaging,
            "optimizer": {"warmup_updates": 0},
        }
    )


def computations(actions: Sequence[Action]) -> list[Action]:
    return [a for a in actions if isinstance(a, RunForward | RunBackward | RunUpdate)]


@settings(max_examples=150, deadline=None)
@given(configs(), st.integers(0, 10**6))
def test_every_order_of_events_ends_with_every_microbatch_done_once(
    config: Config, order_seed: int
) -> None:
    microbatches = list(range(config.train.updates * config.pipeline.accumulation))
    for actions in replica(config, order_seed).log:
        assert [a.microbatch for a in actions if isinstance(a, RunForward)] == microbatches
        assert [a.microbatch for a in actions if isinstance(a, RunBackward)] == microbatches
        updates = [a.update for a in actions if isinstance(a, RunUpdate)]
        assert updates == list(range(1, config.train.updates + 1))
        assert sum(isinstance(a, Finish) for a in actions) == 1
        assert isinstance(actions[-1], Finish)


@settings(max_examples=100, deadline=None)
@given(configs(), st.integers(0, 10**6))
def test_merges_come_after_an_update_and_before_its_snapshot(
    config: Config, order_seed: int
) -> None:
    """And before any forward sees the version, whatever the timing. A round may merge with delay 0,
    which is after its own snapshot.
    """
    if config.averaging.method == "allreduce":
        return  # gradients are merged before the update
    for actions in replica(config, order_seed).log:
        since_update: list[Action] = []
        for action in actions:
            if isinstance(action, RunUpdate):
                since_update = []
            if isinstance(action, MergeRound):
                assert not any(isinstance(a, RunForward | RunBackward) for a in since_update)
                started = [a for a in since_update if isinstance(a, StartRound)]
                assert [a.round for a in started] in ([], [action.round])
            since_update.append(action)


@settings(max_examples=100, deadline=None)
@given(configs(), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_strict_order_does_not_depend_on_timing(config: Config, one: int, other: int) -> None:
    first, second = replica(config, one), replica(config, other)
    for a, b in zip(first.log, second.log, strict=True):
        assert computations(a) == computations(b)


@settings(max_examples=100, deadline=None)
@given(configs(schedule="async", order="eager"), st.integers(0, 10**6))
def test_the_eager_order_never_has_a_larger_delay_than_the_strict_one(
    config: Config, order_seed: int
) -> None:
    k, h = config.pipeline.accumulation, config.pipeline.extra_depth
    assert isinstance(h, list)
    for stage, actions in enumerate(replica(config, order_seed).log):
        c = 1 + sum(1 + edge for edge in h[stage:])
        for action in actions:
            if isinstance(action, RunBackward):
                n = action.microbatch
                assert action.delay <= n // k - max(0, (n - (c - 1)) // k)


@settings(max_examples=100, deadline=None)
@given(configs(), st.integers(0, 10**6))
def test_no_more_in_flight_than_the_capacity(config: Config, order_seed: int) -> None:
    for machine, actions in zip(
        replica(config, order_seed).machines, replica(config, order_seed).log, strict=True
    ):
        in_flight = most = 0
        for action in actions:
            in_flight += isinstance(action, RunForward) - isinstance(action, RunBackward)
            most = max(most, in_flight)
        assert most <= machine.plan.capacity


def small(**pipeline: object) -> Config:
    return Config.from_dict(
        {
            "train": {"updates": 4},
            "mesh": {"stages": 3, "replicas": 1},
            "pipeline": pipeline,
            "optimizer": {"warmup_updates": 0},
        }
    )


def text(actions: Sequence[Action]) -> str:
    letters = {RunForward: "F", RunBackward: "B"}
    return " ".join(
        f"{letters[type(a)]}{a.microbatch}" if not isinstance(a, RunUpdate) else "U"
        for a in actions
        if isinstance(a, RunForward | RunBackward | RunUpdate)
    )


@pytest.mark.parametrize(
    ("pipeline", "stage", "expected"),
    [
        ({}, 0, "F0 F1 F2 B0 U F3 B1 U B2 U B3 U"),
        ({}, 1, "F0 F1 B0 U F2 B1 U F3 B2 U B3 U"),
        ({}, 2, "F0 B0 U F1 B1 U F2 B2 U F3 B3 U"),
        (
            {"schedule": "1f1b", "accumulation": 3},
            1,
            "F0 F1 B0 F2 B1 B2 U F3 F4 B3 F5 B4 B5 U F6 F7 B6 F8 B7 B8 U F9 F10 B9 F11 B10 B11 U",
        ),
        (
            {"schedule": "gpipe", "accumulation": 2},
            0,
            "F0 F1 B0 B1 U F2 F3 B2 B3 U F4 F5 B4 B5 U F6 F7 B6 B7 U",
        ),
        ({"extra_depth": [1, 0]}, 0, "F0 F1 F2 F3 B0 U B1 U B2 U B3 U"),
    ],
)
def test_orders_written_out(pipeline: dict[str, object], stage: int, expected: str) -> None:
    assert text(replica(small(**pipeline), 0).log[stage]) == expected


def test_what_cannot_happen_is_refused() -> None:
    machine = Worker.of(small(), 1)
    machine.on_event(Started())
    with pytest.raises(ProtocolError, match="activation of microbatch 1, expected 0"):
        machine.on_event(ActivationReceived(1))
    with pytest.raises(ProtocolError, match="round 3, which is not in flight"):
        machine.on_event(MeanReceived(3))
