"""What crosses a pipeline edge: one tensor and what is to be known of it, in one message.

Owns the wire format of the pipeline axis. A frame is a header of 128 bytes and the tensor's own
bytes, so that a message needs no second round trip for its shape and no serialiser: nothing that
arrives can run code. Invariant: what is packed is what is unpacked, and bytes that are no frame are
an error before anything is allocated for them.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from asyncmesh.errors import WireError

_MAGIC = b"AMF1"
_HEADER = struct.Struct("<4sBBBBqqd8q")  # magic, kind, two dtypes, dimensions; numbers; 8 sizes
HEADER_BYTES = 128
_MOST_DIMENSIONS = 8
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_NOTHING = 255  # the number of dimensions of no tensor at all


class Kind(IntEnum):
    """What a frame is about."""

    ACTIVATION = 1
    GRADIENT = 2
    EVALUATION = 3
    GOODBYE = 4


@dataclass(frozen=True)
class Frame:
    """`number`: the microbatch, or the validation batch. `last_update`: after which the replica
    ends, as its first stage sees it. `sent_s`: mesh time. `dtype`: of the payload at its sender,
    which the receiver converts it back to. `size`: bytes on the wire, for the receiver.
    """

    kind: Kind
    number: int
    last_update: int
    sent_s: float
    payload: Tensor | None
    dtype: torch.dtype = torch.float32
    size: int = 0


def pack(frame: Frame, message: Tensor, wire: torch.dtype | None = None) -> Tensor:
    """Write the header into `message`; answers where the payload goes, as `wire` if that is given.

    The payload itself is the caller's business, because it may lie on another device.
    """
    payload = frame.payload
    sizes = list(payload.shape) if payload is not None else []
    if len(sizes) > _MOST_DIMENSIONS:
        raise WireError(f"a tensor of {len(sizes)} dimensions does not fit a frame; reshape it")
    sent = wire or frame.dtype
    _HEADER.pack_into(
        message[:HEADER_BYTES].numpy().data,
        0,
        _MAGIC,
        frame.kind,
        _DTYPES.index(sent),
        _DTYPES.index(frame.dtype),
        len(sizes) if payload is not None else _NOTHING,
        frame.number,
        frame.last_update,
        frame.sent_s,
        *(sizes + [0] * (_MOST_DIMENSIONS - len(sizes))),
    )
    return message[HEADER_BYTES:].view(sent).view(sizes if payload is not None else [0])


def frame_bytes(payload: Tensor | None, wire: torch.dtype | None = None) -> int:
    """The size of a frame with that payload, sent as `wire`."""
    if payload is None:
        return HEADER_BYTES
    return HEADER_BYTES + payload.numel() * (wire or payload.dtype).itemsize


def unpack(message: Tensor) -> Frame:
    """The frame in a message, whose payload is a view of it. The message may have room to spare."""
    if message.numel() < HEADER_BYTES:
        raise WireError(f"a frame of {message.numel()} bytes is shorter than its header")
    magic, kind, sent, dtype, dimensions, number, last_update, sent_s, *sizes = _HEADER.unpack_from(
        message[:HEADER_BYTES].numpy().data, 0
    )
    if magic != _MAGIC or kind not in Kind._value2member_map_ or max(sent, dtype) >= len(_DTYPES):
        raise WireError("what arrived on a pipeline edge is no frame of this version of asyncmesh")
    payload, end = None, HEADER_BYTES
    if dimensions != _NOTHING:
        shape = sizes[:dimensions]
        end = HEADER_BYTES + math.prod(shape) * _DTYPES[sent].itemsize
        # Beside a size of 0 the others may be anything, but PyTorch multiplies them all the same.
        sound = min(shape, default=0) >= 0 and math.prod(max(1, n) for n in shape) < 2**63
        if dimensions > _MOST_DIMENSIONS or not sound or end > message.numel():
            raise WireError(f"a frame announces a tensor of shape {shape}, which it cannot hold")
        payload = message[HEADER_BYTES:end].view(_DTYPES[sent]).view(shape)
    return Frame(Kind(kind), number, last_update, sent_s, payload, _DTYPES[dtype], end)
