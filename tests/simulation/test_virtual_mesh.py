"""What the virtual mesh says about time: links, stragglers, emergent delays, busy workers."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from asyncmesh import Config, simulate_modules
from asyncmesh.observe.events import Backward, Event, Merge, Message, Snapshot, Update
from asyncmesh.observe.summary import SummaryBuilder
from asyncmesh.simulator.language_model import hollow_mesh, language_model_job
from asyncmesh.simulator.links import Link, RingLink
from asyncmesh.simulator.mesh import Sizes, VirtualMesh
from asyncmesh.simulator.run import run_job


def hollow(**sections: dict[str, Any]) -> tuple[list[Event], dict[str, Any]]:
    """A hollow mesh whose activations and stages are 1,000 bytes and coordinates each."""
    config = Config.from_dict(sections)
    events: list[Event] = []
    builder = SummaryBuilder(config)

    def emit(event: Event) -> None:
        events.append(event)
        builder(event)

    stages = config.mesh.stages
    VirtualMesh(config, emit, sizes=Sizes([1000] * (stages - 1), [1000] * stages)).run()
    return events, builder.build("completed", 1.0, int)


def test_a_link_serialises_delays_and_keeps_the_order() -> None:
    link = Link(
        bandwidth_mbps=8.0, latency_ms=10.0, jitter_ms=0.0, seed="x"
    )  # 1 byte a microsecond
    assert link.send(0.0, 1000) == pytest.approx(0.011)
    assert link.send(0.0, 1000) == pytest.approx(0.012)  # behind the first
    assert link.send(1.0, 1000) == pytest.approx(1.011)
    jittery = Link(bandwidth_mbps=None, latency_ms=1.0, jitter_ms=5.0, seed="x")
    arrivals = [jittery.send(i * 1e-4, 10) for i in range(200)]
    assert arrivals == sorted(arrivals)
    again = Link(bandwidth_mbps=None, latency_ms=1.0, jitter_ms=5.0, seed="x")
    assert arrivals == [again.send(i * 1e-4, 10) for i in range(200)]


def test_a_ring_costs_what_its_formula_says() -> None:
    config = Config.from_dict(
        {
            "mesh": {"replicas": 4},
            "links": {"bandwidth_mbps": 8.0, "averaging_latency_ms": 2.0},
        }
    )
    ring = RingLink(config)
    assert ring.bytes_sent(1000, 4) == 1500
    assert ring.reduce(0.0, 1000, 4) == pytest.approx(0.0015 + 6 * 0.002)
    assert ring.reduce(0.0, 1000, 4) == pytest.approx(0.0030 + 6 * 0.002)
    slowest = RingLink(config.replace(links={"replica_slowdown": [1.0, 3.0, 1.0, 2.0]}))
    assert slowest.reduce(0.0, 1000, 4) == pytest.approx(3 * (0.0015 + 6 * 0.002))


def test_asynchronous_pipelines_stay_busy_and_flushed_ones_do_not() -> None:
    compute = {"forward_ms": 1.0, "backward_ms": 2.0, "update_ms": 0.0}
    common: dict[str, Any] = {
        "train": {"updates": 60},
        "mesh": {"stages": 4, "replicas": 1},
        "compute": compute,
    }
    busy = {}
    for schedule, k in (("async", 1), ("1f1b", 4), ("gpipe", 4)):
        _, summary = hollow(**common, pipeline={"schedule": schedule, "accumulation": k})
        busy[schedule] = min(summary["busy_fraction"].values())
    assert busy["async"] == pytest.approx(1.0)
    # k microbatches in k + P - 1 slots: (4)/(4 + 3)
    assert busy["1f1b"] == pytest.approx(4 / 7)
    assert busy["gpipe"] == pytest.approx(4 / 7)


def test_extra_depth_hides_latency() -> None:
    def busy(depth: int) -> float:
        _, summary = hollow(
            train={"updates": 80},
            mesh={"stages": 2, "replicas": 1},
            pipeline={"extra_depth": depth},
            compute={"forward_ms": 1.0, "backward_ms": 2.0, "update_ms": 0.0},
            links={"latency_ms": 3.0},
        )
        return float(min(summary["busy_fraction"].values()))

    # From forward to the end of backward at the first stage: 6 ms of links and 6 ms of computing,
    # in which each of the 2 + depth microbatches in flight keeps it busy for 3 ms.
    assert [busy(depth) for depth in (0, 1, 2)] == pytest.approx([6 / 12, 9 / 12, 1.0], rel=0.01)


@pytest.mark.parametrize("delay", [0, 1, 7])
def test_a_fixed_delay_is_exact(delay: int) -> None:
    events, summary = hollow(
        train={"updates": 30},
        mesh={"stages": 2, "replicas": 3},
        averaging={"method": "async-ema", "delay": delay},
        compute={"jitter": 0.5},
    )
    merges = [e for e in events if isinstance(e, Merge)]
    assert {e.delay for e in merges} == {delay}
    assert len(merges) == 6 * (30 - delay)
    assert summary["rounds"] == {
        "completed": 6 * (30 - delay),
        "skipped": 0,
        "unmerged": 0,
        "mean_delay_updates": delay,
    }


def test_an_emergent_delay_follows_the_links() -> None:
    def mean_delay(latency_ms: float) -> float:
        _, summary = hollow(
            train={"updates": 200},
            mesh={"stages": 1, "replicas": 2},
            averaging={"delay": "emergent", "fraction": 0.02},
            compute={"forward_ms": 1.0, "backward_ms": 2.0, "update_ms": 0.0},
            links={"averaging_latency_ms": latency_ms},
        )
        return float(summary["rounds"]["mean_delay_updates"])

    # Two replicas take two hops; an update takes 3 ms; a merge waits for the next boundary.
    assert mean_delay(0.0) == 1
    assert mean_delay(15.0) == 10
    assert mean_delay(16.0) == 11


def test_a_mean_that_arrives_during_an_update_merges_right_after_it() -> None:
    events, _ = hollow(
        train={"updates": 6},
        mesh={"stages": 1, "replicas": 2},
        averaging={"delay": "emergent", "method": "async-delta"},
        compute={"forward_ms": 1.0, "backward_ms": 2.0, "update_ms": 100.0},
        links={"averaging_latency_ms": 10.0},
    )
    # A snapshot's mean is there 20 ms later, while the next update is under way.
    assert {e.delay for e in events if isinstance(e, Merge)} == {1}


def test_the_slowest_site_sets_the_pace_of_averaging_and_of_nothing_else() -> None:
    def seconds(slowdown: list[float]) -> tuple[list[float], float]:
        events, summary = hollow(
            train={"updates": 40},
            mesh={"stages": 2, "replicas": 2},
            averaging={"delay": "emergent"},
            links={"latency_ms": 5.0, "bandwidth_mbps": 10.0, "replica_slowdown": slowdown},
        )
        ends = [
            max(e.end_s for e in events if isinstance(e, Update) and e.replica == r) for r in (0, 1)
        ]
        return ends, summary["rounds"]["mean_delay_updates"]

    (alone, _), short = seconds([1.0, 1.0])
    (beside, slow), long = seconds([1.0, 4.0])
    assert beside == alone
    # Both ways at 1,000 bytes: 0.8 ms to send and 5 ms to travel, all of it four times as long.
    assert slow - 40 * 3e-3 > 2 * (alone - 40 * 3e-3)
    assert long > 2 * short


def test_a_hollow_run_takes_as_long_as_a_numeric_one() -> None:
    """Also where the head, of a large vocabulary, is dearer than the blocks."""
    config = Config.from_dict(
        {
            "train": {"updates": 6, "eval_every": 6, "eval_sequences": 2, "device": "cpu"},
            "mesh": {"stages": 3, "replicas": 2},
            "pipeline": {"microbatch_size": 2},
            "averaging": {"delay": "emergent"},
            "model": {"layers": 3, "width": 16, "heads": 2, "context": 8, "vocab": 5000},
            "links": {"bandwidth_mbps": 10.0, "latency_ms": 1.0},
        }
    )
    numeric = run_job(language_model_job(config).job, lambda event: None).summary
    builder = SummaryBuilder(config)
    hollow_mesh(config, 5000, builder).run()
    empty = builder.build("completed", 1.0, int)
    assert empty["virtual_seconds"] == pytest.approx(numeric["virtual_seconds"], rel=1e-12)
    assert empty["busy_fraction"] == pytest.approx(numeric["busy_fraction"], rel=1e-12)
    assert max(empty["busy_fraction"].values()) > 3 * min(empty["busy_fraction"].values())


def test_a_slow_replica_never_slows_another_one() -> None:
    def end_of(replica: int, slowdown: list[float]) -> float:
        events, _ = hollow(
            train={"updates": 60},
            mesh={"stages": 2, "replicas": 2},
            averaging={"delay": "emergent"},
            compute={"replica_slowdown": slowdown},
        )
        return max(e.end_s for e in events if isinstance(e, Update) and e.replica == replica)

    alone = end_of(0, [1.0, 1.0])
    assert end_of(0, [1.0, 6.0]) == alone
    assert end_of(1, [1.0, 6.0]) == pytest.approx(6 * alone)


def test_a_synchronous_method_waits_for_the_slowest() -> None:
    def seconds(method: str) -> float:
        events, _ = hollow(
            train={"updates": 40},
            mesh={"stages": 1, "replicas": 2},
            averaging={"method": method},
            compute={"replica_slowdown": [1.0, 4.0]},
        )
        return max(e.end_s for e in events if isinstance(e, Update) and e.replica == 0)

    assert seconds("sparta") == pytest.approx(4 * seconds("none"), rel=0.05)
    assert seconds("allreduce") == pytest.approx(4 * seconds("none"), rel=0.05)


def test_bytes_on_both_axes() -> None:
    config: dict[str, Any] = {
        "train": {"updates": 40},
        "mesh": {"stages": 2, "replicas": 2},
        "pipeline": {"accumulation": 2},
        "averaging": {"method": "async-delta", "delay": 2, "fraction": 0.05},
    }
    events, summary = hollow(**config)
    for replica in range(2):
        sent = summary["bytes_sent"][f"stage-0-replica-{replica}"]
        assert sent["pipeline"] == 80 * 1000
        # 38 rounds of 5% of 1,000 coordinates, 4 bytes each; two replicas send the payload once.
        assert sent["data"] == 38 * 50 * 4
    assert all(e.bytes > 0 for e in events if isinstance(e, Message))


def test_hollow_and_numeric_runs_make_the_same_decisions() -> None:
    values = tiny.settings(
        train={"updates": 10},
        mesh={"stages": 3, "replicas": 2},
        averaging={"method": "async-ema", "delay": 2, "fraction": 0.2},
        compute={"jitter": 0.3},
    )
    result = simulate_modules(
        tiny.stages(3), tiny.squared_error, tiny.batch, Config.from_dict(values)
    )
    decisions, _ = hollow(**values)
    kinds = (Backward, Merge)
    assert [e for e in decisions if isinstance(e, kinds)] == [
        e for e in result.events if isinstance(e, kinds)
    ]


def test_the_wire_can_be_bfloat16_on_both_axes() -> None:
    values = tiny.settings(
        averaging={"method": "async-delta", "delay": 1, "fraction": 0.5, "wire_dtype": "bfloat16"},
        pipeline={"wire_dtype": "bfloat16"},
    )
    exact = tiny.settings(averaging={"method": "async-delta", "delay": 1, "fraction": 0.5})
    rounded, full = (
        simulate_modules(tiny.stages(2), tiny.squared_error, tiny.batch, Config.from_dict(v))
        for v in (values, exact)
    )
    sent = [r.summary["bytes_sent"]["stage-0-replica-0"] for r in (rounded, full)]
    assert sent[0]["pipeline"] * 4 == sent[1]["pipeline"]  # float64 otherwise
    assert sent[0]["data"] * 4 == sent[1]["data"]
    for name, value in full.weights[0][0].items():
        difference = (rounded.weights[0][0][name] - value).abs().max()
        assert 0 < difference < 0.02


def test_a_round_begins_when_the_last_snapshot_was_taken() -> None:
    events, _ = hollow(
        train={"updates": 40},
        mesh={"stages": 2, "replicas": 3},
        averaging={"method": "sparta"},
        compute={"jitter": 0.5, "update_ms": 5.0},
    )
    latest: dict[tuple[int, int], float] = {}
    for event in events:
        if isinstance(event, Snapshot):
            key = event.stage, event.round
            latest[key] = max(latest.get(key, 0.0), event.time_s)
    averages = [e for e in events if isinstance(e, Message) and e.axis == "data"]
    assert averages
    assert all(e.sent_s == latest[e.stage, e.number] for e in averages)


def test_who_has_finished_takes_part_in_no_more_rounds() -> None:
    events, summary = hollow(
        train={"updates": 60},
        mesh={"stages": 1, "replicas": 3},
        averaging={"method": "async-delta", "delay": "emergent"},
        compute={"replica_slowdown": [1.0, 4.0, 4.0]},
    )
    merges = [e for e in events if isinstance(e, Merge)]
    assert {len(e.contributors) for e in merges} == {2, 3}
    last = {r: max(e.update for e in merges if e.replica == r) for r in range(3)}
    assert last[1] == last[2] == 60  # the two slow ones go on with each other
    assert summary["rounds"]["completed"] == len(merges)


@pytest.mark.parametrize(
    ("averaging", "dtype"),
    [
        ({"method": "allreduce"}, "float32"),
        ({"method": "async-delta", "delay": 2, "wire_dtype": "float32"}, "float64"),
        ({"method": "async-delta", "delay": 2}, "float32"),
        ({"method": "async-delta", "delay": 2}, "float64"),
        ({"method": "async-delta", "delay": 2, "wire_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_a_hollow_mesh_counts_the_bytes_of_a_numeric_one(
    averaging: dict[str, Any], dtype: str
) -> None:
    config = Config.from_dict(
        {
            "train": {"updates": 6, "dtype": dtype, "device": "cpu"},
            "mesh": {"stages": 2, "replicas": 2},
            "averaging": averaging,
            "pipeline": {"microbatch_size": 2},
            "model": {"layers": 2, "width": 16, "heads": 2, "context": 8},
        }
    )
    numeric = run_job(language_model_job(config).job, lambda event: None)
    builder = SummaryBuilder(config)
    hollow_mesh(config, 256, builder).run()
    counted = builder.build("completed", 1.0, int)["bytes_sent"]
    for worker, sent in numeric.summary["bytes_sent"].items():
        assert counted[worker]["pipeline"] == sent["pipeline"]
        # A class of a cycle may be one coordinate smaller than the largest.
        assert counted[worker]["data"] == pytest.approx(sent["data"], rel=0.01)
