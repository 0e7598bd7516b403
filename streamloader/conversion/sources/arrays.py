"""Sources of arrays whose first axis is the samples: the common code of the scientific formats.

A container is a file or store of arrays. The containers of a source are read in turn into the columns of a fragment.
If arrays have named dimensions and attributes, as xarray and netCDF write them, one dimension is that of the samples,
and packed values are decoded.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import (
    AGAIN,
    BadSample,
    OnBad,
    RowSource,
    check_decoded,
    damaged,
    drop_rows,
    split_rows,
)
from streamloader.conversion.sources.fields import ANY, FieldSelection
from streamloader.conversion.sources.files import field_names
from streamloader.conversion.sources.ranged_io import read_rows
from streamloader.errors import FieldError, FormatError, SourceError, StreamloaderError
from streamloader.format.codecs import Column
from streamloader.format.manifest import MAX_CHUNK_BYTES, Field
from streamloader.format.values import exact_in_float
from streamloader.storage import ObjectInfo, Store
from streamloader.zarr.cf import Unpacking, attribute_text, unpacking_of

# A few bytes may declare any size, since absent chunks read as the fill value. Real data do not compress this much.
CLAIM_BYTES = 4 << 30
CLAIM_RATIO = 1 << 16
_LONGEST = 500  # characters of an attribute or a message that are kept

Into = Mapping[str, Any]  # the column to fill for each field: an array (rows, *shape), or a list to extend
Read = Callable[[NDArray[np.int64], Into], None]
Kind = Field | np.dtype[Any]  # of the rows of an array: if no field holds them, their dtype, for a map function
Bad = Iterator[tuple[int, str]]  # the position and the problem of each bad row


@dataclass(frozen=True, eq=False)
class Container:
    """A file or store whose arrays have `num_samples` rows each. `where` is its URL for messages; `notes` are written
    to the provenance; `unpackings` has the fields with packed values.

    `read(rows, into)`, small and picklable, reads ascending rows as stored. It raises `SourceError`,
    `SourceChangedError`, or a `StorageError`.
    """

    where: str
    num_samples: int
    kinds: Mapping[str, Kind]
    read: Read
    notes: Mapping[str, Any] = field(default_factory=dict)
    unpackings: Mapping[str, Unpacking] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the rows, `ANY` for values that only a map function gets."""
        return {name: ANY if isinstance(kind, np.dtype) else kind for name, kind in self.kinds.items()}

    def packing(self, name: str) -> dict[str, str]:
        """Return the attributes with which the stored values of a field are decoded."""
        attributes = self.notes.get("attributes", {}).get(name, {})
        return {key: value for key, value in attributes.items() if key in PACKING}

    def read_decoded(self, rows: NDArray[np.int64], into: Into) -> Bad:
        """Read rows and decode them; yield the rows that have a value which their field cannot hold."""
        stored: dict[str, NDArray[Any]] = {}
        for name, each in self.unpackings.items():
            stored[name] = np.empty((len(rows), *self.fields[name].shape), each.stored.newbyteorder("<"))
        self.read(rows, {**into, **stored})
        for name, kind in self.fields.items():
            if kind.fixed and kind.dtype == "bool":  # files may store any byte for true
                np.minimum(into[name].view(np.uint8), 1, out=into[name].view(np.uint8))
            bad: Bad = _not_utf8(into[name]) if kind.kind == "text" else iter(())
            if name in self.unpackings:
                bad = _unpack(self.unpackings[name], stored.pop(name), into[name])
            for i, problem in bad:
                yield i, f"its field {name!r} {problem}"


def _read_pieces(
    kinds: Mapping[str, Kind], pieces: Sequence[tuple[Container, NDArray[np.int64]]], on_bad: OnBad
) -> dict[str, Column]:
    """Return the columns of the given rows of each container; a row that its fields cannot hold is bad."""
    count = sum(len(rows) for _, rows in pieces)
    columns = {name: empty_column(kind, count) for name, kind in kinds.items()}
    bad: dict[int, BadSample] = {}
    done = 0
    for container, rows in pieces:
        into = {name: column[done : done + len(rows)] for name, column in columns.items()}
        for i, problem in container.read_decoded(rows, into):
            bad.setdefault(done + i, BadSample(done + i, f"row {rows[i]} of {container.where}", problem))
        for name, column in columns.items():
            if isinstance(column, list):
                column.extend(into[name])
        done += len(rows)
    for _, sample in sorted(bad.items()):
        on_bad(sample)
    return drop_rows(columns, bad) if bad else columns


def empty_column(kind: Kind, count: int) -> Column:
    """Return an uninitialised column of rows of a fixed size, a list to extend for others."""
    if isinstance(kind, np.dtype):
        return np.empty(count, kind)
    return np.empty((count, *kind.shape), np.dtype(kind.dtype).newbyteorder("<")) if kind.fixed else []


