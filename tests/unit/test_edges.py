"""Pipeline edges over real sockets: what arrives, what a slow or dead neighbour costs, goodbyes.

Most edges here have both ends in this process, on a store of its own. Neighbours that die are
processes, each a worker that sends every frame back.
"""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from asyncmesh.errors import MeshError, WireError
from asyncmesh.runtime import edges
from asyncmesh.runtime.edges import Edge
from asyncmesh.runtime.frames import HEADER_BYTES, Frame, Kind
from asyncmesh.runtime.network import LOOPBACK, Store, connect_store, part_of, serve_store
from asyncmesh.runtime.staging import Staging

TIMEOUT_S = 20.0


class End:
    """One end of an edge, and what it was handed."""

    def __init__(self, connect: Callable[[], Store], upstream: int, stage: int) -> None:
        self.edge = Edge(connect, upstream, stage, LOOPBACK)
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def start(
        self, sending: Staging | None = None, on: Callable[[Frame], None] | None = None
    ) -> None:
        self.edge.start(sending or Staging(), Staging(), on or self._frames.put, self._failures.put)

    def send(self, *frames: Frame, wire: torch.dtype | None = None) -> None:
        for frame in frames:
            self.edge.send(frame, wire)

    def frame(self) -> Frame:
        return self._frames.get(timeout=TIMEOUT_S)

    def failure(self) -> Exception:
        return self._failures.get(timeout=TIMEOUT_S)

    @property
    def has_failed(self) -> bool:
        return not self._failures.empty()


@pytest.fixture(scope="module")
def store_address() -> Iterator[str]:
    store, port = serve_store(LOOPBACK)
    yield f"{LOOPBACK}:{port}"
    del store  # it served until here


NAMES = map(str, itertools.count())


def connector(address: str, name: str) -> Callable[[], Store]:
    return lambda: part_of(connect_store(address, timedelta(seconds=TIMEOUT_S)), name)


@pytest.fixture
def ends(store_address: str) -> tuple[End, End]:
    """Stages 0 and 1."""
    connect = connector(store_address, next(NAMES))
    with ThreadPoolExecutor(2) as pool:
        upper, lower = pool.map(lambda stage: End(connect, 0, stage), (0, 1))
    return upper, lower


def close(*both: End) -> None:
    """Together: each waits for the other's goodbye."""
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda end: end.edge.close(TIMEOUT_S), both))
    assert not any(end.has_failed for end in both)


def tensor(number: int, count: int = 64) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(number))


def activation(number: int, payload: Tensor) -> Frame:
    return Frame(Kind.ACTIVATION, number, 9, 0.5 + number, payload)


def assert_same(came: Frame, sent: Frame) -> None:
    assert (came.kind, came.number, came.last_update) == (sent.kind, sent.number, sent.last_update)
    assert (came.sent_s, came.dtype) == (sent.sent_s, sent.dtype)
    if came.payload is None or sent.payload is None:
        assert came.payload is sent.payload
    else:
        assert came.payload.shape == sent.payload.shape
        assert torch.equal(came.payload.view(torch.uint8), sent.payload.view(torch.uint8))


# -- two that go on --------------------------------------------------------------------------------
def test_frames_arrive_in_order_with_the_same_bits_in_both_directions_at_once(
    ends: tuple[End, End],
) -> None:
    upper, lower = ends
    down = [activation(n, tensor(n).view(8, 8)) for n in range(60)]
    up = [Frame(Kind.GRADIENT, n, 9, 0.0, -tensor(n) if n % 3 else None) for n in range(1, 61)]
    upper.send(*down[:30])
    lower.send(*up[:30])
    upper.start()
    lower.start()
    upper.send(*down[30:])
    lower.send(*up[30:])
    for sent in down:
        assert_same(lower.frame(), sent)
    for sent in up:
        assert_same(upper.frame(), sent)
    close(upper, lower)


class CountingStaging(Staging):
    """Counts the messages it packed, their bytes, and how many of them are still in memory."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.packed_bytes: list[int] = []
        self.live = self.most_live = 0

    def pack(
        self, frame: Frame, wire: torch.dtype | None, ready: torch.cuda.Event | None
    ) -> Tensor:
        message = super().pack(frame, wire, ready)
        with self.changed:
            self.packed_bytes.append(message.numel())
            self.live += 1
            self.most_live = max(self.most_live, self.live)
            weakref.finalize(message, self._freed)
            self.changed.notify_all()
        return message

    def _freed(self) -> None:
        with self.changed:
            self.live -= 1


def test_a_bfloat16_wire_halves_the_bytes_and_the_receiver_gets_float32(
    ends: tuple[End, End],
) -> None:
    """Also beside frames that travel in their own dtype: a validation's."""
    upper, lower = ends
    counting = CountingStaging()
    upper.start(counting)
    lower.start()
    for number in range(6):
        sent = activation(number, tensor(number))
        wire = torch.bfloat16 if number % 2 == 0 else None
        upper.send(sent, wire=wire)
        came = lower.frame().payload
        assert came is not None
        assert sent.payload is not None
        assert came.dtype == torch.float32
        assert torch.equal(came, sent.payload.to(wire or torch.float32).float())
    assert counting.packed_bytes == [HEADER_BYTES + 2 * 64, HEADER_BYTES + 4 * 64] * 3
    close(upper, lower)


