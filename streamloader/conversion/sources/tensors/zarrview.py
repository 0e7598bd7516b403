"""A streamloader store as zarr-python's store, to read from. Imported only where a Zarr is read: zarr is heavy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.abc.store import Store as ZarrStore
from zarr.core.buffer import Buffer, BufferPrototype

from streamloader.errors import NotFoundError, UnsupportedError
from streamloader.storage.protocol import Store

DOCUMENTS = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


class ZarrView(ZarrStore):
    """The objects below a store. `documents` are its metadata by key: those that are not in it are not there.

    An object that is absent is a chunk that was never written, as Zarr has it.
    """

    def __init__(self, store: Store, documents: Mapping[str, bytes]) -> None:
        super().__init__(read_only=True)
        self._store = store
        self._documents = documents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrView) and other._store is self._store and other._documents == self._documents

    __hash__ = None  # type: ignore[assignment]

    @property
    def supports_writes(self) -> bool:
        """False."""
        return False

    @property
    def supports_deletes(self) -> bool:
        """False."""
        return False

    @property
    def supports_listing(self) -> bool:
        """False: what there is has been listed before."""
        return False

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return the bytes of an object, or of a range of it; None where there is none."""
        if key.rpartition("/")[2] in DOCUMENTS:
            data = self._documents.get(key)
        else:
            data = await asyncio.to_thread(self._read, key, byte_range)
        return None if data is None else prototype.buffer.from_bytes(data)

    def _read(self, key: str, wanted: ByteRequest | None) -> bytes | None:
        try:
            if isinstance(wanted, RangeByteRequest):
                return self._store.get_range(key, wanted.start, wanted.end)
            if isinstance(wanted, SuffixByteRequest):
                return self._store.get_tail(key, wanted.suffix)
            data = self._store.get(key)
            return data[wanted.offset :] if isinstance(wanted, OffsetByteRequest) else data
        except NotFoundError:
            return None

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return the bytes of several ranges."""
        return list(await asyncio.gather(*(self.get(key, prototype, wanted) for key, wanted in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Return whether the object is there."""
        if key.rpartition("/")[2] in DOCUMENTS:
            return key in self._documents
        return await asyncio.to_thread(self._store.head, key) is not None

    async def set(self, _key: str, _value: Buffer) -> None:
        """Raise `UnsupportedError`."""
        raise _only_read()

    async def delete(self, _key: str) -> None:
        """Raise `UnsupportedError`."""
        raise _only_read()

    def list(self) -> AsyncIterator[str]:
        """Raise `UnsupportedError`."""
        raise _only_read()

    def list_prefix(self, _prefix: str) -> AsyncIterator[str]:
        """Raise `UnsupportedError`."""
        raise _only_read()

    def list_dir(self, _prefix: str) -> AsyncIterator[str]:
        """Raise `UnsupportedError`."""
        raise _only_read()


def _only_read() -> UnsupportedError:
    return UnsupportedError("a source is only read, by the keys that were listed")
