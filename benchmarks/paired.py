"""Paired measurements: two ways of doing the same work, in turn, in one process.

Owns how a ratio is measured here. The machines are shared and noisy, so a single time says little:
A and B take turns, each pair gives one ratio, and what is reported is the median of the ratios with
all of them.
"""

from __future__ import annotations

import gc
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncmesh.observe.summary import environment

RESULTS = Path(__file__).parent / "results"


def ratios(a: Callable[[], float], b: Callable[[], float], repetitions: int) -> dict[str, Any]:
    """seconds of `b` over seconds of `a`, pair by pair, after one pair to warm up."""

    def turn(work: Callable[[], float]) -> float:
        gc.collect()  # what the turn before left behind is not this one's cost
        return work()

    turn(a)
    turn(b)
    pairs = []
    for repetition in range(repetitions):
        # Which one comes first changes, so that neither always gets the quieter moment.
        if repetition % 2:
            seconds_b, seconds_a = turn(b), turn(a)
        else:
            seconds_a, seconds_b = turn(a), turn(b)
        pairs.append((seconds_a, seconds_b))
        print(f"  {seconds_a:.3f} s  {seconds_b:.3f} s  ratio {seconds_b / seconds_a:.3f}")
    measured = [second / first for first, second in pairs]
    return {
        "median_ratio": statistics.median(measured),
        "lowest_ratio": min(measured),
        "highest_ratio": max(measured),
        "ratios": measured,
        "seconds": pairs,
    }


def write_result(name: str, figures: dict[str, Any]) -> None:
    """benchmarks/results/NAME.json: the figures, the command that gave them, the machine."""
    RESULTS.mkdir(exist_ok=True)
    module = f"benchmarks.{Path(sys.argv[0]).stem}"
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    content = {"command": command, "machine": environment(), **figures}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"written: benchmarks/results/{name}.json")
