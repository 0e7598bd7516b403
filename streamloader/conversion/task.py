"""One task: fixed rows of the source become one shard of one split. Pure but for the two stores."""

from __future__ import annotations

from dataclasses import dataclass

from streamloader.conversion.sources.base import Part, refuse_all
from streamloader.format.geometry import Geometry
from streamloader.format.sink import Receipt, write_shard
from streamloader.storage.protocol import Store


@dataclass(frozen=True)
class Task:
    """What a worker needs, picklable. Doing it twice writes the same bytes. `store` is the split's."""

    part: Part
    store: Store
    geometry: Geometry
    shard: int

    def run(self) -> Receipt:
        """Read, encode and write the shard. Raises what the source or the store raise."""
        return write_shard(self.store, self.geometry, self.shard, self.part.read(refuse_all))
