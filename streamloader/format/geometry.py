"""How a dataset is cut: chunk, block, shard and the pinned order, from sizes alone. Pure.

Every size is a power of two, so chunk divides block divides shard by construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import log2
from typing import Any

from streamloader.errors import FieldError
from streamloader.format.manifest import MAX_CHUNK_BYTES, RESIDENT_TOTAL, Field, FieldLayout, OrderPin, layout_json
from streamloader.options import MIB, Layout

RESIDENT_ITEM = 1024  # bytes a sample: larger ones are worth a request of their own
RESIDENT_CHUNK = MIB
RESIDENT_SHARD = 64 * MIB
CHUNKS_PER_SHARD = 1 << 16  # at most: the index of a shard stays below 1 MiB
PINNED_LANES = 64  # at most: what a manifest pins
MAX_BLOCK = 1 << 14  # samples, where chunks allow it: to enter an epoch takes the sorting of a window of each lane
SMALL_TOTAL = RESIDENT_TOTAL  # bytes, decoded: a dataset of at most so many is shuffled over the whole of each lane
BLOCKS = 64  # a small dataset is cut in at least so many blocks, so that the block permutation mixes it
EXPANSION = 4  # a shard decodes to at most so many times `shard_size`: writers and readers hold it in memory


@dataclass(frozen=True)
class Geometry:
    """How a dataset is being written. `order` and `resident` are settled when the number of samples is known.

    `layouts` of resident fields say that the field is small enough; `settle` gives them their own geometry.
    """

    samples_per_shard: int
    order: OrderPin
    layouts: Mapping[str, FieldLayout]
    options: Layout = field(default_factory=Layout)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values: two conversions with equal ones cut their shards alike."""
        return {
            "samples_per_shard": self.samples_per_shard,
            "order": dict(vars(self.order)),
            "layouts": {name: layout_json(layout) for name, layout in sorted(self.layouts.items())},
            "options": asdict(self.options),
        }


