"""Rounds among replicas of whom torchft's lighthouse keeps the list: who is in which mean.

The members are threads with all that a worker has (manager, store connection, Gloo group). The
lighthouse is the coordinator's, but takes a member for dead sooner.
"""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
from torch import Tensor

os.environ.setdefault("RUST_LOG", "error")  # torchft reads it when it is loaded

from asyncmesh.algorithm.correction import mean_in_order
from asyncmesh.errors import MeshError
from asyncmesh.runtime import coordinator
from asyncmesh.runtime.membership import Meeting, Membership
from asyncmesh.runtime.network import LOOPBACK, Store, connect_store, serve_store
from asyncmesh.runtime.rounds import Mean, Offer, Rounds
from asyncmesh.runtime.staging import Staging

TIMEOUT_S = 30.0
DEAD_S = 2.0  # four of a member's heartbeats
T = TypeVar("T")
Alive = Callable[[], int] | None
NAMES = map("replicas of test {}".format, itertools.count())


class Member:
    """One replica's side of the rounds, and what it was handed."""

    def __init__(
        self, name: str, lighthouse: str, store: str, replica: int, alive: Alive = None
    ) -> None:
        def connect() -> Store:
            return connect_store(store, timedelta(seconds=TIMEOUT_S))

        self.replica = replica
        self.membership = Membership(name, lighthouse, connect, replica, LOOPBACK)
        self._means: queue.SimpleQueue[Mean] = queue.SimpleQueue()
        self._failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.rounds = Rounds(
            self.membership,
            Staging(),
            time.monotonic,
            self._means.put,
            self._failures.put,
            alive=alive,
        )

    def offer(self, *numbers: int) -> None:
        for number in numbers:
            self.rounds.offer(Offer(number, payload(self.replica, number)))

    def mean(self, timeout_s: float = TIMEOUT_S) -> Mean:
        return self._means.get(timeout=timeout_s)

    def failure(self) -> str:
        """What went wrong. (The error itself would keep the group of its meeting open.)"""
        failure = self._failures.get(timeout=TIMEOUT_S)
        assert isinstance(failure, MeshError)
        return str(failure)

    def has_ended(self) -> bool:
        self.rounds._thread.join(TIMEOUT_S)
        return not self.rounds._thread.is_alive()

    def leave(self) -> None:
        """And find that nothing went wrong or came that nobody asked for."""
        self.rounds.close(TIMEOUT_S)
        assert self.has_ended()
        assert (self._means.qsize(), self._failures.qsize()) == (0, 0)


def payload(replica: int, number: int) -> Tensor:
    return torch.randn(10, generator=torch.Generator().manual_seed(100 * replica + number))


def assert_mean(mean: Mean, number: int, replicas: tuple[int, ...]) -> None:
    assert (mean.number, mean.replicas) == (number, replicas)
    assert mean.began_s <= mean.ended_s
    expected = mean_in_order([payload(replica, number) for replica in replicas])
    assert torch.equal(mean.mean.view(torch.uint8), expected.view(torch.uint8))


@pytest.fixture(scope="module")
def store_address() -> Iterator[str]:
    store, port = serve_store(LOOPBACK)
    yield f"{LOOPBACK}:{port}"
    del store  # it served until here


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(coordinator, "_HEARTBEAT_MS", int(1000 * DEAD_S))
    server = coordinator._Lighthouse(LOOPBACK)
    yield server.address
    server.close()


Assembled = Callable[..., list[Member]]


@pytest.fixture
def assembled(lighthouse: str, store_address: str) -> Iterator[Assembled]:
    """Makes members, who meet all that were made before; they leave at the end."""
    made: list[Member] = []
    name = next(NAMES)

    def assemble(*replicas: int, alive: Alive = None, meet: bool = True) -> list[Member]:
        new = [Member(name, lighthouse, store_address, r, alive) for r in replicas]
        made.extend(new)
        if meet:
            together(lambda member: meet_all(member, len(made)), made)
        for member in new:
            member.rounds.start()
        return new

    yield assemble
    for member in made:
        member.leave()


def meet_all(member: Member, count: int) -> None:
    """Until all are there: the lighthouse hears of each with its first heartbeat."""
    while len(member.membership.meet(0).replicas) < count:
        pass


def together(work: Callable[[Member], T], members: list[Member]) -> list[T]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(work, members))


