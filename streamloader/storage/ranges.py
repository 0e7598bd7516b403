"""Which byte ranges are fetched together. Pure: sizes in, ranges out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamloader.errors import UsageError


@dataclass(frozen=True)
class MergedRange:
    """Bytes [start, stop) of one object that cover the ranges numbered `members`, ascending by start."""

    start: int
    stop: int
    members: tuple[int, ...]


def coalesce(ranges: Sequence[tuple[int, int]], *, max_gap: int, max_bytes: int) -> list[MergedRange]:
    """Return few requests that cover all `ranges` of one object, ascending.

    Two neighbours are joined where at most `max_gap` unwanted bytes lie between them (fetching a gap is
    cheaper than another request while it takes less than the store's latency) and the result is at most
    `max_bytes`; one range that is larger stays whole, with those inside it. Empty ranges belong to no request.
    Raises `UsageError` for a range that ends before it starts.
    """
    for start, stop in ranges:
        if not 0 <= start <= stop:
            raise UsageError(f"bytes [{start}, {stop}) are no range", "give 0 <= start <= stop")
    wanted = sorted((start, stop, member) for member, (start, stop) in enumerate(ranges) if start < stop)
    merged: list[MergedRange] = []
    members: list[int] = []
    first = last = 0
    for start, stop, member in wanted:
        if members and (start - last > max_gap or (stop > last and stop - first > max_bytes)):
            merged.append(MergedRange(first, last, tuple(members)))
            members = []
        if not members:
            first, last = start, stop
        last = max(last, stop)
        members.append(member)
    if members:
        merged.append(MergedRange(first, last, tuple(members)))
    return merged
