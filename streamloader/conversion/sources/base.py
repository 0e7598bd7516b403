"""A source of a conversion: numbered rows with one schema, read in fragments."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.storage.objects import ObjectInfo

AGAIN = "fetch or make it again"
MAX_DECODED = 1 << 30  # bytes, the default of the source option `max_decoded`
SHARD_DECODED = 4  # times that: what the samples of a shard, which are held together, may take


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be converted.

    `position` is its row within the fragment. `name` identifies it in messages, if the source knows more than its row
    number. `data` are its stored bytes, if they are available.
    """

    position: int
    name: str
    problem: str
    remedy: str = "repair or remove it"
    data: bytes = b""


OnBad = Callable[[BadSample], None]
Bad = dict[int, BadSample]  # by position
Columns = dict[str, Column]
RowNumbers = NDArray[np.int64]


def damaged(problem: str) -> SourceError:
    """Return the error for a file that is damaged or truncated."""
    return SourceError(problem, AGAIN)


def check_decoded(what: str, size: int, limit: int, least: int = 0) -> None:
    """Raise `SourceError` if `size` bytes, which are decoded and held at once, are more than the `limit`.

    A few stored bytes can decode to gigabytes. `least` is the value of the option `max_decoded` that allows them.
    """
    if size > limit:
        value = least or size
        allow = f"source_options={{'max_decoded': {value}}} (--source-option max_decoded={value})"
        raise SourceError(f"{what} {size} bytes, at most {limit} are decoded at once", f"if you trust it, give {allow}")


def check_shard(size: int, where: str, limit: int) -> None:
    """Raise `SourceError` if the texts and bytes of a shard have more than `SHARD_DECODED` times `limit` bytes.

    `limit` is the option `max_decoded`, `where` names the last of the samples.
    """
    check_decoded(f"the samples of a shard, up to {where}, have", size, SHARD_DECODED * limit, 2 * limit)


def raise_bad(bad: BadSample) -> None:
    """Raise `SourceError` for a bad sample."""
    skip = 'leave such samples out with on_error="skip" (--on-error skip)'
    raise SourceError(f"{bad.name}: {bad.problem}", f"{bad.remedy}, or {skip}")


def raise_bad_rows(rows: Sequence[int] | NDArray[np.int64]) -> OnBad:
    """Return a function that raises `SourceError` for a bad sample of a fragment with these rows."""

    def on_bad(bad: BadSample) -> None:
        raise_bad(bad if bad.name else replace(bad, name=f"row {rows[bad.position]} of the source"))

    return on_bad


def take_rows(columns: Mapping[str, Column], rows: Sequence[int] | RowNumbers) -> Columns:
    """Return the given rows of the columns."""
    return {name: c[rows] if isinstance(c, np.ndarray) else [c[row] for row in rows] for name, c in columns.items()}


def drop_rows(columns: Mapping[str, Column], bad: Container[int]) -> Columns:
    """Return the columns without the rows at the positions `bad`."""
    return take_rows(columns, [row for row in range(len(next(iter(columns.values())))) if row not in bad])


# Reads some rows of a source: small, picklable, and with the same result at every call. It passes each bad sample to
# its argument, and returns one column for each field, without the bad samples. It raises `SourceError` for a damaged
# file, `SourceChangedError`, and whatever its argument raises.
Fragment = Callable[[OnBad], Columns]


def read_kept(fragment: Fragment, on_bad: OnBad) -> tuple[Columns, list[int]]:
    """Return the columns of a fragment, and the position of each of their rows in it; pass bad samples to `on_bad`."""
    bad: list[BadSample] = []
    columns = fragment(bad.append)
    for sample in bad:
        on_bad(sample)
    positions = np.arange(len(next(iter(columns.values()))) + len(bad))
    return columns, np.delete(positions, [sample.position for sample in bad]).tolist()


@dataclass(frozen=True, eq=False)
class RowSource:
    """The rows to convert, all with one schema. Opening a source reads a listing and headers only.

    `url` has no credentials. `files` are all files of the source, sorted by path, with size and etag or modification
    time; they identify the conversion. `notes` are written to the manifest's provenance and contain no floats.
    `fragment(rows)` returns the fragment of the given ascending rows. `beside` returns further objects of the dataset
    by path.
    """

    url: str
    files: Sequence[ObjectInfo]
    fields: Mapping[str, Field]
    num_samples: int
    notes: Mapping[str, Any]
    fragment: Callable[[RowNumbers], Fragment]
    beside: Callable[[], Mapping[str, bytes]] = dict


def split_rows(counts: Sequence[int] | RowNumbers, rows: RowNumbers) -> list[tuple[int, int, RowNumbers]]:
    """Return the number, the first row and the selected rows, counted from it, of each file with any of the `rows`.

    `counts` are the numbers of rows of the files; `rows` ascend.
    """
    edges = np.concatenate(([0], np.cumsum(counts)))
    bounds = np.searchsorted(rows, edges)
    used = np.flatnonzero(np.diff(bounds)).tolist()
    return [(file, int(edges[file]), rows[bounds[file] : bounds[file + 1]] - edges[file]) for file in used]


def spread_rows(num_samples: int, count: int, runs: int = 16) -> NDArray[np.int64]:
    """Return about `count` rows, at least `runs` if there are so many: evenly spread runs of rows, ascending."""
    count = max(count, runs)
    if num_samples <= count:
        return np.arange(num_samples, dtype=np.int64)
    length = count // runs
    starts = np.arange(runs, dtype=np.int64) * (num_samples - length) // (runs - 1)
    return (starts[:, None] + np.arange(length, dtype=np.int64)).reshape(-1)