def stack(url: str, files: Sequence[ObjectInfo], containers: Sequence[Container], raw: bool = False) -> RowSource:
    """Return the source of one or more containers; its notes are those of the first.

    Raises `SourceError` if their fields differ, or if values that are kept `raw` are packed in different ways.
    """
    first = containers[0]
    for container in containers[1:]:
        if dict(container.kinds) != dict(first.kinds):
            fields, expected = (", ".join(f"{k}={v}" for k, v in c.kinds.items()) for c in (container, first))
            problem = f"{container.where} holds {fields}, {first.where} {expected}"
            raise SourceError(problem, "give all files the same arrays, or convert those that differ on their own")
        differ = next((name for name in first.fields if container.packing(name) != first.packing(name)), None)
        if raw and differ is not None:
            problem = f"{differ!r} of {first.where} and {container.where} is packed in different ways"
            raise SourceError(problem, "leave raw=True (--raw) out, or convert the files on their own")
    counts = np.array([container.num_samples for container in containers], np.int64)

    def fragment(rows: NDArray[np.int64]) -> partial[dict[str, Column]]:
        pieces = [(replace(containers[number], notes={}), within) for number, _, within in split_rows(counts, rows)]
        return partial(_read_pieces, dict(first.kinds), pieces)

    return RowSource(url, files, dict(first.fields), int(counts.sum()), first.notes, fragment)


def pick(originals: Iterable[str], selection: FieldSelection, where: str) -> dict[str, str]:
    """Return the original names of the selected fields. Raises `FieldError` for a field that does not exist."""
    names = field_names(list(originals), where)
    return selection.pick({name: original for original, name in names.items()}, where)


def common_length(lengths: Mapping[str, int], where: str) -> int:
    """Return the length of all arrays. Raises `SourceError`, which names two arrays, if lengths differ."""
    first, expected = next(iter(lengths.items()))
    for name, length in lengths.items():
        if length != expected:
            problem = f"arrays of {where} differ in length: {first!r} has {expected} rows, {name!r} {length}"
            raise unfit(problem, "give all arrays one length")
    return expected


