"""The mean over a group's members, the same bits for everyone.

Owns how a mean is computed over a network. Two members hand each other all they have: one hop, and
each adds in the order of the replicas. More would send each other too much, so member i gathers
part i from all, adds it in the order of the replicas, and hands the result round: two hops and
2 (M-1)/M of the payload, which is what a ring needs in 2 (M-1) hops. Invariant: every coordinate is
added in the order of the replicas in at least float32, whoever does it, so a run can be replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncmesh.algorithm.correction import mean_in_order
from asyncmesh.runtime.network import GlooGroup


def mean_over(group: GlooGroup | None, mine: Tensor, counts: list[bool]) -> tuple[Tensor, int]:
    """The mean of the members that count, and the bytes that this one sent for it."""
    if group is None:
        return mean_in_order([mine]), 0
    if group.size == 2:
        return mean_in_order(_those(group.gather(mine), counts)), mine.nbytes
    rows = _in_rows(mine, group.size)
    parts = list(group.exchange(rows))
    part = mean_in_order(_those(parts, counts))
    whole = torch.cat(group.gather(part))[: mine.numel()]
    others = group.size - 1
    return whole, others * (rows[0].nbytes + part.nbytes)


def _those(offers: list[Tensor], counts: list[bool]) -> list[Tensor]:
    return [offer for offer, counted in zip(offers, counts, strict=True) if counted]


def _in_rows(flat: Tensor, rows: int) -> Tensor:
    """`flat` as a matrix, padded at its end."""
    width = -(-flat.numel() // rows)
    if rows * width == flat.numel():
        return flat.view(rows, width)
    padded = flat.new_zeros(rows * width)
    padded[: flat.numel()] = flat
    return padded.view(rows, width)
