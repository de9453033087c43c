"""AsyncMesh: train one language model on machines that share no fast interconnect."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from asyncmesh.version import VERSION

if TYPE_CHECKING:
    from asyncmesh.config import Config as Config
    from asyncmesh.simulator.run import Result as Result
    from asyncmesh.simulator.run import simulate_modules as simulate_modules

__version__ = VERSION
__all__ = ["Config", "Result", "simulate_modules"]

_HOMES = {
    "Config": "asyncmesh.config",
    "Result": "asyncmesh.simulator.run",
    "simulate_modules": "asyncmesh.simulator.run",
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds, and `asyncmesh --help` does not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
