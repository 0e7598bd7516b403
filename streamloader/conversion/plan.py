"""Everything that a conversion decides before it writes: the job, as a value and as its JSON file."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.progress import Preview
from streamloader.conversion.recipe import Recipe
from streamloader.conversion.rows import SampleRows
from streamloader.conversion.schema import Schema, probe
from streamloader.conversion.sources.base import Source
from streamloader.conversion.splits import SEED, assign, own_rows
from streamloader.conversion.task import Task
from streamloader.errors import FormatError, UsageError
from streamloader.format.geometry import Geometry
from streamloader.format.manifest import VERSION
from streamloader.format.opening import PIECE_BYTES, read_lines, read_pieces
from streamloader.storage.protocol import ObjectInfo, Store

MAX_LINE = 1 << 20  # bytes of a file list's line: a path has 4 KiB, a signed URL some more


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """One dataset of the job: the source row of each of its samples, and how it is cut. `name` "" is the root."""

    name: str
    rows: SampleRows
    geometry: Geometry
    provenance: Mapping[str, Any]

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return self.rows.count

    @property
    def num_shards(self) -> int:
        """The number of shards, and so of tasks."""
        return -(-self.rows.count // self.geometry.samples_per_shard)

    def shard_rows(self, shard: int) -> NDArray[np.int64]:
        """Return the source rows of one shard, in the order of its samples."""
        size = self.geometry.samples_per_shard
        return self.rows.read(shard * size, (shard + 1) * size)

    def without(self, bad_rows: Collection[int]) -> SplitPlan:
        """Return the plan that leaves out these rows of the source, and says how many."""
        left_out = {"left_out": len(bad_rows)} if bad_rows else {}
        told = {key: value for key, value in self.provenance.items() if key != "left_out"}
        return replace(self, rows=self.rows.without(bad_rows), provenance={**told, **left_out})

    def shards_with(self, rows: Collection[int]) -> set[int]:
        """Return the shards that hold any of these rows of the source."""
        size = self.geometry.samples_per_shard
        return set(np.unique(self.rows.find(rows) // size).tolist())

    def task(self, job: Job, store: Store, shard: int, keep_bad: bool) -> Task:
        """Return the task that writes one shard of the job to the split's store."""
        rows = self.shard_rows(shard)
        order = None if bool(np.all(rows[1:] > rows[:-1])) else np.argsort(np.argsort(rows))
        ascending = rows if order is None else np.sort(rows)
        return Task(job.source.part(ascending), store, self.geometry, shard, ascending, order, keep_bad, job.id)


@dataclass(frozen=True, eq=False)
class Job:
    """A conversion: its source, what its samples are, and its datasets by split. `document` is the job file."""

    source: Source
    format: str
    schema: Schema
    splits: tuple[SplitPlan, ...]
    document: Mapping[str, Any]

    @cached_property
    def id(self) -> str:
        """The SHA-256 of the document: the source, the options and the geometry, and so every byte that is written."""
        return hashlib.sha256(json.dumps(self.document, sort_keys=True).encode()).hexdigest()

    @property
    def record(self) -> Mapping[str, Any]:
        """The options that decide which bytes are written, and of which the manifest does not tell."""
        options = self.document["options"]
        return {key: options[key] for key in ("map", "fill", "raw") if options.get(key)}

    @property
    def unknown(self) -> str:
        """Why nobody can tell whether the map function is the same in another run; empty where that can be told."""
        function = self.document["options"]["map"] or {}
        if "unknown" not in function:
            return ""
        return f"nobody can tell whether its map function is still {function['function']}, since {function['unknown']}"

    @property
    def num_samples(self) -> int:
        """The samples of all splits: all of the source."""
        return sum(split.num_samples for split in self.splits)

    @property
    def num_shards(self) -> int:
        """The tasks of all splits."""
        return sum(split.num_shards for split in self.splits)

    def preview(self) -> Preview:
        """Return what is going to be written."""
        splits = {split.name: split.num_samples for split in self.splits}
        about, schema = self.source, self.schema
        counts = (len(about.files), schema.fields, schema.codecs, schema.sizes, splits, self.num_shards)
        notes = {} if "map" in about.notes else about.notes
        details = {**notes.get("decoded", {}), **notes.get("units", {})}
        named = about.notes.get("classes")
        classes = {name: named[name] for name in schema.fields if name in named} if isinstance(named, Mapping) else {}
        return Preview(about.url, self.format, *counts, details, classes)


