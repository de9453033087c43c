"""The package against an emulation that shares no code with it, in float64, to 1e-9."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from torch import Tensor

import emulation
import tiny
from asyncmesh import Config, simulate_modules
from asyncmesh.algorithm.choice import make_partition

DENSE_METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "allreduce": {},
    "sparta": {"fraction": 1.0},
    "local-sgd": {"interval": 4},
    "diloco": {"interval": 5},
    "async-overwrite": {"fraction": 1.0, "delay": 2, "interval": 3},
    "async-delta": {"fraction": 1.0, "delay": 3, "interval": 3},
    "async-ema": {"fraction": 1.0, "delay": 1, "interval": 1},
    "async-momentum": {"fraction": 1.0, "delay": 2, "interval": 2},
}
AVERAGING_DEFAULTS = {
    "outer_learning_rate": 0.7,
    "outer_momentum": 0.6,
    "ema_start": 0.4,
    "correction": "ema",
}


def largest_difference(settings: dict[str, dict[str, Any]], timing: dict[str, Any] | None) -> float:
    """Between all final weights of the two implementations."""
    config = Config.from_dict({**settings, "compute": timing or {}})
    stages = tiny.stages(config.mesh.stages)
    result = simulate_modules(stages, tiny.squared_error, tiny.batch, config)

    sizes = [sum(p.numel() for p in stage.parameters()) for stage in stages]

    def subset(stage: int, round_: int) -> Tensor:
        indices = make_partition(config, sizes[stage], stage).indices(round_)
        assert indices is not None
        return indices

    told = {**settings["averaging"]}
    told |= {"interval": config.averaging_interval, "delay": config.averaging_delay}
    expected = emulation.emulate(
        stages,
        tiny.squared_error,
        tiny.batch,
        {**settings, "averaging": told},
        subset if config.classes > 1 else None,
    )
    return max(
        float((result.weights[replica][stage][name] - value).abs().max())
        for replica, row in enumerate(expected)
        for stage, parameters in enumerate(row)
        for name, value in parameters.items()
    )


@pytest.mark.parametrize("method", DENSE_METHODS)
def test_every_mesh_and_depth_with_dense_averaging(method: str) -> None:
    for stages, accumulation, depth in product((1, 2, 4), (1, 2, 3), (0, 2)):
        settings = tiny.settings(
            mesh={"stages": stages, "replicas": 2},
            pipeline={"accumulation": accumulation, "extra_depth": depth},
            averaging={"method": method, **AVERAGING_DEFAULTS, **DENSE_METHODS[method]},
        )
        assert largest_difference(settings, None) < 1e-9, (stages, accumulation, depth)


@pytest.mark.parametrize("method", ["async-delta", "async-ema", "async-momentum", "sparta"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_sparse_averaging(method: str, replicas: int) -> None:
    delay = 0 if method == "sparta" else 3
    settings = tiny.settings(
        train={"updates": 17},
        mesh={"stages": 2, "replicas": replicas},
        averaging={"method": method, "fraction": 0.3, "delay": delay, **AVERAGING_DEFAULTS},
    )
    assert largest_difference(settings, None) < 1e-9


@pytest.mark.parametrize("name", ["nadamw", "adamw", "sgd"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.2])
@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_optimizers(name: str, max_grad_norm: float, warmup: int, schedule: str) -> None:
    optimizer = {"name": name, "max_grad_norm": max_grad_norm}
    optimizer |= {"warmup_updates": warmup, "schedule": schedule}
    settings = tiny.settings(mesh={"stages": 3, "replicas": 1}, optimizer=optimizer)
    assert largest_difference(settings, None) < 1e-9


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_flushed_schedules(schedule: str) -> None:
    settings = tiny.settings(
        mesh={"stages": 3, "replicas": 2},
        pipeline={"schedule": schedule, "accumulation": 4},
        averaging={"method": "allreduce"},
    )
    assert largest_difference(settings, None) < 1e-9


def test_a_depth_for_every_edge() -> None:
    settings = tiny.settings(mesh={"stages": 4, "replicas": 1}, pipeline={"extra_depth": [0, 3, 1]})
    assert largest_difference(settings, None) < 1e-9


def test_delta_as_the_correction_of_momentum() -> None:
    averaging = {**AVERAGING_DEFAULTS, "method": "async-momentum", "correction": "delta"}
    averaging |= {"strength": 0.8, "fraction": 0.5, "delay": 2, "interval": 1}
    assert largest_difference(tiny.settings(averaging=averaging), None) < 1e-9


def test_timing_changes_nothing_in_the_strict_order_with_a_fixed_delay() -> None:
    timing = {
        "jitter": 0.7,
        "stage_slowdown": [1.0, 3.0, 0.5],
        "replica_slowdown": [1.0, 2.5],
    }
    settings = tiny.settings(
        mesh={"stages": 3, "replicas": 2},
        averaging={"method": "async-ema", "fraction": 0.25, "delay": 3, **AVERAGING_DEFAULTS},
    )
    assert largest_difference(settings, timing) < 1e-9
