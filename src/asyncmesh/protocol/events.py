"""The vocabulary between a worker's state machine and whoever drives it.

Owns the inputs (what happened) and the actions (what to do now). Invariant: they are plain values
without payloads; tensors, clocks and sockets stay with the driver, which is the simulator or the
runtime. NamedTuples, because large virtual meshes make millions.
"""

from __future__ import annotations

from typing import NamedTuple

# -- what happened ------------------------------------------------------------------------------


class Started(NamedTuple):
    """The worker has its weights and its links."""


class ActivationReceived(NamedTuple):
    microbatch: int


class GradientReceived(NamedTuple):
    microbatch: int


class ForwardFinished(NamedTuple):
    microbatch: int


class BackwardFinished(NamedTuple):
    microbatch: int


class UpdateFinished(NamedTuple):
    """The next version has been made."""

    update: int


class MeanReceived(NamedTuple):
    """The mean of a round has arrived."""

    round: int


class StopRequested(NamedTuple):
    """Somebody wants the run to end early. The first stage decides after which update."""


class StopAt(NamedTuple):
    """The first stage has decided: `update` is the last one."""

    update: int


Input = (
    Started
    | ActivationReceived
    | GradientReceived
    | ForwardFinished
    | BackwardFinished
    | UpdateFinished
    | MeanReceived
    | StopRequested
    | StopAt
)

# -- what to do now, in this order --------------------------------------------------------------


class RunForward(NamedTuple):
    """Forward a microbatch on the newest version; answer with `ForwardFinished`."""

    microbatch: int
    version: int


class RunBackward(NamedTuple):
    """Backward on the version of its forward; answer with `BackwardFinished`."""

    microbatch: int
    version: int
    update: int
    delay: int


class RunUpdate(NamedTuple):
    """Make version `update` from the mean gradient of the last k microbatches; answer with
    `UpdateFinished`.
    """

    update: int


class SendActivation(NamedTuple):
    microbatch: int


class SendGradient(NamedTuple):
    microbatch: int


class StartRound(NamedTuple):
    """Take what the round covers (weights, or the gradient) and begin to average it."""

    round: int
    update: int


class SkipRound(NamedTuple):
    """A round was due after this update, but too many are in flight."""

    update: int


class MergeRound(NamedTuple):
    """Apply a round's mean; it started `delay` updates ago."""

    round: int
    update: int
    delay: int


class Finish(NamedTuple):
    """All updates are done. No action follows this one."""


Action = (
    RunForward
    | RunBackward
    | RunUpdate
    | SendActivation
    | SendGradient
    | StartRound
    | SkipRound
    | MergeRound
    | Finish
)
