"""From events to `summary.json`, in one pass; what it keeps grows with updates, not with events.

Owns the file's contract. Invariant: `SummaryBuilder` sees nothing but events (and what it is told
once about the run), so feeding it the events of a folder again gives the same summary.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch

from asyncmesh.config import Config
from asyncmesh.observe.events import (
    Backward,
    Digest,
    Evaluation,
    Event,
    Forward,
    Joined,
    Loss,
    Memory,
    Merge,
    Message,
    Skip,
    Snapshot,
    Update,
)

Worker = tuple[int, int]  # (stage, replica)


class SteadyState:
    """The share of time in which a worker computed, without the pipeline's filling and draining.

    The window runs from the end of the worker's update `first` to the end of its update `last`.
    """

    def __init__(self, updates: int) -> None:
        self.first = updates // 10
        self.last = max(self.first + 1, updates - updates // 10)
        self.begin_s = 0.0 if self.first == 0 else None
        self.end_s: float | None = None
        self.busy_s = 0.0
        self._filling_s = 0.0  # busy before the window

    def span(self, start_s: float, end_s: float) -> None:
        if self.begin_s is None:
            self._filling_s += end_s - start_s
        elif self.end_s is None:
            self.busy_s += end_s - start_s

    def update(self, event: Update) -> None:
        self.span(event.start_s, event.end_s)
        if event.update == self.first:
            self.begin_s = event.end_s
        elif event.update == self.last:
            self.end_s = event.end_s

    def busy_fraction(self, now_s: float) -> float:
        if self.begin_s is None:  # a run that ended early: all there is
            return self._filling_s / now_s if now_s > 0 else 0.0
        window = (now_s if self.end_s is None else self.end_s) - self.begin_s
        return self.busy_s / window if window > 0 else 1.0


class SummaryBuilder:
    """A sink that keeps what `summary.json` needs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._steady: dict[Worker, SteadyState] = {}
        self._delays: dict[int, Counter[int]] = {}
        self._bytes: dict[tuple[int, int, str], int] = {}
        self._merged: list[int] = [0, 0]  # rounds merged by all workers, and their delays' sum
        self._snapshots = self._skipped = self._microbatches = 0
        self._updates: Counter[Worker] = Counter()
        self._curve: list[Evaluation] = []
        self._losses: dict[int, list[float]] = {}  # sum and count by update
        self._memory: list[Memory] = []
        self._now_s = 0.0
        self.events = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Forward: self._on_forward,
            Backward: self._on_backward,
            Update: self._on_update,
            Message: self._on_message,
            Merge: self._on_merge,
            Snapshot: self._on_snapshot,
            Skip: self._on_skip,
            Evaluation: self._curve.append,
            Loss: self._on_loss,
            Memory: self._memory.append,
            Joined: _ignore,
            Digest: _ignore,
        }

    def __call__(self, event: Event) -> None:
        self.events += 1
        self._handlers[type(event)](event)

    def _worker(self, stage: int, replica: int) -> SteadyState:
        worker = self._steady.get((stage, replica))
        if worker is None:
            worker = self._steady[stage, replica] = SteadyState(self._config.train.updates)
        return worker

    def _on_forward(self, event: Forward) -> None:
        self._worker(event.stage, event.replica).span(event.start_s, event.end_s)

    def _on_backward(self, event: Backward) -> None:
        self._worker(event.stage, event.replica).span(event.start_s, event.end_s)
        histogram = self._delays.get(event.stage)
        if histogram is None:
            histogram = self._delays[event.stage] = Counter()
        histogram[event.delay] += 1
        if event.stage == 0:
            self._microbatches += 1
        self._now_s = max(self._now_s, event.end_s)

    def _on_update(self, event: Update) -> None:
        self._worker(event.stage, event.replica).update(event)
        self._updates[event.stage, event.replica] = event.update
        self._now_s = max(self._now_s, event.end_s)

    def _on_message(self, event: Message) -> None:
        key = (event.stage, event.replica, event.axis)
        self._bytes[key] = self._bytes.get(key, 0) + event.bytes

    def _on_snapshot(self, _: Snapshot) -> None:
        self._snapshots += 1

    def _on_skip(self, _: Skip) -> None:
        self._skipped += 1

    def _on_merge(self, event: Merge) -> None:
        self._merged[0] += 1
        self._merged[1] += event.delay

    def _on_loss(self, event: Loss) -> None:
        update = event.microbatch // self._config.pipeline.accumulation + 1
        entry = self._losses.setdefault(update, [0.0, 0.0])
        entry[0] += event.loss
        entry[1] += 1

    def build(
        self,
        status: str,
        wall_seconds: float,
        tokens_of: Callable[[int], int],
        clock: Literal["virtual", "real"] = "virtual",
        lost: Collection[int] = (),
    ) -> dict[str, Any]:
        """The content of `summary.json`. `tokens_of` says how many are in so many microbatches.

        `lost`: replicas that were gone at the end.
        """
        config, curve = self._config, self._curve
        tokens = tokens_of(self._microbatches)
        return {
            "status": status,
            "clock": clock,  # of every duration but wall_seconds
            "mesh": {"stages": config.mesh.stages, "replicas": config.mesh.replicas},
            "method": {
                "pipeline": config.pipeline.schedule,
                "averaging": config.averaging.method,
                "optimizer": config.optimizer.name,
            },
            "seed": config.seed,
            "updates": min(
                (
                    self._updates[stage, replica]
                    for stage in range(config.mesh.stages)
                    for replica in range(config.mesh.replicas)
                    if replica not in lost
                ),
                default=0,
            ),
            "replicas_lost": sorted(lost),
            "tokens": tokens,
            "final_val_loss": curve[-1].loss if curve else None,
            "best_val_loss": min((e.loss for e in curve if e.loss is not None), default=None),
            "final_replica_val_losses": list(curve[-1].replica_losses) if curve else [],
            "val_curve": [
                {"update": e.update, "tokens": e.tokens, "seconds": e.time_s, "loss": e.loss}
                for e in curve
                if e.loss is not None
            ],
            "train_curve": self._train_curve(),
            "wall_seconds": wall_seconds,
            f"{clock}_seconds": self._now_s,
            "tokens_per_second": tokens / self._now_s if self._now_s else None,
            "busy_fraction": {
                _name(worker): steady.busy_fraction(self._now_s)
                for worker, steady in sorted(self._steady.items())
            },
            "bytes_sent": {
                _name(worker): {
                    axis: self._bytes.get((*worker, axis), 0) for axis in ("pipeline", "data")
                }
                for worker in sorted(self._steady)
            },
            "delays": {
                str(stage): {str(delay): count for delay, count in sorted(histogram.items())}
                for stage, histogram in sorted(self._delays.items())
            },
            "rounds": {
                "completed": self._merged[0],
                "skipped": self._skipped,
                "unmerged": self._snapshots - self._merged[0],
                "mean_delay_updates": self._merged[1] / self._merged[0] if self._merged[0] else 0.0,
            },
            "consensus_distance": curve[-1].consensus_distance if curve else None,
            "memory": {
                _name((memory.stage, memory.replica)): {
                    key: value
                    for key, value in memory._asdict().items()
                    if key not in ("stage", "replica")
                }
                for memory in sorted(self._memory)
            },
            "events": self.events,
            "environment": environment(),
        }

    def _train_curve(self) -> list[dict[str, float]]:
        """Mean training loss over all replicas, by update."""
        return [
            {"update": update, "loss": total / count}
            for update, (total, count) in sorted(self._losses.items())
        ]


def _ignore(_: Event) -> None:
    """For other readers of the events."""


def _name(worker: Worker) -> str:
    return f"stage-{worker[0]}-replica-{worker[1]}"


def environment() -> dict[str, Any]:
    """Where a run was made: enough to judge a figure, nothing that names a person or a host."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
