"""Golden trajectories: the same losses and final weights as ever, on every machine, to 1e-10.

The emulation (test_emulation.py) covers look-ahead, DiLoCo and sparse averaging; error feedback,
Muon, the discount and emergent delays are pinned to themselves here and have tests of their own. A
change of a trajectory is a change of the algorithm; `python tests/property/test_golden.py` writes
them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from asyncmesh import Config, simulate_modules
from asyncmesh.observe.events import Loss

FILE = Path(__file__).parent.parent / "golden" / "trajectories.json"
MESH = {"stages": 4, "replicas": 2}

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "look-ahead, k=1": {"mesh": MESH},
    "look-ahead, k=4, extra depth": {
        "mesh": MESH,
        "pipeline": {"accumulation": 4, "extra_depth": 1},
    },
    "AdamW with error feedback": {
        "mesh": MESH,
        "optimizer": {"name": "adamw", "error_feedback": True},
    },
    "NAdamW with error feedback, k=3": {
        "mesh": MESH,
        "pipeline": {"accumulation": 3},
        "optimizer": {"error_feedback": True},
    },
    "Muon": {"mesh": MESH, "optimizer": {"name": "muon"}},
    "PipeMare discount": {"mesh": MESH, "optimizer": {"name": "adamw", "delay_discount": 8}},
    "flushed 1F1B, DiLoCo": {
        "pipeline": {"schedule": "1f1b", "accumulation": 2},
        "averaging": {"method": "diloco", "interval": 4},
    },
    "sparse EMA": {"averaging": {"method": "async-ema", "fraction": 0.2, "delay": 3}},
    "sparse momentum": {"averaging": {"method": "async-momentum", "fraction": 0.2, "delay": 3}},
    "emergent delay": {
        "averaging": {"method": "async-delta", "fraction": 0.2, "delay": "emergent"},
        "links": {"averaging_latency_ms": 4.0},
        "compute": {"replica_slowdown": [1.0, 1.7]},
    },
}


def trajectory(case: str) -> dict[str, list[float]]:
    config = Config.from_dict(tiny.settings(**CASES[case]))
    stages = tiny.stages(config.mesh.stages)
    result = simulate_modules(stages, tiny.squared_error, tiny.batch, config)
    losses = [e.loss for e in result.events if isinstance(e, Loss) and e.replica == 0]
    sums = [
        float(sum(value.sum() for value in stage.values()))
        for row in result.weights
        for stage in row
    ]
    return {"losses": losses, "weight_sums": sums}


@pytest.mark.parametrize("case", CASES)
def test_trajectory(case: str) -> None:
    golden = json.loads(FILE.read_text())[case]
    now = trajectory(case)
    assert now["losses"] == pytest.approx(golden["losses"], rel=1e-10)
    assert now["weight_sums"] == pytest.approx(golden["weight_sums"], rel=1e-9, abs=1e-10)


if __name__ == "__main__":
    text = json.dumps({case: trajectory(case) for case in CASES}, indent=1)
    FILE.write_text(text + "\n")
