"""Weight versions that cost no copies: a pool of flat buffers and who still reads them.

Owns the buffers of one worker. Version u is the weights after update u. An update writes the next
version into a buffer that nobody reads, so a version in use is never touched; a buffer is free
again when its version is neither the newest nor held by a microbatch in flight. Invariant: at most
(microbatches in flight + 1) buffers exist, because every live version is the newest or is held by a
microbatch, and the one being written is the only one more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncmesh.algorithm.layout import FlatLayout


@dataclass(eq=False)
class Version:
    """One buffer, the version it holds now, and how many microbatches in flight read it.

    `leaves` are the autograd leaves that a microbatch runs on. They are views of `flat` and are
    made once for each buffer: whatever version the buffer holds, autograd keeps these very tensors.
    """

    flat: Tensor
    leaves: dict[str, Tensor]
    number: int = 0
    readers: int = 0


@dataclass(eq=False)
class VersionPool:
    """The newest version and all that are still read."""

    layout: FlatLayout
    newest: Version = field(init=False)
    _all: list[Version] = field(init=False, default_factory=list)

    def start(self, initial: Tensor) -> None:
        """Make version 0 of the given weights (which become the pool's own buffer)."""
        self.newest = self._add(initial)

    @property
    def buffers(self) -> int:
        """Buffers made so far; they are kept for reuse, so this is also the most ever live."""
        return len(self._all)

    def _add(self, flat: Tensor) -> Version:
        leaves = {
            name: view.detach().requires_grad_() for name, view in self.layout.views(flat).items()
        }
        self._all.append(Version(flat, leaves))
        return self._all[-1]

    def acquire(self) -> Version:
        """Hold the newest version for a microbatch that is about to go forward."""
        self.newest.readers += 1
        return self.newest

    def release(self, version: Version) -> None:
        """A microbatch came back and no longer reads its version."""
        version.readers -= 1

    def blank(self) -> Version:
        """A buffer to write the next version into: one that nobody reads, or a new one."""
        for version in self._all:
            if version.readers == 0 and version is not self.newest:
                return version
        return self._add(torch.empty_like(self.newest.flat))

    def publish(self, version: Version) -> None:
        """What was written into a blank is now the newest version."""
        version.number = self.newest.number + 1
        self.newest = version
