"""What the real mesh costs and gains on two cores, paired with what one would use instead.

Owns five measurements. `one`: a 1 × 1 mesh against a plain loop. `two`: two stages of one thread
each against a plain loop of one thread, and against PyTorch's own Schedule1F1B with the same
microbatches. `averaging`: two replicas that average p = 5% after every update against two that
average nothing. `emulated`: 8 × 4 workers that sleep instead of computing, on this machine. `gpu`:
4 × 2 workers that share one GPU against a plain loop that has it for itself.

A ratio is our tokens a second over theirs (their seconds over ours). Rates are of the steady state:
from the end of update WARM_UP to the end of the last one, by the workers' own record; the peers
measure the same.

    python -m benchmarks.real_mesh one --repetitions 5
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from asyncmesh.cli.mesh import run_mesh
from asyncmesh.config import Config
from asyncmesh.configuration import collect
from asyncmesh.device import choose_device
from asyncmesh.observe.events import Update, read_events
from benchmarks.paired import ratios, write_result
from benchmarks.peers import plain_loop, schedule_1f1b
from benchmarks.virtual_overhead import Batches, PlainLoop

WARM_UP = 3
# Two stages of this model cost the same to 1% (asyncmesh inspect stages).
MODEL = [
    *("--model.layers=4", "--model.width=256", "--model.heads=4", "--model.context=128"),
    *("--pipeline.microbatch_size=8", "--pipeline.accumulation=4"),
    *("--train.device=cpu", "--train.eval_sequences=1", "--train.eval_every=100000"),
]
EMULATED = [
    *("--compute.emulated=true", "--mesh.stages=8", "--mesh.replicas=4", "--model.layers=8"),
    *("--compute.forward_ms=50", "--compute.backward_ms=100", "--compute.update_ms=10"),
    *("--model.width=256", "--model.context=128", "--pipeline.microbatch_size=8"),
    *("--pipeline.extra_depth=1", "--pipeline.accumulation=4", "--averaging.method=async-momentum"),
]

GPU = [
    *("--mesh.stages=4", "--mesh.replicas=2", "--train.device=cuda", "--train.dtype=bfloat16"),
    *("--model.layers=12", "--model.width=768", "--model.heads=12", "--model.context=1024"),
    *("--model.vocab=50257", "--pipeline.microbatch_size=8", "--pipeline.accumulation=4"),
    *("--pipeline.extra_depth=1", "--averaging.method=async-momentum"),
    *("--train.eval_sequences=1", "--train.eval_every=100000"),
]


def mesh_seconds(config: Config) -> float:
    """Seconds of the updates after the warm-up; the slowest replica's."""
    summary, events = _run(config)
    assert summary["status"] == "completed", summary["error"]
    ends = {
        (event.replica, event.update): event.end_s
        for event in events
        if isinstance(event, Update) and event.stage == 0
    }
    last = config.train.updates
    return max(ends[r, last] - ends[r, WARM_UP] for r in range(config.mesh.replicas))


def _run(config: Config) -> tuple[dict[str, Any], list[Any]]:
    with (
        tempfile.TemporaryDirectory(prefix="asyncmesh-benchmark-") as folder,
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(nowhere),
    ):
        summary, run = run_mesh(config.on_a_real_mesh(), folder=Path(folder) / "run")
        return summary, list(read_events(run / "events"))


def _config(*settings: str) -> Config:
    return collect(None, None, [*MODEL, *settings]).config()


def measure_one(repetitions: int, updates: int) -> dict[str, Any]:
    """With one thread, and with as many as there are cores."""
    return {f"threads_{t}": _one(t, repetitions, updates) for t in (1, os.cpu_count() or 1)}


def _one(threads: int, repetitions: int, updates: int) -> dict[str, Any]:
    config = _config(
        *("--mesh.stages=1", "--mesh.replicas=1", f"--train.updates={updates + WARM_UP}"),
        f"--train.threads={threads}",
    )
    print(f"1 × 1 mesh and a plain loop, {threads} threads")
    return ratios(
        lambda: mesh_seconds(config), lambda: plain_loop(config, updates, threads), repetitions
    )


def measure_two(repetitions: int, updates: int) -> dict[str, Any]:
    config = _config(
        *("--mesh.stages=2", "--mesh.replicas=1", f"--train.updates={updates + WARM_UP}"),
        "--train.threads=1",
    )
    print("two stages and a plain loop on one core")
    plain = ratios(
        lambda: mesh_seconds(config), lambda: plain_loop(config, updates, 1), repetitions
    )
    print("two stages and Schedule1F1B")
    schedule = ratios(
        lambda: mesh_seconds(config), lambda: schedule_1f1b(config, updates, 1), repetitions
    )
    return {"against_plain_loop": plain, "against_schedule_1f1b": schedule}


def measure_averaging(repetitions: int, updates: int) -> dict[str, Any]:
    common = (
        *("--mesh.stages=1", "--mesh.replicas=2", f"--train.updates={updates + WARM_UP}"),
        "--train.threads=1",
    )
    with_it = _config(*common, "--averaging.method=async-momentum", "--averaging.fraction=0.05")
    without = _config(*common, "--averaging.method=none")
    print("two replicas that average 5% after every update, and two that do not")
    return ratios(lambda: mesh_seconds(with_it), lambda: mesh_seconds(without), repetitions)


def measure_emulated(repetitions: int, updates: int) -> dict[str, Any]:
    config = collect(None, None, [*EMULATED, f"--train.updates={updates}"]).config()
    lowest, means = [], []
    for _ in range(repetitions):
        summary, _events = _run(config)
        busy = list(summary["busy_fraction"].values())
        lowest.append(min(busy))
        means.append(sum(busy) / len(busy))
        print(f"  busy fraction: mean {means[-1]:.3f}, least busy worker {lowest[-1]:.3f}")
    return {"workers": 32, "mean_busy_fraction": means, "lowest_busy_fraction": lowest}


def measure_gpu(repetitions: int, updates: int) -> dict[str, Any]:
    """Tokens a second of both replicas together, over those of one process with the whole GPU."""
    config = collect(None, None, [*GPU, f"--train.updates={updates + WARM_UP}"]).config()
    plain_config = config.replace(train={"updates": updates}, pipeline={"accumulation": 1})
    device = choose_device(config)
    plain = PlainLoop(plain_config, device, Batches(plain_config, device))
    # Seconds for the work that the mesh does: all microbatches of all replicas.
    microbatches = config.pipeline.accumulation * config.mesh.replicas
    return ratios(lambda: mesh_seconds(config), lambda: plain() * microbatches, repetitions)


MEASUREMENTS = {
    "one": (measure_one, 12),
    "two": (measure_two, 12),
    "averaging": (measure_averaging, 15),
    "emulated": (measure_emulated, 30),
    "gpu": (measure_gpu, 30),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--updates", type=int)
    chosen = parser.parse_args()
    measure, updates = MEASUREMENTS[chosen.what]
    figures = measure(chosen.repetitions, chosen.updates or updates)
    write_result(f"real_mesh_{chosen.what}", figures)


if __name__ == "__main__":
    main()
