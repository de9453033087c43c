"""Frames: what is packed is what is unpacked, and bytes that are no frame are a `WireError`.

Checked for tensors of every shape and dtype that a frame can carry, and against bytes that nobody
has packed: random ones, frames with some bytes changed, and headers that announce anything.
"""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncmesh.errors import WireError
from asyncmesh.runtime.frames import HEADER_BYTES, Frame, Kind, frame_bytes, pack, unpack
from asyncmesh.runtime.staging import Staging

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.bool]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
HEADER = struct.Struct("<4sBBBBqqd8q")

shapes = st.lists(st.integers(0, 3), max_size=8)
kinds = st.sampled_from(Kind)
numbers = st.integers(-(2**63), 2**63 - 1)


def tensor(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all, which for floats includes NaN (for bool: 0 or 1)."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 256
    count = math.prod(shape) * dtype.itemsize
    drawn = torch.randint(most, (count,), generator=generator, dtype=torch.uint8)
    return drawn.view(dtype).view(shape)


def message_of(frame: Frame, wire: torch.dtype | None = None, spare: int = 0) -> Tensor:
    message = Staging().pack(frame, wire, None)
    assert message.numel() == frame_bytes(frame.payload, wire)
    return torch.cat([message, torch.full((spare,), 0xAB, dtype=torch.uint8)])


def same_bits(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def is_within(part: Tensor, whole: Tensor) -> bool:
    """A view of the message's own payload bytes: nothing was allocated for it."""
    begin = part.data_ptr() - whole.data_ptr()
    return part.numel() == 0 or HEADER_BYTES <= begin <= whole.numel() - part.nbytes


@settings(deadline=None)
@given(
    kinds,
    numbers,
    numbers,
    st.floats(allow_nan=False),
    shapes,
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_every_shape_and_dtype_comes_back_with_the_same_bits(
    kind: Kind,
    number: int,
    last: int,
    sent_s: float,
    shape: list[int],
    dtype: torch.dtype,
    spare: int,
) -> None:
    payload = tensor(shape, dtype, seed=spare)
    message = message_of(Frame(kind, number, last, sent_s, payload, dtype), spare=spare)
    came = unpack(message)
    assert (came.kind, came.number, came.last_update) == (kind, number, last)
    assert (came.sent_s, came.dtype, came.size) == (sent_s, dtype, frame_bytes(payload))
    assert came.payload is not None
    assert same_bits(came.payload, payload)
    assert is_within(came.payload, message)


@settings(deadline=None)
@given(kinds, numbers, st.sampled_from(DTYPES), st.integers(0, 99))
def test_no_payload_is_another_thing_than_an_empty_one(
    kind: Kind, number: int, dtype: torch.dtype, spare: int
) -> None:
    nothing = unpack(message_of(Frame(kind, number, 0, 0.0, None, dtype), spare=spare))
    assert (nothing.kind, nothing.number, nothing.payload) == (kind, number, None)
    assert nothing.size == HEADER_BYTES
    empty = unpack(message_of(Frame(kind, 0, 0, 0.0, torch.zeros(0, dtype=dtype), dtype)))
    assert empty.payload is not None
    assert empty.payload.shape == (0,)


@settings(deadline=None)
@given(
    shapes,
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.integers(0, 99),
)
def test_a_payload_travels_as_the_wires_dtype_and_comes_back_in_its_own(
    shape: list[int], dtype: torch.dtype, wire: torch.dtype, spare: int
) -> None:
    generator = torch.Generator().manual_seed(spare)
    payload = torch.randn(shape, generator=generator, dtype=dtype)
    message = message_of(Frame(Kind.GRADIENT, 1, 2, 3.0, payload, dtype), wire, spare)
    assert message.numel() == HEADER_BYTES + payload.numel() * wire.itemsize + spare
    narrow = unpack(message)
    assert (narrow.dtype, narrow.size) == (dtype, message.numel() - spare)
    assert narrow.payload is not None
    assert same_bits(narrow.payload, payload.to(wire))
    came = Staging().unpack(message).payload
    assert came is not None
    assert same_bits(came, payload.to(wire).to(dtype))


def test_a_payload_that_is_a_slice_of_something_is_packed_as_what_it_shows() -> None:
    payload = torch.arange(24.0).view(4, 6)[::2, 1::2].T
    came = unpack(message_of(Frame(Kind.ACTIVATION, 0, 0, 0.0, payload))).payload
    assert came is not None
    assert torch.equal(came, payload)


def test_a_tensor_of_nine_dimensions_is_refused_before_it_is_sent() -> None:
    frame = Frame(Kind.ACTIVATION, 0, 0, 0.0, torch.zeros([1] * 9))
    with pytest.raises(WireError, match="9 dimensions"):
        pack(frame, torch.zeros(frame_bytes(frame.payload), dtype=torch.uint8))


# -- what nobody has packed ------------------------------------------------------------------------
def unpack_anything(message: Tensor) -> Frame | None:
    """None if it is refused, which only a `WireError` may say."""
    try:
        frame = unpack(message)
    except WireError:
        return None
    assert frame.payload is None or is_within(frame.payload, message)
    assert frame.payload is None or frame.payload.nbytes <= message.numel() - HEADER_BYTES
    return frame


def as_message(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_refused(content: bytes) -> None:
    assert unpack_anything(as_message(content)) is None


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=2 * HEADER_BYTES))
def test_random_bytes_after_the_magic_are_refused_or_lie_within_the_message(content: bytes) -> None:
    unpack_anything(as_message(b"AMF1" + content))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 3), max_size=8),
    st.sampled_from(DTYPES),
    st.dictionaries(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255), min_size=1, max_size=3),
)
def test_a_frame_with_changed_bytes_is_refused_or_lies_within_the_message(
    shape: list[int], dtype: torch.dtype, changes: dict[int, int]
) -> None:
    message = message_of(Frame(Kind.ACTIVATION, 5, 9, 1.0, tensor(shape, dtype, 0), dtype))
    for place, value in changes.items():
        message[place] = value
    frame = unpack_anything(message)
    if any(place < 4 and value != b"AMF1"[place] for place, value in changes.items()):
        assert frame is None


