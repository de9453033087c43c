"""torchrun for the workers of one replica on one host: `python -m asyncmesh.runtime.job …`.

Owns two things that torchrun's own command lacks. Its agent meets nobody over the network, so its
rendezvous needs no listening socket (torchrun's would listen on every interface); and it dies with
its parent, so nothing is left behind when a launcher is killed. Everything else, watching,
restarting and stopping workers, is torchrun's.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from asyncmesh.runtime.network import LOOPBACK
from asyncmesh.runtime.parent import die_with

BACKEND = "this-host"
LAUNCHER = "ASYNCMESH_LAUNCHER"  # the process id of whoever starts this


class ThisHost(RendezvousHandler):
    """A rendezvous of one agent, with itself."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        store: Any = dist
        self._store = store.HashStore()
        self._round = 0

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        store: Any = dist
        part = store.PrefixStore(f"round-{self._round}", self._store)
        return RendezvousInfo(part, 0, 1, RendezvousStoreInfo(LOOPBACK, 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could come."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def main() -> None:
    die_with(int(os.environ.get(LAUNCHER, os.getppid())), signal.SIGTERM)
    rendezvous_handler_registry.register(BACKEND, ThisHost)
    torchrun()


if __name__ == "__main__":
    main()
