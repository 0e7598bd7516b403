"""Decodes the chunks of Zarr arrays that others wrote.

The usual codecs of version 3, and all of version 2, are those of numcodecs; zarr-python decodes the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import crc32c
import numcodecs
import numcodecs.blosc
import numpy as np
from numcodecs.registry import get_codec
from numpy.typing import NDArray

from streamloader.errors import CorruptError, FormatError
from streamloader.format.codecs import CRC_BYTES, check_frame, has_zstd_size
from streamloader.format.manifest import MAX_CHUNK_BYTES
from streamloader.format.zarr_metadata import ZarrArray

Decode = Callable[[memoryview], Any]
Configurations = Sequence[tuple[str, Mapping[str, Any]]]  # the names and options of codecs
# Packages that have codecs which numcodecs and zarr-python do not, by the beginning of the codec's name.
PACKAGES = {
    "imagecodecs": "imagecodecs",
    "pcodec": "numcodecs[pcodec]",
    "zfpy": "numcodecs[zfpy]",
    "msgpack2": "numcodecs[msgpack]",
    "grib": "kerchunk",
    "fits": "kerchunk",
    "record_member": "kerchunk",
    "zstd_hdf5": "kerchunk",
    "ffmpeg": "numcodecs-video",
    "jpeg2k": "imagecodecs",
    "gribscan": "gribscan",
    "zarrs": "zarrs",
}


# Codecs that decompress into given memory, and fail if the bytes are fewer; those of lz4 and gzip do not.
_INTO = ("blosc", "zstd", "zlib", "bz2", "lzma", "crc32c")
# Codecs whose chunks are hardly larger than what they decode to; others are filters and encodings of text.
_COMPRESSORS = (*_INTO, "gzip", "lz4", "adler32", "crc32", "fletcher32", "shuffle")


class _Checksum:
    """The codec `crc32c` of version 3, with the interface of numcodecs."""

    codec_id = "crc32c"

    def decode(self, data: Any, out: NDArray[np.uint8] | None = None) -> Any:
        """Return the bytes without their checksum, copied to `out` if given. Raises `CorruptError`."""
        view = memoryview(data).cast("B")
        body, stored = view[:-CRC_BYTES], int.from_bytes(view[-CRC_BYTES:], "little")
        if len(view) < CRC_BYTES or crc32c.crc32c(body) != stored:
            raise CorruptError("its checksum does not match")
        if out is not None:
            out[:] = np.frombuffer(body, np.uint8)
        return body


@dataclass(frozen=True, eq=False)
class ChunkCodec:
    """Decodes chunks of one shape to arrays of `dtype`, which may have another byte order than the machine.

    `steps`: codecs of numcodecs, in the order in which they decode. `layout`: the axes of the array as they are stored,
    slowest first. `other` decodes a chunk by zarr-python instead.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    steps: Sequence[Any] = ()
    layout: tuple[int, ...] = ()
    other: Decode | None = None

    @property
    def expands(self) -> bool:
        """Whether chunks may be much larger than what they decode to."""
        return self.other is not None or any(step.codec_id not in _COMPRESSORS for step in self.steps)

    @property
    def plain(self) -> bool:
        """Whether `decode` has an argument `out`: the last step decompresses to the bytes of an array in memory."""
        natural = self.dtype.isnative and self.layout == tuple(range(len(self.shape))) and self.other is None
        return natural and bool(self.steps) and self.steps[-1].codec_id in _INTO

    def decode(self, body: memoryview, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the chunk as an array of `shape`, decoded into C-contiguous `out` if given, which requires `plain`.

        Raises `CorruptError` for bytes that do not decode to it.
        """
        try:
            if self.other is not None:
                return np.asarray(self.other(body)).reshape(self.shape)
            data: Any = body
            for number, step in enumerate(self.steps):
                last = number == len(self.steps) - 1
                _check_size(step, data, prod(self.shape) * self.dtype.itemsize if last else None, prod(self.shape))
                data = (
                    step.decode(data, out.reshape(-1).view(np.uint8)) if last and out is not None else step.decode(data)
                )
            if out is not None:
                return out
            flat = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
            if self.dtype.kind != "O":
                flat = np.ascontiguousarray(flat).reshape(-1).view(np.uint8).view(self.dtype)
            return flat.reshape([self.shape[axis] for axis in self.layout]).transpose(np.argsort(self.layout))
        except CorruptError:
            raise
        except Exception as error:  # numcodecs and zarr-python raise many kinds for damaged bytes
            raise CorruptError(f"it does not decode ({type(error).__name__}: {error})") from error


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
    for name, configuration in codecs:
        if name == "transpose" and isinstance(configuration.get("order"), list):
            layout = tuple(layout[axis] for axis in configuration["order"])
        elif name == "bytes":
            dtype = dtype.newbyteorder(">" if configuration.get("endian") == "big" else "<")
        elif name == "crc32c":
            steps.append(_Checksum())
        elif name in ("blosc", "zstd", "gzip", "vlen-utf8", "vlen-bytes"):
            steps.append(_numcodec({"id": name}, array.path))
        elif "pickle" in name:
            raise _pickled(array.path)
        else:
            return ChunkCodec(shape, dtype.newbyteorder("="), other=_zarr_python(array, codecs, shape))
    return ChunkCodec(shape, dtype, steps[::-1], layout)


def _numcodec(configuration: Any, path: str) -> Any:
    """Return a codec of numcodecs. Raises `FormatError` for an unknown one."""
    name = configuration.get("id") if isinstance(configuration, Mapping) else configuration
    if "pickle" in str(name):
        raise _pickled(path)
    try:
        return get_codec(dict(configuration))
    except Exception as error:  # an unknown name or invalid options, of any codec
        raise _unknown(str(name), path, error) from error


def _pickled(path: str) -> FormatError:
    return FormatError(f"the array {path!r} holds pickled objects, which are never read", "store plain values")


def _unknown(name: str, path: str, error: Exception) -> FormatError:
    short = name.removeprefix("numcodecs.")
    package = next((package for start, package in PACKAGES.items() if short.startswith(start)), None)
    remedy = f"install {package}" if package else "install the package that has it, or write the array again"
    return FormatError(f"the array {path!r} has the codec {name!r}, which cannot be used here ({error})", remedy)


def _configurations(codecs: Any, path: str) -> Configurations:
    try:
        items: list[Any] = [{"name": item} if isinstance(item, str) else item for item in codecs]
        pairs: Configurations = [(item["name"], item.get("configuration") or {}) for item in items]
        if pairs and all(isinstance(name, str) and isinstance(options, Mapping) for name, options in pairs):
            return pairs
    except (TypeError, KeyError, AttributeError):
        pass
    raise FormatError(f"the codecs of the array {path!r} are damaged: {codecs!r:.80}", "write the array again")


def index_codec(array: ZarrArray) -> ChunkCodec:
    """Return the codec of the index of an array's shards: (offset, size) of each inner chunk, u64."""
    assert array.sharding is not None
    grid = tuple(outer // inner for outer, inner in zip(array.stored_chunks, array.chunks, strict=True))
    codecs = _configurations(array.sharding.get("index_codecs"), array.path)
    if any(name not in ("bytes", "crc32c") for name, _ in codecs):
        raise FormatError(f"the index of the shards of {array.path!r} is compressed", "write the array again")
    return _codec_of_version_3(array, codecs, (*grid, 2), np.dtype("uint64"))


def index_bytes(array: ZarrArray) -> int:
    """Return the stored bytes of the index of a shard."""
    assert array.sharding is not None
    sums = [name for name, _ in _configurations(array.sharding.get("index_codecs"), array.path) if name == "crc32c"]
    return 16 * prod(array.stored_chunks) // prod(array.chunks) + CRC_BYTES * len(sums)


def _check_size(codec: Any, data: Any, size: int | None, items: int) -> None:
    """Raise `CorruptError` if the header of a frame has another size than `size`, or than the frame has.

    blosc would read beyond the buffer, and other codecs would allocate memory without a limit: those of values of
    variable length for the number that the chunk declares, at most `items`.
    """
    if codec.codec_id.startswith("vlen"):
        head = bytes(memoryview(data).cast("B")[:4])
        declared = int.from_bytes(head, "little")
        if len(head) < 4 or declared > items:
            raise CorruptError(f"a chunk of {items} items declares {declared}")
    if codec.codec_id not in ("blosc", "zstd"):
        return
    frame = memoryview(data).cast("B")
    if codec.codec_id == "blosc" or has_zstd_size(frame):
        check_frame(codec.codec_id, frame, size or 0, MAX_CHUNK_BYTES if size is None else size)


def _zarr_python(array: ZarrArray, codecs: Configurations, shape: tuple[int, ...]) -> Decode:
    """Return a function that decodes a chunk by zarr-python's codecs."""
    from zarr.core.array import create_codec_pipeline
    from zarr.core.array_spec import ArrayConfig
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.metadata import ArrayV3Metadata

    document = {
        **array.document,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shape)}},
        "codecs": [{"name": name, "configuration": dict(configuration)} for name, configuration in codecs],
    }
    document.pop("consolidated_metadata", None)
    prototype = default_buffer_prototype()
    try:
        metadata = ArrayV3Metadata.from_dict(document)
        pipeline = create_codec_pipeline(metadata)
        spec = metadata.get_chunk_spec((0,) * len(shape), ArrayConfig.from_dict({}), prototype)
    except Exception as error:  # zarr-python raises several kinds
        known = ("transpose", "bytes", "crc32c", "blosc", "zstd", "gzip")
        name = next(name for name, _ in codecs if name not in known)
        raise _unknown(name, array.path, error) from error

    def decode(body: memoryview) -> Any:
        (chunk,) = asyncio.run(pipeline.decode([(prototype.buffer.from_bytes(bytes(body)), spec)]))
        return None if chunk is None else chunk.as_numpy_array()

    return decode
