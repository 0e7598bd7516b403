"""Coalescing: every wanted byte is fetched, in few requests, within the limits."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamloader.errors import UsageError
from streamloader.storage import MergedRange, coalesce

RANGES = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair))), max_size=30
)


@given(RANGES, st.integers(0, 50), st.integers(1, 200))
def test_merged_ranges_cover_each_range_exactly_once(ranges: list[tuple[int, int]], gap: int, most: int) -> None:
    merged = coalesce(ranges, max_gap=gap, max_bytes=most)
    members = [member for request in merged for member in request.members]
    assert sorted(members) == [number for number, (start, stop) in enumerate(ranges) if start < stop]
    for request in merged:
        inside = [ranges[member] for member in request.members]
        assert min(start for start, _ in inside) == request.start
        assert max(stop for _, stop in inside) == request.stop
        assert request.stop - request.start <= most or (request.start, request.stop) in inside


@given(RANGES, st.integers(0, 50))
def test_neighbours_apart_by_more_than_the_gap_stay_apart(ranges: list[tuple[int, int]], gap: int) -> None:
    merged = coalesce(ranges, max_gap=gap, max_bytes=1 << 40)
    assert all(later.start - earlier.stop > gap for earlier, later in pairwise(merged))
    wanted = {byte for start, stop in ranges for byte in range(start, stop)}
    fetched = {byte for request in merged for byte in range(request.start, request.stop)}
    assert wanted <= fetched
    assert len(fetched - wanted) <= gap * max(0, len(ranges) - 1)


def test_touching_ranges_become_one_request() -> None:
    assert coalesce([(4, 8), (0, 4), (9, 12)], max_gap=0, max_bytes=100) == [
        MergedRange(0, 8, (1, 0)),
        MergedRange(9, 12, (2,)),
    ]


def test_a_range_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\[5, 3\)"):
        coalesce([(0, 1), (5, 3)], max_gap=0, max_bytes=10)
