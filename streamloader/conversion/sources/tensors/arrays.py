"""Arrays whose first axis is the samples, in one container or several: what the scientific formats have in common.

A container is one file or store. Those of a source are read one after another into the columns of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Refuse, drop_rows
from streamloader.conversion.sources.files import field_names
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import FieldError, SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import MAX_CHUNK_BYTES, Field
from streamloader.storage.protocol import ObjectInfo

LEAVE_OUT = "leave it out: name the fields to keep with --fields"
MAX_STORED_CHUNK = 1 << 30  # a stored chunk is decoded whole
# What is not stored reads as the fill value: a few bytes may claim any size. Real data never shrink like this.
CLAIM_BYTES = 4 << 30
CLAIM_RATIO = 1 << 16

Into = Mapping[str, "NDArray[Any] | list[bytes]"]
Note = Callable[[str, int, str], None]


class Container(Protocol):
    """One file or store: small and picklable. `where` names it for people; every array has `num_samples` rows."""

    @property
    def where(self) -> str:
        """The URL, for messages."""
        ...

    @property
    def num_samples(self) -> int:
        """The length of every array."""
        ...

    @property
    def fields(self) -> Mapping[str, Field]:
        """One field for each array."""
        ...

    def read(self, rows: NDArray[np.int64], into: Into, note: Note, /) -> None:
        """Fill the arrays of `into` (rows, *shape) and extend its lists by these rows, which ascend.

        `note(field, i, problem)` is told of the i-th of them that is bad; anything may stand for it in the columns.
        Raises `SourceError`, `SourceChangedError`, or a `StorageError`.
        """
        ...


@dataclass(frozen=True)
class ArraySource:
    """The samples of all containers, which have the same fields."""

    url: str
    files: Sequence[ObjectInfo]
    containers: Sequence[Container]
    notes: Mapping[str, Any]

    @property
    def fields(self) -> Mapping[str, Field]:
        """One field for each array."""
        return self.containers[0].fields

    @property
    def num_samples(self) -> int:
        """The samples of all containers."""
        return sum(container.num_samples for container in self.containers)

    def part(self, rows: NDArray[np.int64]) -> ArrayPart:
        """Return these rows, with the containers that hold them."""
        ends = np.cumsum([container.num_samples for container in self.containers])
        used, first = np.unique(np.searchsorted(ends, rows, side="right"), return_index=True)
        pieces = []
        for number, mine in zip(used.tolist(), np.split(rows, first[1:]), strict=False):
            container = self.containers[number]
            pieces.append((container, mine - (int(ends[number]) - container.num_samples)))
        return ArrayPart(dict(self.fields), tuple(pieces))


@dataclass(frozen=True, eq=False)
class ArrayPart:
    """Some rows: each container with those of its own."""

    fields: Mapping[str, Field]
    pieces: Sequence[tuple[Container, NDArray[np.int64]]]

    def read(self, refuse: Refuse) -> dict[str, Column]:
        """Return one column a field; a row with what its field cannot hold is refused."""
        count = sum(len(rows) for _, rows in self.pieces)
        columns: dict[str, NDArray[Any] | list[bytes]] = {
            name: np.empty((count, *field.shape), np.dtype(field.dtype).newbyteorder("<")) if field.fixed else []
            for name, field in self.fields.items()
        }
        bad: dict[int, BadSample] = {}
        done = 0
        for container, rows in self.pieces:
            stop = done + len(rows)
            into = {name: column if isinstance(column, list) else column[done:stop] for name, column in columns.items()}
            container.read(rows, into, _noting(container, rows, done, bad))
            done = stop
        for _, sample in sorted(bad.items()):
            refuse(sample)
        return drop_rows(columns, bad) if bad else dict(columns)


def _noting(container: Container, rows: NDArray[np.int64], first: int, bad: dict[int, BadSample]) -> Note:
    def note(field: str, i: int, problem: str) -> None:
        name = f"row {int(rows[i])} of {container.where}"
        bad.setdefault(first + i, BadSample(first + i, name, f"its field {field!r} {problem}"))

    return note


def stack(
    url: str, files: Sequence[ObjectInfo], containers: Sequence[Container], notes: Mapping[str, Any]
) -> ArraySource:
    """Return the source of one or more containers. Raises `SourceError` where their fields differ."""
    first = containers[0]
    for other in containers[1:]:
        if dict(other.fields) != dict(first.fields):
            theirs, ours = (", ".join(f"{k}={v}" for k, v in one.fields.items()) for one in (other, first))
            problem = f"{other.where} holds {theirs}, {first.where} {ours}"
            raise SourceError(problem, "give all files the same arrays, or convert those that differ on their own")
    return ArraySource(url, files, containers, notes)


def pick(originals: Iterable[str], wish: Wish, where: str) -> dict[str, str]:
    """Return the names of the arrays that are wished, by field. Raises `FieldError` for a field that is not there."""
    there = {name: original for original, name in field_names(list(originals), where).items()}
    missing = next((name for name in wish.fields if name not in there), None)
    if missing is not None:
        raise FieldError(f"{where} has no field {missing!r}", f"it has {', '.join(there) or 'no array'}")
    return {name: there[name] for name in wish.fields} or there


def one_length(lengths: Mapping[str, int], where: str) -> int:
    """Return the length of all arrays. Raises `SourceError`, which names two, where they differ."""
    first, length = next(iter(lengths.items()))
    for name, other in lengths.items():
        if other != length:
            problem = f"arrays of {where} differ in length: {first!r} has {length} rows, {name!r} {other}"
            raise SourceError(problem, f"give all arrays one length, or {LEAVE_OUT}")
    return length


def tensor_field(dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> Field:
    """Return the field of the rows of an array of that dtype, in any byte order, and shape.

    Raises `SourceError`, which names `where`, for what no tensor field holds.
    """
    if not shape:
        raise SourceError(f"{where} is a single value, not an array of samples", LEAVE_OUT)
    try:
        field = Field("tensor", dtype.newbyteorder("=").name, tuple(int(n) for n in shape[1:]))
    except FieldError as error:
        raise SourceError(f"{where}: {error.problem}", LEAVE_OUT) from None
    if field.item_bytes > MAX_CHUNK_BYTES:
        problem = f"{where} has rows of {field.item_bytes} bytes, the format holds up to {MAX_CHUNK_BYTES}"
        raise SourceError(problem, LEAVE_OUT)
    return field


def check_claim(where: str, claimed: int, stored: int, chunk: int = 0) -> None:
    """Raise `SourceError` for an array that cannot be: so many `claimed` bytes of a file or store of `stored` bytes.

    `chunk` are the bytes of its chunks, decoded; those that are too large for the memory are refused too.
    """
    if claimed > max(CLAIM_BYTES, stored * CLAIM_RATIO):
        problem = f"{where} claims {claimed} bytes of which {stored} at most are stored"
        raise SourceError(problem, f"fetch or make it again, or {LEAVE_OUT}")
    if chunk > MAX_STORED_CHUNK:
        problem = f"{where} has chunks of {chunk} bytes, each of which is decoded whole"
        raise SourceError(problem, f"store it in chunks of at most {MAX_STORED_CHUNK} bytes, or {LEAVE_OUT}")


def row_bytes(itemsize: int, shape: Sequence[int]) -> int:
    """Return the bytes of one row of an array of that shape."""
    return itemsize * prod(int(n) for n in shape[1:])


def add_texts(field: str, texts: list[bytes], into: list[bytes], note: Note) -> None:
    """Add texts to a column, and note those that are no UTF-8."""
    try:
        b"\0".join(texts).decode()  # one by one only where that fails: no character spans a NUL
    except UnicodeDecodeError:
        for i, text in enumerate(texts):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                note(field, i, f"is no UTF-8 text: {error.reason}")
    into.extend(texts)


def as_truth(column: NDArray[Any]) -> None:
    """Make every byte of a bool column that is not 0 a 1: files may hold any."""
    if column.dtype == np.bool_ and column.size:
        raw = column.view(np.uint8)
        np.minimum(raw, 1, out=raw)
