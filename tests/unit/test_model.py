"""The GPT family against a model written out by hand, and what stages promise."""

import copy
import hashlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from asyncmesh.errors import AsyncMeshError, ConfigError
from asyncmesh.model.generation import generate
from asyncmesh.model.gpt import (
    GPTStage,
    OutputHeadLinear,
    RotaryTables,
    build_stage,
    build_stages,
    cross_entropy,
)
from asyncmesh.sections import ModelConfig

VOCAB = 50
POSITIONS = pytest.mark.parametrize("positions", ["rotary", "learned"])


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        {"layers": 4, "width": 32, "heads": 4, "context": 16} | changes
    )


def some_tokens(batch: int = 2, length: int = 16, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def run(stages: list[GPTStage], x: Tensor) -> Tensor:
    for stage in stages:
        x = stage(x)
    return x


def merged(stages: list[GPTStage]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for stage in stages:
        weights = stage.state_dict()
        assert not whole.keys() & weights.keys()
        whole |= weights
    return whole


# -- initial weights -------------------------------------------------------------------------------
@given(st.integers(1, 4), st.integers(0, 2**70), st.sampled_from(["rotary", "learned"]))
@settings(max_examples=25, deadline=None)
def test_weights_are_the_same_for_any_number_of_stages(
    stages: int, seed: int, positions: str
) -> None:
    model = config(positions=positions)
    whole = merged(build_stages(model, VOCAB, 1, seed))
    parts = merged(build_stages(model, VOCAB, stages, seed))
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_names_are_global() -> None:
    first, second = build_stages(config(layers=2, positions="learned"), VOCAB, 2, seed=0)
    assert list(first.state_dict())[:3] == [
        "embedding.tokens.weight",
        "embedding.positions.weight",
        "blocks.0.attention_norm.weight",
    ]
    assert list(second.state_dict()) == [
        "blocks.1.attention_norm.weight",
        "blocks.1.attention_norm.bias",
        "blocks.1.attention.qkv.weight",
        "blocks.1.attention.qkv.bias",
        "blocks.1.attention.output.weight",
        "blocks.1.attention.output.bias",
        "blocks.1.mlp_norm.weight",
        "blocks.1.mlp_norm.bias",
        "blocks.1.mlp.hidden.weight",
        "blocks.1.mlp.hidden.bias",
        "blocks.1.mlp.output.weight",
        "blocks.1.mlp.output.bias",
        "head.norm.weight",
        "head.norm.bias",
        "head.output.weight",
    ]


def test_weights_are_pinned() -> None:
    """A change here changes every run that was ever recorded: old seeds would mean new weights."""
    digest = hashlib.sha256()
    for name, weight in sorted(
        merged(build_stages(config(positions="learned"), VOCAB, 2, 7)).items()
    ):
        digest.update(name.encode() + weight.numpy().tobytes())
    assert digest.hexdigest()[:16] == "25a850eb6e57db7d"


def test_weights_have_the_spread_of_gpt_2() -> None:
    model = config(layers=2, width=128, positions="learned")
    for name, weight in merged(build_stages(model, 1000, 2, seed=3)).items():
        if name.endswith("bias"):
            assert not weight.any()
        elif "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            residual = name.endswith(("attention.output.weight", "mlp.output.weight"))
            std = 0.02 / math.sqrt(2 * 2) if residual else 0.02
            assert weight.std().item() == pytest.approx(std, rel=0.05), name
            assert weight.mean().item() == pytest.approx(0, abs=6 * std / math.sqrt(weight.numel()))


def test_seeds_and_layers_differ() -> None:
    one, other = (merged(build_stages(config(), VOCAB, 1, seed)) for seed in (0, 1))
    for name in (name for name in one if "norm" not in name and name.endswith("weight")):
        assert not torch.equal(one[name], other[name])
    assert not torch.equal(one["blocks.0.mlp.hidden.weight"], one["blocks.1.mlp.hidden.weight"])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_global_random_state_is_neither_read_nor_changed(device: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_stages(config(), VOCAB, 2, seed=5, device=device)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = build_stages(config(), VOCAB, 2, seed=5, device=device)
    if device == "cpu":
        torch.testing.assert_close(merged(first), merged(second), rtol=0, atol=0)


def test_meta_gives_the_shapes_of_a_model_that_no_memory_would_hold() -> None:
    model = config(layers=80, width=16384, heads=128, context=8192)
    stages = build_stages(model, 50_257, 8, seed=0, device="meta")
    tensors = [*merged(stages).values(), *(b for stage in stages for b in stage.buffers())]
    assert all(tensor.is_meta for tensor in tensors)
    width = model.width
    block = 12 * width**2 + 13 * width  # 9 w biases and 4 w in two norms
    whole = 2 * 50_257 * width + 80 * block + 2 * width
    assert sum(p.numel() for stage in stages for p in stage.parameters()) == whole
    hidden = stages[1](torch.empty(2, 32, width, device="meta"))
    assert hidden.shape == (2, 32, width)


def test_shapes_on_meta_are_those_of_the_real_model() -> None:
    meta, real = (build_stages(config(), VOCAB, 3, 0, device) for device in ("meta", "cpu"))
    assert {n: t.shape for n, t in merged(meta).items()} == {
        n: t.shape for n, t in merged(real).items()
    }


def test_a_rotary_head_of_odd_width_is_told() -> None:
    with pytest.raises(ConfigError) as told:
        build_stages(config(width=12, heads=4), VOCAB, 1, seed=0)
    assert str(told.value) == (
        "model.heads = 4: rotary positions turn pairs, but model.width / model.heads = 3 is odd;"
        ' try model.positions="learned", or a model.width / model.heads that is even'
    )
    build_stages(config(width=12, heads=4, positions="learned"), VOCAB, 1, seed=0)


# -- what the model computes -----------------------------------------------------------------------
def by_hand(model: ModelConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The whole model in float64, head by head; rotary positions as complex numbers."""
    w = {name: weight.double() for name, weight in weights.items()}
    length, size = tokens.shape[1], model.width // model.heads

    def norm(name: str, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * w[name + ".weight"] + w[name + ".bias"]

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def turned(x: Tensor) -> Tensor:
        if model.positions == "learned":
            return x
        pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :])
        speed = torch.tensor([10_000.0 ** (-2 * j / size) for j in range(size // 2)])
        angle = torch.arange(length).double()[:, None] * speed.double()
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((pairs.real, pairs.imag), -1)

    def attention(name: str, x: Tensor) -> Tensor:
        query, key, value = linear(name + ".qkv", x).chunk(3, -1)
        mixed = []
        for head in range(model.heads):
            here = slice(head * size, (head + 1) * size)
            scores = turned(query[..., here]) @ turned(key[..., here]).transpose(1, 2)
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = (scores / math.sqrt(size)).masked_fill(future, -math.inf)
            mixed.append(scores.softmax(-1) @ value[..., here])
        return linear(name + ".output", torch.cat(mixed, -1))

    def mlp(name: str, x: Tensor) -> Tensor:
        hidden = linear(name + ".hidden", x)
        return linear(name + ".output", hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2)

    x = w["embedding.tokens.weight"][tokens]
    if model.positions == "learned":
        x = x + w["embedding.positions.weight"][:length]
    for layer in range(model.layers):
        at = f"blocks.{layer}."
        x = x + attention(at + "attention", norm(at + "attention_norm", x))
        x = x + mlp(at + "mlp", norm(at + "mlp_norm", x))
    return norm("head.norm", x) @ w["head.output.weight"].T


def livelier(stages: list[GPTStage]) -> list[GPTStage]:
    """Away from the initial weights: biases that count, and attention that is far from uniform."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return stages


@POSITIONS
@pytest.mark.parametrize("stages", [1, 3])
def test_logits_are_those_of_the_model_by_hand(positions: str, stages: int) -> None:
    model = config(positions=positions)
    built = livelier(build_stages(model, VOCAB, stages, seed=0))
    tokens = some_tokens(length=13)
    torch.testing.assert_close(
        run(built, tokens).double(), by_hand(model, merged(built), tokens), rtol=1e-4, atol=1e-4
    )


@POSITIONS
def test_composed_stages_equal_one_stage_bit_for_bit(positions: str) -> None:
    model, tokens = config(positions=positions), some_tokens()
    (whole,) = build_stages(model, VOCAB, 1, seed=0)
    whole_loss = cross_entropy(whole(tokens), tokens)
    torch.autograd.backward(whole_loss)
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for count in (2, 3, 4):
        stages = build_stages(model, VOCAB, count, seed=0)
        loss = cross_entropy(run(stages, tokens), tokens)
        torch.autograd.backward(loss)
        assert torch.equal(loss, whole_loss)
        for stage in stages:
            for name, parameter in stage.named_parameters():
                gradient, wanted = parameter.grad, expected[name]
                assert gradient is not None
                assert wanted is not None
                assert torch.equal(gradient, wanted)


@POSITIONS
def test_a_later_token_leaves_earlier_logits_unchanged(positions: str) -> None:
    stages = livelier(build_stages(config(positions=positions), VOCAB, 2, seed=0))
    tokens = some_tokens()
    for position in (1, 8, 15):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % VOCAB
        before, after = run(stages, tokens), run(stages, changed)
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position], after[:, position])


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 11))
@settings(max_examples=50, deadline=None)
def test_rotary_scores_depend_on_distances_only(query_at: int, key_at: int, shift: int) -> None:
    rotary = RotaryTables(context=32, head_width=8).double()
    query, key = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(i: int, j: int) -> float:
        turned = [rotary(x.expand(1, 1, 32, 8))[0, 0, at] for x, at in ((query, i), (key, j))]
        return float(turned[0] @ turned[1])

    moved = score(query_at + shift, key_at + shift)
    assert score(query_at, key_at) == pytest.approx(moved, abs=1e-5)
    if query_at != key_at:
        assert score(query_at, key_at) != pytest.approx(score(key_at, query_at), abs=1e-5)


