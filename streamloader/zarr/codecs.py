"""Decodes the chunks of Zarr arrays that others wrote.

The codecs are those of numcodecs, in version 3 under their own names or as `numcodecs.*`. No decoder of a stored chunk
returns more bytes than the metadata says: a few bytes can decompress to gigabytes.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import numcodecs
import numcodecs.blosc
import numpy as np
from numcodecs.astype import AsType
from numcodecs.registry import get_codec
from numpy.typing import NDArray

from streamloader.errors import CorruptError, FormatError
from streamloader.format.codecs import ABSENT, CRC_BYTES, check_frame, has_zstd_size, index_size, parse_index
from streamloader.format.manifest import MAX_CHUNK_BYTES
from streamloader.options import MIB
from streamloader.zarr.metadata import ZarrArray

Configurations = Sequence[tuple[str, Mapping[str, Any]]]  # the names and options of codecs
Index = tuple[NDArray[np.int64], NDArray[np.int64]]  # offset and size of each inner chunk of a shard; -1 if missing
# Packages that have codecs which numcodecs does not, by the beginning of the codec's name.
PACKAGES = {
    **dict.fromkeys(("imagecodecs", "jpeg2k"), "imagecodecs"),
    **dict.fromkeys(("grib", "fits", "record_member", "zstd_hdf5"), "kerchunk"),
    **{"pcodec": "numcodecs[pcodec]", "zfpy": "numcodecs[zfpy]", "ffmpeg": "numcodecs-video"},
    **{"gribscan": "gribscan", "zarrs": "zarrs"},
}

# Streaming decompressors, which stop at a number of bytes.
_STREAMS: dict[str, Callable[[Any], Any]] = {
    "zlib": lambda _: zlib.decompressobj(),
    "gzip": lambda _: zlib.decompressobj(16 + zlib.MAX_WBITS),
    "bz2": lambda _: bz2.BZ2Decompressor(),
    "lzma": lambda step: lzma.LZMADecompressor(
        step.format, None, step.filters if step.format == lzma.FORMAT_RAW else None
    ),
}
_FEED = 32 << 10  # stored bytes at a time: these return copies of what follows a stream
_FRAMES = ("blosc", "zstd", "lz4")  # their headers state the decoded size
_INTO = (*_FRAMES, *_STREAMS, "crc32c")  # codecs that decode into given memory
# The bytes that codecs add to values whose size they keep.
_CHECKSUMS = ("crc32c", "crc32", "adler32", "fletcher32", "jenkins_lookup3")
_ADDED = {"shuffle": 0, "bitround": 0, **dict.fromkeys(_CHECKSUMS, CRC_BYTES)}
# Codecs whose chunks are hardly larger than what they decode to; others are filters and encodings of text.
_COMPRESSORS = (*_INTO, *_ADDED)
_FILTERS = ("delta", "fixedscaleoffset", "quantize", "bitround", "astype", "packbits", "categorize")
_OBJECTS = ("json2", "msgpack2", "vlen-array")  # they decode to any number of Python objects
_NUMCODECS = "numcodecs."  # begins the names of its codecs in version 3
# Codecs of version 3 whose options do not matter for decoding, and differ from those of numcodecs.
_OWN = ("crc32c", "blosc", "zstd", "gzip", "vlen-utf8", "vlen-bytes")


@dataclass(frozen=True, eq=False)
class ChunkCodec:
    """Decodes chunks of one shape to arrays of `dtype`, which may have another byte order than the machine.

    `steps`: codecs of numcodecs, in the order in which they decode. `layout`: the axes of the array as they are stored,
    slowest first.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    steps: Sequence[Any] = ()
    layout: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether `decode` has an argument `out`: the last step decompresses to the bytes of an array in memory."""
        natural = self.dtype.isnative and self.layout == tuple(range(len(self.shape)))
        return natural and bool(self.steps) and self.steps[-1].codec_id in _INTO

    @cached_property
    def most_stored(self) -> int:
        """The most bytes of a stored chunk: compressed chunks may be slightly larger than decoded ones.

        Filters and encodings may have stored up to four times as many.
        """
        if self.dtype.kind == "O":
            return MAX_CHUNK_BYTES
        size = prod(self.shape) * self.dtype.itemsize
        most = size + size // 64 + MIB // 4
        return 4 * most if any(step.codec_id not in _COMPRESSORS for step in self.steps) else most

    @cached_property
    def _sizes(self) -> list[int | None]:
        """The bytes before each step, and those after the last one; None where they are unknown."""
        sizes = [None if self.dtype.kind == "O" else prod(self.shape) * self.dtype.itemsize]
        for step in reversed(self.steps):
            sizes.insert(0, None if sizes[0] is None else _encoded_size(step, sizes[0]))
        return sizes

    def decode(self, body: memoryview, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the chunk as an array of `shape`, decoded into C-contiguous `out` if given, which requires `plain`.

        Raises `CorruptError` for bytes that do not decode to it.
        """
        try:
            data: Any = body
            for number, step in enumerate(self.steps):
                _check_size(data, self._sizes[number])
                into = out.reshape(-1).view(np.uint8) if out is not None and number == len(self.steps) - 1 else None
                data = self._decode_step(step, data, self._sizes[number + 1], into)
            _check_size(data, self._sizes[-1])
            if out is not None:
                return out
            flat = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
            if self.dtype.kind != "O":
                flat = np.ascontiguousarray(flat).reshape(-1).view(np.uint8).view(self.dtype)
            return flat.reshape([self.shape[axis] for axis in self.layout]).transpose(np.argsort(self.layout))
        except CorruptError:
            raise
        except Exception as error:  # numcodecs raises many kinds for damaged bytes
            raise CorruptError(f"it does not decode ({type(error).__name__}: {error})") from error

    def _decode_step(self, step: Any, data: Any, size: int | None, out: NDArray[np.uint8] | None) -> Any:
        """Return what a step decodes, `size` bytes if that is known, into `out` if given. Raises `CorruptError`."""
        name, stored = step.codec_id, memoryview(data)
        if name in _STREAMS:
            out = np.empty(self.most_stored if size is None else size, np.uint8) if out is None else out
            return out[: _decompress(partial(_STREAMS[name], step), stored.cast("B"), out, name in ("zlib", "bz2"))]
        if name in _FRAMES:
            found = _frame_size(name, stored.cast("B"), size, self.most_stored)
            out = np.empty(found, np.uint8) if out is None else out
        elif name.startswith("vlen"):  # it allocates as many items as the chunk declares
            declared, items = int.from_bytes(stored.cast("B")[:4], "little"), prod(self.shape)
            if declared > items:
                raise CorruptError(f"a chunk of {items} items declares {declared}")
        if out is None:
            return step.decode(data)
        step.decode(data, out)
        return out


