"""The collector: reports in, an `Evaluation` exactly when all its parts have come.

A validation's parts are made here as the workers make them: one of the loss a replica (and one of
the replica's own weights at the end), one of the distance a worker.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncmesh.errors import WireError
from asyncmesh.observe.events import Evaluation, Event, Forward, Merge, to_json
from asyncmesh.runtime.collector import Collector
from asyncmesh.runtime.messages import FINAL, DistancePart, Report, ValidationPart

Part = ValidationPart | DistancePart


def tokens(update: int, replicas: int) -> int:
    return 1000 * update + replicas


class Recorded:
    """A collector and what it emitted."""

    def __init__(self, stages: int, validates: bool = True) -> None:
        self.events: list[Event] = []
        self.collector = Collector(self.events.append, stages, validates, tokens)

    def take(self, *parts: Part, events: tuple[str, ...] = ()) -> None:
        self.collector.take(
            Report(
                job="job",
                replica=0,
                stage=0,
                state="training",
                first_event=0,
                events=list(events),
                validations=[part for part in parts if isinstance(part, ValidationPart)],
                distances=[part for part in parts if isinstance(part, DistancePart)],
            )
        )

    def evaluations(self) -> list[Evaluation]:
        return [event for event in self.events if isinstance(event, Evaluation)]


@dataclass(frozen=True)
class Validated:
    """The weights of `replicas` at one update, by replica and stage, and their mean."""

    update: int
    weights: list[list[Tensor]]
    seed: int

    @classmethod
    def drawn(cls, update: int, stages: int, replicas: int, seed: int = 0) -> Validated:
        generator = torch.Generator().manual_seed(seed)
        sizes = [3 + stage for stage in range(stages)]
        weights = [
            [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
            for _ in range(replicas)
        ]
        return cls(update, weights, seed)

    @property
    def reached(self) -> int:
        return 77 if self.update == FINAL else self.update

    def distances(self) -> list[DistancePart]:
        parts = []
        for stage, of_stage in enumerate(zip(*self.weights, strict=True)):
            mean = sum(of_stage) / len(of_stage)
            for replica, weights in enumerate(of_stage):
                parts.append(
                    DistancePart(
                        update=self.update,
                        reached=self.reached,
                        stage=stage,
                        replica=replica,
                        parts=len(of_stage),
                        apart=float((weights - mean).square().sum()),
                        norm=float(mean.square().sum()),
                        time_s=10.0 * stage + replica,
                    )
                )
        return parts

    def losses(self, own: bool = False) -> list[ValidationPart]:
        drawn = random.Random(self.seed + own)
        return [
            ValidationPart(
                update=self.update,
                replica=replica,
                loss_sum=drawn.uniform(0, 100),
                targets=drawn.randint(1, 50),
                own=own,
            )
            for replica in range(len(self.weights))
        ]

    def distance(self) -> float:
        """√(mean over replicas of ‖w_r - w̄‖²) / ‖w̄‖ of whole models."""
        whole = torch.stack([torch.cat(stages) for stages in self.weights])
        mean = whole.mean(0)
        return float((whole - mean).square().sum(1).mean().sqrt() / mean.norm())


meshes = st.tuples(st.integers(1, 4), st.integers(1, 4))


def fed_in_any_order(recorded: Recorded, parts: list[Part], order: random.Random) -> None:
    """One after another; nothing may come before the last."""
    order.shuffle(parts)
    for part in parts[:-1]:
        recorded.take(part)
        assert recorded.events == []
    recorded.take(parts[-1])
    assert len(recorded.events) == 1


@settings(deadline=None)
@given(meshes, st.randoms(use_true_random=False))
def test_an_evaluation_comes_exactly_when_all_its_parts_are_there(
    mesh: tuple[int, int], order: random.Random
) -> None:
    stages, replicas = mesh
    validated = Validated.drawn(40, stages, replicas, seed=order.randrange(100))
    recorded = Recorded(stages)
    losses = validated.losses()
    fed_in_any_order(recorded, [*losses, *validated.distances()], order)
    (evaluation,) = recorded.evaluations()
    assert (evaluation.update, evaluation.tokens) == (40, tokens(40, replicas))
    assert evaluation.time_s == 10.0 * (stages - 1) + replicas - 1
    every_target = sum(part.targets for part in losses)
    loss = sum(part.loss_sum for part in losses) / every_target
    assert evaluation.loss == pytest.approx(loss, rel=1e-12)
    assert evaluation.consensus_distance == pytest.approx(
        validated.distance(), rel=1e-12, abs=1e-15
    )
    assert evaluation.replica_losses == ()


@settings(deadline=None)
@example((1, 1), 1)
@given(meshes, st.integers(0, 1000))
def test_the_last_evaluation_waits_for_every_replicas_own_loss(
    mesh: tuple[int, int], seed: int
) -> None:
    stages, replicas = mesh
    validated = Validated.drawn(FINAL, stages, replicas, seed)
    own = validated.losses(own=True)
    parts: list[Part] = [*validated.losses(), *own, *validated.distances()]
    recorded = Recorded(stages)
    fed_in_any_order(recorded, parts, random.Random(seed))
    (evaluation,) = recorded.evaluations()
    assert evaluation.replica_losses == tuple(part.loss_sum / part.targets for part in own)


@given(st.permutations(range(4)))
def test_replica_losses_are_in_the_order_of_the_replicas(order: list[int]) -> None:
    validated = Validated.drawn(FINAL, stages=2, replicas=4)
    own = validated.losses(own=True)
    recorded = Recorded(stages=2)
    for replica in order:
        recorded.take(own[replica])
    recorded.take(*validated.losses(), *validated.distances())
    (evaluation,) = recorded.evaluations()
    assert evaluation.replica_losses == tuple(part.loss_sum / part.targets for part in own)


@given(st.permutations(range(5)))
def test_replicas_may_report_in_any_order_all_that_they_know(order: list[int]) -> None:
    validated = Validated.drawn(FINAL, stages=1, replicas=5)
    recorded = Recorded(stages=1)
    triples = zip(
        validated.losses(), validated.losses(own=True), validated.distances(), strict=True
    )
    by_replica = list(triples)
    for replica in order[:-1]:
        recorded.take(*by_replica[replica])
        assert recorded.events == []
    recorded.take(*by_replica[order[-1]])
    (evaluation,) = recorded.evaluations()
    assert len(evaluation.replica_losses) == 5


def test_the_update_of_the_last_evaluation_is_what_all_have_reached() -> None:
    validated = Validated.drawn(FINAL, stages=2, replicas=2)
    late = [part.model_copy(update={"reached": 70 + part.stage}) for part in validated.distances()]
    recorded = Recorded(stages=2)
    recorded.take(*late, *validated.losses(), *validated.losses(own=True))
    (evaluation,) = recorded.evaluations()
    assert (evaluation.update, evaluation.tokens) == (70, tokens(70, 2))


def test_a_mean_of_those_who_are_left_needs_no_part_of_one_who_was_lost() -> None:
    validated = Validated.drawn(8, stages=3, replicas=2)
    recorded = Recorded(stages=3)
    parts = [
        part.model_copy(update={"replica": part.replica + 1}) for part in validated.distances()
    ]
    losses = [part.model_copy(update={"replica": part.replica + 1}) for part in validated.losses()]
    recorded.take(*parts, *losses)
    (evaluation,) = recorded.evaluations()
    assert evaluation.tokens == tokens(8, 2)
    assert evaluation.consensus_distance == pytest.approx(validated.distance(), rel=1e-12)


def test_replicas_that_agree_are_at_no_distance_and_weights_of_0_are_no_division_by_0() -> None:
    for value, update in ((1.5, 4), (0.0, 8)):
        recorded = Recorded(stages=2)
        same = [[torch.full((3,), value, dtype=torch.float64)] * 2] * 3
        validated = Validated(update, same, seed=0)
        recorded.take(*validated.distances(), *validated.losses())
        assert [e.consensus_distance for e in recorded.evaluations()] == [0.0]


def test_without_anything_to_validate_on_the_distances_alone_are_an_evaluation() -> None:
    validated = Validated.drawn(4, stages=2, replicas=3)
    recorded = Recorded(stages=2, validates=False)
    recorded.take(*validated.distances()[1:])
    assert recorded.events == []
    recorded.take(validated.distances()[0])
    (evaluation,) = recorded.evaluations()
    assert (evaluation.loss, evaluation.replica_losses) == (None, ())


def test_a_replica_without_a_share_of_the_batches_counts_as_no_targets() -> None:
    validated = Validated.drawn(4, stages=1, replicas=2)
    some = ValidationPart(update=4, replica=0, loss_sum=6.0, targets=3, own=False)
    none = ValidationPart(update=4, replica=1, loss_sum=0.0, targets=0, own=False)
    recorded = Recorded(stages=1)
    recorded.take(some, none, *validated.distances())
    assert [evaluation.loss for evaluation in recorded.evaluations()] == [2.0]


# -- validations that are left out -----------------------------------------------------------------
@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_a_validation_that_somebody_left_out_blocks_no_later_one(
    order: random.Random, missing: int
) -> None:
    """Whether its parts come before, between or after those of the next ones."""
    recorded = Recorded(stages=2)
    left_out = Validated.drawn(10, 2, 3, seed=1)
    stragglers: list[Part] = [*left_out.losses(), *left_out.distances()]
    order.shuffle(stragglers)
    del stragglers[:missing]
    for update in (20, 30):
        validated = Validated.drawn(update, 2, 3, seed=update)
        parts: list[Part] = [*validated.losses(), *validated.distances()]
        count = order.randrange(len(stragglers) + 1)
        parts += [stragglers.pop() for _ in range(count)]
        order.shuffle(parts)
        for part in parts:
            recorded.take(part)
    recorded.take(*stragglers)
    assert [evaluation.update for evaluation in recorded.evaluations()] == [20, 30]


def test_two_validations_that_are_under_way_at_once_both_come() -> None:
    one, other = (Validated.drawn(update, 2, 2, seed=update) for update in (10, 20))
    recorded = Recorded(stages=2)
    recorded.take(*other.losses(), *one.distances())
    recorded.take(*one.losses(), *other.distances())
    assert [evaluation.update for evaluation in recorded.evaluations()] == [10, 20]
    distances = [evaluation.consensus_distance for evaluation in recorded.evaluations()]
    assert distances == pytest.approx([one.distance(), other.distance()])


def test_a_report_that_comes_again_makes_no_second_evaluation() -> None:
    """Its answer was lost, so a worker reports once more: all parts of a mesh of one worker."""
    validated = Validated.drawn(4, stages=1, replicas=1)
    recorded = Recorded(stages=1)
    for _ in range(2):
        recorded.take(*validated.losses(), *validated.distances())
    assert [evaluation.update for evaluation in recorded.evaluations()] == [4]


# -- events ----------------------------------------------------------------------------------------
def test_events_pass_in_their_order_and_before_the_evaluation_of_their_report() -> None:
    happened: list[Event] = [
        Forward(0.0, 1.0, 0, 0, 5, 2),
        Merge(1.0, 0, 0, 3, 7, 2, (0, 2)),
        Forward(1.0, 2.0, 0, 0, 6, 3),
    ]
    validated = Validated.drawn(4, stages=1, replicas=1)
    recorded = Recorded(stages=1)
    lines = tuple(map(to_json, happened))
    recorded.take(*validated.losses(), *validated.distances(), events=lines)
    assert recorded.events == [*happened, *recorded.evaluations()]


@pytest.mark.parametrize(
    "line",
    [
        *("", "{", "[]", "{}", '{"event": "forward"}', '{"event": "unheard of"}'),
        *('{"event": []}', '{"event": "merge", "contributors": 5}', '{"event": "loss", "x": 1}'),
        *("1", "null", '"forward"'),
    ],
)
def test_an_event_that_cannot_be_read_is_refused(line: str) -> None:
    recorded = Recorded(stages=1)
    with pytest.raises(WireError, match="a reported event cannot be read"):
        recorded.take(events=(line,))
    assert recorded.events == []
