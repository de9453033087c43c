"""What is done to a gradient before the optimiser sees it.

Owns clipping. Invariant: on a CPU the arithmetic is torch.nn.utils.clip_grad_norm_'s to the last
bit; nowhere is anything read back from the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clip_(gradient: Tensor, of_parameters: list[Tensor], max_norm: float) -> None:
    """g ← g · min(1, max_norm / (‖g‖ + 1e-6)), ‖g‖ over the whole stage; 0 means never.

    `of_parameters` are `gradient`'s views, parameter by parameter.
    """
    if max_norm <= 0 or not of_parameters:
        return
    norm = _norm(gradient, of_parameters)
    gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def _norm(gradient: Tensor, of_parameters: list[Tensor]) -> Tensor:
    """‖g‖. PyTorch takes the norm of every parameter and then of these norms; a norm over the flat
    buffer adds in another order. On a GPU, where two libraries never agree to the last bit, the
    flat one spares a dozen kernel launches.
    """
    parts = gradient if gradient.is_cuda else torch.stack(torch._foreach_norm(of_parameters))
    norm: Tensor = torch.linalg.vector_norm(parts)
    return norm
