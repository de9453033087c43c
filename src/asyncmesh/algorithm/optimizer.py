"""The interface that every optimiser shares, and what can be put around one.

Owns the order of an update. An optimiser turns a gradient g into a displacement -u(g) that is
*added in place* to a target. That one operation serves both uses without another kernel: added to
the decayed weights it is an ordinary step; added to zeros it is the displacement itself, which
error feedback needs.

Invariant: `apply` never writes to `source`; `target` is written completely.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor


class Optimizer(ABC):
    """State and formula of an optimiser over one flat buffer."""

    def __init__(self, weight_decay: float) -> None:
        self.weight_decay = weight_decay
        self.update = 0  # how many have been made

    @abstractmethod
    def displace_(self, target: Tensor, source: Tensor, gradient: Tensor, lr: float) -> None:
        """target ← target - u(g), advancing the state by one update. May overwrite `gradient`.

        `source` is the weights the update starts from, for formulas that look at them.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors that make up the state, by name (for checkpoints and for counting bytes)."""

    def resume(self, state: Mapping[str, Tensor], update: int) -> None:
        """Take over another's `state()` after so many updates."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.count_from(update)

    def count_from(self, update: int) -> None:
        """Go on as if so many updates had been made."""
        self.update = update

    def apply(self, target: Tensor, source: Tensor, gradient: Tensor, lr: float) -> None:
        """target ← (1 - ηλ) source - u(g): the whole update, out of place."""
        self.decay(target, source, lr)
        self.displace_(target, source, gradient, lr)

    def decay(self, target: Tensor, source: Tensor, lr: float) -> None:
        """Decoupled weight decay: target ← (1 - ηλ) source."""
        torch.mul(source, 1 - lr * self.weight_decay, out=target)


class ErrorFeedback(Optimizer):
    """Extrapolates a delayed step by its own trend: w ← w - u(g_t) - δ_s (u(g_t) - u(g_{t-1})).

    δ_s is the stage's mean delay in updates, so a stage without delay takes the plain step. The
    first step has no trend: u(g_0) stands for u(g_1) there.
    """

    def __init__(self, inner: Optimizer, mean_delay: float, like: Tensor) -> None:
        super().__init__(inner.weight_decay)
        self.inner = inner
        self.mean_delay = mean_delay
        self.previous = torch.zeros_like(like)
        self.step = torch.empty_like(like)

    def displace_(self, target: Tensor, source: Tensor, gradient: Tensor, lr: float) -> None:
        self.step.zero_()
        self.inner.displace_(self.step, source, gradient, lr)  # -u(g_t)
        trend = self.mean_delay if self.update else 0.0
        target.add_(self.step, alpha=1 + trend).sub_(self.previous, alpha=trend)
        self.previous, self.step = self.step, self.previous
        self.update += 1

    def count_from(self, update: int) -> None:
        super().count_from(update)
        self.inner.count_from(update)

    def decay(self, target: Tensor, source: Tensor, lr: float) -> None:
        self.inner.decay(target, source, lr)

    def state(self) -> dict[str, Tensor]:
        return {**self.inner.state(), "previous_step": self.previous, "step": self.step}