def test_dropout_acts_in_training_only() -> None:
    (stage,) = build_stages(config(dropout=0.5), VOCAB, 1, seed=0)
    (without,) = build_stages(config(), VOCAB, 1, seed=0)
    assert not torch.equal(stage(some_tokens()), stage(some_tokens()))
    assert torch.equal(stage.eval()(some_tokens()), without(some_tokens()))
    assert sum(isinstance(module, nn.Dropout) for module in stage.modules()) == 1 + 4


# -- how stages are used ---------------------------------------------------------------------------
@POSITIONS
def test_functional_call_runs_on_other_weights_and_gives_their_gradients(positions: str) -> None:
    model, tokens = config(positions=positions), some_tokens()
    (stage,) = build_stages(model, VOCAB, 1, seed=0)
    (other,) = build_stages(model, VOCAB, 1, seed=1)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in other.named_parameters()}
    called = functional_call(stage, (leaves, dict(other.named_buffers())), (tokens,))
    torch.autograd.backward(called.sum())
    direct = other(tokens)
    torch.autograd.backward(direct.sum())
    assert torch.equal(called, direct)
    for name, parameter in other.named_parameters():
        gradient, wanted = leaves[name].grad, parameter.grad
        assert gradient is not None
        assert wanted is not None
        assert torch.equal(gradient, wanted)
    assert all(parameter.grad is None for parameter in stage.parameters())


