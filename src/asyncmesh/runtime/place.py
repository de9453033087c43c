"""A worker's place: what a command line and torchrun's environment say, and asking for it.

Owns how a process learns which (stage, replica) it is. Invariant: a mistake in it is one line for
the person who typed, before anything is started.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from asyncmesh.config import Config
from asyncmesh.configuration import flattened, nested
from asyncmesh.errors import MeshError
from asyncmesh.runtime.control import Control, UnreachableError
from asyncmesh.runtime.messages import ALL_STAGES, Hello, Welcome
from asyncmesh.runtime.network import own_address_towards, split_address
from asyncmesh.runtime.roster import versions_here

_BETWEEN_TRIES_S = 1.0


@dataclass(frozen=True)
class Place:
    """What the command line and torchrun's environment say."""

    coordinator: str
    job: str
    replica: int
    first: int
    last: int
    stage: int
    address: str
    settings: dict[str, Any]


def hello_of(place: Place) -> Hello:
    return Hello(
        job=place.job,
        replica=place.replica,
        first=place.first,
        last=place.last,
        host=socket.gethostname(),
        versions=versions_here(),
        settings=place.settings,
    )


def ask_for_places(
    coordinator: str,
    replica: int,
    stages: str | None,
    settings: dict[str, Any],
    patience_s: float,
) -> tuple[int, int]:
    """Whether this host would be welcome with those stages (default: all); which they are.

    Raises `MeshError` with the coordinator's reason. The places are taken by the workers. A
    coordinator that is not there yet is waited for.
    """
    split_address(coordinator, "--coordinator")
    control = Control(coordinator)
    first, last = parse_stages(stages) if stages is not None else (0, ALL_STAGES)
    question = Hello(
        job="",
        replica=replica,
        first=first,
        last=last,
        host=socket.gethostname(),
        versions=versions_here(),
        settings=settings,
    )
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            welcome = control.hello(question)
            break
        except UnreachableError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_BETWEEN_TRIES_S)
    control.close()
    if stages is None:
        last = config_of(welcome, {}).mesh.stages - 1
    return first, last


def config_of(welcome: Welcome, own: dict[str, Any]) -> Config:
    """The mesh's configuration, with what is this host's own business."""
    return Config.from_dict(nested(welcome.settings | own))


def parse_place(
    coordinator: str,
    replica: int,
    stages: str | None,
    address: str | None,
    settings: dict[str, Any],
) -> Place:
    """A place from the options of a command line and the environment that torchrun makes."""
    host, port = split_address(coordinator, "--coordinator")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first, last = parse_stages(stages) if stages is not None else (0, count - 1)
    if last - first + 1 != count:
        raise MeshError(
            f"--stages {first}-{last}: are {last - first + 1} stages, but torchrun starts {count}"
            f" workers here; give it --nproc-per-node={last - first + 1}"
        )
    return Place(
        coordinator=coordinator,
        job=_job(),
        replica=replica,
        first=first,
        last=last,
        stage=first + rank,
        address=address or own_address_towards(host, port),
        settings=flattened(settings),
    )


def _job() -> str:
    """torchrun's id of the run; without --standalone or --rdzv-id it is "none" on every host."""
    given = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return given if given != "none" else f"{socket.gethostname()}-{os.getppid()}"


def parse_stages(text: str) -> tuple[int, int]:
    """A-B, or A alone."""
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise MeshError(f"--stages {text}: must be A-B, counted from 0, such as 0-1")
    return int(first), int(last or first)
