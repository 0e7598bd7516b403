"""Chooses chunk, block, shard and the pinned order of a dataset from sizes alone, which are measured on some samples.

Pure. Every size is a power of two, so chunk divides block divides shard.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import gcd, log2
from typing import Any, Self

from streamloader.errors import FieldError
from streamloader.format.codecs import Column, column_size, measure_codec
from streamloader.format.manifest import (
    MAX_CHUNK_BYTES,
    RESIDENT_TOTAL,
    Field,
    FieldLayout,
    Manifest,
    OrderPin,
    layout_json,
)
from streamloader.options import MIB, CodecChoice, Layout

RESIDENT_ITEM = 1024  # maximum bytes per sample of a resident field: larger samples are worth separate requests
RESIDENT_CHUNK = MIB
RESIDENT_SHARD = 64 * MIB
CHUNKS_PER_SHARD = 1 << 16  # maximum: the index of a shard has about 1 MiB
PINNED_LANES = 64  # maximum number of lanes that a manifest pins
MAX_BLOCK = 1 << 14  # samples, unless a chunk is larger: entering an epoch sorts a window of each lane
SMALL_TOTAL = RESIDENT_TOTAL  # decoded bytes: up to this size, the shuffle window of a lane is the whole lane
BLOCKS = 64  # minimum number of blocks of a small dataset, so that the block permutation mixes it
SLACK = 2  # how much larger than planned the blocks of a dataset may become when fields are added
EXPANSION = 4  # a shard decodes to at most 4 times `shard_size`, because writers and readers hold it in memory


@dataclass(frozen=True)
class Geometry:
    """The sizes with which a dataset is written.

    `order` and the resident fields are provisional until the number of samples is known: a layout marked `resident` is
    a candidate, and `settle` decides and sets its chunk and shard sizes.
    """

    samples_per_shard: int
    order: OrderPin
    layouts: Mapping[str, FieldLayout]
    options: Layout = field(default_factory=Layout)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. Conversions with equal values write the same shards."""
        return {
            "samples_per_shard": self.samples_per_shard,
            "order": dict(vars(self.order)),
            "layouts": {name: layout_json(layout) for name, layout in sorted(self.layouts.items())},
            "options": asdict(self.options),
        }


@dataclass(frozen=True)
class Schema:
    """The fields of samples, with codec and mean stored and decoded bytes per sample, measured on some of them."""

    fields: Mapping[str, Field]
    codecs: Mapping[str, str]
    sizes: Mapping[str, float]
    decoded: Mapping[str, float]

    @classmethod
    def measure(cls, fields: Mapping[str, Field], columns: Mapping[str, Column], choice: CodecChoice) -> Self:
        """Return the schema of samples like those in the columns; equal columns give the same."""
        codecs, sizes = dict[str, str](), dict[str, float]()
        for name, kind in fields.items():
            codecs[name], sizes[name] = measure_codec(choice, kind, columns[name])
        decoded = {name: column_size(columns[name]) / max(1, len(columns[name])) for name in fields}
        return cls(fields, codecs, sizes, decoded)

    def geometry(self, num_samples: int | None, options: Layout) -> Geometry:
        """Return the provisional geometry of a dataset with that many of these samples; None if that is unknown."""
        return choose_layouts(self.fields, self.sizes, self.codecs, num_samples, options, decoded=self.decoded)


