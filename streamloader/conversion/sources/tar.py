"""WebDataset tars: files with the same name up to its first dot are one sample. See formats/webdataset/MAPPING.md.

Only headers are read to find the members. Nothing is extracted; links and paths are only text.
"""

import io
import re
import tarfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import ranged_io
from streamloader.conversion.sources.base import BadSample, OnBad, RowSource, check_decoded, damaged, split_rows
from streamloader.conversion.sources.fields import ANY, FieldSelection, SourceFormat
from streamloader.conversion.sources.files import Listing, field_names, require
from streamloader.conversion.sources.media import IMAGE_ENCODINGS, image_bytes
from streamloader.conversion.sources.ranged_io import Content, Range, Stream, open_content, read_range, read_spans
from streamloader.conversion.sources.records import RecordFragment, Sample, SampleFields, parse_number
from streamloader.errors import FieldError, SourceError
from streamloader.format.manifest import Field
from streamloader.storage import ObjectInfo, Store
from streamloader.storage.process import run_all

_BLOCK = tarfile.BLOCKSIZE
_MAX_NAME = 1 << 20  # bytes: a hostile header could declare a name of gigabytes
_NAMING = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE)
# links, folders and devices: no data follow, whatever size their header declares
_WITHOUT_DATA = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)
_PAX_RECORD = re.compile(rb"(\d{1,11}) ([^=]*)=")  # <length> <key>=<value>\n
_NEAR = 512 << 10  # headers that are closer share a request, which is cheaper than a request for each
_WIDE, _NARROW = 4 << 20, 16 << 10  # bytes of a request

INTEGERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})  # as in webdataset's decoder
TEXTS = frozenset({"txt", "text", "transcript", "json", "jsn"})
# webdataset's rules: folders belong to the key, names like __this__ are metadata
_KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)\Z", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")


class HeaderReader:
    """Reads short ascending ranges of a file: by 4 MiB while they are close to each other, else by 16 KiB."""

    def __init__(self, content: Content) -> None:
        self.content, self.size = content, content.info.size
        self.first, self.data = 0, memoryview(b"")
        self.count = 0  # of the reads from `data`

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), fewer at the tar's end."""
        stop, size = min(stop, self.size), stop - start
        if stop <= start:
            return b""
        if not self.first <= start or stop > self.first + len(self.data):
            near = self.count and (start - self.first) / self.count < _NEAR
            end = start + max(size, _WIDE if near else _NARROW)
            self.first, self.count = start, 0
            self.data = read_range(self.content.store, Range(self.content.info.path, start, min(end, self.size)))
        self.count += 1
        return bytes(self.data[start - self.first : stop - self.first])

    def finish(self) -> int:
        """Return the file's size in bytes; data after the last range are not read."""
        return self.size


Reader = HeaderReader | Stream  # a Stream for the decompressed bytes of a compressed file


def open_reader(store: Store, info: ObjectInfo) -> Reader:
    """Return a reader of short ascending ranges of a file, decompressed."""
    content = open_content(store, info)
    return Stream(content) if content.compression else HeaderReader(content)


def members(reader: Reader) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and stop of the regular files of a tar in order; links, folders and devices are skipped.

    Raises `SourceError`, which names the tar, if it is damaged or truncated, or lacks its end marker.
    """
    offset, stop, name, where = 0, 0, "", reader.content.where
    pax: dict[bytes, bytes] = {}  # the records that precede a member's header
    while True:
        block = reader.read(offset, offset + _BLOCK)
        if 0 <= reader.size < stop:
            raise damaged(f"{where} is truncated: its member {name} extends to byte {stop}, it ends at {reader.size}")
        header = _header(block, offset, where, pax)
        if header is None:
            return
        name, start, stop = header.name, offset + _BLOCK, offset + _BLOCK + header.size
        offset = start + -(-header.size // _BLOCK) * _BLOCK
        if header.type == tarfile.XHDTYPE:
            pax = {b"path": pax.get(b"path", b""), **dict(_pax_records(reader.read(start, stop), where))}
        elif header.type == tarfile.GNUTYPE_LONGNAME:
            pax[b"path"] = reader.read(start, stop).rstrip(b"\0")
        else:
            if header.isreg():
                if header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith(b"GNU.sparse.") for key in pax):
                    raise SourceError(f"{where} holds {name} as a sparse file", "make the tar without --sparse")
                yield pax.get(b"path", b"").decode("utf-8", "replace") or name, start, stop
            pax = {}


def _header(block: bytes, offset: int, where: str, pax: Mapping[bytes, bytes]) -> tarfile.TarInfo | None:
    """Return the header, None for the end marker. A size in the `pax` records replaces the size of a member."""
    if len(block) < _BLOCK:
        raise damaged(f"{where} is truncated: it ends at byte {offset + len(block)} without the end mark")
    if not any(block):
        return None
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
        if header.type not in _NAMING:
            header.size = int(pax.get(b"size", header.size))
    except (tarfile.HeaderError, ValueError) as error:
        raise damaged(f"{where} is not a tar, or damaged, at byte {offset} ({error})") from None
    if header.size < 0 or (header.type in _NAMING and header.size > _MAX_NAME):
        raise damaged(f"{where} has a member of {header.size} bytes at byte {offset}")
    if header.type in _WITHOUT_DATA:
        header.size = 0
    return header


def _pax_records(data: bytes, where: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the key and the value of each record of a pax header."""
    at = 0
    while at < len(data):
        record = _PAX_RECORD.match(data, at)
        stop = at + int(record[1]) if record else 0
        if record is None or not record.end() < stop <= len(data):
            raise damaged(f"{where} has a damaged pax header")
        yield record[2], data[record.end() : stop - 1]
        at = stop


