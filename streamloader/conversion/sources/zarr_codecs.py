"""The store and codecs with which zarr-python reads from a `Store`. Imported only to read Zarr, since zarr is large."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.codecs import ShardingCodec, VLenBytesCodec, VLenUTF8Codec
from zarr.core.array import AsyncArray
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import MemoryStore

from streamloader.errors import NotFoundError
from streamloader.storage.store import Store

_DOCUMENTS = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


def open_array(store: Store, documents: Mapping[str, bytes], path: str) -> Any:
    """Return zarr-python's array at `path`, which reads chunks from the store. Raises zarr-python's errors."""
    return _guarded(zarr.open_array(StoreView(store, documents), path=path, mode="r"))


class StoreView(MemoryStore):
    """A read-only view of a store. `documents` are its metadata by key; other documents are hidden.

    As Zarr defines it, an object that does not exist is a chunk that was never written.
    """

    def __init__(self, store: Store, documents: Mapping[str, bytes]) -> None:
        from_bytes = default_buffer_prototype().buffer.from_bytes
        super().__init__({key: from_bytes(data) for key, data in documents.items()}, read_only=True)
        self._objects = store

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return the bytes of an object, or of a range of it; None if it does not exist."""
        if key.rpartition("/")[2] in _DOCUMENTS:
            return await super().get(key, prototype, byte_range)
        data = await asyncio.to_thread(self._read, key, byte_range)
        buffer = (prototype or default_buffer_prototype()).buffer
        return None if data is None else buffer.from_bytes(data)

    def _read(self, key: str, byte_range: ByteRequest | None) -> bytes | None:
        try:
            match byte_range:
                case RangeByteRequest(start, end):
                    return self._objects.get_range(key, start, end)
                case SuffixByteRequest(suffix):
                    return self._objects.get_tail(key, suffix)
                case OffsetByteRequest(offset):
                    return self._objects.get(key)[offset:]
                case _:
                    return self._objects.get(key)
        except NotFoundError:
            return None


def _guarded(array: Any) -> Any:
    """Return the array with a check added to codecs of items of variable size.

    It checks the stored number of items before numcodecs allocates memory: a damaged one would allocate 32 GiB.
    """
    metadata = array.metadata
    if metadata.zarr_format == 2:
        filters: list[Any] = []
        for item in metadata.filters or ():
            filters += [item, Counted(prod(array.chunks))] if item.codec_id.startswith("vlen") else [item]
        changed = replace(metadata, filters=tuple(filters) or None)
    else:
        changed = replace(metadata, codecs=tuple(_checked(metadata.codecs)))
    return zarr.Array(AsyncArray(metadata=changed, store_path=array.store_path))


def _checked(codecs: Iterable[Any]) -> Iterable[Any]:
    for codec in codecs:
        sharding = isinstance(codec, ShardingCodec)
        yield replace(codec, codecs=tuple(_checked(codec.codecs))) if sharding else codec
        if isinstance(codec, VLenBytesCodec | VLenUTF8Codec):
            yield CountedItems()


def _check(head: bytes, limit: int) -> None:
    """Raise ValueError unless the bytes begin with a count of at most `limit` items."""
    count = int.from_bytes(head, "little")
    if len(head) < 4 or count > limit:
        raise ValueError(f"a chunk of {limit} items declares {count}")


@dataclass(frozen=True)
class Counted:
    """The check as a filter of version 2, which is after the codec of the items, and so decodes before it."""

    limit: int
    codec_id: ClassVar[str] = "streamloader-counted"

    def decode(self, buf: Any, _out: Any = None) -> Any:
        """Return the bytes unchanged. Raises ValueError if they declare too many items."""
        _check(bytes(memoryview(buf).cast("B")[:4]), self.limit)
        return buf

    def encode(self, buf: Any) -> Any:
        """Return the bytes unchanged."""
        return buf

    def get_config(self) -> dict[str, Any]:
        """Return the configuration for `from_config`."""
        return {"id": self.codec_id, "limit": self.limit}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Counted:
        """Return the filter of a configuration."""
        return cls(config["limit"])


@dataclass(frozen=True)
class CountedItems(BytesBytesCodec):
    """The check as a codec of version 3."""

    is_fixed_size = True

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        _check(chunk_bytes.as_numpy_array()[:4].tobytes(), prod(chunk_spec.shape))
        return chunk_bytes

    def compute_encoded_size(self, input_byte_length: int, _chunk_spec: ArraySpec) -> int:
        """Return the size unchanged."""
        return input_byte_length
