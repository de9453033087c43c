"""Puts together what the workers report: events, and the parts of validations.

Owns the way from reports to the run's folder and summary. A validation's loss comes in parts, one a
replica, and the replicas' distances in parts, one a worker; when all parts of an update are there,
they become one `Evaluation`. Invariant: every event passes here once, in the order in which its
worker emitted it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncmesh.errors import WireError
from asyncmesh.observe.events import Evaluation, Sink, from_json
from asyncmesh.runtime.messages import FINAL, DistancePart, Report, ValidationPart


@dataclass
class _Parts:
    """What has come of one validation."""

    mean: dict[int, ValidationPart] = field(default_factory=dict)  # by replica
    own: dict[int, ValidationPart] = field(default_factory=dict)
    distances: dict[tuple[int, int], DistancePart] = field(default_factory=dict)


class Collector:
    """A sink's front end. `validates`: whether there is anything to validate on."""

    def __init__(
        self,
        emit: Sink,
        stages: int,
        validates: bool,
        tokens: Callable[[int, int], int],
    ) -> None:
        self._emit, self._stages, self._validates = emit, stages, validates
        self._tokens = tokens  # seen by so many replicas after so many updates
        self._parts: dict[int, _Parts] = {}
        self._complete_up_to = 0

    def take(self, report: Report) -> None:
        """Everything in a report, in its order."""
        for line in report.events:
            try:
                event = from_json(line)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise WireError(f"a reported event cannot be read: {error!r}") from None
            self._emit(event)
        for part in report.validations:
            if part.update <= self._complete_up_to:
                continue  # a report that came again, because its answer was lost
            parts = self._parts.setdefault(part.update, _Parts())
            (parts.own if part.own else parts.mean)[part.replica] = part
        for distance in report.distances:
            if distance.update <= self._complete_up_to:
                continue
            of_update = self._parts.setdefault(distance.update, _Parts())
            of_update.distances[distance.stage, distance.replica] = distance
        for update in sorted(self._parts):
            if update in self._parts:
                self._complete(update, self._parts[update])

    def _complete(self, update: int, parts: _Parts) -> None:
        if not parts.distances:
            return
        count = next(iter(parts.distances.values())).parts
        if len(parts.distances) < self._stages * count:
            return
        if self._validates and len(parts.mean) < count:
            return
        if self._validates and update == FINAL and len(parts.own) < count:
            return
        self._emit_evaluation(update, parts, count)

    def finish(self) -> None:
        """Nothing more will come: of the last validation, what there is.

        It is not whole when a replica is lost while it goes on.
        """
        parts = self._parts.get(FINAL)
        if parts is not None and parts.distances and (parts.mean or not self._validates):
            replicas = {part.replica for part in parts.distances.values()}
            self._emit_evaluation(FINAL, parts, len(replicas))

    def _emit_evaluation(self, update: int, parts: _Parts, count: int) -> None:
        for earlier in [u for u in self._parts if u <= update]:
            del self._parts[earlier]  # one that a replica left out is never complete
        self._complete_up_to = update
        reached = min(part.reached for part in parts.distances.values())
        self._emit(
            Evaluation(
                time_s=max(part.time_s for part in parts.distances.values()),
                update=reached,
                tokens=self._tokens(reached, count),
                loss=_mean_loss(list(parts.mean.values())),
                replica_losses=tuple(
                    part.loss_sum / part.targets for _, part in sorted(parts.own.items())
                ),
                consensus_distance=_distance(list(parts.distances.values())),
            )
        )


def _mean_loss(parts: list[ValidationPart]) -> float | None:
    if not parts:
        return None
    return sum(part.loss_sum for part in parts) / sum(part.targets for part in parts)


def _distance(parts: list[DistancePart]) -> float:
    """√(mean over replicas of Σ_s ‖w_{r,s} - w̄_s‖²) / √(Σ_s ‖w̄_s‖²)."""
    replicas = len({part.replica for part in parts})
    apart = sum(part.apart for part in parts)
    norm = sum(part.norm for part in parts) / replicas  # every replica told the same
    return math.sqrt(apart / replicas / norm) if norm else 0.0
