"""Everything that a conversion decides before it writes: the job, as a value and as its JSON file."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.schema import probe
from streamloader.conversion.sources.base import Source
from streamloader.conversion.splits import SEED, Splits, assign
from streamloader.format.geometry import Geometry
from streamloader.format.manifest import VERSION
from streamloader.options import Layout
from streamloader.storage.protocol import ObjectInfo


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """One dataset of the job: the source rows that it holds, ascending, and how it is cut. `name` "" is the root."""

    name: str
    rows: NDArray[np.int64] | range
    geometry: Geometry
    provenance: Mapping[str, Any]

    @property
    def num_shards(self) -> int:
        """The number of shards, and so of tasks."""
        return -(-len(self.rows) // self.geometry.samples_per_shard)

    def shard_rows(self, shard: int) -> NDArray[np.int64]:
        """Return the source rows of one shard."""
        size = self.geometry.samples_per_shard
        rows = self.rows[shard * size : (shard + 1) * size]
        return np.arange(rows.start, rows.stop, dtype=np.int64) if isinstance(rows, range) else rows


@dataclass(frozen=True, eq=False)
class Job:
    """A conversion: its source, and its datasets by split."""

    source: Source
    splits: tuple[SplitPlan, ...]
    document: Mapping[str, Any]

    @property
    def num_samples(self) -> int:
        """The samples of all splits: all of the source."""
        return sum(len(split.rows) for split in self.splits)

    @property
    def num_shards(self) -> int:
        """The tasks of all splits."""
        return sum(split.num_shards for split in self.splits)


def make_job(source: Source, format_name: str, splits: Splits, options: Layout) -> Job:
    """Decide everything; the same source and options give the same job, whoever asks.

    Raises `UsageError` for a split without samples, and what reading some rows raises.
    """
    schema = probe(source, options)
    digest = files_digest(source.files)
    about = {"format": format_name, "url": source.url, "files": len(source.files), "digest": digest}
    provenance = {"source": about, **source.notes}
    plans: list[SplitPlan] = []
    if splits:
        dealt = assign(source.num_samples, splits)
        for name, share in splits.items():
            rows = dealt.rows(name)
            told = {**provenance, "split": {"name": name, "share": str(share), "seed": SEED}}
            plans.append(SplitPlan(name, rows, schema.geometry(len(rows), options), told))
    else:
        geometry = schema.geometry(source.num_samples, options)
        plans.append(SplitPlan("", range(source.num_samples), geometry, provenance))
    document = {
        "by": "convert",
        "version": VERSION,
        "fields": sorted(schema.fields),
        "splits": sorted(splits),
        "shards": sum(plan.num_shards for plan in plans),
        "options": {
            "source": source.url,
            "format": format_name,
            "split": ",".join(f"{name}={share}" for name, share in splits.items()),
            **asdict(options),
        },
        "source": {"files": len(source.files), "samples": source.num_samples, "digest": digest},
        "plans": {plan.name: {"num_samples": len(plan.rows), **plan.geometry.to_json()} for plan in plans},
    }
    return Job(source, tuple(plans), json.loads(json.dumps(document)))  # as it is when read back


def files_digest(files: Sequence[ObjectInfo]) -> str:
    """Return the SHA-256 of the files' paths, sizes and etags, in order."""
    digest = hashlib.sha256()
    for line in _lines(files):
        digest.update(line)
    return digest.hexdigest()


def pack_files(files: Sequence[ObjectInfo]) -> bytes:
    """Return the file list compressed, for naming a file that changed since."""
    packer = zlib.compressobj(1)
    return b"".join([*(packer.compress(line) for line in _lines(files)), packer.flush()])


def first_change(packed: bytes, files: Sequence[ObjectInfo]) -> str:
    """Return what differs first from the packed list, in words; nothing where nothing does."""
    before = {path: (size, etag) for path, size, etag in map(json.loads, zlib.decompress(packed).splitlines())}
    for info in files:
        if info.path not in before:
            return f"{info.path} is new"
        size, etag = before.pop(info.path)
        if size != info.size:
            return f"{info.path} had {size} bytes and has {info.size}"
        if etag != info.etag:
            return f"{info.path} was written again (its size is still {size} bytes)"
    gone = next(iter(before), None)
    return "" if gone is None else f"{gone} is gone"


def _lines(files: Sequence[ObjectInfo]) -> Iterator[bytes]:
    for info in files:
        yield json.dumps([info.path, info.size, info.etag]).encode() + b"\n"
