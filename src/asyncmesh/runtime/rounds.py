"""Averaging in the background: a thread that meets the other replicas, round by round.

Owns the way from an offer (what this worker contributes) to the mean. Nobody waits for it: the main
thread puts an offer into a queue and finds the mean in its inbox. Invariant: rounds are averaged in
the order of their numbers, and all members of a meeting average the same round; one that failed is
tried again with those who are still there, so a round is late at the most.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncmesh.errors import MeshError
from asyncmesh.runtime.healing import State, give, is_giver
from asyncmesh.runtime.membership import Meeting, Membership
from asyncmesh.runtime.reduction import mean_over
from asyncmesh.runtime.staging import Staging

_log = logging.getLogger(__name__)
# A thread that waits for other replicas cannot be called back; it ends with the process.
_RETURN_S = 0.2
_AGAIN_S = 0.05


@dataclass(frozen=True)
class Offer:
    number: int
    payload: Tensor
    ready: torch.cuda.Event | None = None


@dataclass(frozen=True)
class Mean:
    """What came of an offer. `replicas`: those whose offers are in it."""

    number: int
    mean: Tensor
    replicas: tuple[int, ...]
    bytes_sent: int
    began_s: float
    ended_s: float


class Rounds:
    """The thread.

    With `alive` (how many replicas there are) no offer is averaged without all of them, and one
    that the others have left behind is dropped. Without it who is late is left behind, and `state`
    answers this worker's state, with its updates, once the mean of a number is merged into it.
    """

    def __init__(
        self,
        membership: Membership,
        staging: Staging,
        clock: Callable[[], float],
        on_mean: Callable[[Mean], None],
        fail: Callable[[Exception], None],
        alive: Callable[[], int] | None = None,
        state: Callable[[int], tuple[State, int]] | None = None,
    ) -> None:
        self._membership, self._staging, self._clock = membership, staging, clock
        self._on_mean, self._fail, self._alive = on_mean, fail, alive
        self._state = state
        self._queue: queue.SimpleQueue[Offer | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._exchanging = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="averaging", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, offer: Offer) -> None:
        self._queue.put(offer)

    def finish(self) -> None:
        """No further offers. What is queued is still averaged, then the others go on alone."""
        self._queue.put(None)

    def close(self, timeout_s: float) -> None:
        """Leave. An exchange that is under way is ended first, because peers are in it too."""
        self._closing.set()
        self.finish()
        if self._exchanging.acquire(timeout=timeout_s):
            self._membership.close()
            self._exchanging.release()
        self._thread.join(_RETURN_S)

    def _run(self) -> None:
        try:
            while (offer := self._queue.get()) is not None and not self._closing.is_set():
                self._average(offer)
            self._membership.close()
        except Exception as error:
            if not self._closing.is_set():
                self._fail(error)

    def _average(self, offer: Offer) -> None:
        payload = self._staging.to_cpu(offer.payload, offer.ready)
        while True:
            began_s = self._clock()
            try:
                meeting = self._membership.meet(offer.number)
                if meeting.number > offer.number:
                    return self._missed(offer, meeting)
                if self._alive is not None and not self._is_complete(meeting, self._alive()):
                    self._closing.wait(_AGAIN_S)
                    continue
                with self._exchanging:
                    mean, sent = mean_over(meeting.group, payload, meeting.counts)
            except RuntimeError as error:
                if self._closing.is_set():
                    raise
                _log.warning("round %d is tried again: %s", offer.number, error)
                self._membership.failed()
                continue
            self._membership.succeeded()
            members = zip(meeting.replicas, meeting.counts, strict=True)
            replicas = tuple(replica for replica, counted in members if counted)
            self._on_mean(
                Mean(
                    offer.number,
                    self._staging.to_device(mean),
                    replicas,
                    sent,
                    began_s,
                    self._clock(),
                )
            )
            return self._help_who_is_behind(meeting)

    def _is_complete(self, meeting: Meeting, alive: int) -> bool:
        """Whether all are there, as all of them see it.

        A lighthouse does not wait for one who was not there before, and who is behind has yet to
        find out that this offer is not for them. Members learn at different times who is alive; so
        they tell each other, or one would begin an exchange that another one does not.
        """
        if not all(meeting.counts):
            return False
        complete = len(meeting.replicas) >= alive
        if meeting.group is None:
            return complete
        return all(bool(one) for one in meeting.group.gather(torch.tensor([complete])))

    def _help_who_is_behind(self, meeting: Meeting) -> None:
        if self._state is None or not is_giver(meeting):
            return
        state, update = self._state(meeting.number)
        try:
            give(meeting, state, update)
        except RuntimeError as error:
            _log.warning("a late replica is lost again: %s", error)
            self._membership.failed()

    def _missed(self, offer: Offer, meeting: Meeting) -> None:
        if self._alive is None:
            raise MeshError(
                f"the other replicas have averaged up to round {meeting.number} without this one,"
                f" which is at round {offer.number}; start it again, and it gets their weights"
            )
