"""The requests of an epoch, as the loader makes them, without the loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamloader.errors import FieldError, UnsupportedError
from streamloader.format.reader import FieldReader, Run, field_reader, open_manifest
from streamloader.plan.permute import BlockPermutation
from streamloader.storage import Retrier, fork, open_store
from streamloader.storage.location import parse_location
from streamloader.storage.object_reader import open_object_reader
from streamloader.storage.protocol import RangeReader


@dataclass(frozen=True)
class Ranges:
    """The requests of an epoch: each field's reader, and how the samples are cut into blocks."""

    readers: Mapping[str, FieldReader]
    plane: RangeReader
    retries: Retrier
    num_samples: int
    block: int

    @classmethod
    def of(
        cls,
        url: str,
        options: Mapping[str, Any] | None,
        fields: Sequence[str] | None,
        split: str | None,
        *,
        obstore: bool = False,
    ) -> Ranges:
        """Open the dataset. Raises as opening does, and `FieldError` for an unknown field.

        `obstore` reads with that client, or raises `UnsupportedError`.
        """
        if isinstance(fields, str):
            raise FieldError(f"fields={fields!r}", f"give a list: fields=[{fields!r}]")
        manifest, store = open_manifest(open_store(url, options), split)
        names = manifest.fields if fields is None else fields
        readers = {name: field_reader(store, manifest, name) for name in names}
        plane = _obstore(url, options).below(split or "") if obstore else store.reader()
        return cls(readers, plane, store.retries, manifest.num_samples, manifest.order.block)

    def runs(self, passes: int) -> Iterator[tuple[FieldReader, Run, int]]:
        """Yield each request with how many samples are whole after it."""
        resident = [reader for reader in self.readers.values() if reader.layout.resident]
        streamed = [reader for reader in self.readers.values() if not reader.layout.resident]
        whole = 0 if streamed else self.num_samples  # held fields alone: the first pass is the only one
        yield from _last_counts(resident, 0, self.num_samples, whole)
        blocks = -(-self.num_samples // self.block) if streamed else 0
        for number in range(passes if blocks else 0):
            order = BlockPermutation(blocks, number)
            for arrival in range(blocks):
                start = int(order.forward(np.array([arrival]))[0]) * self.block
                stop = min(start + self.block, self.num_samples)
                yield from _last_counts(streamed, start, stop, stop - start)


def _obstore(url: str, options: Mapping[str, Any] | None) -> RangeReader:
    if fork.obstore_is_forbidden():
        raise UnsupportedError(fork.FORKED_REASON, "measure in a process that was not forked")
    return open_object_reader(parse_location(url, options))


def _last_counts(
    readers: Sequence[FieldReader], start: int, stop: int, samples: int
) -> Iterator[tuple[FieldReader, Run, int]]:
    runs = [(reader, run) for reader in readers for run in reader.runs(start, stop)]
    for left, (reader, run) in enumerate(runs, 1 - len(runs)):
        yield reader, run, samples if left == 0 else 0