def decoder_of(suffix: str) -> tuple[Field | None, Callable[[bytes], Any]]:
    """Return the field of a suffix (`jpg`, `seg.png`, ...), None for arrays, and the function that decodes a member.

    The function raises ValueError for a member whose content does not match its suffix.
    """
    last = suffix.rpartition(".")[2]
    if last in IMAGE_ENCODINGS:
        return Field("bytes", encoding=IMAGE_ENCODINGS[last]), image_bytes
    if last in INTEGERS:
        return Field("tensor", "int64"), partial(parse_number, np.int64)
    if last in TEXTS:
        return Field("text"), bytes.decode
    if last == "npy":
        return None, _load_npy
    return Field("bytes", encoding=last if last.isalnum() and last.isascii() else ""), bytes


def _load_npy(data: bytes) -> NDArray[Any]:
    """Return the array of an .npy. Raises ValueError for any other data, and for pickled objects."""
    try:
        array: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    except Exception as error:  # numpy parses the header as Python, which may raise any error
        raise ValueError(f"it is not an .npy that can be read: {str(error) or type(error).__name__}") from error


@dataclass(frozen=True, eq=False)
class TarIndex:
    """The samples of a tar: `spans[n, s]` are (start, stop) of the header and data of sample n's s-th suffix."""

    content: Content
    suffixes: tuple[str, ...]
    spans: NDArray[np.int64]
    first_key: str
    passed_over: int


def open_source(listing: Listing, selection: FieldSelection) -> RowSource:
    """Return the source, with the headers of all tars read; samples are in the order of the sorted tars.

    Raises `SourceError` for a truncated tar, for samples with different suffixes, and for a key that a tar has twice.
    """
    tars = require(listing.of_inner("tar"), listing, "tar")
    limit = selection.max_decoded
    indexes = run_all(lambda info: index_tar(listing.store, info, limit), tars, ranged_io.READ_THREADS)
    filled = [index for index in indexes if len(index.spans)]
    if not filled:
        raise SourceError(f"the tars of {listing.url} hold no sample", "expected members such as 0001.jpg and 0001.cls")
    first = filled[0]
    for index in filled:
        _check_same(index.suffixes, first.suffixes, index.first_key, index.content.where)
    names = {name: suffix for suffix, name in field_names(list(first.suffixes), listing.url).items()}
    suffixes = selection.pick(names, listing.url)
    kept = [first.suffixes.index(suffix) for suffix in suffixes.values()]
    counts = [len(index.spans) for index in filled]

    def cut(rows: NDArray[np.int64]) -> RecordFragment:
        pieces = [(filled[n].content, filled[n].spans[within][:, kept]) for n, _, within in split_rows(counts, rows)]
        return partial(read_samples, tuple(suffixes.values()), pieces)

    fields: dict[str, Field] = {}
    probe = next(_members([(first.content, first.spans[:1, kept])]))
    for (name, suffix), member in zip(suffixes.items(), probe, strict=True):
        where = f"{first.content.where}: {first.first_key}.{suffix}"
        field, decode = decoder_of(suffix)
        try:
            array: Any = decode(member[_BLOCK:]) if field is None else None
            fields[name] = field or Field("tensor", array.dtype.name, array.shape)
        except FieldError as error:
            if not selection.mapped:
                raise SourceError(f"{where}: {error.problem}", error.remedy) from error
            fields[name] = ANY
        except ValueError as error:
            raise SourceError(f"{where}: {error}", "pickled arrays are refused; write it again") from None
        selected = selection.fields.get(name)
        if selected and selected.kind == "ragged" and fields[name].fixed:
            fields[name] = selected  # the first sample cannot tell that arrays differ in length
    notes = {"members": suffixes, "passed_over": sum(index.passed_over for index in indexes)}
    samples = SampleFields(suffixes, fields, mapped=selection.mapped, max_decoded=limit)
    return RowSource(listing.url, tars, fields, sum(counts), notes, lambda rows: samples.fragment(cut(rows), len(rows)))


