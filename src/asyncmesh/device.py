"""Which device a worker computes on.

Owns the meaning of `train.device`. Invariant: a device that is answered can be used.
"""

from __future__ import annotations

import torch

from asyncmesh.config import Config
from asyncmesh.errors import ConfigError


def choose_device(config: Config) -> torch.device:
    """`train.device`, where auto is a GPU if there is one."""
    wanted, has_gpu = config.train.device, torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ConfigError(
            "train.device", wanted, "this machine has no usable GPU", "use train.device=cpu"
        )
    if wanted == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
