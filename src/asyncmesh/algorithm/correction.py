"""What a worker does with the mean of a round: the two halves of a merge.

Owns the data axis' formulas. S is the round's subset, y what this worker sent, a the mean of what
all sent, d = w[S] - y what this worker has moved since. A merge is

    w[S] ← agreement(a) + λ · correction(d)

where the agreement is the value all replicas hold in common, and the correction keeps what this
worker did meanwhile. Every averaging method is a pair of these (see `METHODS`); the baselines are
no exceptions. Invariant: all replicas that merged the same rounds hold the same agreement state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncmesh.algorithm.subsets import gather, scatter_

Indices = Tensor | None


@dataclass(frozen=True)
class Method:
    """An averaging method, in terms of what is averaged and how it is merged.

    "configured" stands for whatever `averaging.correction` says.
    """

    averages: Literal["weights", "gradients", "nothing"]
    agreement: Literal["mean", "momentum"] = "mean"
    correction: Literal["overwrite", "delta", "ema", "configured"] = "overwrite"


METHODS: dict[str, Method] = {
    "none": Method("nothing"),
    "allreduce": Method("gradients"),
    # Blocking: delay 0. SPARTA is sparse; local SGD is dense and seldom; DiLoCo is that with an
    # outer Nesterov momentum, which is the momentum of the agreed value with nothing to correct.
    "sparta": Method("weights"),
    "local-sgd": Method("weights"),
    "diloco": Method("weights", agreement="momentum"),
    "async-overwrite": Method("weights"),
    "async-delta": Method("weights", correction="delta"),
    "async-ema": Method("weights", correction="ema"),
    "async-momentum": Method("weights", agreement="momentum", correction="configured"),
}


@dataclass(frozen=True)
class EmaDecay:
    """β(u): `start` for the first `warmup` share of all updates, then to `end` on a half cosine.

    β = start + (end - start) · ½ (1 - cos πt),  t = (u - warmup·U) / (U - warmup·U)
    """

    start: float
    end: float
    warmup: float
    updates: int

    def __call__(self, update: int) -> float:
        begin = self.warmup * self.updates
        if update <= begin:
            return self.start
        t = (update - begin) / (self.updates - begin)
        return self.start + (self.end - self.start) * 0.5 * (1 - math.cos(math.pi * t))


class Correction:
    """Overwrite: nothing of what the worker did meanwhile is kept. e = 0."""

    def __call__(self, indices: Indices, moved: Tensor, update: int) -> Tensor | None:
        return None

    def state(self) -> dict[str, Tensor]:
        return {}


class DeltaCorrection(Correction):
    """Everything is kept. e = d."""

    def __call__(self, indices: Indices, moved: Tensor, update: int) -> Tensor | None:
        return moved


class EmaCorrection(Correction):
    """The average drift is kept and the noise of a single round is not. e[S] ← β e[S] + (1-β) d."""

    def __init__(self, like: Tensor, decay: EmaDecay) -> None:
        self.e = torch.zeros_like(like)
        self.decay = decay

    def __call__(self, indices: Indices, moved: Tensor, update: int) -> Tensor | None:
        beta = self.decay(update)
        e = gather(self.e, indices).mul_(beta).add_(moved, alpha=1 - beta)
        scatter_(self.e, indices, e)
        return e

    def state(self) -> dict[str, Tensor]:
        return {"e": self.e}


class Agreement:
    """The agreed value is the mean itself."""

    def __call__(self, indices: Indices, mean: Tensor) -> Tensor:
        return mean

    def state(self) -> dict[str, Tensor]:
        return {}


class MomentumAgreement(Agreement):
    """The agreed value r has a Nesterov momentum b of its own (after DiLoCo's outer step).

    Δ = a - r[S];  b[S] ← μ b[S] + Δ;  r[S] ← r[S] + η_o (Δ + μ b[S]);  the agreed value is r[S].
    r starts as the common initial weights, b as 0.
    """

    def __init__(self, initial: Tensor, learning_rate: float, momentum: float) -> None:
        self.r = initial.clone()
        self.b = torch.zeros_like(initial)
        self.learning_rate, self.momentum = learning_rate, momentum

    def __call__(self, indices: Indices, mean: Tensor) -> Tensor:
        r = gather(self.r, indices)
        change = mean - r
        b = gather(self.b, indices).mul_(self.momentum).add_(change)
        r = r.add_(change.add_(b, alpha=self.momentum), alpha=self.learning_rate)
        scatter_(self.b, indices, b)
        scatter_(self.r, indices, r)
        return r

    def state(self) -> dict[str, Tensor]:
        return {"r": self.r, "b": self.b}


def merge_(
    weights: Tensor,
    indices: Indices,
    sent: Tensor,
    mean: Tensor,
    update: int,
    agreement: Agreement,
    correction: Correction,
    strength: float,
    residual: Tensor | None = None,
) -> None:
    """w[S] ← agreement(a) + λ e, with e from d = w[S] - y; plus what y lost on its way, if any."""
    e = correction(indices, gather(weights, indices).sub_(sent), update)
    agreed = agreement(indices, mean)
    merged = agreed if e is None else agreed.add(e, alpha=strength)
    scatter_(weights, indices, merged if residual is None else merged + residual)


def mean_in_order(contributions: list[Tensor]) -> Tensor:
    """Σ_r y_r / M, added in the order of the replicas, so that it is the same bits everywhere."""
    first = contributions[0]
    # A sum in bfloat16 would lose what little the wire left.
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for contribution in contributions[1:]:
        total += contribution
    return total.div_(len(contributions))
