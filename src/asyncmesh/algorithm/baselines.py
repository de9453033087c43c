"""The optimisers that the look-ahead is compared with, as its equals.

Owns AdamW and SGD. Invariant: bit for bit torch.optim's, on one flat buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncmesh.algorithm.optimizer import Optimizer


class AdamW(Optimizer):
    """m ← β1 m + (1-β1) g;  v ← β2 v + (1-β2) g²;  w ← w - η (m/(1-β1^u)) / (√(v/(1-β2^u)) + ε),

    after decoupled weight decay.
    """

    def __init__(
        self, like: Tensor, beta1: float, beta2: float, epsilon: float, weight_decay: float
    ) -> None:
        super().__init__(weight_decay)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.m = torch.zeros_like(like)
        self.v = torch.zeros_like(like)

    def displace_(self, target: Tensor, source: Tensor, gradient: Tensor, lr: float) -> None:
        self.update += 1
        self.m.lerp_(gradient, 1 - self.beta1)
        self.v.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        correction1 = 1 - self.beta1**self.update
        correction2 = 1 - self.beta2**self.update
        root = (self.v.sqrt() / correction2**0.5).add_(self.epsilon)
        target.addcdiv_(self.m, root, value=-(lr / correction1))

    def state(self) -> dict[str, Tensor]:
        return {"m": self.m, "v": self.v}


class SGD(Optimizer):
    """d = g + λ w;  m ← β1 m + d (m = d at first);  w ← w - η m. The weight decay is L2."""

    def __init__(self, like: Tensor, momentum: float, weight_decay: float) -> None:
        super().__init__(weight_decay)
        self.momentum = momentum
        self.m = torch.zeros_like(like) if momentum else None

    def decay(self, target: Tensor, source: Tensor, lr: float) -> None:
        target.copy_(source)

    def displace_(self, target: Tensor, source: Tensor, gradient: Tensor, lr: float) -> None:
        if self.weight_decay:
            gradient.add_(source, alpha=self.weight_decay)
        if self.m is not None:
            if self.update:
                self.m.mul_(self.momentum).add_(gradient)
            else:
                self.m.copy_(gradient)
            gradient = self.m
        self.update += 1
        target.add_(gradient, alpha=-lr)

    def state(self) -> dict[str, Tensor]:
        return {} if self.m is None else {"m": self.m}
