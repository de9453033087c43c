"""Text from a trained model, one token after another.

Owns the choice of the next token: at temperature 0 the likeliest, else one drawn from
softmax(logits / temperature) over the top_k likeliest. Invariant: the draws depend on `generator`
alone. Every token runs the whole context again: no cache is kept, since samples here are short.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from asyncmesh.errors import AsyncMeshError


@torch.no_grad()
def generate(
    stages: Sequence[nn.Module],
    prompt: Tensor,
    tokens: int,
    context: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> Tensor:
    """`prompt` (B, T) continued by `tokens` ids each: (B, T + tokens).

    The stages run as they are: call their `eval()` first if the model has dropout.
    """
    _check(prompt, temperature, top_k)
    text = prompt
    for _ in range(tokens):
        x = text[:, -context:]
        for stage in stages:
            x = stage(x)
        chosen = _choose(x[:, -1].float(), temperature, top_k, generator)
        text = torch.cat((text, chosen.to(text.device)), dim=1)
    return text


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> Tensor:
    """The next ids (B, 1) from logits (B, vocab)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    kept, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)
    # Less the maximum before the division: a tiny temperature must not overflow.
    probabilities = ((kept - kept[:, :1]) / temperature).softmax(dim=-1)
    drawn = torch.multinomial(probabilities.to(generator.device), 1, generator=generator)
    return ids.gather(1, drawn.to(ids.device))


def _check(prompt: Tensor, temperature: float, top_k: int | None) -> None:
    if prompt.shape[-1] == 0:
        raise AsyncMeshError("prompt: is empty, but needs one token to continue; give some text")
    if not temperature >= 0:
        raise AsyncMeshError(f"temperature = {temperature}: must be 0 or more; try 0.8")
    if top_k is not None and top_k < 1:
        raise AsyncMeshError(f"top_k = {top_k}: must be 1 or more; leave it out for all tokens")
