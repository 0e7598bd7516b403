"""A check between a Zarr array's codecs: items of variable size are counted before numcodecs makes room for them.

A damaged count would have it reserve 32 GiB. Imported only where a Zarr is read: zarr is heavy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

from zarr import Array
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import ShardingCodec, VLenBytesCodec, VLenUTF8Codec
from zarr.core.array import AsyncArray
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer


def guarded(array: Any) -> Any:
    """Return the array with the check in its codecs, where they need it."""
    metadata = array.metadata
    if metadata.zarr_format == 2:
        filters: list[Any] = []
        for one in metadata.filters or ():
            filters += [one, Counted(prod(array.chunks))] if one.codec_id.startswith("vlen") else [one]
        changed = replace(metadata, filters=tuple(filters) or None)
    else:
        changed = replace(metadata, codecs=tuple(_checked(metadata.codecs)))
    return Array(AsyncArray(metadata=changed, store_path=array.store_path))


def _checked(codecs: Iterable[Any]) -> Iterable[Any]:
    for codec in codecs:
        sharding = isinstance(codec, ShardingCodec)
        yield replace(codec, codecs=tuple(_checked(codec.codecs))) if sharding else codec
        if isinstance(codec, VLenBytesCodec | VLenUTF8Codec):
            yield CountedItems()


def _check(head: bytes, most: int) -> None:
    """Raise ValueError unless the bytes begin with a count of at most that many items."""
    count = int.from_bytes(head, "little")
    if len(head) < 4 or count > most:
        raise ValueError(f"a chunk of {most} items says that it has {count}")


@dataclass(frozen=True)
class Counted:
    """The check as a filter of version 2: it stands behind the codec of the items, and is asked before it."""

    most: int
    codec_id: ClassVar[str] = "streamloader-counted"

    def decode(self, buf: Any, _out: Any = None) -> Any:
        """Return the bytes as they are. Raises ValueError."""
        _check(bytes(memoryview(buf).cast("B")[:4]), self.most)
        return buf

    def encode(self, buf: Any) -> Any:
        """Return the bytes as they are."""
        return buf

    def get_config(self) -> dict[str, Any]:
        """Return what `from_config` takes."""
        return {"id": self.codec_id, "most": self.most}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Counted:
        """Return the check of that configuration."""
        return cls(config["most"])


@dataclass(frozen=True)
class CountedItems(BytesBytesCodec):
    """The check as a codec of version 3."""

    is_fixed_size = True

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        _check(chunk_bytes.as_numpy_array()[:4].tobytes(), prod(chunk_spec.shape))
        return chunk_bytes

    def compute_encoded_size(self, input_byte_length: int, _chunk_spec: ArraySpec) -> int:
        """Return the size as it is."""
        return input_byte_length
