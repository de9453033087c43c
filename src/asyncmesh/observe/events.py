"""What a run leaves behind: one typed record for everything that happened.

Owns the vocabulary of a run's `events/` folder. The metrics, the report, the plots, the tests and
replay read these and nothing else. Invariant: with the same configuration and seed the simulator
emits the same records in the same order, so `EventHash` is the same (times are virtual seconds; no
record holds a wall-clock time).

A record is a NamedTuple: cheap to make (a mesh of 1,024 workers makes millions), immutable, and one
JSON object a line on disk, with its kind under "event".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Forward(NamedTuple):
    """A microbatch went forward through a stage at a version of its weights."""

    start_s: float
    end_s: float
    stage: int
    replica: int
    microbatch: int
    version: int
    digest: str | None = None


class Backward(NamedTuple):
    """A microbatch came back. `delay`: updates between `version` and the one it is applied in."""

    start_s: float
    end_s: float
    stage: int
    replica: int
    microbatch: int
    version: int
    update: int
    delay: int
    digest: str | None = None


class Update(NamedTuple):
    """The optimiser step that made version `update` (counted from 1)."""

    start_s: float
    end_s: float
    stage: int
    replica: int
    update: int
    learning_rate: float


class Snapshot(NamedTuple):
    """A round of sparse averaging began at the boundary after `update`."""

    time_s: float
    stage: int
    replica: int
    round: int
    update: int
    coordinates: int


class Merge(NamedTuple):
    """A round's mean was merged after `update`, `delay` updates after its snapshot.

    `contributors`: the replicas whose snapshots are in it.
    """

    time_s: float
    stage: int
    replica: int
    round: int
    update: int
    delay: int
    contributors: tuple[int, ...]


class Skip(NamedTuple):
    """A round could have begun after `update`, but as many as may be are still in flight."""

    time_s: float
    stage: int
    replica: int
    update: int


class Message(NamedTuple):
    """Something crossed a link. `number`: the microbatch, or the round on the data axis."""

    sent_s: float
    arrived_s: float
    stage: int
    replica: int
    axis: str  # "pipeline" or "data"
    what: str  # "activation", "gradient" or "average"
    number: int
    bytes: int


class Loss(NamedTuple):
    """The training loss of a microbatch, seen by the last stage."""

    time_s: float
    stage: int
    replica: int
    microbatch: int
    loss: float


class Evaluation(NamedTuple):
    """The validation loss of the mean of the replicas' weights after `update`."""

    time_s: float
    update: int
    tokens: int
    loss: float | None  # None: nothing to validate on
    replica_losses: tuple[float, ...]
    consensus_distance: float


class Memory(NamedTuple):
    """What a worker's weights took at the most: `buffers` full copies of `buffer_bytes` each."""

    stage: int
    replica: int
    buffers: int
    buffer_bytes: int
    optimizer_bytes: int
    averaging_bytes: int


class Joined(NamedTuple):
    """A real worker has taken its place. With these threads it computes these very bits."""

    time_s: float
    stage: int
    replica: int
    update: int
    device: str
    threads: int


class Digest(NamedTuple):
    """A hash of a real worker's weights after `update`, merges included."""

    time_s: float
    stage: int
    replica: int
    update: int
    digest: str


Event = (
    Forward
    | Backward
    | Update
    | Snapshot
    | Merge
    | Skip
    | Message
    | Loss
    | Evaluation
    | Memory
    | Joined
    | Digest
)
Sink = Callable[[Event], None]

KINDS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (
        Forward,
        Backward,
        Update,
        Snapshot,
        Merge,
        Skip,
        Message,
        Loss,
        Evaluation,
        Memory,
        Joined,
        Digest,
    )
}


def to_json(event: Event) -> str:
    """One line of an events file."""
    return json.dumps({"event": type(event).__name__.lower(), **event._asdict()})


def from_json(line: str) -> Event:
    """The inverse of `to_json`."""
    values = json.loads(line)
    kind = KINDS[values.pop("event")]
    for name in ("replica_losses", "contributors"):  # JSON knows no tuples
        if name in values:
            values[name] = tuple(values[name])
    event: Event = kind(**values)
    return event


class EventHash:
    """A sink: the SHA-256 over all records in order. Equal hashes mean equal runs."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def __call__(self, event: Event) -> None:
        self._sha.update(f"{type(event).__name__}{tuple(event)!r}\n".encode())

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


class EventFiles:
    """A sink that writes one JSONL file a worker into a folder, and `mesh.jsonl` for the whole."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lines: dict[str, list[str]] = {}

    def __call__(self, event: Event) -> None:
        name = "mesh"
        if not isinstance(event, Evaluation):
            name = f"stage-{event.stage}-replica-{event.replica}"
        lines = self._lines.setdefault(name, [])
        lines.append(to_json(event))
        if len(lines) >= 1000:
            self._write(name)

    def _write(self, name: str) -> None:
        with (self._folder / f"{name}.jsonl").open("a") as file:
            file.write("\n".join(self._lines[name]) + "\n")
        self._lines[name] = []

    def flush(self) -> None:
        """Write what is held back."""
        for name, lines in self._lines.items():
            if lines:
                self._write(name)


def read_events(folder: Path) -> Iterator[Event]:
    """All records of a run's `events/` folder, file by file."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open() as file:
            for line in file:
                yield from_json(line)
