"""A pipeline edge: two neighbouring stages, one process group, a thread for each direction.

Owns the queues between a worker's main thread and the network. Nothing on the main thread waits:
to send is to put into a queue, to receive is to find something in the inbox. Invariants: frames
arrive in the order they were sent; there are never more of them than the protocol lets be in
flight, so a slow neighbour costs no memory; one edge's failure closes no other edge's sockets,
because each edge has a group of its own.

The receiver posts its receives ahead: Gloo sends only into memory that the other side has offered,
so a receive that is posted late would cost a message one more round trip.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncmesh.errors import MeshError, WireError
from asyncmesh.runtime.frames import HEADER_BYTES, Frame, Kind, frame_bytes
from asyncmesh.runtime.network import GlooGroup, Store, part_of
from asyncmesh.runtime.staging import Staging

_AHEAD = 4  # receives that are posted before their frames are there
# A neighbour may compute for long before it has something to send; a dead one is noticed at once,
# because its sockets close.
_SILENCE = timedelta(days=7)

OnFrame = Callable[[Frame], None]
OnFailure = Callable[[Exception], None]


class Edge:
    """One worker's end of the edge between stage `upstream` and the next."""

    def __init__(
        self, connect: Callable[[], Store], upstream: int, stage: int, address: str
    ) -> None:
        # A store serves one call at a time, and the receiver may wait in its own for long.
        self._store = part_of(connect(), f"edge-{upstream}")
        self._receivers_store = part_of(connect(), f"edge-{upstream}")
        self._rank, self._peer = stage - upstream, 1 - (stage - upstream)
        self.name = f"stage {upstream + self._peer}"
        try:
            self._group = GlooGroup(self._store, self._rank, 2, address, _SILENCE)
        except RuntimeError as error:
            raise MeshError(
                f"{self.name} cannot be reached from {address}: its host and this one must reach"
                " each other on all TCP ports; check addresses, routes and firewalls"
            ) from error
        self._queue: queue.SimpleQueue[
            tuple[Frame, torch.dtype | None, torch.cuda.Event | None]
        ] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._sent = 0

    def start(self, sending: Staging, receiving: Staging, on: OnFrame, fail: OnFailure) -> None:
        """Send what is put into the queue; hand what arrives to `on`, and a failure to `fail`."""
        for what, work in (
            ("send", lambda: self._send_all(sending)),
            ("receive", lambda: self._receive_all(receiving, on)),
        ):
            thread = threading.Thread(
                target=self._guarded, args=(work, fail), name=f"{what} {self.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def send(
        self, frame: Frame, wire: torch.dtype | None, ready: torch.cuda.Event | None = None
    ) -> None:
        """Queue a frame. `wire`: the dtype it is sent as; `ready`: when its payload is complete."""
        self._queue.put((frame, wire, ready))

    def close(self, timeout_s: float) -> bool:
        """Say goodbye and wait for the other side's: True if both sides are done."""
        self.send(Frame(Kind.GOODBYE, 0, 0, 0.0, None), None)
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _guarded(self, work: Callable[[], None], fail: OnFailure) -> None:
        try:
            work()
        except WireError as error:
            fail(error)
        except Exception as error:
            lost = MeshError(f"the connection to {self.name} is lost")
            lost.__cause__ = error
            fail(lost)

    def _send_all(self, staging: Staging) -> None:
        capacity = 0
        while True:
            frame, wire, ready = self._queue.get()
            if not capacity:
                # Also a validation's activations fit, which travel in their own dtype.
                capacity = frame_bytes(frame.payload)
                self._store.set(f"capacity-{self._rank}", str(capacity))
            try:
                message = staging.pack(frame, wire, ready)
            except (RuntimeError, ValueError) as error:
                raise WireError(f"what goes to {self.name} cannot be sent: {error}") from error
            if message.numel() > capacity:
                raise WireError(
                    f"what is sent to {self.name} grew from {capacity} to {message.numel()} bytes;"
                    " a stage's outputs must all have the shape of its first"
                )
            self._group.send(message, self._peer, self._sent).wait()
            self._sent += 1
            if frame.kind is Kind.GOODBYE:
                return

    def _receive_all(self, staging: Staging, on: OnFrame) -> None:
        key = f"capacity-{self._peer}"
        self._receivers_store.wait([key], _SILENCE)
        capacity = max(HEADER_BYTES, int(self._receivers_store.get(key)))
        posted: deque[tuple[torch.Tensor, dist.Work]] = deque()
        number = 0
        while True:
            while len(posted) < _AHEAD:
                room = staging.room(capacity)
                posted.append((room, self._group.receive(room, self._peer, number)))
                number += 1
            message, work = posted.popleft()
            work.wait()
            frame = staging.unpack(message)
            if frame.kind is Kind.GOODBYE:
                return
            on(frame)