def tensor_field(dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> Field:
    """Return the field for the rows of an array of a dtype, in any byte order, and a shape.

    Raises `SourceError`, which names `where`, if no tensor field holds them.
    """
    if not shape:
        raise unfit(f"{where} is a single value, not an array of samples")
    try:
        field = Field("tensor", dtype.newbyteorder("=").name, tuple(int(n) for n in shape[1:]))
    except FieldError as error:
        raise unfit(f"{where}: {error.problem}") from None
    if field.item_bytes > MAX_CHUNK_BYTES:
        raise unfit(f"{where} has rows of {field.item_bytes} bytes, the format holds up to {MAX_CHUNK_BYTES}")
    return field


def kind_of(describe: Callable[[], Field], dtype: np.dtype[Any], shape: tuple[int, ...], mapped: bool) -> Kind:
    """Return the field that a function describes; if no field holds the rows and they are `mapped`, their dtype.

    Raises the `SourceError` of the function, also for rows without values, or of 2 GiB.
    """
    try:
        return describe()
    except SourceError:
        if not mapped or not shape or not 0 < dtype.itemsize * prod(shape[1:]) < 1 << 31:
            raise
        return np.dtype((dtype, shape[1:]))


def unfit(problem: str, remedy: str = "") -> SourceError:
    """Return the error for an array that no field holds, and that the user may leave out."""
    leave_out = "leave it out: name the fields to keep with fields=, or those that a map function gets with columns="
    return SourceError(problem, f"{remedy}, or {leave_out}" if remedy else leave_out)


@contextmanager
def reading(problem: str) -> Iterator[None]:
    """Raise the errors of a library or a reader of Zarr about damaged data as `SourceError`, with the problem."""
    try:
        yield
    except FormatError as error:
        raise SourceError(f"{problem}: {error.problem}", error.remedy) from error
    except StreamloaderError:
        raise
    except Exception as error:  # each library and codec has its own errors, and numpy evaluates headers as Python
        text = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
        raise damaged(f"{problem}: {text}") from error


def check_claim(where: str, claimed: int, stored: int, limit: int, *, row: int = 0, chunk: int = 0) -> None:
    """Raise `SourceError` for an array that declares too many bytes for a file or store of `stored` bytes.

    `row` and `chunk` are the sizes of its rows and chunks in bytes, as far as these are decoded; `limit` limits them.
    """
    if claimed > max(CLAIM_BYTES, stored * CLAIM_RATIO):
        raise unfit(f"{where} claims {claimed} bytes of which {stored} at most are stored", AGAIN)
    check_decoded(f"{where} has chunks of", chunk, limit)
    check_decoded(f"{where} has rows of", row, limit)


def _not_utf8(texts: list[bytes]) -> Bad:
    for i, text in enumerate(texts):
        try:
            text.decode()
        except UnicodeDecodeError as error:
            yield i, f"is not UTF-8 text: {error.reason}"


def read_column(store: Store, path: str, starts: NDArray[np.int64], dtype: np.dtype[Any], column: NDArray[Any]) -> None:
    """Fill a column with rows that begin at the bytes `starts` of a file, which stores values as `dtype`."""
    if column.size:
        read_rows(store, path, starts, column.reshape(len(column), -1).view(np.uint8))
    if dtype.byteorder == ">" != column.dtype.byteorder:
        column.byteswap(inplace=True)


# the attributes that change values, and all that describe them
PACKING = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned", "dtype")
ATTRIBUTES = (
    *("_FillValue", "add_offset", "calendar", "dtype", "flag_meanings", "flag_values", "long_name", "missing_value"),
    *("scale_factor", "standard_name", "units", "valid_max", "valid_min", "valid_range", "_Unsigned"),
)
_CHECKED_BYTES = 16 << 20  # of values, at once


Dimensions = Mapping[str, tuple[str, ...]]


def along_samples(
    originals: Mapping[str, str], dimensions: Dimensions, selected: bool, where: str, unlimited: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the variables along the dimension of the samples, by field, and the notes.

    `originals` has the variables by field, `dimensions` those of each variable. The samples' dimension is the first
    one of most variables; an `unlimited` one wins a tie. Coordinates of a dimension count only if there are no other
    variables. Raises `SourceError` for a tie, and if the variables are `selected` and one has another first dimension.
    """
    axes = {name: dimensions[name] for name in originals.values()}
    first = {name: axes[name][0] for name in axes if axes[name]}
    counts = Counter(first[name] for name in first if axes[name] != (name,)) or Counter(first.values())
    if not counts:
        raise SourceError(f"{where} holds no variable with a dimension", "name their group, as in ::/group")
    leaders = [name for name, count in counts.items() if count == max(counts.values())]
    leaders = [name for name in leaders if name in unlimited] or leaders
    if len(leaders) > 1:
        problem = f"as many variables of {where} have {leaders[0]!r} as have {leaders[1]!r} for their first dimension"
        raise SourceError(problem, "name the fields of one of them with fields=")
    skipped = [name for name in axes if first.get(name) != leaders[0]]
    if selected and skipped:
        name = skipped[0]
        has = f"has the dimensions {', '.join(axes[name])}" if axes[name] else "has no dimension"
        raise unfit(f"{name!r} of {where} {has}, the samples' is {leaders[0]!r}")
    kept = {name: original for name, original in originals.items() if original not in skipped}
    return kept, {"dimension": leaders[0], "passed_over": skipped}


def _unpack(unpacking: Unpacking, stored: NDArray[Any], out: NDArray[Any]) -> Bad:
    """Fill `out` with the unpacked values; yield the rows with a whole number that its dtype does not hold exactly."""
    unpacking.write(stored, out)
    values = stored.view(unpacking.view)
    scaled = unpacking.scale is not None or unpacking.offset is not None
    if scaled or out.dtype.kind != "f" or values.dtype.kind == "f" or values.dtype.itemsize < 8:
        return
    step = max(1, _CHECKED_BYTES * len(out) // max(1, out.nbytes))
    for first in range(0, len(out), step):
        rows = slice(first, first + step)
        exact = exact_in_float(values[rows], out.dtype)
        if exact.all():
            continue
        inexact = ~(exact | unpacking.missing(stored[rows]))
        for row in np.flatnonzero(inexact.reshape(len(inexact), -1).any(axis=1)).tolist():
            yield first + row, f"holds a whole number that {out.dtype} cannot hold: keep it with raw=True (--raw)"


def decoded(container: Container, attributes: Mapping[str, Mapping[str, Any]], raw: bool) -> Container:
    """Return the container with the unpacking of its packed arrays, unless they are kept `raw`, and with notes on them.

    `attributes` are those of each field. Raises `SourceError` for one that is not a number.
    """
    unpackings: dict[str, Unpacking] = {}
    kept: dict[str, dict[str, str]] = {}
    for name, kind in container.fields.items():
        present, unpacking = attributes.get(name, {}), None
        if kind.fixed and not raw:
            try:
                where = f"{container.where}: {name!r}"
                unpacking = unpacking_of(present, np.dtype(kind.dtype), where, as_xarray=True)
            except FormatError as error:
                raise SourceError(error.problem, "keep it as stored with raw=True (--raw)") from error
        if unpacking is not None:
            unpackings[name] = unpacking
        keys = [key for key in ATTRIBUTES if key in present and (unpacking is None or key not in PACKING)]
        if keys:  # as text: provenance has no floats
            kept[name] = {key: attribute_text(present[key])[:_LONGEST] for key in keys}
    notes = {**container.notes, **({"attributes": kept} if kept else {})}
    if unpackings:
        notes["decoded"] = {name: str(unpacking) for name, unpacking in unpackings.items()}
    changed = {name: replace(container.fields[name], dtype=unpacking.dtype) for name, unpacking in unpackings.items()}
    return replace(container, kinds={**container.kinds, **changed}, notes=notes, unpackings=unpackings)
