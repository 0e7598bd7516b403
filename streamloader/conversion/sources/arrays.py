"""Arrays whose first axis is the samples, in one container or several: what the scientific formats have in common.

A container is one file or store. Those of a source are read one after another into the columns of a part. Where arrays
have named dimensions and attributes, as xarray and netCDF write them, one dimension is the samples', and packed values
are decoded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import AGAIN, BadSample, OnBad, Part, Source, damaged, drop_rows, split_rows
from streamloader.conversion.sources.fields import FieldSelection
from streamloader.conversion.sources.files import field_names
from streamloader.conversion.sources.ranged_io import read_rows
from streamloader.errors import FieldError, SourceError, StreamloaderError
from streamloader.format.codecs import Column
from streamloader.format.manifest import MAX_CHUNK_BYTES, Field
from streamloader.format.values import exact_in_float
from streamloader.storage.store import ObjectInfo, Store

MAX_STORED_CHUNK = 1 << 30  # a stored chunk is decoded whole
# What is not stored reads as the fill value: a few bytes may claim any size. Real data never shrink like this.
CLAIM_BYTES = 4 << 30
CLAIM_RATIO = 1 << 16
_LONGEST = 500  # characters of an attribute or a message that are kept

Into = Mapping[str, Any]  # an array (rows, *shape), or a list that is extended, for each field
Read = Callable[[NDArray[np.int64], Into], None]
Bad = Iterator[tuple[int, str]]  # which of the rows, and what is wrong with it


@dataclass(frozen=True, eq=False)
class Container:
    """One file or store, whose arrays have `num_samples` rows each. `where` is its URL for messages, `notes` go into
    the provenance, packed values have a decoding.

    `read(rows, into)`, small and picklable, reads these rows, which ascend, as they are stored. It raises
    `SourceError`, `SourceChangedError`, or a `StorageError`.
    """

    where: str
    num_samples: int
    fields: Mapping[str, Field]
    read: Read
    notes: Mapping[str, Any] = field(default_factory=dict)
    decodings: Mapping[str, Decoding] = field(default_factory=dict)

    def packing(self, name: str) -> dict[str, str]:
        """Return the attributes of a field that its values as stored must be decoded with."""
        attributes = self.notes.get("attributes", {}).get(name, {})
        return {key: value for key, value in attributes.items() if key in PACKING}

    def read_decoded(self, rows: NDArray[np.int64], into: Into) -> Bad:
        """Read these rows and decode them; yield what fields cannot hold, whose value in the columns is not used."""
        stored = {name: empty_column(one.stored, len(rows)) for name, one in self.decodings.items()}
        self.read(rows, {**into, **stored})
        for name, kind in self.fields.items():
            if kind.fixed and kind.dtype == "bool":  # files may hold any byte for true
                np.minimum(into[name].view(np.uint8), 1, out=into[name].view(np.uint8))
            bad: Bad = _not_utf8(into[name]) if kind.kind == "text" else iter(())
            if name in self.decodings:
                bad = self.decodings[name].apply(stored.pop(name), into[name])
            for i, problem in bad:
                yield i, f"its field {name!r} {problem}"


def _read_pieces(
    fields: Mapping[str, Field], pieces: Sequence[tuple[Container, NDArray[np.int64]]], on_bad: OnBad
) -> dict[str, Column]:
    """Return one column a field, of each container with its rows; a row with what its field cannot hold is refused."""
    count = sum(len(rows) for _, rows in pieces)
    columns: dict[str, Column] = {
        name: empty_column(kind, count) if kind.fixed else [] for name, kind in fields.items()
    }
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


def empty_column(kind: Field, count: int) -> NDArray[Any]:
    """Return an uninitialised column of a field of fixed shape."""
    return np.empty((count, *kind.shape), np.dtype(kind.dtype).newbyteorder("<"))


def stack(url: str, files: Sequence[ObjectInfo], containers: Sequence[Container], raw: bool = False) -> Source:
    """Return the source of one or more containers; its notes are those of the first.

    Raises `SourceError` where their fields differ, or where values that are kept `raw` are packed in different ways.
    """
    first = containers[0]
    for other in containers[1:]:
        if dict(other.fields) != dict(first.fields):
            theirs, ours = (", ".join(f"{k}={v}" for k, v in one.fields.items()) for one in (other, first))
            problem = f"{other.where} holds {theirs}, {first.where} {ours}"
            raise SourceError(problem, "give all files the same arrays, or convert those that differ on their own")
        differ = next((name for name in first.fields if other.packing(name) != first.packing(name)), None)
        if raw and differ is not None:
            problem = f"{differ!r} of {first.where} and {other.where} is packed in different ways"
            raise SourceError(problem, "leave --raw out, or convert the files on their own")
    fields = dict(first.fields)
    counts = np.array([container.num_samples for container in containers], np.int64)

    def part(rows: NDArray[np.int64]) -> Part:
        pieces = [(replace(containers[number], notes={}), within) for number, _, within in split_rows(counts, rows)]
        return partial(_read_pieces, fields, pieces)

    return Source(url, files, fields, int(counts.sum()), first.notes, part)


def pick(originals: Iterable[str], selection: FieldSelection, where: str) -> dict[str, str]:
    """Return the names of the arrays that are selected, by field. Raises `FieldError` for a field that is not there."""
    names = field_names(list(originals), where)
    return selection.pick({name: original for original, name in names.items()}, where)


def one_length(lengths: Mapping[str, int], where: str) -> int:
    """Return the length of all arrays. Raises `SourceError`, which names two, where they differ."""
    first, length = next(iter(lengths.items()))
    for name, other in lengths.items():
        if other != length:
            problem = f"arrays of {where} differ in length: {first!r} has {length} rows, {name!r} {other}"
            raise unfit(problem, "give all arrays one length")
    return length


def tensor_field(dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> Field:
    """Return the field of the rows of an array of that dtype, in any byte order, and shape.

    Raises `SourceError`, which names `where`, for what no tensor field holds.
    """
    if not shape:
        raise unfit(f"{where} is a single value, not an array of samples")
    try:
        kind = Field("tensor", dtype.newbyteorder("=").name, tuple(int(n) for n in shape[1:]))
    except FieldError as error:
        raise unfit(f"{where}: {error.problem}") from None
    if kind.item_bytes > MAX_CHUNK_BYTES:
        raise unfit(f"{where} has rows of {kind.item_bytes} bytes, the format holds up to {MAX_CHUNK_BYTES}")
    return kind


def unfit(problem: str, remedy: str = "") -> SourceError:
    """Return the error for an array that no field holds, and that the user may leave out."""
    return SourceError(
        problem, f"{remedy}{', or ' if remedy else ''}leave it out: name the fields to keep with --fields"
    )


@contextmanager
def reading(problem: str) -> Iterator[None]:
    """Turn what a library says of damaged data into a `SourceError`, which begins with the problem."""
    try:
        yield
    except StreamloaderError:
        raise
    except Exception as error:  # every library and codec has errors of its own, and numpy evaluates headers as Python
        shown = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
        raise damaged(f"{problem}: {shown}") from error


def check_claim(where: str, claimed: int, stored: int, chunk: int = 0) -> None:
    """Raise `SourceError` for an array that claims too many bytes for a file or store of `stored` bytes.

    `chunk` are the bytes of its chunks, decoded; those that are too large for the memory are refused too.
    """
    if claimed > max(CLAIM_BYTES, stored * CLAIM_RATIO):
        raise unfit(f"{where} claims {claimed} bytes of which {stored} at most are stored", AGAIN)
    if chunk > MAX_STORED_CHUNK:
        problem = f"{where} has chunks of {chunk} bytes, each of which is decoded whole"
        raise unfit(problem, f"store it in chunks of at most {MAX_STORED_CHUNK} bytes")


def _not_utf8(texts: list[bytes]) -> Bad:
    for i, text in enumerate(texts):
        try:
            text.decode()
        except UnicodeDecodeError as error:
            yield i, f"is not UTF-8 text: {error.reason}"


def read_column(store: Store, path: str, starts: NDArray[np.int64], dtype: np.dtype[Any], column: NDArray[Any]) -> None:
    """Fill a column with values that are stored as `dtype` in the rows that begin at these bytes of a file."""
    if column.size:
        read_rows(store, path, starts, column.reshape(len(column), -1).view(np.uint8))
    if dtype.byteorder == ">":
        column.byteswap(inplace=True)


# what one needs to understand the values
PACKING = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned", "dtype")
ATTRIBUTES = (
    *("_FillValue", "add_offset", "calendar", "dtype", "flag_meanings", "flag_values", "long_name", "missing_value"),
    *("scale_factor", "standard_name", "units", "valid_max", "valid_min", "valid_range", "_Unsigned"),
)
_DECODED_BYTES = 16 << 20  # of the values that are decoded at once

Dimensions = Mapping[str, tuple[str, ...]]


def along_samples(
    named: Mapping[str, str], dimensions: Dimensions, selected: bool, where: str, unlimited: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the variables along the samples' dimension by field, of those that are `named`, and the notes.

    It is the one that most variables have first, of equal ones an unlimited one. Coordinates of a dimension count only
    where there is nothing else. Raises `SourceError` where two are as frequent, and for a variable that is `selected`,
    as all of them then are, but has another dimension first.
    """
    own = {name: dimensions[name] for name in named.values()}
    first = {name: axes[0] for name, axes in own.items() if axes}
    counts = Counter(first[name] for name in first if own[name] != (name,)) or Counter(first.values())
    if not counts:
        raise SourceError(f"{where} holds no variable with a dimension", "name their group, as in ::/group")
    leaders = [name for name, count in counts.items() if count == max(counts.values())]
    leaders = [name for name in leaders if name in unlimited] or leaders
    if len(leaders) > 1:
        problem = f"as many variables of {where} have {leaders[0]!r} as have {leaders[1]!r} for their first dimension"
        raise SourceError(problem, "name the fields of one of them with --fields")
    others = [name for name in own if first.get(name) != leaders[0]]
    if selected and others:
        has = f"has the dimensions {', '.join(own[others[0]])}" if own[others[0]] else "has no dimension"
        raise unfit(f"{others[0]!r} of {where} {has}, the samples' is {leaders[0]!r}")
    kept = {name: original for name, original in named.items() if original not in others}
    return kept, {"dimension": leaders[0], "passed_over": others}


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray | list | tuple):
        items = value.reshape(-1) if isinstance(value, np.ndarray) else value
        return ", ".join(_text(item) for item in items[:_LONGEST])
    return str(value)


