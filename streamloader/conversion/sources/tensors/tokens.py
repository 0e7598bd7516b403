"""Binary files of tokens: rows of one length, or documents cut at one. See formats/tokens/MAPPING.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import READ_THREADS, Range, read_range
from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.rowreads import read_into, read_rows
from streamloader.conversion.sources.tensors.arrays import ArraySource, Into, Note, stack
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError, UsageError
from streamloader.format.manifest import Field
from streamloader.format.threads import run_all
from streamloader.storage.protocol import ObjectInfo, Store

NAME = "tokens"

CUT = 4096  # values of a sample where no document is known

# llm.c and what follows it write 256 int32 in front: one of these, a version, and the number of tokens
_HEADER_BYTES = 1024
_MAGIC = {20240520: 2, 20240801: 4}  # and the bytes of a token


def matches(listing: Listing) -> bool:
    """Return whether all files are .bin: others beside them, such as an index, say more than their bytes do."""
    return list(listing.by_extension) == ["bin"]


def open_source(listing: Listing, wish: Wish) -> ArraySource:
    """Return the source: the values of each .bin, cut on their own, file after file, sorted by path.

    Raises `UsageError` unless one field is wished, with the type of the values; `SourceError` for a file that is not
    a whole number of them, or where no file holds a sample.
    """
    files = listing.of("bin")
    if not files:
        raise SourceError(f"{listing.url} names no .bin", "give a file, a folder of files, or a glob")
    name, field = _wished(listing, wish)
    item = np.dtype(field.dtype).itemsize
    starts = run_all(lambda info: _header_bytes(listing.store, info, item), files, READ_THREADS)
    parts: list[TokenFile] = []
    left = 0
    for info, start in zip(files, starts, strict=True):
        values, rest = divmod(info.size - start, item)
        if rest:
            problem = f"{listing.store.url}/{info.path} has {info.size} bytes, which are no whole {field.dtype} values"
            raise SourceError(problem, "check the type of --fields, or fetch the file again")
        row = field.item_bytes // item if field.fixed else CUT
        count = values // row if field.fixed else -(-values // row)
        left += values - count * row if field.fixed else 0
        parts.append(TokenFile(listing.store, info, name, field, start, values, count))
    if not any(part.num_samples for part in parts):
        raise SourceError(f"no file of {listing.url} holds a row of {field}", "give shorter rows with --fields")
    headers = sum(start > 0 for start in starts)
    notes = {"passed_over_values": left, **({"headers": headers} if headers else {})}
    return stack(listing.url, files, parts, notes)


def _wished(listing: Listing, wish: Wish) -> tuple[str, Field]:
    """Return the one field that is wished. Raises `UsageError`, which shows how."""
    name, field = next(iter(wish.fields.items()), ("", None))
    numbers = len(wish.fields) == 1 and field is not None and field.dtype not in ("", "bool")
    if numbers and field is not None and (field.fixed or not field.shape):
        return name, field
    asked = ", ".join(one if kind is None else f"{one}={kind}" for one, kind in wish.fields.items())
    problem = (
        f"a .bin such as {listing.files[0].path} does not say what its bytes are{asked and f'; asked for {asked}'}"
    )
    ways = 'rows of one length with --fields "tokens=uint16[2048]", or pieces of up to 4096 values'
    raise UsageError(problem, f'name one field and the type of its values: {ways} with --fields "tokens=ragged:uint16"')


def _header_bytes(store: Store, info: ObjectInfo, item: int) -> int:
    """Return how many bytes stand before the values: none, unless they say how many follow."""
    if info.size < _HEADER_BYTES:
        return 0
    magic, _, count = np.frombuffer(read_range(store, Range(info.path, 0, 12)), "<i4").tolist()
    told = _MAGIC.get(magic) == item and _HEADER_BYTES + count * item == info.size
    return _HEADER_BYTES if told else 0


@dataclass(frozen=True)
class TokenFile:
    """`values` of one file, from byte `start` on, cut into samples."""

    store: Store
    info: ObjectInfo
    name: str
    field: Field
    start: int
    values: int
    num_samples: int

    @property
    def where(self) -> str:
        """The URL, for messages."""
        return f"{self.store.url}/{self.info.path}"

    @property
    def fields(self) -> Mapping[str, Field]:
        """The one field."""
        return {self.name: self.field}

    def read(self, rows: NDArray[np.int64], into: Into, _note: Note) -> None:
        """Fill the column; see `Container`."""
        column = into[self.name]
        item = np.dtype(self.field.dtype).itemsize
        if isinstance(column, np.ndarray):
            size = self.field.item_bytes
            read_rows(self.store, self.info.path, self.start + rows * size, _raw(column, size))
            return
        size = CUT * item
        whole = rows[(rows + 1) * CUT <= self.values]
        out = np.empty((len(whole), size), np.uint8)
        read_rows(self.store, self.info.path, self.start + whole * size, out)
        column.extend(row.tobytes() for row in out)
        if len(whole) < len(rows):  # the last one is shorter
            last = np.empty((self.values - int(rows[-1]) * CUT) * item, np.uint8)
            read_into(self.store, self.info.path, self.start + int(rows[-1]) * size, last)
            column.append(last.tobytes())


def _raw(column: NDArray[np.generic], size: int) -> NDArray[np.uint8]:
    return column.reshape(-1).view(np.uint8).reshape(len(column), size)
