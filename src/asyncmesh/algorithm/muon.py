"""Muon: steps of equal length in every direction of a matrix; AdamW for what is no hidden matrix.

Owns the orthogonalised step (after K. Jordan's Muon, with the scale that lets it share AdamW's
learning rate). Invariant: every coordinate of the flat buffer belongs to exactly one of the two.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from asyncmesh.algorithm.baselines import AdamW
from asyncmesh.algorithm.layout import FlatLayout
from asyncmesh.algorithm.optimizer import Optimizer

# A quintic whose slope at 0 is as steep as it can be while [0, 1] still lands in about [0.7, 1.2].
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_RMS_OF_ADAMW = 0.2  # the usual RMS of an AdamW step, in units of the learning rate


def orthogonalised(matrix: Tensor) -> Tensor:
    """X ← aX + (bA + cA²)X with A = XXᵀ, from X = G/‖G‖: pulls all singular values to about 1.

    Runs in bfloat16 on CUDA, where that is several times faster and the result as good; elsewhere
    in the matrix' own dtype.
    """
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.T if tall else x).to(matrix.dtype)


def hidden_matrices(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that Muon takes: matrices that are neither an embedding nor the head.

    Rows of those two belong to single tokens, so a step of equal length in all directions makes no
    sense for them. A head tells by a true attribute `is_output_head` on its module.
    """
    names = set()
    for prefix, owner in module.named_modules():
        if isinstance(owner, nn.Embedding) or getattr(owner, "is_output_head", False):
            continue
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.ndim == 2:
                names.add(f"{prefix}.{name}" if prefix else name)
    return frozenset(names)


class Muon(Optimizer):
    """For a hidden matrix W (a × b), gradient G, after decoupled weight decay:

    M ← β M + (1-β) G;  W ← W - η · 0.2 √max(a, b) · orthogonalised((1-β) G + β M)

    The √ makes the step's RMS that of an AdamW step, so one learning rate serves both.
    """

    def __init__(
        self,
        like: Tensor,
        layout: FlatLayout,
        matrices: frozenset[str],
        momentum: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
    ) -> None:
        super().__init__(weight_decay)
        self.momentum = momentum
        self.m = torch.zeros_like(like)
        self.matrices = [slot for slot in layout.slots if slot.name in matrices]
        self.rest = [
            (slot, AdamW(slot.of(like), 0.9, beta2, epsilon, weight_decay))
            for slot in layout.slots
            if slot.name not in matrices
        ]

    def displace_(self, target: Tensor, source: Tensor, gradient: Tensor, lr: float) -> None:
        for slot, adamw in self.rest:
            adamw.displace_(slot.of(target), slot.of(source), slot.of(gradient), lr)
        for slot in self.matrices:
            g, m = slot.of(gradient), slot.of(self.m)
            m.lerp_(g, 1 - self.momentum)
            scale = _RMS_OF_ADAMW * math.sqrt(max(slot.shape))
            slot.of(target).add_(orthogonalised(g.lerp(m, self.momentum)), alpha=-lr * scale)

        self.update += 1

    def count_from(self, update: int) -> None:
        super().count_from(update)
        for _, adamw in self.rest:
            adamw.count_from(update)

    def state(self) -> dict[str, Tensor]:
        state = {"m": self.m}
        for slot, adamw in self.rest:
            state |= {f"{slot.name}.{name}": tensor for name, tensor in adamw.state().items()}
        return state
