"""What a run will hold in memory, told before it begins.

Owns the prediction of live weight versions. It walks the protocol itself (a hollow mesh of one
replica) and counts who reads what, so it holds for every schedule. Invariant: in the strict order,
and for any schedule that flushes, the engine's own count after the run is the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from asyncmesh.algorithm.correction import METHODS
from asyncmesh.config import Config
from asyncmesh.observe.events import Backward, Event, Forward, Update
from asyncmesh.protocol.pipeline import PipelinePlan
from asyncmesh.simulator.mesh import Sizes, VirtualMesh


@dataclass(frozen=True)
class StageMemory:
    """One stage's worker. `buffers` counts full copies of the weights, `in_flight` microbatches."""

    stage: int
    coordinates: int
    in_flight: int
    buffers: int
    weight_bytes: int
    averaging_bytes: int


class BufferCount:
    """A sink that counts buffers as `VersionPool` hands them out."""

    def __init__(self, stages: int) -> None:
        self.newest = [0] * stages
        self.readers: list[Counter[int]] = [Counter() for _ in range(stages)]
        self.buffers = [1] * stages
        self.in_flight = [0] * stages

    def __call__(self, event: Event) -> None:
        if isinstance(event, Forward):
            readers = self.readers[event.stage]
            readers[event.version] += 1
            self.in_flight[event.stage] = max(self.in_flight[event.stage], readers.total())
        elif isinstance(event, Backward):
            readers = self.readers[event.stage]
            readers[event.version] -= 1
            if not readers[event.version]:
                del readers[event.version]
        elif isinstance(event, Update):
            stage = event.stage
            live = self.readers[stage].keys() | {self.newest[stage]}
            self.buffers[stage] = max(self.buffers[stage], len(live) + 1)
            self.newest[stage] = event.update


def predict(config: Config, sizes: Sizes, width: int) -> list[StageMemory]:
    """Live versions of every stage. `width`: bytes of one coordinate."""
    alone = _shortened(config)
    count = BufferCount(config.mesh.stages)
    VirtualMesh(alone, count, sizes=sizes).run()
    return [
        StageMemory(
            stage=stage,
            coordinates=coordinates,
            in_flight=count.in_flight[stage],
            buffers=count.buffers[stage],
            weight_bytes=count.buffers[stage] * coordinates * width,
            averaging_bytes=_averaging_bytes(config, coordinates, width),
        )
        for stage, coordinates in enumerate(sizes.coordinates)
    ]


def _shortened(config: Config) -> Config:
    """One replica and, as the strict order repeats, no more updates than fill the pipeline."""
    updates = config.train.updates
    if config.pipeline.order == "strict":
        first = PipelinePlan.of(config, 0)
        updates = min(updates, 4 + 2 * -(-first.capacity // first.accumulation))
    return config.replace(
        mesh={"replicas": 1},
        train={"updates": updates},
        optimizer={"warmup_updates": 0},
        compute={"replica_slowdown": []},
        links={"replica_slowdown": []},
    )


def _averaging_bytes(config: Config, coordinates: int, width: int) -> int:
    """Agreement (r, b), correction (e), and the snapshots in flight."""
    method = METHODS[config.averaging.method]
    if config.mesh.replicas == 1 or method.averages != "weights":
        return 0
    full = 2 if method.agreement == "momentum" else 0
    name = config.averaging.correction if method.correction == "configured" else method.correction
    full += name == "ema"
    snapshots = config.rounds_in_flight * -(-coordinates // config.classes)
    return (full * coordinates + snapshots) * width
