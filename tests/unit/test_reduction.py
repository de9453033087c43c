"""The mean over a group: the bits of `mean_in_order` for everyone, for the bytes it should cost.

The members are threads, each with a Gloo group and a store connection of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncmesh.algorithm.correction import mean_in_order
from asyncmesh.runtime.network import (
    LOOPBACK,
    GlooGroup,
    connect_store,
    part_of,
    serve_store,
)
from asyncmesh.runtime.reduction import mean_over

TIMEOUT = timedelta(seconds=30)
SIZES = (1, 2, 3, 4)
Results = list[tuple[Tensor, int]]


class Members:
    """Groups of 1 to 4 members, in threads."""

    def __init__(self, store: str, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

        def join(size: int, rank: int) -> GlooGroup:
            name = part_of(connect_store(store, TIMEOUT), f"group of {size}")
            return GlooGroup(name, rank, size, LOOPBACK, TIMEOUT)

        self._groups: dict[int, list[GlooGroup | None]] = {1: [None]}
        for size in SIZES[1:]:
            self._groups[size] = list(pool.map(join, [size] * size, range(size)))

    def mean(self, offers: list[Tensor], counts: list[bool] | None = None) -> Results:
        """What each of the members is answered."""
        size = len(offers)
        everybodys = [counts or [True] * size] * size
        return list(self._pool.map(mean_over, self._groups[size], offers, everybodys))


@pytest.fixture(scope="module")
def members() -> Iterator[Members]:
    store, port = serve_store(LOOPBACK)
    with ThreadPoolExecutor(max(SIZES)) as pool:
        yield Members(f"{LOOPBACK}:{port}", pool)
    del store  # it served until here


def offers_of(size: int, count: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Numbers of such different sizes that a sum in another order has other bits."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(size, count, generator=generator, dtype=torch.float64)
    scale = torch.randint(-3, 4, (size, count), generator=generator)
    return list((drawn * 10.0**scale).to(dtype))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SIZES),
    st.integers(0, 67),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 10**6),
    st.data(),
)
def test_every_member_gets_the_bits_of_the_mean_in_order_of_those_that_count(
    members: Members, size: int, count: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    offers = offers_of(size, count, dtype, seed)
    given_away = [offer.clone() for offer in offers]
    every = st.lists(st.booleans(), min_size=size, max_size=size).filter(any)
    counts = data.draw(every) if size > 1 else [True]
    expected = mean_in_order([o for o, counted in zip(offers, counts, strict=True) if counted])
    for mean, _ in members.mean(offers, counts):
        assert same_bits(mean, expected)
    assert all(map(same_bits, offers, given_away))


@pytest.mark.parametrize("size", SIZES[1:])
def test_the_order_is_that_of_the_replicas_which_the_bits_tell(members: Members, size: int) -> None:
    """(1e8 + 1) - 1e8 is 0 in float32, in any other order it is 1."""
    column = [1e8, 1.0, -1e8, 0.0][:size]
    expected = {2: 1e8 / 2, 3: 0.0, 4: 0.0}[size]
    offers = [torch.full((12,), value) for value in column]
    for mean, _ in members.mean(offers):
        assert mean.tolist() == [expected] * 12


@pytest.mark.parametrize("size", SIZES)
def test_a_mean_of_bfloat16_is_float32_and_finer_than_bfloat16(members: Members, size: int) -> None:
    offers = [torch.full((7,), 1.0, dtype=torch.bfloat16) for _ in range(size)]
    offers[0] += 2**-7  # the next number after 1 that the wire knows
    for mean, _ in members.mean(offers):
        assert mean.dtype == torch.float32
        assert mean.tolist() == pytest.approx([1 + 2**-7 / size] * 7, rel=1e-7)


@pytest.mark.parametrize("left_out", range(4))
def test_one_that_does_not_count_has_no_influence_and_gets_the_mean(
    members: Members, left_out: int
) -> None:
    offers = offers_of(4, 10, torch.float32, seed=left_out)
    offers[left_out].fill_(float("nan"))
    others = [offer for rank, offer in enumerate(offers) if rank != left_out]
    counts = [rank != left_out for rank in range(4)]
    for mean, _ in members.mean(offers, counts):
        assert same_bits(mean, mean_in_order(others))


@pytest.mark.parametrize("size", SIZES)
def test_a_member_sends_twice_the_payload_less_its_own_share(members: Members, size: int) -> None:
    """2 (M-1)/M of the payload, exactly where it can be shared out evenly."""
    for count in (12, 1200):
        offers = offers_of(size, count, torch.float32, seed=0)
        sent = [bytes_sent for _, bytes_sent in members.mean(offers)]
        assert sent == [2 * (size - 1) * (4 * count) // size] * size


@pytest.mark.parametrize(
    ("size", "count", "dtype", "expected"),
    [
        (3, 13, torch.float32, 2 * (5 * 4) + 2 * (5 * 4)),  # parts of ceil(13 / 3)
        (4, 1, torch.float32, 3 * 4 + 3 * 4),
        (2, 13, torch.float32, 13 * 4),  # two need no parts
        (2, 13, torch.bfloat16, 13 * 2),
        (4, 16, torch.bfloat16, 3 * (4 * 2) + 3 * (4 * 4)),  # out as bfloat16, back as float32
        (3, 0, torch.float32, 0),
    ],
)
def test_parts_are_rounded_up_and_come_back_in_float32(
    members: Members, size: int, count: int, dtype: torch.dtype, expected: int
) -> None:
    offers = offers_of(size, count, dtype, seed=1)
    assert [bytes_sent for _, bytes_sent in members.mean(offers)] == [expected] * size