def test_frames_queued_before_a_goodbye_still_arrive(ends: tuple[End, End]) -> None:
    upper, lower = ends
    sent = [activation(number, tensor(number)) for number in range(20)]
    upper.start()
    lower.start()
    upper.send(*sent)
    close(upper, lower)
    for frame in sent:
        assert_same(lower.frame(), frame)


def test_an_edge_on_which_nothing_was_ever_sent_says_goodbye(ends: tuple[End, End]) -> None:
    upper, lower = ends
    upper.start()
    lower.start()
    close(upper, lower)


def test_one_who_said_goodbye_hears_the_other_until_it_says_so_too(ends: tuple[End, End]) -> None:
    upper, lower = ends
    upper.start()
    lower.start()
    assert not upper.edge.close(0.02)
    sent = activation(0, tensor(0))
    lower.send(sent)
    assert_same(upper.frame(), sent)
    assert lower.edge.close(TIMEOUT_S)
    assert upper.edge.close(TIMEOUT_S)
    assert not upper.has_failed
    assert not lower.has_failed


def test_a_slow_receiver_costs_its_sender_no_memory_beyond_the_queue(
    ends: tuple[End, End],
) -> None:
    """The sender packs a message when the one before lies in memory that the receiver offered,
    so at most two exist, and what bounds the queue is what the protocol lets be in flight.

    The receiver offers memory for `_AHEAD` frames. It takes one only when the sender has got as far
    as it can, and has heard from the receiver since, so that there was time to go further.
    """
    upper, lower = ends
    count, taken, most_ahead = 40, 0, 0
    counting = CountingStaging()
    heard: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    numbers, all_taken = [], threading.Event()

    def ahead() -> int:
        return len(counting.packed_bytes) - taken

    def take_slowly(frame: Frame) -> None:
        nonlocal taken, most_ahead
        numbers.append(frame.number)
        with counting.changed:
            taken += 1
            can = min(edges._AHEAD, count - taken)
            assert counting.changed.wait_for(lambda: ahead() >= can, TIMEOUT_S)
        lower.send(Frame(Kind.GRADIENT, frame.number, 0, 0.0, None))
        assert heard.get(timeout=TIMEOUT_S).number == frame.number
        most_ahead = max(most_ahead, ahead())
        if taken == count:
            all_taken.set()

    payload = torch.zeros(2**14)
    upper.send(*(activation(number, payload) for number in range(count)))
    lower.start(on=take_slowly)
    upper.start(counting, on=heard.put)
    assert all_taken.wait(TIMEOUT_S)
    close(upper, lower)
    assert numbers == list(range(count))
    assert most_ahead == edges._AHEAD
    assert counting.most_live <= 2


# -- neighbours that die ---------------------------------------------------------------------------
def echo(address: str, name: str, upstream: int, stage: int) -> None:
    """A neighbour's process: sends back all that comes, until it is killed or its tests are."""
    end = End(connector(address, name), upstream, stage)
    end.start(on=end.send)
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()


@contextmanager
def neighbour(address: str, upstream: int, stage: int) -> Iterator[tuple[End, Callable[[], None]]]:
    """This process's end of an edge to one, and what kills it. `stage`: the neighbour's."""
    name = next(NAMES)
    process = multiprocessing.get_context("spawn").Process(
        target=echo, args=(address, name, upstream, stage), daemon=True
    )
    process.start()
    try:
        yield End(connector(address, name), upstream, 2 * upstream + 1 - stage), process.kill
    finally:
        process.kill()
        process.join()


def test_a_payload_that_grew_is_told_with_both_sizes_and_is_not_sent(store_address: str) -> None:
    with neighbour(store_address, 0, 1) as (end, kill):
        end.start()
        small = activation(0, tensor(0, 3))
        end.send(small, activation(1, tensor(1, 4)))
        failure = end.failure()
        assert isinstance(failure, WireError)
        assert "sent to stage 1 grew from 140 to 144 bytes" in str(failure)
        assert_same(end.frame(), small)
        kill()
        assert isinstance(end.failure(), MeshError)
        assert end.edge.close(TIMEOUT_S)


def test_a_killed_neighbour_is_told_of_within_a_second_and_the_other_edge_goes_on(
    store_address: str,
) -> None:
    """This process is stage 1; stages 0 and 2 are processes, which both get kill -9."""
    with (
        neighbour(store_address, 0, 0) as (upstream, kill_upstream),
        neighbour(store_address, 1, 2) as (downstream, kill_downstream),
    ):
        both = ((downstream, kill_downstream, 2), (upstream, kill_upstream, 0))
        for end, _, _ in both:
            end.start()
            end.send(activation(0, tensor(0)))
            end.frame()
        for end, kill, stage in both:
            sent = activation(1, tensor(1))
            upstream.send(sent)
            assert_same(upstream.frame(), sent)
            killed_s = time.monotonic()
            kill()
            failure = end.failure()
            assert time.monotonic() - killed_s < 1.0
            assert isinstance(failure, MeshError)
            assert str(failure) == f"the connection to stage {stage} is lost"
            assert end.edge.close(TIMEOUT_S)  # nothing of it is left that waits