def index_tar(store: Store, info: ObjectInfo, limit: int) -> TarIndex:
    """Return the index of a tar. Raises `SourceError`, which names the key."""
    reader = open_reader(store, info)
    where = reader.content.where
    suffixes: tuple[str, ...] = ()
    flat, keys, passed_over = array("q"), dict[str, None](), 0

    def keyed() -> Iterator[tuple[str, str, int, int]]:
        nonlocal passed_over
        for name, start, stop in members(reader):
            parts = _KEY.match(name)
            if parts is None or _META.match(name):
                passed_over += 1
            else:
                yield parts[1], parts[2].lower(), start - _BLOCK, stop

    for key, group in groupby(keyed(), lambda member: member[0]):
        sample: dict[str, tuple[int, int]] = {}
        for _, suffix, start, stop in group:
            if suffix in sample or key in keys:
                problem = f"has two members .{suffix}" if suffix in sample else "occurs again after other samples"
                raise SourceError(f"the key {key!r} {problem} in {where}", "give each sample its own key")
            sample[suffix] = start, stop
            if reader.content.compression:
                size = sum(stop - start - _BLOCK for start, stop in sample.values())
                check_decoded(f"the sample {key!r} of {where} has", size, limit)
        keys[key] = None
        suffixes = suffixes or tuple(sorted(sample))
        _check_same(sample, suffixes, key, where)
        flat.extend(chain.from_iterable(sample[suffix] for suffix in suffixes))
    spans = np.frombuffer(flat, np.int64).reshape(-1, max(len(suffixes), 1), 2)
    return TarIndex(replace(reader.content, size=reader.finish()), suffixes, spans, next(iter(keys), ""), passed_over)


def _check_same(suffixes: Iterable[str], first: Iterable[str], key: str, where: str) -> None:
    if set(suffixes) != set(first):
        actual, expected = (", ".join(f".{suffix}" for suffix in sorted(group)) for group in (suffixes, first))
        problem = f"the sample {key!r} of {where} has {actual}; the first sample has {expected}"
        raise SourceError(problem, "give every sample the same members")


Pieces = Sequence[tuple[Content, NDArray[np.int64]]]  # the spans of some samples of each tar, as in `TarIndex`


def read_samples(suffixes: Sequence[str], pieces: Pieces, on_bad: OnBad) -> Iterator[Sample]:
    """Yield the samples; a sample with a member that does not match its suffix is bad."""
    wheres = chain.from_iterable([content.where] * len(spans) for content, spans in pieces)
    decoders = [(suffix, decoder_of(suffix)[1]) for suffix in suffixes]
    for position, (where, members) in enumerate(zip(wheres, _members(pieces), strict=True)):
        sample: dict[str, Any] = {}
        for (suffix, decode), member in zip(decoders, members, strict=True):
            data = member[_BLOCK:]
            try:
                sample[suffix] = decode(data)
            except ValueError as error:
                on_bad(BadSample(position, f"{where}: {_name_in(member)}", str(error), data=data))
                break
        else:
            yield position, f"{where}: {_name_in(members[0]).removesuffix(f'.{suffixes[0]}')}", sample


def _members(pieces: Pieces) -> Iterator[list[bytes]]:
    """Yield the members of each sample with their headers, in the order of the suffixes."""
    orders = [np.argsort(spans[:, :, 0]) for _, spans in pieces]  # the order of members in the tar
    files: list[ranged_io.Spans] = []
    for (content, spans), order in zip(pieces, orders, strict=True):
        files.append((content, *np.take_along_axis(spans, order[:, :, None], 1).reshape(-1, 2).T))
    samples = zip(*[read_spans(files)] * (orders[0].shape[1] if orders else 1), strict=True)
    positions = chain.from_iterable(np.argsort(order).tolist() for order in orders)
    for by_suffix, stored in zip(positions, samples, strict=True):
        yield [bytes(stored[position]) for position in by_suffix]


def _name_in(member: bytes) -> str:
    """Return the name in a header, of a long name its first 100 bytes."""
    name = member[:100].partition(b"\0")[0]
    if member[257:263] == b"ustar\0" and member[345]:
        name = member[345:500].partition(b"\0")[0] + b"/" + name
    return name.decode("utf-8", "replace")


FORMATS = (SourceFormat("webdataset", lambda listing: bool(listing.of_inner("tar")), open_source),)
