"""The cuts are the best there are, and the costs are what PyTorch counts."""

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from asyncmesh.errors import ConfigError
from asyncmesh.model.gpt import build_stages
from asyncmesh.model.splitting import component_costs, partition, split, stage_costs
from asyncmesh.sections import ModelConfig


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        {"layers": 4, "width": 32, "heads": 4, "context": 16} | changes
    )


def score(costs: list[float], parts: list[range]) -> tuple[float, float]:
    of_part = [sum(costs[i] for i in part) for part in parts]
    return max(of_part), sum(cost**2 for cost in of_part)


def all_partitions(length: int, parts: int) -> list[list[range]]:
    return [
        [range(a, b) for a, b in zip((0, *cuts), (*cuts, length), strict=True)]
        for cuts in combinations(range(1, length), parts - 1)
    ]


# Whole numbers, so that sums are exact and ties happen.
@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.data())
@settings(max_examples=300, deadline=None)
def test_partition_is_as_good_as_brute_force(weights: list[int], data: st.DataObject) -> None:
    costs = [float(weight) for weight in weights]
    parts = data.draw(st.integers(1, len(costs)))
    found = partition(costs, parts)
    assert len(found) == parts
    assert all(len(part) > 0 for part in found)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert score(costs, found) == min(score(costs, p) for p in all_partitions(len(costs), parts))


@given(st.lists(st.floats(1e-3, 1e9), min_size=2, max_size=8), st.data())
@settings(max_examples=100, deadline=None)
def test_partition_of_any_costs_has_the_least_maximum(
    costs: list[float], data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    least, _ = min(score(costs, p) for p in all_partitions(len(costs), parts))
    assert score(costs, partition(costs, parts))[0] == pytest.approx(least, rel=1e-6)


def test_a_larger_maximum_at_the_beginning_is_used_where_it_is_free() -> None:
    # The least maximum is the last 9 alone, which leaves the others free to be as even as can be.
    assert partition([1, 1, 4, 2, 9], 3) == [range(0, 2), range(2, 4), range(4, 5)]


def test_the_least_maximum_goes_before_the_least_squares() -> None:
    # [1, 5 | 2 | 3] has the smaller sum of squares, and a part of 6.
    assert partition([1, 5, 2, 3], 3) == [range(0, 1), range(1, 2), range(2, 4)]


def test_partition_of_a_long_model_is_quick_and_stable() -> None:
    costs = [0.0, *[7.0] * 126, 20.0]
    assert partition(costs, 64) == partition(costs, 64)
    assert score(costs, partition(costs, 64))[0] == 20.0


@pytest.mark.parametrize("parts", [0, -1, 4])
def test_partition_rejects_what_cannot_be(parts: int) -> None:
    with pytest.raises(ValueError, match="3 components"):
        partition([1.0, 2.0, 3.0], parts)


@pytest.mark.parametrize("layers", [1, 2, 3, 7])
@pytest.mark.parametrize("vocab", [2, 256, 50_257])
def test_split_never_leaves_the_embedding_alone(layers: int, vocab: int) -> None:
    for stages in range(1, layers + 1):
        parts = split(config(layers=layers), vocab, stages)
        assert [i for part in parts for i in part] == list(range(layers + 2))
        assert parts[0] != range(0, 1)


def test_a_large_vocabulary_makes_the_head_a_stage_of_its_own() -> None:
    assert split(config(), 50_257, 2) == [range(0, 5), range(5, 6)]
    assert split(config(), 256, 2) == [range(0, 3), range(3, 6)]


def test_more_stages_than_layers_are_an_impossible_mesh() -> None:
    with pytest.raises(ConfigError) as told:
        split(config(layers=4), 256, 5)
    assert str(told.value) == (
        "mesh.stages = 5: impossible mesh: more stages than layers (model.layers = 4);"
        " try mesh.stages=4 or model.layers=5"
    )


def test_costs_are_the_multiply_adds_that_pytorch_counts() -> None:
    model, vocab = config(layers=2), 50
    (whole,) = build_stages(model, vocab, 1, seed=0)
    with FlopCounterMode(display=False) as counter:
        whole(torch.zeros(3, model.context, dtype=torch.int64))
    counted = counter.get_flop_counts()["Global"]
    of_linear = sum(count for op, count in counted.items() if "mm" in str(op)) / (3 * model.context)
    embedding, first, second, head = component_costs(model, vocab)
    # A query at position t meets t + 1 keys; twice the width in multiply-adds for each.
    met = sum(t + 1 for t in range(model.context)) / model.context
    attention = 2 * met * model.width
    assert embedding == 0
    assert first == second
    assert 2 * (first - attention) * 2 + 2 * head == of_linear


def test_stage_costs_have_mean_one_and_the_ratios_of_the_stages() -> None:
    model = config()
    assert stage_costs(model, 256, 1) == [1.0]
    first, second = stage_costs(model, 50_257, 2)
    embedding, *blocks, head = component_costs(model, 50_257)
    assert first + second == pytest.approx(2.0)
    assert second / first == pytest.approx(head / (embedding + sum(blocks)))
