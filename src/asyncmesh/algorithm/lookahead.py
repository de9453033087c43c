"""NAdamW: the look-ahead that makes a delayed gradient useful.

Owns the update of the pipeline axis. The momentum term moves the weights on to where they will be
when the gradient that is now under way arrives; that is Nesterov's point of evaluation (arXiv
2505.01099). Invariant: bit for bit torch.optim.NAdam(decoupled_weight_decay=True), on one flat
buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncmesh.algorithm.optimizer import Optimizer


class NAdamW(Optimizer):
    """One update, u = 1, 2, …, gradient g, after decoupled weight decay:

    m ← β1 m + (1-β1) g;  v ← β2 v + (1-β2) g²;  μ_u = β1 (1 - ½·0.96^(uψ))
    w ← w - η [ (1-μ_u) g / (1-Π_{i≤u} μ_i) + μ_{u+1} m / (1-Π_{i≤u+1} μ_i) ] / (√(v/(1-β2^u)) + ε)
    """

    def __init__(
        self,
        like: Tensor,
        beta1: float,
        beta2: float,
        momentum_decay: float,
        epsilon: float,
        weight_decay: float,
    ) -> None:
        super().__init__(weight_decay)
        self.beta1, self.beta2 = beta1, beta2
        self.momentum_decay, self.epsilon = momentum_decay, epsilon
        self.m = torch.zeros_like(like)
        self.v = torch.zeros_like(like)
        # torch.optim.NAdam keeps Π μ_i as a tensor of the default dtype; a Python float would be
        # more precise, and so differ from it in the last bit after a few updates.
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.mu_product = torch.ones((), dtype=dtype)

    def mu(self, update: int) -> float:
        return float(self.beta1 * (1.0 - 0.5 * (0.96 ** (update * self.momentum_decay))))

    def displace_(self, target: Tensor, source: Tensor, gradient: Tensor, lr: float) -> None:
        self.update += 1
        mu, mu_next = self.mu(self.update), self.mu(self.update + 1)
        self.mu_product *= mu
        product = self.mu_product.item()
        self.m.lerp_(gradient, 1 - self.beta1)
        self.v.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        root = self.v.div(1 - self.beta2**self.update).sqrt_().add_(self.epsilon)
        target.addcdiv_(gradient, root, value=-lr * (1.0 - mu) / (1.0 - product))
        target.addcdiv_(self.m, root, value=(-lr * mu_next) / (1.0 - product * mu_next))

    def state(self) -> dict[str, Tensor]:
        return {"m": self.m, "v": self.v, "mu_product": self.mu_product}
