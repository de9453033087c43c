"""What averaging costs on the wire, as the kernel counts it: tensors and torchft's own talk."""

from __future__ import annotations

import os
import queue
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch

os.environ.setdefault("RUST_LOG", "error")  # torchft reads it when it is loaded

from asyncmesh.runtime.coordinator import _Lighthouse
from asyncmesh.runtime.membership import Membership
from asyncmesh.runtime.network import LOOPBACK, connect_store, serve_store
from asyncmesh.runtime.rounds import Mean, Offer, Rounds
from asyncmesh.runtime.staging import Staging

ROUNDS = 40
COORDINATES = 100_000
BYTES_SENT_AT = 200  # of tcpi_bytes_sent in Linux' struct tcp_info
TIMEOUT_S = 30.0


def bytes_sent_by_this_process() -> int:
    """By all its TCP sockets, over their lives."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is no TCP socket, or is closed by now
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as one:
                told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT_AT + 8)
                if len(told) == BYTES_SENT_AT + 8:
                    total += struct.unpack_from("<Q", told, BYTES_SENT_AT)[0]
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' socket counters")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_of_two_replicas_sends_its_payload_and_little_more(dtype: torch.dtype) -> None:
    """At most 1.02 of the payload and 4 KiB, a round and replica. Here that counts all sockets of
    both replicas, and the lighthouse's answers too.
    """
    store, port = serve_store(LOOPBACK)
    lighthouse = _Lighthouse(LOOPBACK)
    means: queue.SimpleQueue[Mean | Exception] = queue.SimpleQueue()

    def member(replica: int) -> Rounds:
        address = f"{LOOPBACK}:{port}"
        membership = Membership(
            f"bytes-{dtype}",
            lighthouse.address,
            lambda: connect_store(address, timedelta(seconds=TIMEOUT_S)),
            replica,
            LOOPBACK,
        )
        memberships.append(membership)
        return Rounds(membership, Staging(), time.monotonic, means.put, means.put)

    memberships: list[Membership] = []
    members = [member(replica) for replica in range(2)]
    meetings = [
        threading.Thread(target=one.meet_all, args=(lambda: len(members),)) for one in memberships
    ]
    for meeting in meetings:
        meeting.start()
    for meeting in meetings:
        meeting.join(TIMEOUT_S)
    before = bytes_sent_by_this_process()
    for rounds in members:
        rounds.start()
        for number in range(1, ROUNDS + 1):
            rounds.offer(Offer(number, torch.ones(COORDINATES, dtype=dtype)))
    for _ in range(2 * ROUNDS):
        mean = means.get(timeout=TIMEOUT_S)
        assert isinstance(mean, Mean), mean
        assert mean.bytes_sent == COORDINATES * dtype.itemsize
    a_round = (bytes_sent_by_this_process() - before) / (2 * ROUNDS)
    for rounds in members:
        rounds.close(TIMEOUT_S)
    lighthouse.close()
    del store  # it served until here
    payload = COORDINATES * dtype.itemsize
    assert payload <= a_round <= 1.02 * payload + 4096
