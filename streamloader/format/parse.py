"""From JSON to a manifest: what strangers may have written there is refused here, and bounded for all that follows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from streamloader.errors import FormatError, VersionError
from streamloader.format.geometry import RESIDENT_TOTAL
from streamloader.format.manifest import (
    APPEND,
    MAX_CHUNK_BYTES,
    VERSION,
    FieldLayout,
    Manifest,
    OrderPin,
    check_name,
    layout_from_json,
    natural,
)

KNOWN_REQUIREMENTS = frozenset({APPEND})
MAX_SAMPLES = 1 << 62  # positions of an epoch, padding included, stay below 2^63
MAX_CHUNKS = 1 << 20  # of a shard: its index has 16 MiB then
MAX_LANES = 1 << 16  # readers loop over the lanes
MAX_WINDOW = 1 << 31
MAX_SKIPS = 1 << 16  # of a field: each append adds one at most
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


def parse_json(data: bytes) -> Any:
    """Return a JSON document. Raises ValueError, also for a key that stands twice, or RecursionError."""
    return json.loads(data, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # readers would differ in which of the values they take
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return found


def check_version(attributes: Mapping[str, Any], url: str) -> None:
    """Raise `VersionError` for a later version, or for a requirement that this version does not know."""
    version, requires = attributes.get("version"), attributes.get("requires", [])
    listed = isinstance(requires, list) and all(isinstance(one, str) for one in requires)
    if type(version) is not int or version < 1 or not listed:
        problem = f"{url} has format version {version!r}, requires {requires!r}"
        raise FormatError(problem, "its manifest is damaged: convert it again")
    if version > VERSION:
        problem = f"{url} has format version {version}, this streamloader reads up to {VERSION}"
        raise VersionError(problem, "upgrade streamloader")
    unknown = sorted(set(requires) - KNOWN_REQUIREMENTS)
    if unknown:
        problem = f"{url} requires {', '.join(unknown)}, which this streamloader does not know"
        raise VersionError(problem, "upgrade streamloader")


def manifest_from_json(attributes: Mapping[str, Any], url: str) -> Manifest:
    """Return the manifest of one dataset. Raises `VersionError` or `FormatError`, which name `url`."""
    check_version(attributes, url)
    try:
        order = attributes["order"]
        if order["version"] != 1:
            raise ValueError(f"order version {order['version']!r}")
        manifest = Manifest(
            num_samples=natural(attributes["num_samples"]),
            samples_per_shard=natural(attributes["samples_per_shard"], 1),
            fields={name: layout_from_json(raw) for name, raw in attributes["fields"].items()},
            order=OrderPin(natural(order["block"], 1), natural(order["lanes"], 1), natural(order["window"], 1)),
            tables=dict(attributes["tables"]),
            provenance=dict(attributes.get("provenance", {})),
            generation=natural(attributes.get("generation", 1), 1),
        )
        if (APPEND in attributes.get("requires", [])) != (manifest.generation > 1):
            raise ValueError(f"generation {manifest.generation} requires {attributes.get('requires', [])}")
        stated = attributes["digest"]
        _check(manifest)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = f"the manifest of {url} is damaged ({type(error).__name__}: {error})"
        raise FormatError(problem, "convert it again") from error
    if stated != manifest.digest:
        problem = f"the manifest of {url} says digest {stated}, its content gives {manifest.digest}"
        raise FormatError(problem, "it was edited: convert it again")
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise ValueError for what no writer of ours writes, so that nothing later allocates or computes by it."""
    if not manifest.fields:
        raise ValueError("no field")
    if set(manifest.tables) != set(manifest.fields):
        raise ValueError(f"fields {sorted(manifest.fields)} have tables {sorted(manifest.tables)}")
    if manifest.num_samples >= MAX_SAMPLES:
        raise ValueError(f"{manifest.num_samples} samples")
    for name, layout in manifest.fields.items():
        check_name(name)
        if not _SHA256.match(manifest.tables[name]):
            raise ValueError(f"table hash {manifest.tables[name]!r} of {name}")
        size = layout.field.item_bytes if layout.field.fixed else 4
        if layout.chunk * size > MAX_CHUNK_BYTES or layout.chunks_per_shard > MAX_CHUNKS:
            raise ValueError(f"chunk {layout.chunk} and shard {layout.shard} of {name} are too large")
        if layout.field.fixed and layout.nbytes != manifest.num_samples * size:
            raise ValueError(f"{manifest.num_samples} samples of {name} have {layout.nbytes} bytes")
        if not layout.resident and layout.shard != manifest.samples_per_shard:
            raise ValueError(f"shard {layout.shard} of {name} where the dataset has {manifest.samples_per_shard}")
        if layout.resident and not layout.field.fixed:
            raise ValueError(f"{layout.field} field {name} is resident")
        if not layout.resident and manifest.order.block % layout.chunk:
            raise ValueError(f"order block {manifest.order.block} cuts chunks of {layout.chunk} of {name}")
        if layout.skips:
            _check_skips(name, layout, manifest)
    resident = sum(layout.nbytes for layout in manifest.fields.values() if layout.resident)
    if resident > RESIDENT_TOTAL:
        raise ValueError(f"resident fields of {resident} bytes, at most {RESIDENT_TOTAL} are held")
    _check_order(manifest.order)


def _check_skips(name: str, layout: FieldLayout, manifest: Manifest) -> None:
    places = [(shard, chunk) for shard, chunk, _ in layout.skips]
    if manifest.generation == 1 or len(places) > MAX_SKIPS:
        raise ValueError(f"{len(places)} skips of {name} in generation {manifest.generation}")
    if any(one >= other for one, other in pairwise(places)):
        raise ValueError(f"the skips of {name} do not ascend")
    total = sum(size for _, _, size in layout.skips)
    if total > layout.stored or total >= MAX_SAMPLES:
        raise ValueError(f"{name} skips {total} of {layout.stored} bytes")
    for shard, chunk in places:
        sample = shard * layout.shard + chunk * layout.chunk
        if chunk >= layout.chunks_per_shard or sample >= manifest.num_samples:
            raise ValueError(f"{name} skips bytes before chunk {chunk} of shard {shard}, which does not exist")


def _check_order(order: OrderPin) -> None:
    if order.lanes > MAX_LANES:
        raise ValueError(f"order of {order.lanes} lanes, at most {MAX_LANES}")
    if order.window % order.block or not 2 * order.block <= order.window < MAX_WINDOW:
        raise ValueError(f"order window {order.window} is no multiple of block {order.block} in [2 blocks, 2^31)")
