"""A stage's parameters as one flat vector.

Owns the order of a stage's coordinates: parameters in `named_parameters` order, each row by row,
with nothing between them. Invariant: `views(flat)` shares storage with `flat`, so that one kernel
over the flat buffer updates all parameters, and a coordinate's index means the same on every
replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the flat vector."""

    name: str
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """The slots of a stage. Parameters of one stage share one dtype."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, Tensor]]) -> FlatLayout:
        slots, offset = [], 0
        for name, parameter in parameters:
            slots.append(Slot(name, parameter.shape, offset))
            offset += parameter.numel()
        return cls(tuple(slots))

    @property
    def numel(self) -> int:
        return self.slots[-1].offset + self.slots[-1].numel if self.slots else 0

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters as views of `flat`, by name."""
        return {slot.name: slot.of(flat) for slot in self.slots}
