"""How fast the hollow mesh is: protocol events a second, and how long a large mesh takes.

python -m benchmarks.hollow                     # 64 stages × 16 replicas × 1,000 updates
python -m benchmarks.hollow --updates 100       # a tenth of it
"""

from __future__ import annotations

import argparse
import time

from asyncmesh.config import Config
from asyncmesh.observe.summary import SummaryBuilder
from asyncmesh.simulator.mesh import Sizes, VirtualMesh
from benchmarks.paired import write_result


def run(stages: int, replicas: int, updates: int) -> dict[str, float]:
    """One hollow run with everything a summary needs being recorded."""
    config = Config.from_dict(
        {
            "train": {"updates": updates},
            "mesh": {"stages": stages, "replicas": replicas},
            "averaging": {"method": "async-momentum", "delay": "emergent"},
            "links": {"bandwidth_mbps": 1000, "latency_ms": 2},
            "compute": {"forward_ms": 10, "backward_ms": 20, "update_ms": 1, "jitter": 0.1},
        }
    )
    builder = SummaryBuilder(config)
    sizes = Sizes([1_000_000] * (stages - 1), [10_000_000] * stages)
    mesh = VirtualMesh(config, builder, sizes=sizes)
    began_s = time.perf_counter()
    mesh.run()
    wall_s = time.perf_counter() - began_s
    busy = builder.build("completed", wall_s, int)["busy_fraction"].values()
    return {
        "wall_seconds": wall_s,
        "protocol_events": mesh.inputs,
        "protocol_events_per_second": mesh.inputs / wall_s,
        "records": builder.events,
        "mean_busy_fraction": sum(busy) / len(busy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=5)
    chosen = parser.parse_args()
    runs = []
    for _ in range(chosen.repetitions):
        runs.append(run(chosen.stages, chosen.replicas, chosen.updates))
        last = runs[-1]
        print(
            f"{last['protocol_events']:,} protocol events and {last['records']:,} records in"
            f" {last['wall_seconds']:.1f} s: {last['protocol_events_per_second']:,.0f} a second"
        )
    write_result(
        "hollow",
        {
            "mesh": f"{chosen.stages} x {chosen.replicas}, {chosen.updates} updates",
            "required": {"protocol_events_per_second": 100_000, "wall_seconds": 60},
            "runs": runs,
        },
    )


if __name__ == "__main__":
    main()
