"""Which replicas of a stage are there, and the group they form.

Owns a torchft manager and the Gloo group of the present quorum. torchft says who is alive and who
lags behind; its own `Manager` class is not used, because it listens on every interface and heals
through pickle. Invariants: a group's ranks are in the order of the replicas; a group is made anew
whenever the quorum changes or an operation on it failed; members of a quorum agree on its number.

What is counted (rounds, or updates at which to validate) is the caller's business. A lighthouse
tells everyone the highest count among the members; who has a lower one has missed something.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torchft.coordination import ManagerClient, ManagerServer

from asyncmesh.runtime.network import GlooGroup, Store, part_of

_log = logging.getLogger(__name__)
_CONNECT = timedelta(seconds=20)
_HEARTBEAT = timedelta(milliseconds=500)
_PATIENCE = timedelta(days=7)  # for a slow replica; a dead one is noticed by its heartbeats
_GROUP = timedelta(seconds=10)  # for the members of a quorum, who are all there, to connect


@dataclass(frozen=True)
class Meeting:
    """Who has come. `group` is None for one who is alone.

    `replicas` are in the order of the group's ranks. `counts` says of each whether it is as far as
    the furthest, `number`.
    """

    replicas: tuple[int, ...]
    group: GlooGroup | None
    number: int
    counts: list[bool]


class Membership:
    """One worker among the replicas of its stage. Used by one thread."""

    def __init__(
        self, name: str, lighthouse: str, connect: Callable[[], Store], replica: int, address: str
    ) -> None:
        self._store, self._address = part_of(connect(), name), address
        # Ids are sorted as text; the second part tells a new process from the one it replaces.
        self._id = f"{replica:06d}:{uuid.uuid4()}"
        self._server = ManagerServer(
            replica_id=self._id,
            lighthouse_addr=lighthouse,
            hostname=address,
            bind=f"{address}:0",
            store_addr=name,
            world_size=1,
            heartbeat_interval=_HEARTBEAT,
            connect_timeout=_CONNECT,
            # A lighthouse whose connection broke is asked again at once: between two tries torchft
            # waits for the time-out divided by their number.
            quorum_retries=10_000_000,
        )
        self._client = ManagerClient(self._server.address(), connect_timeout=_CONNECT)
        self._quorum = -1
        self._group: GlooGroup | None = None
        self._failures = 0
        self._has_left = False

    def meet(self, number: int) -> Meeting:
        """Wait until all replicas that are alive want to meet; then everyone has the same list."""
        result = self._client._quorum(
            group_rank=0,
            step=number,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=_PATIENCE,
            commit_failures=self._failures,
            init_sync=False,
        )
        replicas = tuple(int(member.split(":")[0]) for member in result.replica_ids)
        rank: int = result.replica_rank
        if result.quorum_id != self._quorum:
            self._group = None  # closes the old one's sockets first
            self._quorum = result.quorum_id
            if len(replicas) > 1:
                self._group = GlooGroup(
                    part_of(self._store, f"quorum-{result.quorum_id}"),
                    rank,
                    len(replicas),
                    self._address,
                    _GROUP,
                )
        counts = [True] * len(replicas)
        if result.max_world_size < len(replicas) and self._group is not None:
            numbers = self._group.gather(torch.tensor([number]))
            counts = [int(one) == result.max_step for one in numbers]
        return Meeting(replicas, self._group, result.max_step, counts)

    def meet_all(self, alive: Callable[[], int]) -> None:
        """Before the run begins: until all that are alive have come.

        A lighthouse hears of a replica with its first heartbeat, so a first meeting may be without
        some.
        """
        while not self._have_met(alive()):
            time.sleep(_HEARTBEAT.total_seconds() / 10)

    def _have_met(self, count: int) -> bool:
        try:
            return len(self.meet(0).replicas) >= count
        except RuntimeError as error:
            _log.warning("a replica was lost while all were meeting: %s", error)
            self.failed()
            return False

    def failed(self) -> None:
        """An operation of the group failed: the next meeting makes a new one."""
        self._failures += 1
        self._quorum, self._group = -1, None

    def succeeded(self) -> None:
        self._failures = 0

    def close(self) -> None:
        """Leave. The others notice when the heartbeats stop."""
        if not self._has_left:
            self._has_left = True
            self._server.shutdown()
        self._group = None