def test_functional_call_fills_a_stage_on_meta() -> None:
    (meta,) = build_stages(config(), VOCAB, 1, seed=0, device="meta")
    (real,) = build_stages(config(), VOCAB, 1, seed=0)
    filling: dict[str, Tensor] = {**dict(real.named_parameters()), **dict(real.named_buffers())}
    assert torch.equal(functional_call(meta, filling, (some_tokens(),)), real(some_tokens()))


def test_rotary_tables_are_no_state_and_survive_to_empty() -> None:
    (stage,) = build_stages(config(), VOCAB, 1, seed=0)
    assert not any("rotary" in name for name in stage.state_dict())
    assert [name for name, _ in stage.named_buffers()] == ["rotary.cosine", "rotary.sine"]
    fresh = RotaryTables(16, 8)
    assert stage.rotary is not None
    assert torch.equal(stage.rotary.sine, fresh.sine)
    assert torch.equal(stage.rotary.cosine, fresh.cosine)


def test_rotary_keeps_the_type_that_attention_shares_with_its_values() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert RotaryTables(16, 8)(torch.ones(1, 1, 4, 8, dtype=dtype)).dtype == dtype


def test_a_copy_is_independent_and_equal() -> None:
    (stage,) = build_stages(config(), VOCAB, 1, seed=0)
    twin = copy.deepcopy(stage)
    assert torch.equal(twin(some_tokens()), stage(some_tokens()))
    before = stage(some_tokens())
    livelier([twin])
    assert torch.equal(stage(some_tokens()), before)


def test_float64_stages_compute_in_float64() -> None:
    model = config()
    stages = [stage.double() for stage in livelier(build_stages(model, VOCAB, 2, seed=0))]
    logits = run(stages, some_tokens())
    assert logits.dtype == torch.float64
    torch.testing.assert_close(
        logits, by_hand(model, merged(stages), some_tokens()), rtol=1e-5, atol=1e-5
    )


@POSITIONS
def test_bfloat16_autocast(positions: str) -> None:
    (stage,) = build_stages(config(positions=positions), VOCAB, 1, seed=0)
    exact = stage(some_tokens())
    with torch.autocast("cpu", torch.bfloat16):
        logits = stage(some_tokens())
        loss = cross_entropy(logits, some_tokens())
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    torch.testing.assert_close(logits.float(), exact, rtol=0.05, atol=0.02)
    torch.autograd.backward(loss)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in stage.parameters())


