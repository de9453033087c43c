"""Every microbatch has the version and the delay that the design's formula gives."""

from __future__ import annotations

from itertools import product

import pytest

import tiny
from asyncmesh import Config, simulate_modules
from asyncmesh.observe.events import Backward, Forward
from asyncmesh.protocol.pipeline import PipelinePlan

CASES = [(stages, k, h) for stages in (1, 2, 4, 8) for k in sorted({1, 2, stages}) for h in (0, 2)]


@pytest.mark.parametrize(("stages", "k", "h"), CASES)
def test_version_and_delay_of_every_microbatch(stages: int, k: int, h: int) -> None:
    updates = 30 // k + 2
    settings = tiny.settings(
        train={"updates": updates},
        mesh={"stages": stages, "replicas": 1},
        pipeline={"accumulation": k, "extra_depth": h},
        compute={"jitter": 0.4},
        links={"latency_ms": 0.7, "jitter_ms": 0.5},
    )
    result = simulate_modules(
        tiny.stages(stages),
        tiny.squared_error,
        tiny.batch,
        Config.from_dict(settings),
        digests=True,
    )
    forwards = {(e.stage, e.microbatch): e for e in result.events if isinstance(e, Forward)}
    backwards = {(e.stage, e.microbatch): e for e in result.events if isinstance(e, Backward)}
    assert len(forwards) == len(backwards) == stages * updates * k
    for stage, n in product(range(stages), range(updates * k)):
        forward, backward = forwards[stage, n], backwards[stage, n]
        c = 1 + (stages - 1 - stage) * (1 + h)
        version = max(0, (n - (c - 1)) // k)
        assert forward.version == backward.version == version
        assert backward.update == n // k
        assert backward.delay == n // k - version
        # Backward uses the very weights that forward used, and every version is other weights.
        assert forward.digest is not None
        assert forward.digest == backward.digest
    for stage in range(stages):
        digests = {(f.version, f.digest) for (s, _), f in forwards.items() if s == stage}
        assert len({d for _, d in digests}) == len({v for v, _ in digests}) == len(digests)
    measured = result.summary["delays"]
    for stage in range(stages):
        expected: dict[str, int] = {}
        for n in range(updates * k):
            delay = str(backwards[stage, n].delay)
            expected[delay] = expected.get(delay, 0) + 1
        assert measured[str(stage)] == expected


@pytest.mark.parametrize(("stages", "k", "worst"), [(8, 1, 7), (8, 8, 1), (4, 4, 1), (4, 2, 2)])
def test_the_largest_delay(stages: int, k: int, worst: int) -> None:
    """k = 1: P - 1 - s updates; k ≥ P: at most one."""
    settings = tiny.settings(
        train={"updates": 20},
        mesh={"stages": stages, "replicas": 1},
        pipeline={"accumulation": k},
    )
    result = simulate_modules(
        tiny.stages(stages), tiny.squared_error, tiny.batch, Config.from_dict(settings)
    )
    assert max(e.delay for e in result.events if isinstance(e, Backward)) == worst


@pytest.mark.parametrize(("stages", "k", "h"), CASES)
def test_the_mean_delay_that_corrections_are_scaled_by_is_what_is_recorded(
    stages: int, k: int, h: int
) -> None:
    updates = 30 // k + 4
    settings = tiny.settings(
        train={"updates": updates},
        mesh={"stages": stages, "replicas": 1},
        pipeline={"accumulation": k, "extra_depth": h},
    )
    config = Config.from_dict(settings)
    result = simulate_modules(tiny.stages(stages), tiny.squared_error, tiny.batch, config)
    for stage in range(stages):
        delays = [e.delay for e in result.events if isinstance(e, Backward) and e.stage == stage]
        full = delays[-2 * k :]  # the last two updates, long after the pipeline has filled
        assert PipelinePlan.of(config, stage).mean_delay == pytest.approx(sum(full) / len(full))
