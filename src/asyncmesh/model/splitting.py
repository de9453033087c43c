"""Where a model is cut into stages.

Owns the cost of every component and the choice of the cuts. A model of L layers has L + 2
components, in this order: 0 the embedding, 1..L the blocks, L + 1 the head. Invariant: the stages
are contiguous, none is empty, and the cost of the dearest is the least possible, since the dearest
stage sets the pace of the whole pipeline: min over cuts of max_s C_s, and among those
min of sum_s C_s², where C_s is the sum of the costs of stage s's components.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

from asyncmesh.errors import ConfigError
from asyncmesh.sections import ModelConfig


def component_costs(model: ModelConfig, vocab: int) -> list[float]:
    """Forward multiply-adds per token of [embedding, block, …, head].

    A block of width w has 12 w² in its projections (3 w² for query, key and value, w² for the
    attention's output, 8 w² for the MLP) and, over a context of T, (T + 1) w in attention: a causal
    query meets (T + 1) / 2 keys on average, once for its scores and once for their values.
    """
    block = 12.0 * model.width**2 + (model.context + 1.0) * model.width
    embedding = 0.0  # a look-up multiplies nothing
    head = float(model.width * vocab)
    return [embedding, *[block] * model.layers, head]


def partition(costs: Sequence[float], parts: int) -> list[range]:
    """The contiguous, non-empty parts of `costs` (all at least 0) with the least maximum cost.

    Ties are broken by the smaller sum of squares, then by the earlier cuts.
    """
    if not 1 <= parts <= len(costs):
        raise ValueError(f"cannot cut {len(costs)} components into {parts} non-empty parts")
    totals = [0.0, *accumulate(costs)]

    def cost(start: int, end: int) -> float:
        return totals[end] - totals[start]

    # In two passes, because the least (maximum, sum of squares) of a whole need not contain the
    # least one of its beginning: there, a larger maximum may be free and save squares.
    least_maximum, _ = _cheapest(len(costs), parts, cost, max)

    def square_within_maximum(start: int, end: int) -> float:
        part = cost(start, end)
        return part**2 if part <= least_maximum else math.inf

    _, ranges = _cheapest(len(costs), parts, square_within_maximum, operator.add)
    return ranges


def split(model: ModelConfig, vocab: int, stages: int) -> list[range]:
    """The components of each stage. With a large vocabulary the head may be one by itself."""
    if stages > model.layers:
        raise ConfigError(
            "mesh.stages",
            stages,
            f"impossible mesh: more stages than layers (model.layers = {model.layers})",
            f"try mesh.stages={model.layers} or model.layers={stages}",
        )
    return partition(component_costs(model, vocab), stages)


def stage_costs(model: ModelConfig, vocab: int, stages: int) -> list[float]:
    """Each stage's share of the work, as factors with mean 1."""
    costs = component_costs(model, vocab)
    of_stage = [math.fsum(costs[i] for i in part) for part in split(model, vocab, stages)]
    mean = math.fsum(of_stage) / stages
    return [cost / mean for cost in of_stage]


def _cheapest(
    length: int,
    parts: int,
    price: Callable[[int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[range]]:
    """The cuts of 0..length into `parts` whose combined price is least, and that price.

    best_p(end) = min over start of combine(best_{p-1}(start), price(start, end)). `combine` must
    not decrease when an argument grows, or the best whole would not consist of best beginnings.
    """
    best = {0: 0.0}
    starts: list[dict[int, int]] = []
    for _ in range(parts):
        candidates = {
            end: min(
                (combine(best[start], price(start, end)), start) for start in best if start < end
            )
            for end in range(min(best) + 1, length + 1)
        }
        best = {end: value for end, (value, _) in candidates.items()}
        starts.append({end: start for end, (_, start) in candidates.items()})
    ranges: list[range] = []
    end = length
    for start_of in reversed(starts):
        ranges.insert(0, range(start_of[end], end))
        end = start_of[end]
    return best[length], ranges
