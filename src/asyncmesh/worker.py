"""`torchrun … -m asyncmesh.worker --coordinator HOST:PORT --replica R`: one worker of a mesh.

`asyncmesh join` starts these; with a launcher of your own (SLURM, Kubernetes) start them yourself.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from asyncmesh.configuration import collect, nested
from asyncmesh.errors import AsyncMeshError
from asyncmesh.runtime.place import parse_place
from asyncmesh.runtime.process import leave_word, run_worker


def main() -> int:
    """Parse, run, answer the exit code."""
    parser = argparse.ArgumentParser(
        "asyncmesh.worker", description="One worker of a mesh, started by torchrun."
    )
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT")
    parser.add_argument("--replica", required=True, type=int, metavar="R")
    parser.add_argument("--stages", metavar="A-B", help="default: as many as torchrun starts")
    parser.add_argument("--bind", metavar="ADDRESS", help="default: the one towards HOST")
    parser.add_argument("--log-dir", type=Path, default=Path("asyncmesh-logs"))
    known, assignments = parser.parse_known_args()
    try:
        settings = nested(collect(None, None, assignments).values)
        place = parse_place(known.coordinator, known.replica, known.stages, known.bind, settings)
        code = run_worker(place, known.log_dir)
    except AsyncMeshError as error:
        leave_word("worker", str(error))
        print(f"asyncmesh.worker: {error}", file=sys.stderr)
        return error.exit_code
    # Threads may still wait in torchft or Gloo, whose frames Python cannot unwind when it ends.
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
