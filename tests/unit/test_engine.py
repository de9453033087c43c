"""The engine's own promises: versions that are never touched, compilation, autocast, GPU."""

from __future__ import annotations

import unittest.mock
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncmesh.algorithm.layout import FlatLayout
from asyncmesh.algorithm.versions import VersionPool
from asyncmesh.config import Config
from asyncmesh.engine import Engine, StageProgram
from asyncmesh.simulator.run import simulate_modules

CPU = torch.device("cpu")


def config(**sections: dict[str, object]) -> Config:
    base: dict[str, dict[str, object]] = {
        "train": {"updates": 4},
        "mesh": {"stages": 1, "replicas": 1},
        "optimizer": {"warmup_updates": 0, "learning_rate": 0.1},
    }
    return Config.from_dict(
        {n: {**base.get(n, {}), **sections.get(n, {})} for n in base | sections}
    )


def squared(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def engine(module: nn.Module, settings: Config) -> Engine:
    return Engine(StageProgram(module, settings, CPU, squared), settings, 0, 0, mean_delay=0.0)


def test_a_version_in_flight_is_unharmed_by_updates() -> None:
    torch.manual_seed(0)
    made = engine(nn.Linear(3, 2), config())
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    made.forward(0, x, target)
    before = made.digest(0)
    made.forward(1, x, target)
    made.backward(1, None)
    made.update()
    made.forward(2, x, target)
    made.backward(2, None)
    made.update()
    assert made.digest(0) == before
    made.forward(3, x, target)
    assert made.digest(3) != before
    # Version 0 is still read, version 1 is not, and version 2 went into a third buffer at the most.
    assert made.pool.buffers == 3


def test_a_buffer_is_used_again_once_nobody_reads_it() -> None:
    layout = FlatLayout.of([("w", torch.empty(4))])
    pool = VersionPool(layout)
    pool.start(torch.zeros(4))
    first = pool.acquire()
    for _ in range(5):
        blank = pool.blank()
        assert blank is not first
        pool.publish(blank)
    assert pool.buffers == 3
    pool.release(first)
    assert pool.blank() is first
    assert pool.newest.number == 5


def test_leaves_share_storage_with_the_flat_buffer() -> None:
    layout = FlatLayout.of([("a", torch.empty(2, 3)), ("b", torch.empty(4))])
    flat = torch.arange(10.0)
    views = layout.views(flat)
    assert views["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    flat += 1
    assert views["b"].tolist() == [7, 8, 9, 10]
    assert layout.numel == 10


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def losses(compile_: bool, dtype: str, device: str = "cpu") -> list[float]:
    torch.manual_seed(1)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
    settings = config(
        train={"updates": 6, "compile": compile_, "dtype": dtype, "device": device},
        mesh={"stages": 3, "replicas": 1},
        optimizer={"warmup_updates": 0, "learning_rate": 0.01},
    )

    def batch(replica: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(microbatch)
        return torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)

    result = simulate_modules(stages, squared, batch, settings)
    return [point["loss"] for point in result.summary["train_curve"]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_stages_compute_the_same() -> None:
    assert losses(True, "float32") == pytest.approx(losses(False, "float32"), rel=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_every_stage_is_compiled_however_many_there_are() -> None:
    """torch.compile gives up on a code object's ninth variant; no stage may count as another's."""
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    stages = 10
    settings = config(train={"compile": True}, mesh={"stages": stages, "replicas": 1})
    with unittest.mock.patch("torch.compile", partial(torch.compile, backend=count)):
        programs = [StageProgram(nn.Linear(3, 3), settings, CPU, None) for _ in range(stages)]
    x = torch.randn(2, 3)
    for _ in range(2):
        for program in programs:
            weights = program.layout.views(program.initial_weights())
            expected = x @ weights["weight"].T + weights["bias"]
            assert torch.allclose(program.run(weights, {}, x, None), expected)
    assert len(graphs) == stages


def test_bfloat16_autocast_is_close_and_not_the_same() -> None:
    half, full = losses(False, "bfloat16"), losses(False, "float32")
    assert half != full
    assert half == pytest.approx(full, rel=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_computes_what_the_cpu_does(dtype: str) -> None:
    assert losses(False, dtype, "cuda") == pytest.approx(losses(False, dtype), rel=0.02)
