"""Writes `golden/`: tiny datasets of format version 1 and `expected.json`. The same bytes every time.

    python make_golden.py [FOLDER]

Run it again only to add a dataset. One that was published stays as it is: every later version must read it. So
every size and codec is written out here, and nothing depends on what a version of the package would choose.
Compressed bytes depend on the versions of zstd and blosc that constraints.txt pins.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from golden_values import DATASETS, Fields

from streamloader.format.codecs import column_size, encode_shard
from streamloader.format.manifest import Field, FieldLayout, Manifest, OrderPin
from streamloader.format.metadata import dataset_documents, to_bytes
from streamloader.format.publish import (
    clean_append,
    finish_extension,
    plan_extension,
    prepare_shard,
    publish,
    write_split_root,
)
from streamloader.format.tables import (
    encode_lengths,
    encode_pages,
    lengths_of,
    lengths_path,
    rows_per_page,
    table_digest,
    table_path,
)
from streamloader.format.values import to_columns
from streamloader.storage import open_store
from streamloader.storage.store import Store

CODECS = ("none", "lz4", "zstd")
NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
RESIDENT, BULK = True, False
Layouts = dict[str, tuple[int, int, str, bool]]  # chunk, shard, codec, resident


def in_turn(name: str) -> Layouts:
    """All fields bulk, chunks of 2 in shards of 4, with the codecs in turn."""
    return {field: (2, 4, CODECS[i % 3], BULK) for i, field in enumerate(DATASETS[name])}


EVERY_KIND: Layouts = {
    "signal": (1, 1, "lz4", BULK),
    "icon": (1, 1, "none", BULK),
    "caption": (1, 1, "zstd", BULK),
    "boxes": (1, 1, "lz4", BULK),
    "label": (1, 1, "zstd", RESIDENT),
}
SMALL: Layouts = {"label": (8, 8, "none", RESIDENT), "vector": (8, 8, "zstd", RESIDENT)}
# samples_per_shard, order, layouts
PLANS: dict[str, tuple[int, OrderPin, Layouts]] = {
    "tensors": (4, OrderPin(2, 1, 8), in_turn("tensors")),
    "variable": (4, OrderPin(2, 1, 8), in_turn("variable")),
    "mixed": (
        8,
        OrderPin(4, 2, 16),
        {
            "signal": (2, 8, "lz4", BULK),
            "caption": (4, 8, "zstd", BULK),
            "label": (32, 32, "lz4", RESIDENT),
            "vector": (16, 32, "none", RESIDENT),
        },
    ),
    "only_resident": (
        16,
        OrderPin(1, 4, 4),
        {"label": (64, 64, "lz4", RESIDENT), "score": (64, 64, "none", RESIDENT), "seen": (64, 64, "zstd", RESIDENT)},
    ),
    "empty": (1, OrderPin(1, 1, 4), EVERY_KIND),
    "one": (1, OrderPin(1, 1, 4), EVERY_KIND),
    "splits/train": (8, OrderPin(1, 1, 4), SMALL | {"signal": (1, 8, "lz4", BULK), "caption": (1, 8, "none", BULK)}),
    "splits/val": (4, OrderPin(1, 1, 4), SMALL | {"signal": (1, 4, "lz4", BULK), "caption": (1, 4, "none", BULK)}),
    # what the format allows and our writers do not choose: no powers of two, a resident field of several shards
    "free": (
        12,
        OrderPin(6, 2, 12),
        {"wave": (3, 12, "none", BULK), "blob": (6, 12, "lz4", BULK), "label": (5, 15, "zstd", RESIDENT)},
    ),
    # last shards and chunks that are not full, of every codec, when samples come behind them
    "appended": (
        8,
        OrderPin(4, 1, 16),
        {
            "wave": (4, 8, "none", BULK),
            "caption": (2, 8, "zstd", BULK),
            "boxes": (4, 8, "lz4", BULK),
            "label": (8, 16, "lz4", RESIDENT),
        },
    ),
    # a table of lengths for each field whose samples vary, with a shard that is not full
    "lengths": (
        8,
        OrderPin(4, 1, 16),
        {
            "wave": (4, 8, "none", BULK),
            "caption": (2, 8, "none", BULK),
            "boxes": (4, 8, "zstd", BULK),
            "label": (8, 16, "none", RESIDENT),
        },
    ),
}
# the numbers of samples of a dataset's versions: it is written with the first, and appended to
VERSIONS = {"appended": (5, 11, 20)}
WITH_LENGTHS = {"lengths"}
PROVENANCE = {"free": {"source": "by hand", "ratio": 0.5, "who": "Zoë"}}


def value_of(field: Field, value: Any) -> Any:
    """Return a JSON value as the Writer takes it."""
    if field.kind == "bytes":
        return base64.b64decode(value)
    if field.kind == "text":
        return value
    numbers = np.vectorize(lambda one: NUMBERS.get(one, one), otypes=[object])(np.array(value, object))
    return numbers.astype(field.dtype) if numbers.size else np.empty((0, *field.shape), field.dtype)


def columns_of(fields: Fields) -> tuple[dict[str, Field], dict[str, Any]]:
    """Return the fields and their checked columns."""
    parsed = {name: Field.parse(spec) for name, (spec, _) in fields.items()}
    raw = {name: [value_of(parsed[name], value) for value in values] for name, (_, values) in fields.items()}
    return parsed, to_columns(parsed, raw, 0)[1]


def write_field(store: Store, name: str, layout: FieldLayout, column: Any) -> tuple[FieldLayout, str]:
    """Write the shards and the table of a field; return its final layout and the table's hash."""
    entries, stored = np.zeros((0, layout.chunks_per_shard, 2), np.uint32), 0
    for i in range(layout.num_shards(len(column))):
        encoded = encode_shard(layout, column[i * layout.shard : (i + 1) * layout.shard])
        store.put(layout.shard_key(name, i), encoded.parts)
        entries = np.concatenate([entries, encoded.entries[None]])
        stored += encoded.size
    for i, page in enumerate(encode_pages(entries, rows_per_page(layout, len(column)))):
        store.put(f"{table_path(name)}/c/{i}/0/0", page)
    return replace(layout, nbytes=column_size(column), stored=stored), table_digest(entries)


