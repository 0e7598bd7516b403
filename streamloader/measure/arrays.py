"""What an epoch reads of arrays that others wrote, and what it uses of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from streamloader.engine.dataset import Dataset
from streamloader.errors import FormatError
from streamloader.loader.arguments import Source
from streamloader.loader.opening import open_dataset
from streamloader.options import Sampling
from streamloader.storage import open_store, references_url
from streamloader.zarr.codecs import chunk_codec
from streamloader.zarr.columns import Member, RegionColumn, RegionReader
from streamloader.zarr.coordinates import TIME_CHANNELS
from streamloader.zarr.metadata import ZarrArray, read_group
from streamloader.zarr.reader import ArrayReader

SAMPLED_BLOCKS = 64
SAMPLED_OBJECTS = 4  # of an array, whose sizes are asked for
# Reading this many times the bytes that samples use is worth a conversion: with fewer, an epoch or two are cheaper.
WORTH_CONVERTING = 4.0


@dataclass(frozen=True)
class ArrayReads:
    """What an epoch reads of one array: decoded bytes of the chunks, and those of the elements that samples use.

    `least`: the decoded bytes of these chunks if each is read once. `stored`: the bytes read in the store, from the
    sizes of some chunks; equal to `read` if they are unknown.
    `ratio`: bytes read for each byte used.
    """

    column: str
    array: str
    read: int
    least: int
    used: int
    stored: int
    ratio: float

    def sharing(self, share: float) -> ArrayReads:
        """Return what is read if this share of what several blocks need is read once for all of them."""
        scale = 1 - share * (1 - self.least / max(1, self.read))
        ratio = round(self.ratio * scale, 3)
        return replace(self, read=int(self.read * scale), stored=int(self.stored * scale), ratio=ratio)


def array_reads(dataset: Dataset, block: int) -> list[ArrayReads]:
    """Return what an epoch in blocks reads of each array, from up to `SAMPLED_BLOCKS` of them; none of other datasets.

    What several blocks need is read for each of them.
    """
    found = []
    for name, reader in dataset.region_readers.items():
        column = reader.column
        for member, array in reader.members():
            read = _bytes_read(reader, member, array, block)
            least = min(read, reader.count_chunks(member, array) * array.array.chunk_bytes)
            used = _bytes_used(column, member, array, reader.fields.unused)
            stored, ratio = int(read * stored_share(dataset, array)), round(read / max(1, used), 3)
            found.append(ArrayReads(name, array.array.path or name, read, least, used, stored, ratio))
    return found


@dataclass(frozen=True)
class Rechunking:
    """A conversion after which samples read only what they use.

    `names`: the value of `streamloader convert --rechunk`. `sample_axis`: that of `--sample-axis`. `before`, `after`:
    the stored bytes that an epoch reads, given that values compress as before.
    """

    names: tuple[str, ...]
    sample_axis: str | int | None
    before: int
    after: int


def rechunking(reads: Sequence[ArrayReads], sampling: Sampling, *, mix: bool = False) -> Rechunking | None:
    """Return the conversion that is worth it, None if no array reads `WORTH_CONVERTING` times what is used.

    `mix`: it is worth it for smaller blocks, since batches mix badly. None for patches too: a dataset has whole samples
    in its chunks.
    """
    if sampling.patches is not None or not reads or not (mix or any(each.ratio > WORTH_CONVERTING for each in reads)):
        return None
    stacked = [name for column in sampling.columns.values() for name in column.names]
    names = dict.fromkeys([*stacked, *(each.array for each in reads if each.column not in sampling.columns)])
    before = sum(each.stored for each in reads)
    after = int(sum(each.used for each in reads) * before / max(1, sum(each.read for each in reads)))
    return Rechunking(tuple(name for name in names if name not in TIME_CHANNELS), sampling.sample_axis, before, after)


def _bytes_read(reader: RegionReader, member: Member, array: ArrayReader, block: int) -> int:
    starts = range(0, reader.num_samples, block)
    chosen = starts[:: max(1, len(starts) // SAMPLED_BLOCKS)]
    chunks = 0
    for start in chosen:
        for low, high in reader.regions(start, min(start + block, reader.num_samples)):
            chunks += len(array.places(reader.boxes_of(member, low, high)))
    return int(chunks * len(starts) / len(chosen)) * array.array.chunk_bytes


def _bytes_used(column: RegionColumn, member: Member, array: ArrayReader, unused: dict[str, int]) -> int:
    lengths = dict(column.lengths)
    for dim, scale in column.scales.items():
        lengths[dim] -= int(unused[dim] * scale)
    return prod(lengths.values()) * len(member.slices) * array.array.dtype.itemsize


def stored_share(dataset: Dataset, array: ArrayReader) -> float:
    """Return stored over decoded bytes, from the sizes of some objects; 1 if none is known."""
    zarr = array.array
    places = {tuple(n * i // SAMPLED_OBJECTS for n in zarr.grid) for i in range(SAMPLED_OBJECTS)}
    infos = [dataset.store.head(zarr.object_key(place)) for place in sorted(places)]
    sizes = [info.size for info in infos if info is not None and info.size]
    decoded = prod(zarr.stored_chunks) * zarr.dtype.itemsize
    return sum(sizes) / (len(sizes) * decoded) if sizes else 1.0


@dataclass(frozen=True)
class ArraySummary:
    """An array of a group as its metadata describes it; `problem` says why it cannot be read, "" if it can."""

    name: str
    dtype: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    shards: tuple[int, ...]
    codecs: str
    problem: str = ""


def sampled_reads(url: str, storage_options: Mapping[str, Any] | None, sampling: Sampling) -> list[ArrayReads]:
    """Return what an epoch of the declared samples of a URL reads. Raises the errors of opening it."""
    dataset = open_dataset(Source(url, storage_options=storage_options, **vars(sampling)))
    return array_reads(dataset, dataset.manifest.order.block)


def summarize(url: str, storage_options: Mapping[str, Any] | None = None) -> list[ArraySummary]:
    """Return the arrays of the group at a URL. Raises `NotADatasetError` if there is no Zarr, and `FormatError`."""
    group = read_group(open_store(references_url(url), storage_options))
    return [_summary(name, array) for name, array in group.arrays.items()]


def _summary(name: str, array: ZarrArray) -> ArraySummary:
    problem, dtype = "", str(array.document.get("data_type", array.document.get("dtype")))
    try:
        dtype = array.dtype.name
        chunk_codec(array)
    except FormatError as error:
        problem = error.problem
    shards = array.stored_chunks if array.sharding is not None else ()
    return ArraySummary(name, dtype, array.dims, array.shape, array.chunks, shards, ", ".join(_codecs(array)), problem)


def _codecs(array: ZarrArray) -> list[str]:
    """Return the names of the codecs that compress or filter an array's chunks."""
    document = array.document if array.sharding is None else array.sharding
    if array.version == 2:
        items = [*(document.get("filters") or []), *([document["compressor"]] if document.get("compressor") else [])]
        return [f"{item.get('cname', '')} {item['id']}".strip() for item in items]
    items = [item for item in document.get("codecs") or [] if isinstance(item, Mapping) and item.get("name") != "bytes"]
    return [f"{(item.get('configuration') or {}).get('cname', '')} {item['name']}".strip() for item in items]