# -- all are there ---------------------------------------------------------------------------------
def test_all_members_get_the_same_means_in_the_order_of_the_rounds(assembled: Assembled) -> None:
    members = assembled(0, 1, 2)
    for member in members:
        member.offer(1, 2, 3, 4, 5)
    for member in members:
        for number in range(1, 6):
            assert_mean(member.mean(), number, (0, 1, 2))


def test_one_that_is_alone_is_its_own_mean_and_sends_nothing(assembled: Assembled) -> None:
    (member,) = assembled(3)
    member.offer(1)
    mean = member.mean()
    assert_mean(mean, 1, (3,))
    assert mean.bytes_sent == 0


def test_ranks_are_in_the_order_of_the_replicas_numbers(assembled: Assembled) -> None:
    members = assembled(10, 2, 9)
    meetings: list[Meeting] = together(lambda member: member.membership.meet(7), members)
    assert [meeting.replicas for meeting in meetings] == [(2, 9, 10)] * 3
    assert [meeting.number for meeting in meetings] == [7] * 3
    assert [meeting.counts for meeting in meetings] == [[True] * 3] * 3
    groups = [meeting.group for meeting in meetings]
    assert [(group.rank, group.size) for group in groups if group] == [(2, 3), (0, 3), (1, 3)]


def test_everybody_learns_who_is_behind(assembled: Assembled) -> None:
    members = assembled(0, 1, 2)
    numbers = {0: 8, 1: 7, 2: 8}
    meetings = together(lambda member: member.membership.meet(numbers[member.replica]), members)
    assert [meeting.number for meeting in meetings] == [8] * 3
    assert [meeting.counts for meeting in meetings] == [[True, False, True]] * 3


def test_a_slow_member_only_delays(assembled: Assembled) -> None:
    """However slow: its heartbeats say that it is alive."""
    first, slow, last = assembled(0, 1, 2)
    for member in (first, last):
        member.offer(1)
    with pytest.raises(queue.Empty):
        first.mean(timeout_s=DEAD_S + 0.5)
    slow.offer(1)
    for member in (first, slow, last):
        assert_mean(member.mean(), 1, (0, 1, 2))


def test_one_that_joins_is_in_the_rounds_from_then_on(assembled: Assembled) -> None:
    members = assembled(0, 2)
    for member in members:
        member.offer(1)
    for member in members:
        assert_mean(member.mean(), 1, (0, 2))
    members += assembled(1)
    for member in members:
        member.offer(2)
    for member in members:
        assert_mean(member.mean(), 2, (0, 1, 2))


def test_after_one_members_failure_all_make_a_new_group(assembled: Assembled) -> None:
    """Nobody was lost: only one of them knows that the old one is of no use any more."""
    members = assembled(0, 1, 2)
    before = together(lambda member: member.membership.meet(1), members)
    members[1].membership.failed()
    after = together(lambda member: member.membership.meet(1), members)
    assert all(one.group is not other.group for one, other in zip(before, after, strict=True))
    del before
    for member in members:
        member.offer(1)
    for member in members:
        assert_mean(member.mean(), 1, (0, 1, 2))


def test_what_is_queued_when_a_member_finishes_is_still_averaged(assembled: Assembled) -> None:
    """Then the others go on alone."""
    members = assembled(0, 1, 2)
    for member in members:
        member.offer(1, 2, 3)
    for member in members[:2]:
        member.rounds.finish()
    members[2].offer(4)
    for member in members:
        for number in (1, 2, 3):
            assert_mean(member.mean(), number, (0, 1, 2))
    assert all(member.has_ended() for member in members[:2])
    assert_mean(members[2].mean(), 4, (2,))


# -- some are lost ---------------------------------------------------------------------------------
def test_a_member_that_closes_is_left_behind(assembled: Assembled) -> None:
    first, leaver, last = assembled(0, 1, 2)
    for member in (first, leaver, last):
        member.offer(1)
    for member in (first, leaver, last):
        assert_mean(member.mean(), 1, (0, 1, 2))
    leaver.rounds.close(TIMEOUT_S)
    for member in (first, last):
        member.offer(2, 3)
    for member in (first, last):
        assert_mean(member.mean(), 2, (0, 2))
        assert_mean(member.mean(), 3, (0, 2))