@dataclass(frozen=True)
class Decoding:
    """How the values of an array are decoded, as xarray does (`decode_cf`, `mask_and_scale`): the stored ones become
    `dtype`, times `scale`, plus `offset`; those that are one of `fills` become NaN.

    `view` is the dtype that the stored values are taken for, where an attribute says that their sign is another.
    """

    stored: Field
    dtype: str
    scale: Any = None
    offset: Any = None
    fills: tuple[Any, ...] = ()
    view: str = ""

    def __str__(self) -> str:
        scale = "" if self.scale is None else f" * {self.scale}"
        offset = "" if self.offset is None else f" + {self.offset}"
        fills = f", NaN for {' and '.join(map(str, self.fills))}" if self.fills else ""
        return f"{self.view or self.stored.dtype}{scale}{offset}{fills}"

    def apply(self, stored: NDArray[Any], out: NDArray[Any]) -> Bad:
        """Fill `out` with the decoded values; yield the rows with a value that it does not hold exactly."""
        step = max(1, _DECODED_BYTES * len(out) // max(1, out.nbytes))
        for first in range(0, len(out), step):
            inexact = self._apply(stored[first : first + step], out[first : first + step])
            for row in np.flatnonzero(inexact.reshape(len(inexact), -1).any(axis=1)).tolist():
                yield first + row, f"holds a whole number that {self.dtype} does not hold exactly: keep it with --raw"

    def _apply(self, stored: NDArray[Any], out: NDArray[Any]) -> NDArray[np.bool_]:
        values = stored.view(self.view) if self.view else stored
        missing = np.zeros(stored.shape, np.bool_)
        for fill in self.fills:
            missing |= (stored == fill) | (values == fill)
        out[...] = values
        inexact = np.zeros(stored.shape, np.bool_)
        masked = self.scale is None and self.offset is None and out.dtype.kind == "f"
        if masked and values.dtype.kind in "iu" and values.dtype.itemsize == 8:
            inexact = ~exact_in_float(values, out.dtype) & ~missing
        if self.scale is not None:
            out *= self.scale
        if self.offset is not None:
            out += self.offset
        if self.fills:
            out[missing] = np.nan
        return inexact


def decoding_of(attributes: Mapping[str, Any], stored: Field, where: str) -> Decoding | None:
    """Return how an array with these attributes is decoded; None where its values are as stored.

    Raises `SourceError`, which names `where`, for a scale or an offset that is not one number.
    """
    dtype = np.dtype(stored.dtype) if stored.fixed else np.dtype(bool)
    if dtype.kind == "b":
        return None
    fills = _fills(attributes, dtype)
    scale, offset = (_factor(attributes.get(name), name, where) for name in ("scale_factor", "add_offset"))
    sign = {"true": "u", "false": "i"}.get(_text(attributes.get("_Unsigned", "")), dtype.kind)
    view = np.dtype(f"{sign}{dtype.itemsize}").name if dtype.kind in "iu" and dtype.kind != sign else ""
    decoded = view
    if scale is not None or offset is not None:
        nan_fill = dtype.kind == "f" and not fills and not attributes.keys().isdisjoint(("_FillValue", "missing_value"))
        decoded = stored.dtype if nan_fill else _scaled_dtype(dtype, scale, offset)  # as xarray does
    elif fills:
        decoded = stored.dtype if dtype.kind == "f" else "float32" if dtype.itemsize <= 2 else "float64"
    elif _text(attributes.get("dtype", "")) == "bool":  # how xarray stores bools in netCDF
        decoded, view = "bool", ""
    return Decoding(stored, decoded, scale, offset, fills, view) if decoded else None


def _fills(attributes: Mapping[str, Any], dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return the values that stand for missing ones, as Python's numbers; NaN needs no decoding."""
    found: dict[Any, None] = {}
    values = [np.ravel(np.asarray(attributes.get(name, []))).tolist() for name in ("_FillValue", "missing_value")]
    for value in (one for some in values for one in some):
        number = float(value) if value in ("Infinity", "-Infinity") else value  # as Zarr writes them
        if type(number) not in (int, float) or isnan(number):
            continue
        if dtype.kind == "f":  # one of another width is meant to be a value of the array
            with np.errstate(over="ignore"):
                cast = float(dtype.type(number))
            if isfinite(cast) == isfinite(number):
                found[cast] = None
        else:
            found[int(number) if number == number // 1 else number] = None
    return tuple(found)


def _factor(value: Any, name: str, where: str) -> Any:
    """Return a scale or an offset as a numpy scalar of its own dtype, or None.

    A Python number, as from JSON, stays one: with it numpy computes in the dtype of the array, as xarray does.
    """
    if value is None or type(value) in (int, float):
        return value
    array = np.ravel(np.asarray(value))
    if array.size != 1 or array.dtype.kind not in "iuf":
        shown = _text(value)[:_LONGEST]
        raise SourceError(f"{where} has the {name} {shown!r}, which is not one number", "keep it as stored with --raw")
    return array.astype(array.dtype.newbyteorder("="))[0]


def _scaled_dtype(stored: np.dtype[Any], scale: Any, offset: Any) -> str:
    """Return the dtype that xarray chooses for packed values."""
    types = {np.asarray(factor).dtype.name for factor in (scale, offset) if factor is not None}
    wide = stored.kind in "iu" and stored.itemsize == 4 and offset is not None
    return "float32" if types == {"float32"} and scale is not None and not wide else "float64"


def decoded(container: Container, attributes: Mapping[str, Mapping[str, Any]], raw: bool) -> Container:
    """Return the container with its packed arrays decoded, unless they are kept `raw`, and with what its notes tell.

    `attributes` are those of each field. Raises `SourceError` as `decoding_of`.
    """
    decodings: dict[str, Decoding] = {}
    kept: dict[str, dict[str, str]] = {}
    for name, kind in container.fields.items():
        own = attributes.get(name, {})
        one = None if raw else decoding_of(own, kind, f"{container.where}: {name!r}")
        if one is not None:
            decodings[name] = one
        keys = [key for key in ATTRIBUTES if key in own and (one is None or key not in PACKING)]
        if keys:  # as text: provenance holds no floats
            kept[name] = {key: _text(own[key])[:_LONGEST] for key in keys}
    notes = {**container.notes, **({"attributes": kept} if kept else {})}
    if not decodings:
        return replace(container, notes=notes)
    notes["decoded"] = {name: str(one) for name, one in decodings.items()}
    changed = {name: replace(one.stored, dtype=one.dtype) for name, one in decodings.items()}
    return replace(container, fields={**container.fields, **changed}, notes=notes, decodings=decodings)
