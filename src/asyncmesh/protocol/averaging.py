"""When a round of averaging starts and when it merges.

Owns the order of events at an update's boundary: merges first, oldest round first, then at most one
snapshot. Invariants: a round's coordinates are in no other round in flight, because a round starts
only if the oldest one still in flight is fewer than F rounds back and any F consecutive rounds are
disjoint (`algorithm.subsets`); a merge comes after an update and before any forward sees its
version.

A fixed delay of D updates means exactly that: the round is merged at the boundary D updates after
its snapshot, and if the mean has not arrived by then, the worker waits. D = 0 is the blocking case
(SPARTA, local SGD, DiLoCo). With an emergent delay nothing ever waits: a round merges at the first
boundary that finds its mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncmesh.algorithm.correction import METHODS
from asyncmesh.config import Config
from asyncmesh.errors import ProtocolError
from asyncmesh.protocol.events import Action, MergeRound, SkipRound, StartRound


@dataclass(frozen=True)
class AveragingPlan:
    """The constants of one worker's data axis. `delay` None: as long as it takes."""

    averages: str  # "weights", "gradients" or "nothing"
    interval: int
    delay: int | None
    in_flight: int
    updates: int

    @classmethod
    def of(cls, config: Config) -> AveragingPlan:
        averages: str = METHODS[config.averaging.method].averages
        return cls(
            # One replica has nobody to average with.
            averages=averages if config.mesh.replicas > 1 else "nothing",
            interval=config.averaging_interval,
            delay=config.averaging_delay,
            in_flight=config.rounds_in_flight,
            updates=config.train.updates,
        )


@dataclass
class _Round:
    number: int
    update: int
    arrived: bool = False


class Averaging:
    """The rounds of one worker that are in flight, oldest first."""

    def __init__(self, plan: AveragingPlan, first_update: int = 0, first_round: int = 0) -> None:
        """With `first_update` and `first_round`, as if so many had been made."""
        self.plan = plan
        self._in_flight: list[_Round] = []
        self._started = first_round
        self._last_start = first_update
        self._snapshot_taken_at = first_update  # the boundary whose snapshot is settled

    @property
    def of_gradients(self) -> bool:
        return self.plan.averages == "gradients"

    def mean_received(self, number: int) -> None:
        for round_ in self._in_flight:
            if round_.number == number:
                round_.arrived = True
                return
        raise ProtocolError(f"the mean of round {number}, which is not in flight")

    def start(self, update: int) -> StartRound:
        """Begin the next round."""
        number = self._started
        if self._in_flight and number - self._in_flight[0].number >= self.plan.in_flight:
            raise ProtocolError(f"round {number} would overlap round {self._in_flight[0].number}")
        self._in_flight.append(_Round(number, update))
        self._started += 1
        self._last_start = update
        return StartRound(number, update)

    def merge_gradient(self, update: int) -> MergeRound | None:
        """The merge of the gradients' round in flight; None while its mean is under way."""
        return self._merge(self._in_flight[0], update) if self._in_flight[0].arrived else None

    def at_boundary(self, update: int, actions: list[Action]) -> bool:
        """Append what happens right after an update. False: wait for a mean, then call again."""
        if self.plan.averages != "weights":
            return True
        if not self._merge_due(update, actions):
            return False
        if self._snapshot_taken_at < update:
            self._snapshot_taken_at = update
            self._maybe_start(update, actions)
            return self._merge_due(update, actions)  # D = 0 is due at once
        return True

    def _merge_due(self, update: int, actions: list[Action]) -> bool:
        delay = self.plan.delay
        if delay is None:
            for round_ in [r for r in self._in_flight if r.arrived]:
                actions.append(self._merge(round_, update))
            return True
        while self._in_flight and self._in_flight[0].update + delay <= update:
            if not self._in_flight[0].arrived:
                return False
            actions.append(self._merge(self._in_flight[0], update))
        return True

    def _merge(self, round_: _Round, update: int) -> MergeRound:
        self._in_flight.remove(round_)
        return MergeRound(round_.number, update, update - round_.update)

    def _maybe_start(self, update: int, actions: list[Action]) -> None:
        plan = self.plan
        if update - self._last_start < plan.interval:
            return
        if plan.delay is not None and update + plan.delay > plan.updates:
            return  # it could never be merged
        if self._in_flight and self._started - self._in_flight[0].number >= plan.in_flight:
            actions.append(SkipRound(update))
        else:
            actions.append(self.start(update))