def test_compiles_as_one_graph() -> None:
    stages = build_stages(config(), VOCAB, 2, seed=0)
    compiled = [torch.compile(stage, backend="eager", fullgraph=True) for stage in stages]
    hidden = compiled[0](some_tokens()).detach()  # as it arrives from another worker
    assert torch.equal(compiled[1](hidden), run(stages, some_tokens()))


def test_one_stage_is_built_without_the_others() -> None:
    stages = build_stages(config(), VOCAB, 3, seed=4)
    for index, stage in enumerate(stages):
        alone = build_stage(config(), VOCAB, 3, index, seed=4)
        torch.testing.assert_close(alone.state_dict(), stage.state_dict(), rtol=0, atol=0)


def test_only_the_output_head_is_marked_as_one() -> None:
    stages = build_stages(config(), VOCAB, 2, seed=0)
    marked = [m for stage in stages for m in stage.modules() if getattr(m, "is_output_head", False)]
    assert [type(module) for module in marked] == [OutputHeadLinear]
    head = stages[1].head
    assert head is not None
    assert marked == [head.output]
    assert head.output.bias is None


# -- loss ------------------------------------------------------------------------------------------
def test_cross_entropy_is_the_mean_over_tokens_in_float32() -> None:
    logits = torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(0))
    target = some_tokens(length=5)
    picked = logits.double().log_softmax(-1).gather(-1, target[..., None])
    torch.testing.assert_close(cross_entropy(logits, target).double(), -picked.mean())
    rounded = logits.bfloat16()
    assert cross_entropy(rounded, target).dtype == torch.float32
    assert torch.equal(cross_entropy(rounded, target), cross_entropy(rounded.float(), target))
    assert cross_entropy(logits.double(), target).dtype == torch.float64


def test_training_learns() -> None:
    stages = build_stages(config(layers=2), VOCAB, 2, seed=0)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=3e-3)
    tokens = some_tokens()
    first = cross_entropy(run(stages, tokens[:, :-1]), tokens[:, 1:])
    assert first.item() == pytest.approx(math.log(VOCAB), abs=0.1)
    for _ in range(60):
        loss = cross_entropy(run(stages, tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert loss.item() < 0.5


# -- generation ------------------------------------------------------------------------------------
def generated(stages: list[GPTStage], **changes: Any) -> Tensor:
    arguments: dict[str, Any] = {
        "prompt": some_tokens(length=3),
        "tokens": 20,
        "context": 16,
        "temperature": 0.8,
        "top_k": None,
        "generator": torch.Generator().manual_seed(0),
    }
    return generate(stages, **(arguments | changes))


@pytest.fixture(scope="module")
def lively() -> list[GPTStage]:
    return livelier(build_stages(config(), VOCAB, 2, seed=0))


def test_greedy_generation_takes_the_likeliest_within_the_context(lively: list[GPTStage]) -> None:
    text = some_tokens(length=3)
    for _ in range(20):
        likeliest = run(lively, text[:, -16:])[:, -1].argmax(-1)
        text = torch.cat((text, likeliest[:, None]), 1)
    found = generated(lively, temperature=0)
    assert torch.equal(found, text)
    assert torch.equal(generated(lively, top_k=1), text)
    assert torch.equal(generated(lively, temperature=1e-9), text)
    assert not found.requires_grad


def test_sampling_is_a_function_of_the_generator(lively: list[GPTStage]) -> None:
    before = torch.get_rng_state()
    assert torch.equal(generated(lively), generated(lively))
    other = generated(lively, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(generated(lively), other)
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_have_the_probabilities_of_the_model(lively: list[GPTStage]) -> None:
    prompt = some_tokens(batch=1, length=3)
    best, ids = (run(lively, prompt)[0, -1] / 2).topk(5)
    found = generated(lively, prompt=prompt.expand(4000, 3), tokens=1, temperature=2, top_k=5)[
        :, -1
    ]
    shares = torch.stack([(found == i).float().mean() for i in ids])
    assert shares.sum().item() == pytest.approx(1)
    torch.testing.assert_close(shares, functional.softmax(best, -1), rtol=0, atol=0.04)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompt": torch.empty(1, 0, dtype=torch.int64)},
            "prompt: is empty, but needs one token to continue; give some text",
        ),
        ({"temperature": -1}, "temperature = -1: must be 0 or more; try 0.8"),
        ({"top_k": 0}, "top_k = 0: must be 1 or more; leave it out for all tokens"),
    ],
)
def test_impossible_generation_is_told(
    lively: list[GPTStage], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(AsyncMeshError) as told:
        generated(lively, **changes)
    assert str(told.value) == message
