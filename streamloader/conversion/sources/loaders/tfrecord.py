"""TFRecord files of tf.train.Example, read without TensorFlow. See formats/tfrecord/MAPPING.md."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import base
from streamloader.conversion.sources.base import BadSample, Refuse, spread_rows
from streamloader.conversion.sources.files import Listing, field_names
from streamloader.conversion.sources.loaders.tfexample import parse_example
from streamloader.conversion.sources.records import PROBED, Origin, RecordSource, open_records
from streamloader.conversion.sources.spans import read_each
from streamloader.conversion.sources.streams import Content
from streamloader.conversion.sources.tars.tarindex import Walk, open_tar
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError
from streamloader.format.threads import run_all
from streamloader.storage.protocol import ObjectInfo, Store

NAME = "tfrecord"
# x.tfrecord, x.tfrecords, x.tfrec, x.tfrecord-00000-of-00010, any of them compressed
_NAMED = re.compile(r"\.tfrec(ords?)?(-\d+-of-\d+)?(\.(gz|gzip|zlib|z))?\Z", re.IGNORECASE)
_NUMBERED = re.compile(r"-\d+-of-\d+\Z")

_HEAD, _TAIL = 12, 4  # u64 length, u32 checksum of it; data; u32 checksum of the data
_MAX_RECORD = (1 << 31) - 1  # the longest protocol buffer


def matches(listing: Listing) -> bool:
    """Return whether the listing holds a file with such a name."""
    return any(_NAMED.search(info.path) for info in listing.visible)


def open_source(listing: Listing, wish: Wish) -> RecordSource:
    """Return the source, with the head of every record read once; records keep the order of the sorted files.

    Raises `SourceError` for a truncated or damaged file.
    """
    files = _files(listing)
    if not files:
        raise SourceError(f"{listing.url} names no TFRecord file", "give files such as data-00000-of-00010.tfrecord")
    indexes = run_all(lambda info: _index(listing.store, info), files, base.READ_THREADS)
    records = TFRecords(tuple(content for content, _ in indexes), tuple(starts for _, starts in indexes))
    count = int(records.firsts[-1])
    kinds = _kinds(records.cut(spread_rows(count, PROBED)), wish, listing.url)
    return open_records(Origin(listing.url, files, count), replace(records, kinds=kinds).cut, wish)


def _files(listing: Listing) -> tuple[ObjectInfo, ...]:
    """Return the files that are called TFRecords; where none is, those that are numbered like them, or the only one."""
    there = listing.visible
    named = [info for info in there if _NAMED.search(info.path)]
    named = named or [info for info in there if _NUMBERED.search(info.path)]
    return tuple(named or (() if listing.folder else there))


def _index(store: Store, info: ObjectInfo) -> tuple[Content, NDArray[np.int64]]:
    """Return what the file holds, and where its records begin and end; one that is compressed is unpacked for it."""
    content, walk = open_tar(store, info)  # any file's bytes; nothing of it is about tars
    starts = record_starts(walk, content.where)
    return content.sized(int(starts[-1])), starts


def record_starts(walk: Walk, where: str) -> NDArray[np.int64]:
    """Return where each record of a file begins, and where the last one ends; only their heads are looked at.

    Raises `SourceError`, which names `where`, for a truncated or damaged file.
    """
    starts, at = array("q"), 0
    while head := walk.read(at, at + _HEAD):
        starts.append(at)
        length = int.from_bytes(head[:8], "little") if len(head) == _HEAD else 0
        if len(head) == _HEAD and _masked_crc(head[:8]) != int.from_bytes(head[8:], "little"):
            raise _no_record(head, at, where)
        if length > _MAX_RECORD:
            raise SourceError(f"{where} has a record of {length} bytes at byte {at}", "an Example ends at 2 GiB")
        at += _HEAD + length + _TAIL
        if 0 <= walk.size < at:
            break
    starts.append(at)
    size = walk.finish()
    if size != at:
        problem = f"{where} is truncated: it ends at byte {size}, within the record that begins at byte {starts[-2]}"
        raise SourceError(problem, "fetch or make it again")
    return np.frombuffer(starts, np.int64)


def _masked_crc(data: bytes | memoryview) -> int:
    """Return the checksum as TFRecord stores it: CRC-32C, rotated right by 15 bits, plus a constant."""
    crc = crc32c.crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _no_record(head: bytes, at: int, where: str) -> SourceError:
    """Return the error for a head that does not match its checksum."""
    if at == 0 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0:
        return SourceError(f"{where} is compressed with zlib", "write it again with GZIP, or without compression")
    problem = f"{where} is no TFRecord, or damaged: the checksum of the length at byte {at} does not match"
    return SourceError(problem, "fetch or make it again")


@dataclass(frozen=True)
class Kinds:
    """How features become values, by their key: `scalars` are lists of one number, `texts` are UTF-8."""

    scalars: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()

    def sample(self, data: memoryview) -> dict[str, Any]:
        """Return the values of a record. Raises ValueError for what is no Example, or no text."""
        values: dict[str, Any] = dict(parse_example(data))
        for key in self.scalars & values.keys():
            if isinstance(values[key], np.ndarray) and values[key].size == 1:
                values[key] = values[key].reshape(())
        for key in self.texts & values.keys():
            if isinstance(values[key], bytes):
                values[key] = _text(key, values[key])
        return values


def _text(key: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the feature {key!r} is no UTF-8: {error.reason} at byte {error.start}") from None


def _kinds(part: TFRecordPart, wish: Wish, url: str) -> Kinds:
    """Return how the features are read: as the user wishes, else as they are in the samples of the part."""
    seen: dict[str, set[bool]] = {}
    for _, sample in part.read(_pass_over):
        for key, value in sample.items():
            seen.setdefault(key, set()).add(isinstance(value, np.ndarray) and value.size == 1)
    wished = {key: wish.fields.get(name) for key, name in field_names(list(seen), url).items()}
    scalars = {key for key, kind in wished.items() if (kind.fixed and not kind.shape if kind else seen[key] == {True})}
    return Kinds(frozenset(scalars), frozenset(key for key, kind in wished.items() if kind and kind.kind == "text"))


def _pass_over(_: BadSample) -> None:
    """Leave a bad sample to whoever reads it."""


@dataclass(frozen=True, eq=False)
class TFRecords:
    """The records of all files: `starts[f]` says where those of file f begin, and where it ends."""

    files: tuple[Content, ...]
    starts: tuple[NDArray[np.int64], ...]
    kinds: Kinds = Kinds()

    @property
    def firsts(self) -> NDArray[np.int64]:
        """The number of each file's first record, and that of all records."""
        return np.cumsum([0, *(len(one) - 1 for one in self.starts)], dtype=np.int64)

    def cut(self, rows: NDArray[np.int64]) -> TFRecordPart:
        """Return the part of these rows, with the files that they need only."""
        firsts = self.firsts
        used, file = np.unique(np.searchsorted(firsts, rows, side="right") - 1, return_inverse=True)
        number = rows - firsts[used[file]]
        spans = np.empty((len(rows), 2), np.int64)
        for i, one in enumerate(used.tolist()):
            here = number[file == i]
            spans[file == i] = np.stack([self.starts[one][here], self.starts[one][here + 1]], axis=1)
        return TFRecordPart(tuple(self.files[one] for one in used.tolist()), file, number, spans, self.kinds)