def choose_layouts(
    fields: Mapping[str, Field],
    sizes: Mapping[str, float],
    codecs: Mapping[str, str],
    num_samples: int | None,
    options: Layout,
    *,
    decoded: Mapping[str, float] | None = None,
) -> Geometry:
    """Return the geometry of a dataset. `sizes` are mean stored bytes a sample; `num_samples` None is unknown.

    `decoded` are mean decoded bytes of a sample, by default those of fixed shape: no shard, block or chunk decodes to
    more than four times its target, however well it compresses.

    The largest bulk field sets the shard (about `shard_size` stored), all bulk fields together the block (about
    `block_size` stored), each field its chunk (about `chunk_size`, decoded where the shape is fixed). A sample
    larger than every target gives chunk = block = 1. Raises `FieldError` for a sample of 2 GiB or more.
    """
    for name, one in fields.items():
        if one.fixed and one.item_bytes > MAX_CHUNK_BYTES:
            raise FieldError(f"a sample of field {name!r} has {one.item_bytes} bytes", "the format holds up to 2 GiB")
    small = resident_fields(fields, num_samples)
    bulk = {name: max(sizes[name], 1.0) for name in fields if name not in small}
    known = {**(decoded or {}), **{name: float(one.item_bytes) for name, one in fields.items() if one.fixed}}
    least = {name: known.get(name, 0.0) / EXPANSION for name in fields}  # what a sample counts at least
    resident = sum(fields[name].item_bytes for name in small)
    # the small fields of a shard travel together, in one part
    largest = max([1.0, *bulk.values(), *(least[name] for name in bulk), float(resident)])
    shard = nearest_power(options.shard_size / largest)
    if options.samples_per_shard is not None:
        shard = next_power(options.samples_per_shard)
    if num_samples is not None:
        shard = min(shard, next_power(num_samples))
    mean = max(sum(bulk.values()), sum(least[name] for name in bulk)) if bulk else sum(sizes[name] for name in small)
    block = _block(mean, num_samples, shard, options)
    layouts = {}
    for name in sorted(fields):
        unit = fields[name].item_bytes if fields[name].fixed else max(sizes[name], least[name], 1.0)
        chunk = min(max(nearest_power(options.chunk_size / unit), shard // CHUNKS_PER_SHARD), block)
        layouts[name] = FieldLayout(fields[name], chunk, shard, codecs[name], resident=name in small)
    return Geometry(shard, order_pin(num_samples, block), layouts, options)


def settle(geometry: Geometry, num_samples: int, stored: Mapping[str, int], decoded: int | None = None) -> Geometry:
    """Return the final geometry of a dataset of `num_samples`; `stored` are the encoded bytes of its bulk fields.

    Bulk fields keep their layout, since they are written. Small fields become resident, smallest first, as
    long as all of them fit; the others become bulk, with the shards of the bulk fields. The block is computed
    again from what was really stored; it is one sample where all fields are resident, since nothing is then fetched in
    blocks. `decoded`: bytes of the bulk fields (None: many), which bound the block, and by which the window is chosen.
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
    # only what is not written yet may still follow the block
    bulk |= {
        name: replace(bulk[name], chunk=min(bulk[name].chunk, block), resident=False) for name in bulk if name in small
    }
    block = max([block, *(layout.chunk for layout in bulk.values())]) if bulk else 1
    if decoded is not None:
        decoded += sum(one.item_bytes for one in small.values()) * num_samples
    layouts = bulk | {name: _resident_layout(geometry.layouts[name], num_samples) for name in resident}
    layouts = {name: layouts[name] for name in sorted(layouts)}
    return Geometry(geometry.samples_per_shard, order_pin(num_samples, block, decoded), layouts, geometry.options)


def resident_fields(fields: Mapping[str, Field], num_samples: int | None) -> tuple[str, ...]:
    """Return the names of the small fields: fixed shape, at most 1 KiB, smallest first, together at most 256 MB."""
    small = [
        (field.item_bytes, name) for name, field in fields.items() if field.fixed and field.item_bytes <= RESIDENT_ITEM
    ]
    total, names = 0, []
    for size, name in sorted(small):
        total += size * (num_samples or 0)
        if total > RESIDENT_TOTAL:
            break
        names.append(name)
    return tuple(names)


def order_pin(num_samples: int | None, block: int, decoded: int | None = None) -> OrderPin:
    """Return what rule 1 of the order contract advises.

    L is the largest power of two <= min(64, max(1, blocks / 8)), W = 4 B. Where `decoded` bytes of all fields are few,
    W is the whole lane; but not for blocks of one sample, which the permutation of blocks mixes completely.
    """
    lanes, window = PINNED_LANES, 4 * block
    if num_samples is not None:
        blocks = -(-num_samples // block)
        lanes = previous_power(min(PINNED_LANES, max(1, blocks // 8)))
        if decoded is not None and decoded <= SMALL_TOTAL and block > 1:
            window = max(window, -(-num_samples // (lanes * block)) * block)
    return OrderPin(block, lanes, window)


def nearest_power(value: float) -> int:
    """Return the power of two nearest to `value` on a logarithmic scale, at least 1."""
    return 1 << round(log2(value)) if value > 1 else 1


def next_power(value: int) -> int:
    """Return the least power of two >= `value`, at least 1."""
    return 1 << max(value - 1, 0).bit_length()


def previous_power(value: int) -> int:
    """Return the largest power of two <= `value` >= 1."""
    return 1 << (value.bit_length() - 1)


def _block(mean: float, num_samples: int | None, shard: int, options: Layout) -> int:
    block = min(nearest_power(options.block_size / max(mean, 1.0)), MAX_BLOCK)
    if num_samples is not None:
        block = min(block, next_power(num_samples) // BLOCKS)
    return min(max(block, shard // CHUNKS_PER_SHARD, 1), shard)


def _resident_layout(layout: FieldLayout, num_samples: int) -> FieldLayout:
    most = next_power(num_samples)
    shard = min(nearest_power(RESIDENT_SHARD / layout.field.item_bytes), most)
    return replace(layout, chunk=min(nearest_power(RESIDENT_CHUNK / layout.field.item_bytes), shard), shard=shard)
