"""A worker that comes late gets its state from a peer of its stage.

Owns the transfer: one safetensors image through the Gloo group of the round that both are in, so
nothing is unpickled and no further port is open. The peer gives what it has once the means of that
round are merged into it; the late one then takes part from the next round on. Invariant: who has
not been given current weights contributes to no mean.
"""

from __future__ import annotations

import logging

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from asyncmesh.engine import Engine
from asyncmesh.errors import MeshError, WireError
from asyncmesh.runtime.membership import Meeting, Membership
from asyncmesh.runtime.network import GlooGroup, Store
from asyncmesh.runtime.reduction import mean_over

_log = logging.getLogger(__name__)
_SIZE_TAG, _CONTENT_TAG = 2**20, 2**20 + 1  # apart from those that collectives use
_UPDATE = "made.updates"
_HEADER_ROOM = 2**20  # of a safetensors image, beside its tensors

State = dict[str, Tensor]


def give(meeting: Meeting, state: State, update: int) -> None:
    """Send it to every member that is behind."""
    assert meeting.group is not None  # somebody is there who is behind
    tensors = {name: tensor.contiguous().cpu() for name, tensor in state.items()}
    image = save(tensors | {_UPDATE: torch.tensor(update)})
    content = torch.frombuffer(bytearray(image), dtype=torch.uint8)
    for rank, counted in enumerate(meeting.counts):
        if not counted:
            _log.info("replica %d gets the state after update %d", meeting.replicas[rank], update)
            meeting.group.send_all(torch.tensor([content.numel()]), rank, _SIZE_TAG)
            meeting.group.send_all(content, rank, _CONTENT_TAG)


def take(group: GlooGroup, source: int, most_bytes: int) -> tuple[State, int]:
    """The state and how many updates made it."""
    size = torch.zeros(1, dtype=torch.int64)
    group.receive_all(size, source, _SIZE_TAG)
    if not 0 < int(size) <= most_bytes + _HEADER_ROOM:
        raise WireError(f"a peer announces a state of {int(size)} bytes; at most {most_bytes} fit")
    content = torch.empty(int(size), dtype=torch.uint8)
    group.receive_all(content, source, _CONTENT_TAG)
    try:
        state: State = load(content.numpy().tobytes())
    except SafetensorError as error:
        raise WireError(f"the state that a peer sent cannot be read: {error}") from None
    return state, int(state.pop(_UPDATE))


def is_giver(meeting: Meeting) -> bool:
    """The first of those who are up to date gives, if anybody is behind."""
    if meeting.group is None or all(meeting.counts):
        return False
    return meeting.counts.index(True) == meeting.group.rank


def catch_up(membership: Membership, engine: Engine) -> tuple[State, int, int]:
    """As a late one: a peer's state, how many updates made it, how many rounds it has seen."""
    while True:
        meeting = membership.meet(0)
        if meeting.group is None:
            raise MeshError("no other replica of this stage is there to get the weights from")
        if meeting.number == 0:  # they are about to begin, from the weights that are here too
            return engine.state(), 0, 0
        try:
            # The others average this round, and their group's operations need every member.
            blank = engine.blank_offer(meeting.number - 1).cpu()
            mean_over(meeting.group, blank, meeting.counts)
            source = meeting.counts.index(True)
            state, update = take(meeting.group, source, engine.state_bytes)
        except RuntimeError as error:
            _log.warning("the peer that was giving its state is lost; another is asked: %s", error)
            membership.failed()
            continue
        return state, update, meeting.number


def agree_on_update(store: Store, stage: int, stages: int, update: int) -> int:
    """The stages of a late replica got states of different updates; it begins with the newest."""
    store.set(f"late-{stage}", str(update))
    keys = [f"late-{other}" for other in range(stages)]
    return max(int(store.get(key)) for key in keys)  # get() waits for a key
