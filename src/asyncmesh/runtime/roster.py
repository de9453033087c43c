"""Who has which place in the mesh: claims, states, and the phase of the run.

Owns the coordinator's decisions, without clocks of its own, sockets or threads. Invariants: a place
(stage, replica) belongs to one job at a time; the run begins when every place is taken and nobody
is still getting ready (who failed meanwhile is left behind), and is over when nobody trains any
more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from asyncmesh.config import Config
from asyncmesh.configuration import resolved
from asyncmesh.errors import MeshError
from asyncmesh.runtime.messages import ALL_STAGES, Hello, Lost, Phase, Report, State
from asyncmesh.version import VERSION

# What may differ between the hosts of a mesh.
HOST_SETTINGS = ("train.device", "train.threads", "output_dir")
_SAME_EVERYWHERE = ("asyncmesh", "torch", "torchft")
_GONE = ("failed", "diverged")
_ENDED = ("finished", *_GONE)
_UNHEARD_S = 10.0  # after which a place may be taken by another job
_LOST_S = 30.0  # after which its worker is taken for lost


@dataclass
class Place:
    """One (stage, replica), and who holds it."""

    job: str
    host: str
    heard_s: float
    state: State = "starting"
    error: str | None = None
    events: int = 0  # taken so far
    knows_it_is_over: bool = False


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
        if hello.last == ALL_STAGES:
            hello = hello.model_copy(update={"last": self._config.mesh.stages - 1})
        self._check_places(hello)
        self._check_versions(hello)
        self._check_settings(hello)
        for stage in range(hello.first, hello.last + 1):
            self._check_free(stage, hello, now_s)
        if not hello.job:
            return  # it only asked
        self._begin_attempt(hello, now_s)
        for stage in range(hello.first, hello.last + 1):
            held = self.places.get((stage, hello.replica))
            if held is None or held.job != hello.job:
                self.places[stage, hello.replica] = Place(hello.job, hello.host, now_s)

    def _begin_attempt(self, hello: Hello, now_s: float) -> None:
        """A replica that lost a worker begins anew as a whole: its stages must agree."""
        mine = {place: held for place, held in self.places.items() if place[1] == hello.replica}
        gone = [
            held
            for held in mine.values()
            if held.state in _GONE or (held.job != hello.job and now_s - held.heard_s > _UNHEARD_S)
        ]
        if gone:
            for place in mine:
                del self.places[place]
            self.attempts[hello.replica] = self.attempts.get(hello.replica, 0) + 1

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
        if held is None or held.job == hello.job or held.state in _GONE:
            return
        if now_s - held.heard_s > _UNHEARD_S and held.state != "finished":
            return
        raise MeshError(
            f"stage {stage} of replica {hello.replica} is already taken by {held.host}; give"
            " another --replica, or other --stages"
        )

    # -- what workers tell ------------------------------------------------------------------------
    def news(self, report: Report) -> Report:
        """The report without the events that came before (its answer was lost on the way)."""
        place = self._place(report)
        known = place.events - report.first_event
        place.events = max(place.events, report.first_event + len(report.events))
        return report.model_copy(update={"events": report.events[max(known, 0) :]})

    def heard(self, report: Report, now_s: float) -> None:
        """Take note of a worker's state; a run begins with the last one that is ready."""
        place = self._place(report)
        place.heard_s, place.state = now_s, report.state
        place.error = report.error or place.error
        if report.state == "diverged":
            self.stop()
        if self.phase == "gathering" and not self.missing() and self._is_ready(self.places):
            self.phase, self.started_s = "running", now_s
        self._end_if_over()

    def _place(self, report: Report) -> Place:
        place = self.places.get((report.stage, report.replica))
        if place is None or place.job != report.job:
            raise MeshError(
                f"stage {report.stage} of replica {report.replica} is not held by this worker any"
                " more; another one took its place"
            )
        return place

    def lost(self, lost: Lost) -> None:
        """Workers are gone, perhaps without a word of their own."""
        for stage in range(lost.first, min(lost.last + 1, self._config.mesh.stages)):
            place = self.places.get((stage, lost.replica))
            if place is not None and place.job == lost.job:
                self._fail(place, lost.reason)

    def forget_the_silent(self, now_s: float) -> None:
        """While the mesh trains; before, a host may take its time to install things."""
        for place in self.places.values():
            if self.phase != "gathering" and now_s - place.heard_s > _LOST_S:
                self._fail(place, f"was not heard for {_LOST_S:.0f} s")

    def _fail(self, place: Place, reason: str) -> None:
        if place.state not in _ENDED:
            place.state, place.error = "failed", place.error or reason
            self._end_if_over()

    def stop(self) -> None:
        if self.phase == "running":
            self.phase = "stopping"
        elif self.phase == "gathering":
            self.phase = "over"

    def _end_if_over(self) -> None:
        ended = [place.state in _ENDED for place in self.places.values()]
        has_begun = self.phase in ("running", "stopping")
        if all(ended) and (has_begun or not self.missing()):
            self.phase = "over"

    # -- what others want to know -----------------------------------------------------------------
    def phase_for(self, report: Report) -> Phase:
        """What a worker is answered. One that comes late gathers while the others train."""
        self._place(report).knows_it_is_over = self.phase == "over"
        mine = [place for place in self.places if place[1] == report.replica]
        if any(self.places[place].state == "failed" for place in mine):
            return "over"  # a pipeline without one of its stages has nothing left to do
        if self.phase == "running" and not self._is_ready(mine, self._config.mesh.stages):
            return "gathering"
        return self.phase

    def _is_ready(self, places: Iterable[tuple[int, int]], count: int = 0) -> bool:
        states = [self.places[place].state for place in places]
        return len(states) >= count and "starting" not in states

    def missing(self) -> list[tuple[int, int]]:
        """Places that nobody has taken, as (stage, replica)."""
        mesh = self._config.mesh
        return [
            (stage, replica)
            for replica in range(mesh.replicas)
            for stage in range(mesh.stages)
            if (stage, replica) not in self.places
        ]

    def all_know_it_is_over(self) -> bool:
        return all(p.knows_it_is_over or p.state in _ENDED for p in self.places.values())

    def failures(self) -> list[tuple[int, int, Place]]:
        """(stage, replica, place) of all that failed."""
        return [
            (stage, replica, place)
            for (stage, replica), place in sorted(self.places.items())
            if place.state in _GONE
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


def versions_here() -> dict[str, str]:
    """Of the packages that must be the same on all hosts."""
    return {"asyncmesh": VERSION, "torch": version("torch"), "torchft": version("torchft")}
