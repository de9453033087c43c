"""A real run as its coordinator's host sees it: from the first claim to the summary.

Owns the order of a run: servers, record, phases, result. Invariant: however a run ends (done,
stopped, diverged, its last worker lost), everything recorded is summarised.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncmesh.config import Config
from asyncmesh.data.sampler import Dataset
from asyncmesh.errors import AsyncMeshError, DivergedError, InputFileError, MeshError
from asyncmesh.observe.events import Event
from asyncmesh.observe.folder import RunFolder
from asyncmesh.observe.live import Live
from asyncmesh.observe.summary import SummaryBuilder
from asyncmesh.runtime.collector import Collector
from asyncmesh.runtime.coordinator import Coordinator
from asyncmesh.runtime.launch import ReplicaJob
from asyncmesh.runtime.roster import explain_missing

_TICK_S = 0.25  # between two looks at the launched processes


class MeshRun:
    """A context manager: the coordinator and the run's record."""

    def __init__(
        self,
        config: Config,
        data: Dataset,
        address: str,
        port: int = 0,
        folder: Path | None = None,
    ) -> None:
        self.config = config
        self._summary, self.live = SummaryBuilder(config), Live(config)
        validates = bool(data.validation) and not config.compute.emulated
        self._collector = Collector(self._emit, config.mesh.stages, validates, self._tokens)
        # An address that is taken is found out before a folder is made.
        self.coordinator = Coordinator(config, data.digest(), address, port)
        self._folder = RunFolder.new(config) if folder is None else RunFolder(folder, config)
        self.path = self._folder.path
        self._weights = self.path / "checkpoints"
        self._opened_s = time.monotonic()
        self._stopped = False

    def __enter__(self) -> MeshRun:
        self.coordinator.start(self._collector, self._weights)
        return self

    def __exit__(self, *_: object) -> None:
        self.coordinator.close()
        with suppress(OSError):  # a full disk has been told of by then
            self._folder.close()

    def _emit(self, event: Event) -> None:
        self._folder(event)
        self._summary(event)
        self.live(event)

    def _tokens(self, update: int, replicas: int) -> int:
        return self._tokens_of(update * self.config.pipeline.accumulation * replicas)

    def _tokens_of(self, microbatches: int) -> int:
        return microbatches * self.config.pipeline.microbatch_size * self.config.model.context

    # -- while it goes on -------------------------------------------------------------------------
    def watch(
        self, jobs: Sequence[ReplicaJob], show: Callable[[], None], patience_s: float = math.inf
    ) -> None:
        """Until the run is over and the jobs have ended; `show` is called now and then.

        `patience_s`: how long places may be empty before it begins.
        """
        roster = self.coordinator.roster
        while roster.phase != "over" or any(job.exit_code() is None for job in jobs):
            self.coordinator.wait(_TICK_S)
            self.coordinator.forget_the_silent()
            missing = roster.missing() if roster.phase == "gathering" else []
            if missing and time.monotonic() - self._opened_s > patience_s:
                self.coordinator.stop()
                raise MeshError(
                    f"nobody came for {explain_missing(missing)} within {patience_s:.0f} s; start"
                    " asyncmesh join for it, or wait longer with --patience"
                )
            for job in jobs:
                if job.exit_code() is not None:
                    self._note_the_end_of(job)
            show()

    def _note_the_end_of(self, job: ReplicaJob) -> None:
        self.coordinator.lost(job.lost())
        roster = self.coordinator.roster
        if job.exit_code() and roster.phase == "gathering" and roster.missing():
            # Nobody else will come for its places.
            raise MeshError(f"replica {job.replica}: {job.reason()}; see {job.log_folder}")

    def stop(self) -> None:
        """Save and stop."""
        self._stopped = True
        self.coordinator.stop()

    # -- the end ----------------------------------------------------------------------------------
    def conclude(self) -> dict[str, Any]:
        """Write the summary; answers it. The checkpoint gets its name when it is whole."""
        failure = self.coordinator.failure
        if failure is not None:
            raise self._cannot_record(failure)
        self._collector.finish()
        self._name_the_checkpoint()
        began_s = self.coordinator.roster.started_s or self._opened_s
        wall_s = time.monotonic() - began_s
        lost = {replica for _, replica, _ in self.coordinator.roster.failures()}
        summary = self._summary.build(self._status(), wall_s, self._tokens_of, "real", lost)
        try:
            self._folder.finish(summary)
        except OSError as error:
            raise self._cannot_record(error) from None
        return summary

    def _status(self) -> str:
        states = {place.state for place in self.coordinator.roster.places.values()}
        if "diverged" in states:
            return "diverged"
        if self._stopped:
            return "interrupted"
        return "completed" if "finished" in states else "failed"

    def _name_the_checkpoint(self) -> None:
        for partial in self._weights.glob(".step-*.partial"):
            if len(list(partial.glob("*.safetensors"))) == self.config.mesh.stages:
                partial.rename(partial.with_name(partial.name[1:].removesuffix(".partial")))

    def error(self) -> AsyncMeshError | None:
        """Why the run is not what was asked for."""
        failures = self.coordinator.roster.failures()
        for _, _, place in failures:
            if place.state == "diverged":
                return DivergedError(place.error or "diverged")
        if failures and self._status() == "failed":
            stage, replica, place = failures[0]
            logs = self.path / "logs"
            return MeshError(f"stage {stage} of replica {replica}: {place.error}; see {logs}")
        return None

    def _cannot_record(self, error: Exception) -> AsyncMeshError:
        reason = getattr(error, "strerror", None) or error
        return InputFileError(
            f"{self.path}: the run cannot be recorded ({reason}); make room, or choose"
            " another output_dir"
        )
