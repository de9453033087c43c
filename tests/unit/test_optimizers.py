"""The optimisers that have no bit-for-bit twin in PyTorch, and what is put around them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asyncmesh.algorithm.baselines import SGD, AdamW
from asyncmesh.algorithm.layout import FlatLayout
from asyncmesh.algorithm.muon import Muon, hidden_matrices, orthogonalised
from asyncmesh.algorithm.optimizer import ErrorFeedback
from asyncmesh.algorithm.schedule import LearningRate
from asyncmesh.model.gpt import OutputHeadLinear


def test_orthogonalised_pulls_singular_values_to_one() -> None:
    torch.manual_seed(0)
    for shape in ((20, 30), (30, 20), (16, 16)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
        assert values.min() > 0.6
        assert values.max() < 1.3


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.inner = nn.Linear(8, 12)
        self.head = OutputHeadLinear(12, 11, bias=False)


def test_hidden_matrices_leave_out_embedding_head_and_biases() -> None:
    assert hidden_matrices(Small()) == {"inner.weight"}


def test_muon_moves_matrices_like_pytorchs_muon_and_the_rest_like_adamw() -> None:
    torch.manual_seed(0)
    module = Small()
    named = dict(module.named_parameters())
    layout = FlatLayout.of(named.items())
    weights = torch.cat([p.detach().flatten() for p in named.values()])
    ours = Muon(weights, layout, hidden_matrices(module), 0.95, 0.99, 1e-8, 0.1)
    matrix = named["inner.weight"]
    rest = [p for name, p in named.items() if name != "inner.weight"]
    theirs = [
        torch.optim.Muon(
            [matrix], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
    ]
    for _ in range(5):
        gradient = torch.randn_like(weights)
        for slot in layout.slots:
            named[slot.name].grad = slot.of(gradient).clone()
        target = torch.empty_like(weights)
        ours.apply(target, weights, gradient, 0.01)
        weights = target
        for optimizer in theirs:
            optimizer.step()
    for slot in layout.slots:
        # PyTorch orthogonalises in bfloat16, this in float32: their steps differ by its rounding.
        tolerance = 2e-3 if slot.name == "inner.weight" else 1e-6
        assert torch.allclose(slot.of(weights), named[slot.name], atol=tolerance), slot.name


def steps(optimizer: ErrorFeedback | SGD, gradients: list[Tensor], lr: float) -> list[Tensor]:
    weights, path = torch.zeros(3), []
    for gradient in gradients:
        target = torch.empty(3)
        optimizer.apply(target, weights, gradient.clone(), lr)
        path.append(target - weights)
        weights = target
    return path


def test_error_feedback_extrapolates_by_the_mean_delay() -> None:
    """w ← w - u(g_t) - δ (u(g_t) - u(g_{t-1})), here with u(g) = η g."""
    gradients = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 1.0]), torch.zeros(3)]
    delta, lr = 1.5, 0.1
    moved = steps(
        ErrorFeedback(SGD(torch.zeros(3), 0.0, 0.0), delta, torch.zeros(3)), gradients, lr
    )
    u = [lr * g for g in gradients]
    assert torch.allclose(moved[0], -u[0])
    assert torch.allclose(moved[1], -u[1] - delta * (u[1] - u[0]))
    assert torch.allclose(moved[2], -u[2] - delta * (u[2] - u[1]))


def test_error_feedback_without_delay_is_the_plain_optimiser() -> None:
    torch.manual_seed(0)
    like = torch.zeros(40)
    plain, around = AdamW(like, 0.9, 0.99, 1e-8, 0.1), AdamW(like, 0.9, 0.99, 1e-8, 0.1)
    feedback = ErrorFeedback(around, 0.0, like)
    a = b = torch.randn(40)
    for _ in range(4):
        gradient = torch.randn(40)
        next_a, next_b = torch.empty(40), torch.empty(40)
        plain.apply(next_a, a, gradient.clone(), 0.01)
        feedback.apply(next_b, b, gradient.clone(), 0.01)
        a, b = next_a, next_b
        assert torch.allclose(a, b, atol=1e-7)


def rate(**changes: float) -> LearningRate:
    values = {"peak": 0.1, "schedule": "cosine", "updates": 100, "warmup_updates": 10}
    return LearningRate(**{**values, "min_ratio": 0.2, **changes})  # type: ignore[arg-type]


def test_warm_up_is_linear_and_cosine_ends_at_the_ratio() -> None:
    assert [rate()(u) for u in (1, 5, 10)] == pytest.approx([0.01, 0.05, 0.1])
    assert rate()(100) == pytest.approx(0.02)
    assert rate()(55) == pytest.approx(0.1 * (0.2 + 0.8 * 0.5))
    constant = LearningRate(0.1, "constant", 100, 0, 0.2)
    assert {constant(u) for u in (1, 50, 100)} == {0.1}


def test_the_discount_divides_by_the_delay_at_first_and_fades() -> None:
    discounted = LearningRate(0.1, "constant", 100, 0, 0.2, mean_delay=4.0, discount_updates=50)
    assert discounted(25) == pytest.approx(0.1 / 2)  # 4 ** (1 - 1/2)
    assert discounted(50) == discounted(100) == pytest.approx(0.1)
    short = LearningRate(0.1, "constant", 100, 0, 0.2, mean_delay=0.5, discount_updates=50)
    assert short(1) == pytest.approx(0.1)  # a delay below one update raises no rate