@dataclass(frozen=True, eq=False)
class TFRecordPart:
    """Some records: `file[n]` numbers record n's file in `files`, `number[n]` is its place there, `spans[n]` its
    (start, stop) with head and tail.
    """

    files: tuple[Content, ...]
    file: NDArray[np.int64]
    number: NDArray[np.int64]
    spans: NDArray[np.int64]
    kinds: Kinds

    def read(self, refuse: Refuse) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield position and values of each record; those of a wrong checksum, or no Example, go to `refuse`."""
        for file, content in enumerate(self.files):
            here = np.flatnonzero(self.file == file)
            records = read_each(content, self.spans[here, 0], self.spans[here, 1])
            for position, record in zip(here.tolist(), records, strict=True):
                data = record[_HEAD:-_TAIL]
                try:
                    if _masked_crc(data) != int.from_bytes(record[-_TAIL:], "little"):
                        raise ValueError("it is damaged: its data do not match their checksum")
                    sample = self.kinds.sample(data)
                except ValueError as error:
                    refuse(BadSample(position, self.name(position), str(error), data=bytes(data)))
                else:
                    yield position, sample

    def name(self, position: int) -> str:
        """Return the file and the number of the record in it."""
        return f"{self.files[int(self.file[position])].where}: record {int(self.number[position])}"
