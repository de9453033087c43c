"""Addresses: where servers listen, how a store and a Gloo group are bound to one address.

Owns the rule that nothing listens anywhere but on the address that was asked for. PyTorch's store
would listen on every interface if it opened its socket itself, so it is handed one; Gloo would look
up the host's name, so it is handed an address.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from asyncmesh.errors import MeshError

# PyTorch's type stubs leave out what is used of it here.
c10d: Any = dist
options_of: Any = distributed_c10d

LOOPBACK = "127.0.0.1"
_LEAST_PATIENCE_S = 20.0
_SLOWEST_BYTES_PER_S = 50_000  # a link that is slower than this is no link


def check_bindable(address: str) -> None:
    """One IPv4 address, because it is also what the others are told."""
    if ":" in address:
        raise MeshError(f"--bind {address}: IPv6 is not supported yet; give an IPv4 address")
    if address in ("0.0.0.0", ""):
        raise MeshError(
            f"--bind {address}: must be one address of this host, because the others are told to"
            " use it; choose one that `ip address` shows"
        )


def listen(address: str, port: int, what: str) -> socket.socket:
    """A listening socket on that address alone; port 0 takes any that is free."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        raise MeshError(f"{what} cannot listen on {address}:{port}: {_reason(error)}") from None
    return listener


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; choose another with --port, or end what uses it"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return "this host has no such address; choose one that `ip address` shows with --bind"
    return f"{error.strerror or error}; choose another address with --bind or --port"


def split_address(text: str, option: str) -> tuple[str, int]:
    """HOST:PORT (or [HOST]:PORT) as its two parts."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise MeshError(f"{option} {text}: must be HOST:PORT, such as 10.0.0.1:7400")
    return host.strip("[]"), int(port)


def own_address_towards(host: str, port: int) -> str:
    """This host's address on the way to another: what its peers can reach it at."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((host, port))  # chooses a route; nothing is sent
        except OSError as error:
            raise MeshError(
                f"coordinator {host}:{port}: there is no way to it from here"
                f" ({error.strerror or error}); check the address and this host's network"
            ) from None
        return str(probe.getsockname()[0])


class Store(Protocol):
    """What is used of PyTorch's key-value stores, whose own types are private to it."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def serve_store(address: str) -> tuple[Store, int]:
    """The mesh's key-value store, through which process groups find each other, and its port."""
    listener = listen(address, 0, "the store")
    port: int = listener.getsockname()[1]
    store: Store = c10d.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def connect_store(address: str, timeout: timedelta) -> Store:
    host, port = split_address(address, "store")
    store: Store = c10d.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    return store


def part_of(store: Store, name: str) -> Store:
    """The same store, all of whose keys begin with a name."""
    part: Store = c10d.PrefixStore(name, store)
    return part


def patience(bytes_moved: int) -> timedelta:
    """How long so much may take before a peer is taken for gone."""
    return timedelta(seconds=_LEAST_PATIENCE_S + bytes_moved / _SLOWEST_BYTES_PER_S)


class GlooGroup:
    """A few processes that can send to each other, bound to one address of this host.

    Everything is asynchronous: what is answered has a `wait()`, which raises when a peer is gone.
    """

    def __init__(
        self, store: Store, rank: int, size: int, address: str, timeout: timedelta
    ) -> None:
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address, interface="")]
        options._timeout = timeout
        self.rank, self.size = rank, size
        self._group = c10d.ProcessGroupGloo(store, rank, size, options)

    def send_all(self, message: Tensor, to: int, tag: int) -> None:
        """Send it and wait for as long as a slow link may take."""
        self.send(message, to, tag).wait(patience(message.nbytes))

    def receive_all(self, message: Tensor, sender: int, tag: int) -> None:
        self.receive(message, sender, tag).wait(patience(message.nbytes))

    def send(self, message: Tensor, to: int, tag: int) -> dist.Work:
        work: dist.Work = self._group.send([message], to, tag)
        return work

    def receive(self, message: Tensor, sender: int, tag: int) -> dist.Work:
        work: dist.Work = self._group.recv([message], sender, tag)
        return work

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Everybody's tensor, in order of rank. All must have the same shape."""
        everybodys = [torch.empty_like(mine) for _ in range(self.size)]
        options = options_of.AllgatherOptions()
        options.timeout = patience(mine.nbytes * self.size)
        self._group.allgather([everybodys], [mine], options).wait()
        return everybodys

    def exchange(self, mine: Tensor) -> Tensor:
        """Row i goes to rank i; answers the rows that came, in order of rank."""
        came = torch.empty_like(mine)
        options = options_of.AllToAllOptions()
        options.timeout = patience(mine.nbytes)
        self._group.alltoall_base(came, mine, [], [], options).wait()
        return came