def test_a_round_in_which_a_member_dies_is_tried_again_without_it(assembled: Assembled) -> None:
    """It came to the meeting, and never gave what it came for."""
    first, dying, last = assembled(0, 1, 2)
    for member in (first, last):
        member.offer(1)
    assert dying.membership.meet(1).replicas == (0, 1, 2)
    dying.membership.close()
    for member in (first, last):
        assert_mean(member.mean(), 1, (0, 2))
    for member in (first, last):
        member.offer(2)
    for member in (first, last):
        assert_mean(member.mean(), 2, (0, 2))


# -- some are behind -------------------------------------------------------------------------------
def test_an_offer_that_needs_all_who_are_alive_is_dropped_where_the_others_are_further(
    assembled: Assembled,
) -> None:
    """The others wait for its next one: a validation is of all or of none."""
    ahead, behind, also_ahead = assembled(0, 1, 2, alive=lambda: 3)
    behind.offer(5)
    for member in (ahead, also_ahead):
        member.offer(10)
    behind.offer(6, 10, 20)
    for member in (ahead, also_ahead):
        member.offer(20)
    for member in (ahead, behind, also_ahead):
        assert_mean(member.mean(), 10, (0, 1, 2))
        assert_mean(member.mean(), 20, (0, 1, 2))


def test_an_offer_that_needs_all_who_are_alive_waits_for_one_who_has_yet_to_come(
    assembled: Assembled,
) -> None:
    members = assembled(0, 2, alive=lambda: 3)
    for member in members:
        member.offer(1)
    with pytest.raises(queue.Empty):
        members[0].mean(timeout_s=0.3)
    members += assembled(1, alive=lambda: 3, meet=False)
    members[2].offer(1)
    for member in members:
        assert_mean(member.mean(), 1, (0, 1, 2))


def test_an_offer_that_needs_all_who_are_alive_needs_nobody_who_was_lost(
    assembled: Assembled,
) -> None:
    members = assembled(0, 1, 2, alive=lambda: 2)
    members[1].rounds.close(TIMEOUT_S)
    for member in (members[0], members[2]):
        member.offer(1)
    for member in (members[0], members[2]):
        assert_mean(member.mean(), 1, (0, 2))


def test_one_that_missed_a_round_is_told_so_and_the_others_go_on_without_it(
    assembled: Assembled,
) -> None:
    ahead, behind, also_ahead = assembled(0, 1, 2)
    behind.offer(2)
    for member in (ahead, also_ahead):
        member.offer(3)
    assert behind.failure() == (
        "the other replicas have averaged up to round 3 without this one, which is at round 2;"
        " start it again, and it gets their weights"
    )
    behind.rounds.close(TIMEOUT_S)  # its process ends
    for member in (ahead, also_ahead):
        assert_mean(member.mean(), 3, (0, 2))


# -- a connection that breaks ----------------------------------------------------------------------
class Cut:
    """Forwards connections to a server, until some words go by for the so-manieth time: then all of
    them are reset, once. New ones are welcome.
    """

    def __init__(self, target: str) -> None:
        self._host, _, port = target.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self._listener = socket.create_server((LOOPBACK, 0))
        self.address = f"http://{LOOPBACK}:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._words, self._left = b"", 0
        self.happened = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def when(self, words: str) -> None:
        self._words = words.encode()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                theirs = socket.create_connection((self._host, self._port))
                self._sockets += [ours, theirs]
                for source, sink in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(2**16):
                sink.sendall(content)
                if self._words and self._words in content:
                    self._words = b""
                    break
            else:
                return
            for end in self._sockets:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self.happened.set()

    def close(self) -> None:
        self._listener.close()


def test_a_broken_connection_to_the_lighthouse_costs_a_waiting_member_nothing_but_time(
    lighthouse: str, store_address: str
) -> None:
    """A reset while it waits for the others, who are not there yet."""
    name, cut = next(NAMES), Cut(lighthouse)
    waiting = Member(name, cut.address, store_address, 0)
    other = Member(name, lighthouse, store_address, 1)
    together(lambda member: meet_all(member, 2), [waiting, other])
    for member in (waiting, other):
        member.rounds.start()
    cut.when(name)  # which is in a member's wish to meet, and in no heartbeat
    waiting.offer(1)
    assert cut.happened.wait(TIMEOUT_S)
    other.offer(1)
    for member in (waiting, other):
        assert_mean(member.mean(), 1, (0, 1))
    for member in (waiting, other):
        member.leave()
    cut.close()
