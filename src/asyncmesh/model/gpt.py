"""The GPT family, as stages of a pipeline.

Owns the architecture, the names of its parameters and their initial values. A block is pre-norm:

    x ← x + Attention(LayerNorm(x));  x ← x + MLP(LayerNorm(x))

Order is told by rotary positions (each pair (x_j, x_{j+d/2}) of a query or key at position t is
turned by the angle t · 10000^(-2j/d), so that scores depend on distances only) or by learned ones.

Invariants: parameter names are global, so the state dicts of all stages together are the whole
model's, whatever the split; the initial weights are a function of the seed and the component only,
the same for every split and on every machine; the global random state is neither read nor changed.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncmesh.errors import ConfigError
from asyncmesh.model.splitting import split
from asyncmesh.sections import ModelConfig

WEIGHT_STD = 0.02
ROTARY_BASE = 10_000.0


class RotaryTables(nn.Module):
    """The sines and cosines of rotary positions: buffers that follow the stage, and no state."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, context: int, head_width: int) -> None:
        super().__init__()
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(context, head_width // 2), persistent=False)
        if not self.cosine.is_meta:  # where there is nothing to compute
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the tables, also again after `to_empty`."""
        context, pairs = self.cosine.shape
        frequencies = ROTARY_BASE ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)
        self.cosine.copy_(angles.cos())
        self.sine.copy_(angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, heads, T, head_width), turned; of its type, so that attention meets one type."""
        positions = x.shape[-2]
        cosine, sine = self.cosine[:positions], self.sine[:positions]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
        return turned.to(x.dtype)


class ResidualLinear(nn.Linear):
    """The last projection of a branch: what it gives is added to the residual stream."""


class OutputHeadLinear(nn.Linear):
    """The projection to logits, which optimisers for hidden matrices must leave to another."""

    is_output_head = True


class Embedding(nn.Module):
    """Token ids (B, T) to the residual stream (B, T, width)."""

    def __init__(self, model: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.tokens = _table(vocab, model.width)
        learned = model.positions == "learned"
        self.positions = _table(model.context, model.width) if learned else None
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[-1]]
        dropped: Tensor = self.dropout(x)
        return dropped


def _table(rows: int, width: int) -> nn.Embedding:
    """An embedding without values. Its own constructor would draw some, which on the meta device
    loads torch's compiler: two seconds that every command would wait for.
    """
    table: nn.Embedding = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
        torch.empty(rows, width), freeze=False
    )
    return table


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.heads = model.heads
        self.qkv = nn.Linear(model.width, 3 * model.width)
        self.output = ResidualLinear(model.width, model.width)

    def forward(self, x: Tensor, rotary: RotaryTables | None) -> Tensor:
        batch, positions, width = x.shape
        of_heads = self.qkv(x).view(batch, positions, 3, self.heads, width // self.heads)
        query, key, value = of_heads.permute(2, 0, 3, 1, 4).unbind()
        if rotary is not None:
            query, key = rotary(query), rotary(key)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, positions, width))
        return projected


class MLP(nn.Module):
    """Two projections with a GELU between, four times as wide inside."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.hidden = nn.Linear(model.width, 4 * model.width)
        self.output = ResidualLinear(4 * model.width, model.width)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.output(functional.gelu(self.hidden(x)))
        return projected


class Block(nn.Module):
    """One layer: attention, then MLP, each added to the residual stream."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model.width)
        self.attention = Attention(model)
        self.mlp_norm = nn.LayerNorm(model.width)
        self.mlp = MLP(model)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, x: Tensor, rotary: RotaryTables | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary))
        added: Tensor = self.dropout(self.mlp(self.mlp_norm(x)))
        return x + added


class Head(nn.Module):
    """The residual stream to logits (B, T, vocab)."""

    def __init__(self, model: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.width)
        self.output = OutputHeadLinear(model.width, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(x))
        return logits


class GPTStage(nn.Module):
    """A contiguous part of a GPT: `components` are numbered as `splitting.split` does.

    The stage with the embedding takes int64 tokens (B, T), the others the residual stream
    (B, T, width); the stage with the head gives logits (B, T, vocab), the others the stream.
    """

    def __init__(self, model: ModelConfig, vocab: int, components: range) -> None:
        super().__init__()
        last = model.layers + 1
        layers = [component - 1 for component in components if 0 < component < last]
        self.embedding = Embedding(model, vocab) if 0 in components else None
        self.blocks = nn.ModuleDict({str(layer): Block(model) for layer in layers})
        self.head = Head(model, vocab) if last in components else None
        # One pair of tables for all blocks: they are equal, and long contexts make them large.
        self.rotary = _rotary_tables(model) if layers and model.positions == "rotary" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, self.rotary)
        if self.head is not None:
            x = self.head(x)
        return x

    def components(self) -> dict[str, nn.Module]:
        """The parts that are initialised by themselves, by their global names."""
        named: dict[str, nn.Module | None] = {"embedding": self.embedding}
        named |= {f"blocks.{layer}": block for layer, block in self.blocks.items()}
        named["head"] = self.head
        return {name: component for name, component in named.items() if component is not None}


def build_stage(
    model: ModelConfig, vocab: int, stages: int, stage: int, seed: int, device: str = "cpu"
) -> GPTStage:
    """Stage `stage` of a model cut into `stages`; on "meta" only its shapes, without memory."""
    components = split(model, vocab, stages)[stage]
    with torch.device("meta"):  # else PyTorch would draw initial weights from the global state
        built = GPTStage(model, vocab, components)
    if device == "meta":
        return built
    built.to_empty(device="cpu")
    if built.rotary is not None:
        built.rotary.reset_parameters()
    residual_std = WEIGHT_STD / math.sqrt(2 * model.layers)
    for name, component in built.components().items():
        _initialise(component, _generator(seed, name), residual_std)
    return built.to(device)


def build_stages(
    model: ModelConfig, vocab: int, stages: int, seed: int, device: str = "cpu"
) -> list[GPTStage]:
    """The whole model as stages: `build_stage` of each."""
    return [build_stage(model, vocab, stages, stage, seed, device) for stage in range(stages)]


def coordinates(model: ModelConfig, vocab: int, stages: int) -> list[int]:
    """How many parameters each stage has, without allocating one."""
    parts = (build_stage(model, vocab, stages, stage, 0, "meta") for stage in range(stages))
    return [sum(p.numel() for p in part.parameters()) for part in parts]


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The mean loss of a token: logits (B, T, vocab) against target (B, T), at least in float32."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def _rotary_tables(model: ModelConfig) -> RotaryTables:
    head_width = model.width // model.heads
    if head_width % 2:
        raise ConfigError(
            "model.heads",
            model.heads,
            f"rotary positions turn pairs, but model.width / model.heads = {head_width} is odd",
            'try model.positions="learned", or a model.width / model.heads that is even',
        )
    return RotaryTables(model.context, head_width)


def _generator(seed: int, component: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{component}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


@torch.no_grad()
def _initialise(component: nn.Module, generator: torch.Generator, residual_std: float) -> None:
    """LayerNorms to the identity, biases to 0, weights to N(0, std²), drawn in a fixed order."""
    for module in component.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Embedding):
            std = residual_std if isinstance(module, ResidualLinear) else WEIGHT_STD
            # Drawn in float64 and rounded: float32 draws differ between processors (AVX2, AVX-512),
            # and replicas on unlike machines must begin with the same weights.
            drawn = torch.empty_like(module.weight, dtype=torch.float64)
            module.weight.copy_(drawn.normal_(0.0, std, generator=generator))
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
