"""TFRecord files of tf.train.Example, read without TensorFlow. See formats/tfrecord/MAPPING.md."""

import re
from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import AGAIN, MAX_DECODED, RowSource, check_decoded, damaged, spread_rows
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat
from streamloader.conversion.sources.files import Listing, field_names, require
from streamloader.conversion.sources.ranged_io import READ_THREADS, read_spans
from streamloader.conversion.sources.records import PROBED, RecordFile, RecordFragment, cut_files, open_records
from streamloader.conversion.sources.tar import Reader, open_reader
from streamloader.errors import SourceError
from streamloader.storage import ObjectInfo, Store
from streamloader.storage.optional import need
from streamloader.storage.process import run_all

_PACKAGE = "streamloader"
# TensorFlow's example.proto: messages and their fields, numbered from 1. A map is a list of entries.
_MESSAGES = {
    "BytesList": {"value": "*bytes"},
    "FloatList": {"value": "*float"},
    "Int64List": {"value": "*int64"},
    "Feature": {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"},
    "Entry": {"key": "string", "value": "Feature"},
    "Features": {"feature": "*Entry"},
    "Example": {"features": "Features", "feature_lists": "bytes"},  # the second only in a SequenceExample
}


Feature = NDArray[Any] | bytes | list[bytes] | None


@cache
def _example_class() -> Any:
    """Return protobuf's class for tf.train.Example. Raises `UsageError` without protobuf."""
    descriptors = need("google.protobuf.descriptor_pb2")
    field = descriptors.FieldDescriptorProto
    file = descriptors.FileDescriptorProto(name="example.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (key, kind) in enumerate(fields.items(), 1):
            label = field.LABEL_REPEATED if kind.startswith("*") else field.LABEL_OPTIONAL
            added = message.field.add(name=key, number=number, label=label)
            if kind.lstrip("*") in _MESSAGES:
                added.type, added.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind.lstrip('*')}"
            else:
                added.type = field.Type.Value(f"TYPE_{kind.lstrip('*').upper()}")
            if name == "Feature":
                added.oneof_index = 0
        if name == "Feature":
            message.oneof_decl.add(name="kind")
    pool = need("google.protobuf.descriptor_pool").DescriptorPool()
    pool.Add(file)
    return need("google.protobuf.message_factory").GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Example"))


def parse_example(data: memoryview) -> dict[str, Feature]:
    """Return the features by name: int64 and float32 arrays of one axis, bytes, lists of several bytes, or None.

    Raises ValueError if the data are not a tf.train.Example, `UsageError` without protobuf.
    """
    try:
        example = _example_class().FromString(data)
    except need("google.protobuf.message").DecodeError as error:
        raise ValueError(f"it is not a tf.train.Example, or damaged: {error}") from None
    if example.feature_lists:
        raise ValueError("it is a tf.train.SequenceExample, which is not read")
    return {entry.key: _feature(entry.value) for entry in example.features.feature}  # the last of equal keys wins


def _feature(feature: Any) -> Feature:
    kind = feature.WhichOneof("kind")
    values = getattr(feature, kind).value if kind else []
    if kind == "int64_list":
        return np.array(values, np.int64)
    if kind == "float_list":
        return np.array(values, np.float32)
    if len(values) > 1:
        return list(values)
    return values[0] if values else None


# x.tfrecord, x.tfrecords, x.tfrec, x.tfrecord-00000-of-00010, compressed or not
_NAMED = re.compile(r"\.tfrec(ords?)?(-\d+-of-\d+)?(\.(gz|gzip|zlib|z))?\Z", re.IGNORECASE)
_NUMBERED = re.compile(r"-\d+-of-\d+\Z")

_HEAD, _TAIL = 12, 4  # u64 length, u32 checksum of it; data; u32 checksum of the data
_MAX_RECORD = (1 << 31) - 1  # the longest protocol buffer


def open_source(listing: Listing, selection: FieldSelection) -> RowSource:
    """Return the source, with the lengths of all records read; records are in the order of the sorted files.

    Raises `SourceError` for a truncated or damaged file.
    """
    files = require(_files(listing), listing, "tfrecord")
    indexed = run_all(lambda info: _index(listing.store, info, selection.max_decoded), files, READ_THREADS)
    count = sum(file.count for file in indexed)
    probe = cut_files(indexed, decode_record)(spread_rows(count, PROBED))
    scalars, texts = _kinds(probe, selection, listing.url)
    decode = partial(decode_record, scalars=scalars, texts=texts)
    return open_records(listing.url, files, count, cut_files(indexed, decode), selection)


def _matches(listing: Listing) -> bool:
    return any(_NAMED.search(info.path) for info in listing.visible)


def _files(listing: Listing) -> tuple[ObjectInfo, ...]:
    """Return the files with names of TFRecords, else with numbers like theirs, else the file that the user names."""
    files = listing.visible
    named = [info for info in files if _NAMED.search(info.path)]
    named = named or [info for info in files if _NUMBERED.search(info.path)]
    return tuple(named or (() if listing.folder else files))


def _index(store: Store, info: ObjectInfo, limit: int) -> RecordFile:
    """Return the records of a file, which is decompressed if necessary."""
    reader = open_reader(store, info)
    starts = record_starts(reader, limit)
    content = replace(reader.content, size=int(starts[-1]))

    def cut(rows: NDArray[np.int64]) -> Callable[[], Iterator[memoryview]]:
        return partial(read_spans, [(content, starts[rows], starts[rows + 1])])

    return RecordFile(content.where, len(starts) - 1, cut)


def record_starts(reader: Reader, limit: int = MAX_DECODED) -> NDArray[np.int64]:
    """Return the starts of the records of a file, and the end of the last one, from the lengths of the records.

    Raises `SourceError` for a truncated or damaged file, and for a record of a compressed file that is longer than the
    `limit`.
    """
    where = reader.content.where
    starts, at = array("q"), 0
    while head := reader.read(at, at + _HEAD):
        starts.append(at)
        length = int.from_bytes(head[:8], "little") if len(head) == _HEAD else 0
        if len(head) == _HEAD and _masked_crc(head[:8]) != int.from_bytes(head[8:], "little"):
            problem = f"is not a TFRecord file, or damaged: the checksum of the length at byte {at} does not match"
            raise SourceError(f"{where} {problem}", f"{AGAIN}; one that is compressed with zlib is not read")
        if length > _MAX_RECORD:
            raise SourceError(f"{where} has a record of {length} bytes at byte {at}", "an Example ends at 2 GiB")
        if reader.content.compression:
            check_decoded(f"{where} has at byte {at} a record of", length, limit)
        at += _HEAD + length + _TAIL
    starts.append(at)
    size = reader.finish()
    if size != at:
        raise damaged(f"{where} is truncated: it ends at byte {size}, within the record at byte {starts[-2]}")
    return np.frombuffer(starts, np.int64)


def _masked_crc(data: bytes | memoryview) -> int:
    """Return the checksum that TFRecord stores: CRC-32C, rotated right by 15 bits, plus a constant."""
    crc = crc32c.crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def decode_record(record: memoryview, scalars: Collection[str] = (), texts: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of a record by key; lists of one number in `scalars` become numbers, bytes in `texts` text.

    Raises ValueError for a wrong checksum, for data that are not an Example, and for text that is not UTF-8.
    """
    data = record[_HEAD:-_TAIL]
    if _masked_crc(data) != int.from_bytes(record[-_TAIL:], "little"):
        raise ValueError("it is damaged: its data do not match their checksum")
    values: dict[str, Any] = dict(parse_example(data))
    for key, value in values.items():
        if key in scalars and isinstance(value, np.ndarray) and value.size == 1:
            values[key] = value.reshape(())
        if key in texts and isinstance(value, bytes):
            try:
                values[key] = value.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"the feature {key!r} is not UTF-8: {error}") from None
    return values


def _kinds(probe: RecordFragment, selection: FieldSelection, url: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the features that are scalars, and those that are texts, by the selected types, else by the samples."""
    seen: dict[str, set[bool]] = {}
    for _, _, sample in probe(lambda _: None):
        for key, value in sample.items():
            seen.setdefault(key, set()).add(isinstance(value, np.ndarray) and value.size == 1)
    selected = {key: selection.fields.get(name) for key, name in field_names(list(seen), url).items()}
    scalars = {key for key, kind in selected.items() if (kind.fixed and not kind.shape if kind else all(seen[key]))}
    return frozenset(scalars), frozenset(key for key, kind in selected.items() if kind and kind.kind == "text")


FORMATS = (SourceFormat("tfrecord", _matches, open_source, nullable=True),)