def make_job(source: Source, format_name: str, recipe: Recipe, keep_bad: bool) -> Job:
    """Decide everything; the same source and recipe give the same job, whoever asks.

    Raises `UsageError` for a split without samples, and what reading some rows raises; `keep_bad` passes over bad ones.
    """
    schema = probe(source, recipe.layout, keep_bad)
    digest = files_digest(source.files)
    about = {"format": format_name, "url": source.url, "files": len(source.files), "digest": digest}
    provenance = {"source": about, **source.notes, **recipe.wish.notes}
    if recipe.shuffle is not None:
        provenance["shuffle"] = {"seed": recipe.shuffle}
    plans: list[SplitPlan] = []
    for name, numbers, split in _split_rows(source, recipe):
        rows = SampleRows.of(numbers, recipe.shuffle)
        told = {**provenance, "split": split} if split else provenance
        plans.append(SplitPlan(name, rows, schema.geometry(rows.count, recipe.layout), told))
    document = {
        "by": "convert",
        "version": VERSION,
        "fields": sorted(schema.fields),
        "splits": sorted(plan.name for plan in plans if plan.name),
        "shards": sum(plan.num_shards for plan in plans),
        "options": {"source": source.url, "format": format_name, **recipe.options()},
        "source": {"files": len(source.files), "samples": source.num_samples, "digest": digest},
        "plans": {plan.name: {"num_samples": plan.num_samples, **plan.geometry.to_json()} for plan in plans},
    }
    return Job(source, format_name, schema, tuple(plans), json.loads(json.dumps(document)))  # as when it is read back


def _split_rows(
    source: Source, recipe: Recipe
) -> Iterator[tuple[str, NDArray[np.int64] | range, Mapping[str, Any] | None]]:
    """Yield the name, the rows and the provenance of each split: those that are asked for, or the source's own."""
    own = source.notes.get("splits") or {}
    if recipe.splits and own:
        problem = f"{source.url} has the splits {', '.join(own)} of its own, and split={recipe.shares!r} is given"
        raise UsageError(problem, "leave split out, or convert one of its folders")
    if recipe.splits:
        dealt = assign(source.num_samples, recipe.splits)
        for name, share in recipe.splits.items():
            yield name, dealt.rows(name), {"name": name, "share": str(share), "of": recipe.shares, "seed": SEED}
    elif own:
        for name in own:
            yield name, own_rows(own, name), {"name": name}
    else:
        yield "", range(source.num_samples), None


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


def unpack_files(store: Store, path: str) -> Iterator[ObjectInfo]:
    """Yield the files of a stored list, which may be of any length: it is read and unpacked a piece at a time.

    Raises `NotFoundError`, and `FormatError` for what `pack_files` does not write.
    """
    try:
        for line in read_lines(_unpacked(read_pieces(store, path)), MAX_LINE, f"{store.url}/{path}"):
            name, size, etag = json.loads(line)
            yield ObjectInfo(str(name), int(size), str(etag))
    except (zlib.error, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{store.url}/{path} is damaged ({error})", "start again with --overwrite") from error


def _unpacked(pieces: Iterator[bytes]) -> Iterator[bytes]:
    unpacker = zlib.decompressobj()
    for piece in pieces:
        packed = piece
        while found := unpacker.decompress(packed, PIECE_BYTES):
            yield found
            packed = unpacker.unconsumed_tail
        if unpacker.eof:
            return
    raise ValueError("it is cut short")


def first_change(before: Iterable[ObjectInfo], files: Sequence[ObjectInfo]) -> str:
    """Return what differs first from an earlier list, in words; nothing where nothing does.

    Of the earlier list nothing is kept.
    """
    now = {info.path: info for info in files}
    for info in before:
        found = now.pop(info.path, None)
        if found is None:
            return f"{info.path} is gone"
        if found.size != info.size:
            return f"{info.path} had {info.size} bytes and has {found.size}"
        if found.etag != info.etag:
            return f"{info.path} was written again (its size is still {info.size} bytes)"
    new = next(iter(now), None)
    return "" if new is None else f"{new} is new"


def _lines(files: Sequence[ObjectInfo]) -> Iterator[bytes]:
    for info in files:
        yield json.dumps([info.path, info.size, info.etag]).encode() + b"\n"
