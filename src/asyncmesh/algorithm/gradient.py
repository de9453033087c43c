"""What is done to a gradient before the optimiser sees it.

Owns clipping. Invariant: the arithmetic is torch.nn.utils.clip_grad_norm_'s to the last bit, and
nothing is read back from the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncmesh.algorithm.layout import FlatLayout


def clip_(gradient: Tensor, layout: FlatLayout, max_norm: float) -> None:
    """g ← g · min(1, max_norm / (‖g‖ + 1e-6)), ‖g‖ over the whole stage; 0 means never.

    The norm is taken parameter by parameter and then over these norms, as PyTorch does, because a
    norm over the flat buffer would add in another order and differ in the last bit.
    """
    if max_norm <= 0 or not layout.slots:
        return
    norm = torch.nn.utils.get_total_norm(layout.views(gradient).values())
    gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
