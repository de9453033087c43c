"""What workers and the coordinator say to each other: JSON over HTTP, checked on arrival.

Owns the vocabulary of the control plane. Nothing of it is on the way of an update. Invariant: a
message that was not understood is refused with a reason; unknown fields are refused too, because
they mean that the two sides are not of one version.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FINAL = 2**40  # the validation at the end, after whichever update a replica ends with
ALL_STAGES = 2**31 - 1  # a host that asks for the last stage without knowing how many there are
Phase = Literal["gathering", "running", "stopping", "over"]
State = Literal["starting", "ready", "training", "finished", "failed", "diverged"]
Number = Annotated[int, Field(ge=0, lt=2**31)]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hello(Message):
    """A host wants to run stages `first` to `last` of a replica. `job` is one launch of it.

    Without a job it only asks whether it could.
    """

    job: str
    replica: Number
    first: Number
    last: Number
    host: str
    versions: dict[str, str]
    settings: dict[str, Any] = {}  # that the host was started with, to be compared


class Welcome(Message):
    """What a worker needs to take its place."""

    settings: dict[str, Any]  # `section.key: value`, those that were set
    store: str
    rounds: list[str]  # lighthouses, by stage
    evaluations: list[str]
    attempt: int  # of this replica: tells its process groups from those of an earlier attempt
    running: bool  # the mesh trains already: the worker comes late
    data: str  # a digest of the tokens, which must be the same on all hosts


class ValidationPart(Message):
    """One replica's share of a validation: the loss summed over `targets`.

    `own`: of the replica's own weights, not of the mean.
    """

    update: int
    replica: int
    loss_sum: float
    targets: int
    own: bool


class DistancePart(Message):
    """One worker's squared distance from the mean, and the mean's squared norm.

    `update` is the validation's (`FINAL` for the one at the end), `reached` the worker's own.
    `parts`: how many replicas the mean is of.
    """

    update: int
    reached: int
    stage: int
    replica: int
    parts: int
    apart: float
    norm: float
    time_s: float


class Report(Message):
    """What a worker did since its last report. `events` are lines of `observe.events.to_json`."""

    job: str
    replica: Number
    stage: Number
    state: State
    error: str | None = None
    first_event: int  # how many it had reported before
    events: list[str] = []
    validations: list[ValidationPart] = []
    distances: list[DistancePart] = []


class Lost(Message):
    """A launcher saw its workers of a replica end otherwise than they should."""

    job: str
    replica: Number
    first: Number
    last: Number
    reason: str


class Taken(Message):
    """Noted."""


class Orders(Message):
    """The answer to a report. Times are the coordinator's monotonic clock, in seconds."""

    phase: Phase
    replicas_alive: int
    now_s: float
    started_s: float | None


class Refusal(Message):
    """Why not, in one line."""

    reason: str
