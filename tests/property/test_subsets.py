"""Every coordinate once a cycle, and never in two rounds in flight, for any shapes and settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tiny
from asyncmesh import Config, simulate_modules
from asyncmesh.algorithm.correction import mean_in_order
from asyncmesh.algorithm.subsets import Partition, gather
from asyncmesh.errors import ConfigError
from asyncmesh.observe.events import Event, Merge, Snapshot

SHAPES = st.integers(0, 400)


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    classes = draw(st.integers(1, 40))
    return Partition(
        numel=draw(SHAPES),
        classes=classes,
        in_flight=draw(st.integers(1, classes)),
        seed=draw(st.integers(0, 2**63)),
        stage=draw(st.integers(0, 64)),
    )


def coordinates(partition: Partition, round_: int) -> list[int]:
    indices = partition.indices(round_)
    return list(range(partition.numel)) if indices is None else [int(i) for i in indices]


@given(partitions(), st.integers(0, 1000))
def test_every_coordinate_exactly_once_a_cycle(partition: Partition, cycle: int) -> None:
    first = cycle * partition.classes
    visited = [
        i for r in range(first, first + partition.classes) for i in coordinates(partition, r)
    ]
    assert sorted(visited) == list(range(partition.numel))


@given(partitions(), st.integers(0, 200))
def test_any_rounds_that_may_be_in_flight_together_are_disjoint(
    partition: Partition, first: int
) -> None:
    visited = [
        i for r in range(first, first + partition.in_flight) for i in coordinates(partition, r)
    ]
    assert len(visited) == len(set(visited))


@given(partitions(), st.integers(0, 200))
def test_classes_are_equal_in_size_and_sorted(partition: Partition, round_: int) -> None:
    chosen = coordinates(partition, round_)
    assert abs(len(chosen) - partition.numel / partition.classes) <= 1
    assert chosen == sorted(chosen)


def test_the_partition_is_drawn_anew_every_cycle_and_for_every_seed_and_stage() -> None:
    base = Partition(numel=2000, classes=20, in_flight=10, seed=5, stage=0)
    other_seed = Partition(numel=2000, classes=20, in_flight=10, seed=6, stage=0)
    other_stage = Partition(numel=2000, classes=20, in_flight=10, seed=5, stage=1)
    first = set(coordinates(base, 3))
    for other in (
        coordinates(base, 3 + 20),
        coordinates(other_seed, 3),
        coordinates(other_stage, 3),
    ):
        # 100 coordinates of 2,000: two unrelated draws share few.
        assert len(first & set(other)) < 40
    assert coordinates(base, 3) == coordinates(Partition(2000, 20, 10, 5, 0), 3)


def test_golden_indices() -> None:
    """Replicas on unlike machines and versions must agree: these may never change."""
    partition = Partition(numel=50, classes=7, in_flight=3, seed=42, stage=2)
    assert [coordinates(partition, round_) for round_ in (0, 6, 7)] == GOLDEN


GOLDEN = [[5, 9, 14, 27, 34, 37, 47], [1, 12, 18, 22, 30, 38, 44], [5, 7, 19, 25, 28, 36, 42, 49]]


@st.composite
def averaging_settings(draw: st.DrawFn) -> dict[str, Any]:
    method = draw(
        st.sampled_from(
            ["async-overwrite", "async-delta", "async-ema", "async-momentum", "sparta", "diloco"]
        )
    )
    chosen: dict[str, Any] = {
        "method": method,
        "fraction": draw(st.sampled_from([0.07, 0.1, 0.25, 0.34, 0.5, 1.0])),
        "interval": draw(st.integers(1, 4)),
    }
    if method.startswith("async-"):
        chosen["delay"] = draw(st.one_of(st.integers(0, 12), st.just("emergent")))
        chosen["max_in_flight"] = draw(st.one_of(st.none(), st.integers(1, 20)))
    return chosen


def in_flight_together(events: list[Event], stage: int, replica: int) -> list[set[int]]:
    """The rounds between snapshot and merge, after every snapshot."""
    now: set[int] = set()
    moments = []
    for event in events:
        if not isinstance(event, Snapshot | Merge):
            continue
        if (event.stage, event.replica) != (stage, replica):
            continue
        if isinstance(event, Merge):
            now.remove(event.round)
        else:
            now.add(event.round)
            moments.append(set(now))
    return moments


@settings(max_examples=60, deadline=None)
@given(averaging_settings(), st.floats(0, 40), st.booleans())
def test_the_invariant_holds_or_the_settings_are_refused(
    averaging: dict[str, Any], latency_ms: float, uneven: bool
) -> None:
    """A coordinate is in at most one round in flight, for any settings and links."""
    values = tiny.settings(
        train={"updates": 25},
        mesh={"stages": 1, "replicas": 2},
        averaging=averaging,
        links={"averaging_latency_ms": latency_ms},
        compute={"jitter": 0.5, "replica_slowdown": [1.0, 3.0] if uneven else []},
    )
    try:
        config = Config.from_dict(values)
    except ConfigError:
        with pytest.raises(ConfigError, match="one round at a time"):
            Config.from_dict(values)
        return
    stages = tiny.stages(1)
    result = simulate_modules(stages, tiny.squared_error, tiny.batch, config)
    numel = sum(p.numel() for p in stages[0].parameters())
    partition = Partition(numel, config.classes, config.rounds_in_flight, config.seed, 0)
    for replica in range(2):
        for together in in_flight_together(result.events, 0, replica):
            visited = [i for round_ in together for i in coordinates(partition, round_)]
            assert len(visited) == len(set(visited))


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_everything_averaged_without_delay_is_the_dense_mean(replicas: int) -> None:
    """p = 1, D = 0: after every update each replica holds the mean of what all had."""
    values = tiny.settings(
        train={"updates": 1},
        mesh={"stages": 2, "replicas": replicas},
        optimizer={"warmup_updates": 0},
    )
    alone = simulate_modules(
        tiny.stages(2), tiny.squared_error, tiny.batch, Config.from_dict(values)
    )
    values["averaging"] = {"method": "sparta", "fraction": 1.0}
    averaged = simulate_modules(
        tiny.stages(2), tiny.squared_error, tiny.batch, Config.from_dict(values)
    )
    for stage in range(2):
        for name in alone.weights[0][stage]:
            mean = torch.stack([row[stage][name] for row in alone.weights]).mean(0)
            for replica in range(replicas):
                assert torch.allclose(
                    averaged.weights[replica][stage][name], mean, rtol=0, atol=1e-15
                )


def test_gather_takes_what_the_indices_say() -> None:
    flat = torch.arange(10.0)
    assert gather(flat, torch.tensor([1, 4])).tolist() == [1.0, 4.0]
    assert gather(flat, None) is not flat
    assert mean_in_order([flat, flat + 2]).tolist() == (flat + 1).tolist()


def test_a_stage_without_parameters_takes_part() -> None:
    values = tiny.settings(averaging={"method": "async-ema", "fraction": 0.5, "delay": 1})
    values["mesh"] = {"stages": 3, "replicas": 2}
    stages = [tiny.stages(1)[0], nn.Tanh(), tiny.stages(2)[1]]
    result = simulate_modules(stages, tiny.squared_error, tiny.batch, Config.from_dict(values))
    assert result.summary["status"] == "completed"
    assert result.weights[0][1] == {}
