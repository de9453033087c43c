"""Who has which place in the mesh: claims, states, and the phase of the run.

Owns the coordinator's decisions, without clocks of its own, sockets or threads. Invariants: a place
(stage, replica) belongs to one job at a time; the run begins when every place is ready, and is over
when nobody is left who trains.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncmesh.config import Config
from asyncmesh.configuration import resolved
from asyncmesh.errors import MeshError
from asyncmesh.runtime.messages import Hello, Phase, Report, State

# What may differ between the hosts of a mesh.
HOST_SETTINGS = ("train.device", "train.threads", "output_dir")
_SAME_EVERYWHERE = ("asyncmesh", "torch", "torchft")
_UNHEARD_S = 10.0  # after which a place may be taken by another job


@dataclass
class Place:
    """One (stage, replica), and who holds it."""

    job: str
    host: str
    heard_s: float
    state: State = "starting"
    error: str | None = None


class Roster:
    """The places of a mesh."""

    def __init__(self, config: Config, versions: Mapping[str, str]) -> None:
        self._config, self._versions = config, dict(versions)
        self._settings = resolved(config)
        self.places: dict[tuple[int, int], Place] = {}
        self.attempts: dict[int, int] = {}
        self.phase: Phase = "gathering"
        self.started_s: float | None = None

    # -- taking a place ---------------------------------------------------------------------------
    def claim(self, hello: Hello, now_s: float) -> None:
        """Give a host the places it asks for, or say in one line why not."""
        self._check_places(hello)
        self._check_versions(hello)
        self._check_settings(hello)
        for stage in range(hello.first, hello.last + 1):
            self._check_free(stage, hello, now_s)
        for stage in range(hello.first, hello.last + 1):
            held = self.places.get((stage, hello.replica))
            if held is None or held.job != hello.job:
                self.places[stage, hello.replica] = Place(hello.job, hello.host, now_s)

    def _check_places(self, hello: Hello) -> None:
        mesh = self._config.mesh
        if hello.replica >= mesh.replicas:
            raise MeshError(
                f"--replica {hello.replica}: this mesh has mesh.replicas = {mesh.replicas}, counted"
                f" from 0; give 0 to {mesh.replicas - 1}"
            )
        if hello.last < hello.first or hello.last >= mesh.stages:
            raise MeshError(
                f"--stages {hello.first}-{hello.last}: this mesh has mesh.stages = {mesh.stages},"
                f" counted from 0; give a range within 0-{mesh.stages - 1}"
            )
        if self.phase in ("stopping", "over"):
            raise MeshError("this run is ending; start another")

    def _check_versions(self, hello: Hello) -> None:
        for package in _SAME_EVERYWHERE:
            here = _release(self._versions[package])
            there = _release(hello.versions.get(package, "none"))
            if here != there:
                raise MeshError(
                    f"{package} {there} on {hello.host}, but {here} at the coordinator: all hosts"
                    f' need the same; install it with pip install "{package}=={here}"'
                )

    def _check_settings(self, hello: Hello) -> None:
        differing = [
            f"{name} = {value!r} here, {self._settings.get(name)!r} at the coordinator"
            for name, value in hello.settings.items()
            if name not in HOST_SETTINGS and value != self._settings.get(name)
        ]
        if differing:
            raise MeshError(
                f"this host was started with other settings: {'; '.join(differing)}; leave them"
                " out, a host gets its settings from the coordinator"
            )

    def _check_free(self, stage: int, hello: Hello, now_s: float) -> None:
        held = self.places.get((stage, hello.replica))
        if held is None or held.job == hello.job or held.state == "failed":
            return
        if now_s - held.heard_s > _UNHEARD_S and held.state != "finished":
            return
        raise MeshError(
            f"stage {stage} of replica {hello.replica} is already taken by {held.host}; give"
            " another --replica, or other --stages"
        )

    # -- what workers tell ------------------------------------------------------------------------
    def heard(self, report: Report, now_s: float) -> None:
        """Take note of a worker's state; a run begins with the last one that is ready."""
        place = self.places.get((report.stage, report.replica))
        if place is None or place.job != report.job:
            raise MeshError(
                f"stage {report.stage} of replica {report.replica} is not held by this worker any"
                " more; another one took its place"
            )
        place.heard_s, place.state = now_s, report.state
        place.error = report.error or place.error
        if self.phase == "gathering" and self._all("ready"):
            self.phase, self.started_s = "running", now_s
        self._end_if_over()

    def lost(self, stage: int, replica: int, reason: str) -> None:
        """A worker is gone without a word of its own."""
        place = self.places.get((stage, replica))
        if place is not None and place.state not in ("finished", "failed"):
            place.state, place.error = "failed", place.error or reason
            self._end_if_over()

    def stop(self) -> None:
        if self.phase == "running":
            self.phase = "stopping"
        elif self.phase == "gathering":
            self.phase = "over"

    def _end_if_over(self) -> None:
        ended = [place.state in ("finished", "failed") for place in self.places.values()]
        if self.phase in ("running", "stopping") and all(ended):
            self.phase = "over"

    # -- what others want to know -----------------------------------------------------------------
    def _all(self, state: State) -> bool:
        return not self.missing() and all(p.state == state for p in self.places.values())

    def missing(self) -> list[tuple[int, int]]:
        """Places that nobody has taken, as (stage, replica)."""
        mesh = self._config.mesh
        return [
            (stage, replica)
            for replica in range(mesh.replicas)
            for stage in range(mesh.stages)
            if (stage, replica) not in self.places
        ]

    def failures(self) -> list[tuple[int, int, Place]]:
        """(stage, replica, place) of all that failed."""
        return [
            (stage, replica, place)
            for (stage, replica), place in sorted(self.places.items())
            if place.state == "failed"
        ]

    def replicas_alive(self) -> int:
        """Replicas none of whose workers failed."""
        broken = {replica for _, replica, _ in self.failures()}
        return sum(
            replica not in broken and any(r == replica for _, r in self.places)
            for replica in range(self._config.mesh.replicas)
        )


def _release(version: str) -> str:
    """Without the name of a build: 2.13.0+cpu and 2.13.0+cu130 are the same release."""
    return re.split(r"\+", version)[0]


def explain_missing(missing: list[tuple[int, int]]) -> str:
    """Which places are empty, in words."""
    shown = ", ".join(f"stage {stage} of replica {replica}" for stage, replica in missing[:4])
    return shown + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")


def versions_here() -> dict[str, Any]:
    """Of the packages that must be the same on all hosts."""
    from importlib.metadata import version

    return {package: version(package) for package in _SAME_EVERYWHERE}
