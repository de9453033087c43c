"""Which coordinates a round of averaging covers.

Owns the partition of a stage's N coordinates into K = ceil(1/p) classes, one for each round of a
cycle, as a pure function of (seed, stage, round). Nothing about it crosses the wire and no
permutation is stored: a class is computed when it is needed, from integers alone, so that it is the
same on every machine and device.

The flat vector is read as rows of K coordinates; every class holds exactly one coordinate of each
row. A row's K places are turned by an amount drawn once for the row and cut into segments of `b`
places; the rounds of a cycle walk through the segments, and within a segment the row's order is
turned by an amount drawn anew for every (row, cycle, segment).

Invariants: (1) every coordinate is in exactly one class of a cycle; (2) two visits of a coordinate
are at least K - b + 1 rounds apart. (2) is what redrawing all K classes freely would break: the
last class of one cycle and the first of the next would share coordinates, and with two rounds in
flight corrections would be counted twice. With b = K - F + 1, any F consecutive rounds are disjoint
and the partition is still redrawn as freely as that allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """The splitmix64 finaliser: every bit of the result depends on every bit of x."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _key(*parts: int) -> int:
    """One number from several, all of which matter."""
    key = 0
    for part in parts:
        key = _mix((key + part + 0x9E3779B97F4A7C15) & _MASK)
    return key


def _draw(rows: Tensor, key: int, below: int) -> Tensor:
    """A number in [0, below) for every row: 31-bit multiplicative hashing, exact in int64."""
    x = (rows + (key & 0x7FFFFFFF)) & 0x7FFFFFFF
    for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D), (16, 0x297A2D39)):
        x = (((x ^ (x >> shift)) & 0x7FFFFFFF) * factor + (key >> 33)) & 0x7FFFFFFF
    return (x ^ (x >> 16)) % below


@dataclass(frozen=True)
class Partition:
    """The classes of one stage.

    `classes` is K, `in_flight` is F: the most rounds that may be under way at once.
    """

    numel: int
    classes: int
    in_flight: int
    seed: int
    stage: int

    def __post_init__(self) -> None:
        if not 1 <= self.in_flight <= self.classes:
            raise ValueError(f"{self.in_flight} rounds in flight need as many classes")

    @property
    def segment(self) -> int:
        """b = K - F + 1: places within which a row's order is redrawn every cycle."""
        return self.classes - self.in_flight + 1

    def place(self, rows: Tensor, round_: int) -> Tensor:
        """The place in [0, K) that every row contributes to the round."""
        cycle, step = divmod(round_, self.classes)
        index, offset = divmod(step, self.segment)
        first = index * self.segment
        length = min(self.segment, self.classes - first)
        turn = _draw(rows, _key(self.seed, self.stage, cycle, index), length)
        turned = first + (offset + turn) % length
        return (turned + _draw(rows, _key(self.seed, self.stage), self.classes)) % self.classes

    def indices(self, round_: int, device: torch.device | None = None) -> Tensor | None:
        """The round's coordinates in rising order; None when it covers them all (K = 1)."""
        if self.classes == 1:
            return None
        count = -(-self.numel // self.classes)
        rows = torch.arange(count, device=device)
        chosen = rows * self.classes + self.place(rows, round_)
        # Only the last row can be short, so at most the last coordinate has to go.
        short = self.numel % self.classes
        if short and int(self.place(torch.tensor([count - 1]), round_)) >= short:
            chosen = chosen[:-1]
        return chosen


def gather(flat: Tensor, indices: Tensor | None) -> Tensor:
    """flat[S], as a copy."""
    return flat.clone() if indices is None else flat[indices]


def scatter_(flat: Tensor, indices: Tensor | None, values: Tensor) -> None:
    """flat[S] ← values."""
    if indices is None:
        flat.copy_(values)
    else:
        flat[indices] = values
