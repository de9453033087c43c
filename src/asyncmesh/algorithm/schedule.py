"""The learning rate of every update, and what a stage's delay takes off it.

Owns warm-up, cosine and the per-stage discount. Invariant: a pure function of (settings, update).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRate:
    """η_u for u = 1, 2, …

    u ≤ W: η u / W. After that "constant" is η, and "cosine", with t = (u - W) / (U - W), is
    η (r + (1 - r) · ½ (1 + cos πt)).

    A stage of mean delay δ may have its rate discounted (PipeMare, arXiv 1910.05124): it is divided
    by max(1, δ)^(1 - min(u / U_d, 1)), so the discount is gone after U_d updates (U_d = 0: none).
    """

    peak: float
    schedule: str
    updates: int
    warmup_updates: int
    min_ratio: float
    mean_delay: float = 0.0
    discount_updates: int = 0

    def __call__(self, update: int) -> float:
        return self._scheduled(update) / self._discount(update)

    def _scheduled(self, update: int) -> float:
        if update <= self.warmup_updates:
            return self.peak * update / self.warmup_updates
        if self.schedule == "constant":
            return self.peak
        t = (update - self.warmup_updates) / (self.updates - self.warmup_updates)
        return self.peak * (
            self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * t))
        )

    def _discount(self, update: int) -> float:
        if not self.discount_updates:
            return 1.0
        exponent = 1 - min(update / self.discount_updates, 1.0)
        return float(max(1.0, self.mean_delay) ** exponent)
