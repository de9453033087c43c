"""One stage, one replica is a plain PyTorch loop, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncmesh import Config, simulate_modules
from asyncmesh.algorithm.schedule import LearningRate

UPDATES = 25

# Odd sizes, so that the flat buffer's vector lanes fall otherwise than those of single parameters.
WIDTHS = (7, 13, 5)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    a, b, c = WIDTHS
    return nn.Sequential(
        nn.Linear(a, b), nn.LayerNorm(b), nn.GELU(), nn.Linear(b, 37), nn.Tanh(), nn.Linear(37, c)
    ).to(dtype)


def batch(replica: int, microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * replica + microbatch)
    x = torch.randn(6, WIDTHS[0], generator=generator)
    return x, torch.randn(6, WIDTHS[-1], generator=generator)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def plain_loop(
    make: Callable[[Any], torch.optim.Optimizer],
    accumulation: int,
    max_norm: float,
    rate: Callable[[int], float],
) -> dict[str, Tensor]:
    module = model()
    optimizer = make(module.parameters())
    for update in range(1, UPDATES + 1):
        optimizer.param_groups[0]["lr"] = rate(update)
        optimizer.zero_grad()
        for j in range(accumulation):
            x, target = batch(0, (update - 1) * accumulation + j)
            loss = squared_error(module(x), target) / accumulation
            loss.backward()  # type: ignore[no-untyped-call]
        if max_norm:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
    return dict(module.named_parameters())


OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "nadamw": (
        {"name": "nadamw", "beta1": 0.95, "beta2": 0.99, "momentum_decay": 0.004},
        lambda p: torch.optim.NAdam(
            p,
            betas=(0.95, 0.99),
            momentum_decay=0.004,
            weight_decay=0.1,
            decoupled_weight_decay=True,
        ),
    ),
    "adamw": (
        {"name": "adamw", "beta1": 0.9, "beta2": 0.99},
        lambda p: torch.optim.AdamW(p, betas=(0.9, 0.99), weight_decay=0.1),
    ),
    "sgd": (
        {"name": "sgd", "beta1": 0.9},
        lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.1),
    ),
    "sgd without momentum": (
        {"name": "sgd"},
        lambda p: torch.optim.SGD(p, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("max_norm", [0.0, 0.3])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_equal_bit_for_bit(name: str, accumulation: int, max_norm: float, schedule: str) -> None:
    settings, make = OPTIMIZERS[name]
    config = Config.from_dict(
        {
            "train": {"updates": UPDATES},
            "mesh": {"stages": 1, "replicas": 1},
            "pipeline": {"accumulation": accumulation},
            "optimizer": {
                "learning_rate": 0.02,
                "weight_decay": 0.1,
                "max_grad_norm": max_norm,
                "warmup_updates": 5,
                "schedule": schedule,
                **settings,
            },
        }
    )
    rate = LearningRate(0.02, schedule, UPDATES, 5, 0.1)
    expected = plain_loop(make, accumulation, max_norm, rate)
    trained = simulate_modules([model()], squared_error, batch, config).weights[0][0]
    assert trained.keys() == expected.keys()
    for parameter, value in expected.items():
        assert torch.equal(trained[parameter], value), parameter


def test_the_modules_and_the_random_state_are_left_alone() -> None:
    module = model()
    before = {name: p.clone() for name, p in module.named_parameters()}
    torch.manual_seed(11)
    state = torch.get_rng_state()
    config = Config.from_dict({"train": {"updates": 3}, "mesh": {"replicas": 1}})
    simulate_modules([module], squared_error, batch, config)
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
