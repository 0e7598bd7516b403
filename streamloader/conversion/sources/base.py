"""The seam between a conversion and what it reads: numbered rows of one schema, read in parts."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.storage.store import ObjectInfo

AGAIN = "fetch or make it again"


@dataclass(frozen=True)
class BadSample:
    """One sample that cannot be converted. `position` counts the rows of its part; `name` says which sample it is,
    where its adapter knows more than its row; `problem` is what is wrong; `data` what was stored, if that is at hand.
    """

    position: int
    name: str
    problem: str
    remedy: str = "repair or remove it"
    data: bytes = b""


OnBad = Callable[[BadSample], None]


def damaged(problem: str) -> SourceError:
    """Return the error for a file that is damaged or truncated."""
    return SourceError(problem, AGAIN)


def raise_bad(bad: BadSample) -> None:
    """Raise `SourceError` for a bad sample."""
    raise SourceError(f"{bad.name}: {bad.problem}", f"{bad.remedy}, or leave such samples out with --on-error skip")


def raise_bad_rows(rows: Sequence[int] | NDArray[np.int64]) -> OnBad:
    """Return a function that raises `SourceError` for a bad sample of a part with these rows."""

    def on_bad(bad: BadSample) -> None:
        raise_bad(bad if bad.name else replace(bad, name=f"row {rows[bad.position]} of the source"))

    return on_bad


def take_rows(columns: Mapping[str, Column], rows: Sequence[int] | NDArray[np.int64]) -> dict[str, Column]:
    """Return these rows of the columns."""
    return {
        name: column[rows] if isinstance(column, np.ndarray) else [column[row] for row in rows]
        for name, column in columns.items()
    }


def drop_rows(columns: Mapping[str, Column], bad: Container[int]) -> dict[str, Column]:
    """Return the columns without the rows at the positions `bad`."""
    return take_rows(columns, [row for row in range(len(next(iter(columns.values())))) if row not in bad])


# Some rows of a source: small, picklable, and the same columns at every call. Returns one column a field, without the
# bad samples, each of which is given to `on_bad`. Raises `SourceError` for what is wrong with a file as such,
# `SourceChangedError`, and what `on_bad` raises.
Part = Callable[[OnBad], dict[str, Column]]


def read_kept(part: Part, on_bad: OnBad) -> tuple[dict[str, Column], list[int]]:
    """Return the columns of a part, and the position of each of their rows; bad samples are passed on."""
    bad: list[BadSample] = []
    columns = part(bad.append)
    for one in bad:
        on_bad(one)
    positions = np.arange(len(next(iter(columns.values()))) + len(bad))
    return columns, np.delete(positions, [one.position for one in bad]).tolist()


@dataclass(frozen=True, eq=False)
class Source:
    """What is converted: rows of one schema. Opening it costs a listing and the headers; rows are read part by part.

    `files` are all that it is made of, sorted by path, with size and etag or modification time: the conversion's
    identity. `notes` go into the manifest's provenance, without floats. `url` has no credentials. `part(rows)` returns
    the part that holds these rows, which ascend.
    """

    url: str
    files: Sequence[ObjectInfo]
    fields: Mapping[str, Field]
    num_samples: int
    notes: Mapping[str, Any]
    part: Callable[[NDArray[np.int64]], Part]


def split_rows(
    counts: Sequence[int] | NDArray[np.int64], rows: NDArray[np.int64]
) -> list[tuple[int, int, NDArray[np.int64]]]:
    """Return number, first row, and the rows within, of each file or block that has some of the `rows`, which ascend.

    `counts` has the rows of each.
    """
    edges = np.concatenate(([0], np.cumsum(counts)))
    places = np.searchsorted(rows, edges)
    used = np.flatnonzero(np.diff(places)).tolist()
    return [(one, int(edges[one]), rows[places[one] : places[one + 1]] - edges[one]) for one in used]


def spread_rows(num_samples: int, count: int, runs: int = 16) -> NDArray[np.int64]:
    """Return about `count` rows, at least `runs` where there are so many: in runs that are spread evenly, ascending."""
    count = max(count, runs)
    if num_samples <= count:
        return np.arange(num_samples, dtype=np.int64)
    length = count // runs
    starts = np.arange(runs, dtype=np.int64) * (num_samples - length) // (runs - 1)
    return np.unique(starts[:, None] + np.arange(length, dtype=np.int64))
