"""Small float64 stages and data that several tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6


def stages(count: int) -> list[nn.Module]:
    """`count` unequal two-layer perceptrons, always with the same weights."""
    generator = torch.Generator().manual_seed(1)
    built: list[nn.Module] = []
    for stage in range(count):
        inner = 5 + stage
        module = nn.Sequential(nn.Linear(WIDTH, inner), nn.Tanh(), nn.Linear(inner, WIDTH)).double()
        with torch.no_grad():
            for parameter in module.parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.5 * drawn)
        built.append(module)
    return built


def batch(replica: int, microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * replica + microbatch)
    x, target = torch.randn(2, 4, WIDTH, generator=generator, dtype=torch.float64)
    return x, target


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def settings(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Complete settings: no default is left that two implementations could read otherwise."""
    base: dict[str, dict[str, Any]] = {
        "train": {"updates": 12},
        "mesh": {"stages": 2, "replicas": 2},
        "pipeline": {"schedule": "async", "accumulation": 1, "extra_depth": 0},
        "averaging": {"method": "none"},
        "optimizer": {
            "name": "nadamw",
            "learning_rate": 0.01,
            "beta1": 0.95,
            "beta2": 0.99,
            "momentum_decay": 0.1,
            "epsilon": 1e-8,
            "weight_decay": 0.01,
            "max_grad_norm": 0.5,
            "warmup_updates": 3,
            "schedule": "cosine",
            "min_lr_ratio": 0.1,
        },
    }
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