def _check_size(data: Any, size: int | None) -> None:
    found = memoryview(data).nbytes
    if size is not None and found != size:
        raise CorruptError(f"it decodes to {found} bytes, expected {size}")


def _encoded_size(step: Any, size: int) -> int | None:
    """Return the bytes that a step decodes to `size` bytes; None for those of compressors and unknown codecs."""
    if step.codec_id in _ADDED:
        return size + _ADDED[step.codec_id]
    if step.codec_id not in _FILTERS:
        return None
    after, before = _dtypes(step, np.dtype(np.bool_))
    return 1 + -(-size // 8) if step.codec_id == "packbits" else size // after.itemsize * before.itemsize


def _dtypes(step: Any, default: np.dtype[Any]) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the dtypes of the values that a filter returns and stores."""
    after = np.dtype(getattr(step, "decode_dtype", None) or getattr(step, "dtype", default))
    return after, np.dtype(getattr(step, "encode_dtype", None) or getattr(step, "astype", after))


def _decompress(start: Callable[[], Any], data: memoryview, out: NDArray[np.uint8], ignores: bool) -> int:
    """Decompress the streams in `data` into `out`, and return the bytes. Raises `CorruptError` if they do not fit.

    `ignores`: what follows a stream and gives no bytes is ignored, as numcodecs does.
    """
    stream, at, before = None, 0, 0
    for first in range(0, len(data), _FEED):
        rest = bytes(data[first : first + _FEED])
        while rest := rest if stream or not at else rest.lstrip(b"\0"):  # zeros may pad a stream
            if stream is None:
                stream, before = start(), at
            try:
                part = stream.decompress(rest, len(out) - at + 1)
            except (OSError, zlib.error):
                if ignores and at == before > 0:
                    return at
                raise
            if at + len(part) > len(out):
                raise CorruptError(f"it decompresses to more than {len(out)} bytes")
            out[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
            rest, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
    if stream and not (ignores and at == before > 0):
        raise CorruptError("it is cut off")
    return at


def _frame_size(name: str, frame: memoryview, size: int | None, most: int) -> int:
    """Return the decoded size of a frame. Raises `CorruptError` unless its header has `size`, or up to `most` if None.

    blosc would read beyond the buffer, and other codecs would allocate memory without a limit.
    """
    least, most = (0, most) if size is None else (size, size)
    if name == "zstd" and size is not None and not has_zstd_size(frame):
        return size  # it is decompressed into memory of this size
    if name != "lz4":
        return check_frame(name, frame, least, most)
    found = int.from_bytes(frame[:4], "little")
    if not least <= found <= most:
        raise CorruptError(f"the lz4 frame of {frame.nbytes} bytes claims {found}, expected {most}")
    return found


class ShardIndex:
    """The index of each shard of an array: `nbytes` at the end of the object if `is_last`, else at the beginning.

    `grid`: the number of inner chunks along each axis. Raises `FormatError` for one that is compressed.
    """

    def __init__(self, array: ZarrArray, sharding: Mapping[str, Any]) -> None:
        codecs = _configurations(sharding.get("index_codecs"), array.path)
        if any(name not in ("bytes", "crc32c") for name, _ in codecs):
            raise FormatError(f"the index of the shards of {array.path!r} is compressed", "write the array again")
        self.grid = tuple(outer // inner for outer, inner in zip(array.stored_chunks, array.chunks, strict=True))
        self._checksums = sum(name == "crc32c" for name, _ in codecs)
        self._dtype = ">u8" if dict(codecs).get("bytes", {}).get("endian") == "big" else "<u8"
        self.nbytes = index_size(prod(self.grid), self._checksums)
        self.is_last = sharding.get("index_location", "end") == "end"

    def parse(self, data: memoryview) -> Index:
        """Return the offset and the size of each inner chunk. Raises `CorruptError`."""
        entries = parse_index(data, prod(self.grid), self._dtype, self._checksums)
        empty = entries[:, 0] == ABSENT
        if (entries[~empty] >= 2**62).any():
            raise CorruptError("an offset is too large")
        offsets, sizes = (np.where(empty, -1, entries[:, i].astype(np.int64)) for i in (0, 1))
        return offsets, sizes


class _Shard:
    """The codec `sharding_indexed` inside another one, with the interface of numcodecs."""

    codec_id = "sharding_indexed"

    def __init__(self, outer: ZarrArray, configuration: Mapping[str, Any], shape: list[int]) -> None:
        grid = {"name": "regular", "configuration": {"chunk_shape": shape}}
        codecs = [{"name": self.codec_id, "configuration": configuration}]
        document = {**outer.document, "shape": shape, "chunk_grid": grid, "codecs": codecs}
        self._array = array = ZarrArray(outer.path, document, ())
        try:
            self._codec, self._index = chunk_codec(array), ShardIndex(array, configuration)
        except RecursionError:
            raise FormatError(f"the shards of {outer.path!r} are nested too deep", "write the array again") from None

    def decode(self, data: Any) -> NDArray[Any]:
        """Return the elements of all chunks. Raises `CorruptError`."""
        array, index, body = self._array, self._index, memoryview(data).cast("B")
        stored = body[max(0, len(body) - index.nbytes) :] if index.is_last else body[: index.nbytes]
        offsets, sizes = index.parse(stored)
        out = np.full(array.shape, array.fill, array.values.dtype.newbyteorder("="))
        found = zip(np.ndindex(*index.grid), offsets.tolist(), sizes.tolist(), strict=True)
        for place, offset, count in found:
            if offset >= 0:
                box = tuple(slice(at * n, at * n + n) for at, n in zip(place, array.chunks, strict=True))
                out[box] = self._codec.decode(body[offset : offset + count])
        return out


def chunk_codec(array: ZarrArray) -> ChunkCodec:
    """Return the codec of an array's chunks, of its inner chunks if it has shards.

    Raises `FormatError` for an unknown codec, with its name and the package that has it, and for invalid metadata.
    """
    numcodecs.blosc.use_threads = False  # one lock for all threads of the process; see `format/codecs.py`
    if array.version == 2:
        compressor, filters = array.document.get("compressor"), array.document.get("filters") or []
        if not isinstance(filters, list):
            raise FormatError(f"the filters of the array {array.path!r} are damaged: {filters!r:.80}", "write it again")
        steps = [_numcodec(item, array.path) for item in [*filters, *([compressor] if compressor else [])]]
        layout = tuple(range(len(array.shape)))
        layout = layout[::-1] if array.document.get("order") == "F" else layout
        return ChunkCodec(array.chunks, array.values.dtype, steps[::-1], layout)
    codecs = array.document.get("codecs") if array.sharding is None else array.sharding.get("codecs")
    return _codec_of_version_3(array, _configurations(codecs, array.path), array.chunks, array.values.dtype)


def _codec_of_version_3(array: ZarrArray, codecs: Configurations, shape: tuple[int, ...], dtype: Any) -> ChunkCodec:
    layout = tuple(range(len(shape)))
    steps: list[Any] = []
    encoded = dtype  # of the values that the filters so far store
    for name, configuration in codecs:
        if name == "transpose" and isinstance(configuration.get("order"), list):
            layout = tuple(layout[axis] for axis in configuration["order"])
        elif name == "bytes":
            order = ">" if configuration.get("endian") == "big" else "<"
            if not steps:
                dtype = dtype.newbyteorder(order)
            elif order == ">":  # the filters store values of the other order
                steps.append(AsType(encoded.newbyteorder(">"), encoded.newbyteorder("<")))
        elif name == "sharding_indexed" and not steps:
            steps.append(_Shard(array, configuration, [shape[axis] for axis in layout]))
            dtype = dtype.newbyteorder("=")
        else:
            default = {"elementsize": encoded.itemsize} if name.removeprefix(_NUMCODECS) == "shuffle" else {}
            options = {} if name in _OWN else {**default, **configuration}
            step = _numcodec({**options, "id": name}, array.path)
            if step.codec_id in _FILTERS:
                after, encoded = _dtypes(step, encoded)
                dtype = dtype if steps else dtype.newbyteorder(after.byteorder)
            steps.append(step)
    return ChunkCodec(shape, dtype, steps[::-1], layout)


def _numcodec(configuration: Any, path: str) -> Any:
    """Return a codec of numcodecs. Raises `FormatError` for an unknown one, and for one that decodes to objects."""
    name = str(configuration.get("id") if isinstance(configuration, Mapping) else configuration)
    if "pickle" in name:
        raise FormatError(f"the array {path!r} holds pickled objects, which are never read", "store plain values")
    if name.removeprefix(_NUMCODECS) in _OBJECTS:
        raise FormatError(f"the array {path!r} has the codec {name!r}, for objects", "leave it out of the fields")
    try:
        step = get_codec({**configuration, "id": name.removeprefix(_NUMCODECS)})
    except Exception as error:  # an unknown name or invalid options, of any codec
        short = name.removeprefix(_NUMCODECS)
        package = next((package for start, package in PACKAGES.items() if short.startswith(start)), None)
        remedy = f"install {package}" if package else "install the package that has it, or write the array again"
        problem = f"the array {path!r} has the codec {name!r}, which cannot be used here ({error})"
        raise FormatError(problem, remedy) from error
    if step.codec_id == "shuffle" and (type(step.elementsize) is not int or step.elementsize < 1):
        problem = f"the codec {name!r} of the array {path!r} has the element size {step.elementsize!r:.20}"
        raise FormatError(problem, "write the array again")
    return step


def _configurations(codecs: Any, path: str) -> Configurations:
    try:
        items: list[Any] = [{"name": item} if isinstance(item, str) else item for item in codecs]
        pairs: Configurations = [(item["name"], item.get("configuration") or {}) for item in items]
        if pairs and all(isinstance(name, str) and isinstance(options, Mapping) for name, options in pairs):
            return pairs
    except (TypeError, KeyError, AttributeError):
        pass
    raise FormatError(f"the codecs of the array {path!r} are damaged: {codecs!r:.80}", "write the array again")