def choose_layouts(
    fields: Mapping[str, Field],
    sizes: Mapping[str, float],
    codecs: Mapping[str, str],
    num_samples: int | None,
    options: Layout,
    *,
    decoded: Mapping[str, float] | None = None,
) -> Geometry:
    """Return the provisional geometry of a dataset.

    `sizes` and `decoded` are the mean stored and decoded bytes per sample of each field; `decoded` may omit fields of
    fixed shape. `num_samples` is None if unknown.

    The largest bulk field determines the shard (about `shard_size` stored), all bulk fields together the block (about
    `block_size` stored), and each field its chunk (about `chunk_size`, decoded for a fixed shape). A sample larger than
    every target gives chunk = block = 1. No shard, block or chunk decodes to more than four times its target, however
    well it compresses. Raises `FieldError` for a sample of 2 GiB or more.
    """
    fixed = {name: field.item_bytes for name, field in fields.items() if field.fixed}
    for name, size in fixed.items():
        if size > MAX_CHUNK_BYTES:
            raise FieldError(f"a sample of field {name!r} has {size} bytes", "the format holds up to 2 GiB")
    small = resident_fields(fields, num_samples)
    known = {**(decoded or {}), **fixed}
    minimum = {name: known.get(name, 0.0) / EXPANSION for name in fields}
    bulk = {name: max(sizes[name], 1.0) for name in fields if name not in small}
    resident = sum(fields[name].item_bytes for name in small)
    # the small fields of a shard are stored together, in one part
    largest = max([1.0, *bulk.values(), *(minimum[name] for name in bulk), float(resident)])
    shard = nearest_power(options.shard_size / largest)
    if options.samples_per_shard is not None:
        shard = next_power(options.samples_per_shard)
    if num_samples is not None:
        shard = min(shard, next_power(num_samples))
    if any(field.is_video for field in fields.values()):
        shard = min(shard, CHUNKS_PER_SHARD)
    mean = max(sum(bulk.values()), sum(minimum[name] for name in bulk)) if bulk else sum(sizes[name] for name in small)
    block = _block(mean, num_samples, shard, options)
    layouts = {}
    for name in sorted(fields):
        unit = fixed.get(name) or max(sizes[name], minimum[name], 1.0)
        chunk = min(max(nearest_power(options.chunk_size / unit), shard // CHUNKS_PER_SHARD), block)
        chunk = 1 if fields[name].is_video else chunk  # a part of it is read without the others
        layouts[name] = FieldLayout(fields[name], chunk, shard, codecs[name], resident=name in small)
    return Geometry(shard, order_pin(num_samples, block), layouts, options)


def settle(geometry: Geometry, num_samples: int, stored: Mapping[str, int], decoded: int | None = None) -> Geometry:
    """Return the final geometry of a dataset of `num_samples` samples.

    `stored` are the encoded bytes of its bulk fields. `decoded` are the decoded bytes of all bulk fields, or None for
    a large dataset; they bound the block and determine the window.

    Bulk fields keep their layout, because their shards are written. Small fields become resident, smallest first, while
    they fit; the others become bulk fields with the same shards. The block is computed again from the stored bytes. It
    is one sample if all fields are resident, because nothing is then fetched in blocks.
    """
    fields = {name: layout.field for name, layout in geometry.layouts.items()}
    small = {name: fields[name] for name, layout in geometry.layouts.items() if layout.resident}
    resident = resident_fields(small, num_samples)
    bulk = {name: layout for name, layout in geometry.layouts.items() if name not in resident}
    samples = max(num_samples, 1)
    sizes = {name: max(stored.get(name, 0) / samples, 1.0) for name in bulk if name not in small}
    sizes |= {name: float(fields[name].item_bytes) for name in small}
    mean = max(sum(sizes[name] for name in (bulk or small)), (decoded or 0) / samples / EXPANSION)
    block = _block(mean, num_samples, geometry.samples_per_shard, geometry.options)
    # only small fields, whose shards are not written yet, can adapt to the block
    bulk |= {n: replace(bulk[n], chunk=min(bulk[n].chunk, block), resident=False) for n in bulk if n in small}
    block = max([block, *(layout.chunk for layout in bulk.values())]) if bulk else 1
    if decoded is not None:
        decoded += sum(kind.item_bytes for kind in small.values()) * num_samples
    layouts = bulk | {name: _resident_layout(geometry.layouts[name], num_samples) for name in resident}
    order = order_pin(num_samples, block, decoded)
    return replace(geometry, order=order, layouts=dict(sorted(layouts.items())))


def add_layouts(base: Manifest, schema: Schema) -> Manifest:
    """Return the manifest, without samples, of new fields of `schema` for the samples of the version `base`.

    Bulk fields have the shards of `base`. Its blocks stay, unless they would be much larger than `block_size` and than
    before; then they are halved as far as chunks allow. If `base` has no bulk field, shards and blocks are those of a
    conversion.
    """
    options, samples = Layout(), base.num_samples
    planned = schema.geometry(samples, options)
    held = sum(layout.nbytes for layout in base.fields.values() if layout.resident)
    small = resident_fields(schema.fields, samples, held)
    sizes = {name: max(size, schema.decoded[name] / EXPANSION, 1.0) for name, size in schema.sizes.items()}
    mean = sum(size for name, size in sizes.items() if name not in small)
    bulk = [layout for layout in base.fields.values() if not layout.resident]
    shard, block = base.samples_per_shard, base.order.block
    if not bulk and mean:
        shard, block = planned.samples_per_shard, planned.order.block
    before = sum(layout.stored for layout in bulk) / samples
    limit = SLACK * max(options.block_size, block * before)
    while bulk and block * (before + mean) > limit and all(block % (2 * layout.chunk) == 0 for layout in bulk):
        block //= 2
    layouts = {}
    for name, layout in planned.layouts.items():
        chunk = gcd(max(layout.chunk, shard // CHUNKS_PER_SHARD), block, shard)
        bulk_layout = replace(layout, chunk=chunk, shard=shard, resident=False)
        layouts[name] = _resident_layout(replace(layout, resident=True), samples) if name in small else bulk_layout
    return Manifest(0, shard, layouts, replace(base.order, block=block), generation=base.generation)


def resident_fields(fields: Mapping[str, Field], num_samples: int | None, held: int = 0) -> tuple[str, ...]:
    """Return the names of the fields to hold in memory, smallest first.

    They have a fixed shape and at most 1 KiB per sample, and together, with the `held` bytes of others, at most 256 MB.
    """
    total, names = held, []
    for size, name in sorted((kind.item_bytes, name) for name, kind in fields.items() if kind.fixed):
        total += size * (num_samples or 0)
        if size > RESIDENT_ITEM or total > RESIDENT_TOTAL:
            break
        names.append(name)
    return tuple(names)


def order_pin(num_samples: int | None, block: int, decoded: int | None = None) -> OrderPin:
    """Return the order that rule 1 of the order contract recommends for blocks of `block` samples.

    L is the largest power of two <= min(64, max(1, blocks / 8)), and W = 4 B. If all fields together have at most
    `SMALL_TOTAL` `decoded` bytes, W is the whole lane; except for blocks of one sample, which the block permutation
    mixes completely.
    """
    lanes, window = PINNED_LANES, 4 * block
    if num_samples is not None:
        blocks = -(-num_samples // block)
        lanes = previous_power(min(PINNED_LANES, max(1, blocks // 8)))
        if decoded is not None and decoded <= SMALL_TOTAL and block > 1:
            window = max(window, -(-num_samples // (lanes * block)) * block)
    return OrderPin(block, lanes, window)


def nearest_power(value: float) -> int:
    """Return the power of two that is nearest to `value` on a logarithmic scale, at least 1."""
    return 1 << round(log2(value)) if value > 1 else 1


def next_power(value: int) -> int:
    """Return the smallest power of two >= `value`, at least 1."""
    return 1 << max(value - 1, 0).bit_length()


def previous_power(value: int) -> int:
    """Return the largest power of two <= `value`, which is at least 1."""
    return 1 << (value.bit_length() - 1)


def _block(mean: float, num_samples: int | None, shard: int, options: Layout) -> int:
    block = min(nearest_power(options.block_size / max(mean, 1.0)), MAX_BLOCK)
    if num_samples is not None:
        block = min(block, next_power(num_samples) // BLOCKS)
    return min(max(block, shard // CHUNKS_PER_SHARD, 1), shard)


def _resident_layout(layout: FieldLayout, num_samples: int) -> FieldLayout:
    shard = min(nearest_power(RESIDENT_SHARD / layout.field.item_bytes), next_power(num_samples))
    return replace(layout, chunk=min(nearest_power(RESIDENT_CHUNK / layout.field.item_bytes), shard), shard=shard)