@given(st.integers(0, HEADER_BYTES + 11))
def test_a_frame_that_was_cut_off_is_refused(kept: int) -> None:
    message = message_of(Frame(Kind.ACTIVATION, 0, 0, 0.0, torch.ones(3)))
    with pytest.raises(WireError):
        unpack(message[:kept])


def announcing(
    shape: list[int], room: int, kind: int = 1, sent: int = 0, dtype: int = 0, dimensions: int = -1
) -> Tensor:
    """A message with a well-formed header that nobody vouches for, and so many bytes after it."""
    message = torch.zeros(HEADER_BYTES + room, dtype=torch.uint8)
    count = len(shape) if dimensions < 0 else dimensions
    sizes = shape + [0] * (8 - len(shape))
    HEADER.pack_into(message.numpy().data, 0, b"AMF1", kind, sent, dtype, count, 0, 0, 0.0, *sizes)
    return message


sizes = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 2**31, 2**32 + 1, 2**62, 2**63 - 1])


@settings(max_examples=300, deadline=None)
@example([2**62, 2**62, 0], 0, 1, 0, 0)
@example([2], 8, 1, 0, 10)
@example([2], 8, 1, 10, 0)
@example([2], 8, 5, 0, 0)
@example([-2, -1], 8, 1, 0, 0)
@given(
    st.lists(sizes, max_size=8),
    st.integers(0, 64),
    st.integers(0, 5),
    st.integers(0, 11),
    st.integers(0, 11),
)
def test_a_header_that_announces_anything_is_refused_or_lies_within_the_message(
    shape: list[int], room: int, kind: int, sent: int, dtype: int
) -> None:
    frame = unpack_anything(announcing(shape, room, kind, sent, dtype))
    if kind not in range(1, 5) or max(sent, dtype) > 9 or any(size < 0 for size in shape):
        assert frame is None
    elif frame is not None:
        assert frame.payload is not None
        assert list(frame.payload.shape) == shape
        assert frame.payload.nbytes <= room
    else:
        assert max(shape, default=1) > 3 or math.prod(shape) > room // 8


@pytest.mark.parametrize("dimensions", [9, 100, 254])
def test_more_dimensions_than_a_header_has_room_for_are_refused(dimensions: int) -> None:
    with pytest.raises(WireError, match="announces a tensor"):
        unpack(announcing([1] * 8, 64, dimensions=dimensions))


def test_a_payload_one_byte_longer_than_the_message_is_refused() -> None:
    assert unpack(announcing([3], 12)).payload is not None
    with pytest.raises(WireError, match=r"shape \[3\], which it cannot hold"):
        unpack(announcing([3], 11))