def write_lengths(store: Store, layouts: dict[str, FieldLayout], lengths: dict[str, Any]) -> dict[str, str]:
    """Write the tables of lengths of the fields whose samples vary; return their hashes."""
    hashes = {}
    for name, layout in layouts.items():
        if not layout.field.fixed:
            pages = []
            for i in range(layout.num_shards(len(lengths[name]))):
                page = lengths[name][i * layout.shard : (i + 1) * layout.shard]
                store.put(lengths_path(name, i), encode_lengths(page, layout))
                pages.append(hashlib.sha256(page.astype("<u4").tobytes()).digest())
            hashes[name] = hashlib.sha256(b"".join(pages)).hexdigest()
    return hashes


def write(store: Store, name: str) -> Manifest:
    """Write one golden dataset, the root document last."""
    samples_per_shard, order, plan = PLANS[name]
    parsed, columns = columns_of(DATASETS[name])
    versions = VERSIONS.get(name, (None,))
    whole, columns = columns, {field: column[: versions[0]] for field, column in columns.items()}
    lengths = {field: lengths_of(column) for field, column in columns.items() if not parsed[field].fixed}
    layouts, tables = {}, {}
    for field, (chunk, shard, codec, resident) in plan.items():
        layout = FieldLayout(parsed[field], chunk, shard, codec, resident)
        layouts[field], tables[field] = write_field(store, field, layout, columns[field])
    count = len(next(iter(columns.values())))
    manifest = Manifest(count, samples_per_shard, layouts, order, tables, PROVENANCE.get(name, {}))
    if name in WITH_LENGTHS:
        manifest = replace(manifest, lengths=write_lengths(store, layouts, lengths))
    documents = dataset_documents(manifest)
    if name == "free":  # keys that a reader must ignore, and the other name of the bytes dtype
        ours = documents[""]["attributes"]["streamloader"]
        ours["later"] = {"a reader": "ignores this"}
        ours["fields"]["wave"]["unit"] = "V"
        documents["blob"]["data_type"] = "bytes"
    root = documents.pop("")
    for path, document in documents.items():
        store.put(f"{path}/zarr.json", to_bytes(document))
    store.put("zarr.json", to_bytes(root))
    for stop in versions[1:]:
        manifest = append(store, manifest, {field: column[:stop] for field, column in whole.items()})
    return manifest


def append(store: Store, base: Manifest, columns: dict[str, Any]) -> Manifest:
    """Publish the next version, which has all of these samples."""
    first = base.num_samples
    extension = plan_extension(store, base, len(next(iter(columns.values()))) - first)
    receipts = {}
    for shard in extension.shards:
        start, stop = extension.samples(shard)
        part = {field: column[first + start : first + stop] for field, column in columns.items()}
        receipts[shard] = prepare_shard(store, extension.geometry, shard, part, extension=extension)()
    manifest = finish_extension(store, extension, receipts, base.provenance)
    publish(store, base.digest, manifest)
    clean_append(store)
    return manifest


def make(folder: Path) -> None:
    """Write all golden datasets below `folder`."""
    store = open_store(str(folder))
    manifests = {name: write(store.child(name), name) for name in PLANS}
    write_split_root(store.child("splits"), {name: manifests[f"splits/{name}"] for name in ("train", "val")})
    expected = {
        name: {
            "num_samples": manifests[name].num_samples,
            "digest": manifests[name].digest,  # pinned, so that a change of its definition is seen
            "fields": {field: {"spec": spec, "values": values} for field, (spec, values) in fields.items()},
        }
        for name, fields in DATASETS.items()
    }
    text = json.dumps(expected, separators=(",", ":"), sort_keys=True)
    (folder / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "golden")
