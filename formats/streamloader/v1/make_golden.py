"""Writes `golden/`: tiny datasets of format version 1 and `expected.json`. The same bytes every time.

    python make_golden.py [FOLDER]

Run it again only to add a dataset. One that was published stays as it is: every later version must read it.
Compressed bytes depend on the versions of zstd and blosc that constraints.txt pins.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from golden_values import DATASETS, Fields

from streamloader.format.geometry import Geometry
from streamloader.format.manifest import Field, FieldLayout, Manifest, OrderPin
from streamloader.format.metadata import dataset_documents, to_bytes
from streamloader.format.shard import encode_shard
from streamloader.format.sink import column_bytes, finish, read_receipts, write_shard, write_split_root
from streamloader.format.table import encode_pages, rows_per_page, table_digest, table_path
from streamloader.format.values import to_columns
from streamloader.format.writer import Writer
from streamloader.options import Layout
from streamloader.storage import open_store
from streamloader.storage.protocol import Store

CODECS = ("none", "lz4", "zstd")
NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


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


def with_writer(url: str, fields: Fields, layout: Layout) -> Manifest:
    """Write as a user does."""
    parsed, _ = columns_of(fields)
    count = len(next(iter(fields.values()))[1])
    with Writer(url, parsed, layout=layout, num_samples=count, workers=1) as out:
        for i in range(count):
            out.write({name: value_of(parsed[name], values[i]) for name, (_, values) in fields.items()})
    return out.close()


def all_bulk(store: Store, fields: Fields) -> None:
    """Write every field as bulk, chunks of 2 in shards of 4, with the codecs in turn."""
    parsed, columns = columns_of(fields)
    layouts = {
        name: FieldLayout(field, 2, 4, CODECS[i % 3], resident=False) for i, (name, field) in enumerate(parsed.items())
    }
    geometry = Geometry(4, OrderPin(2, 1, 8), layouts)
    count = len(next(iter(columns.values())))
    for shard in range(-(-count // 4)):
        write_shard(store, geometry, shard, {name: column[4 * shard :][:4] for name, column in columns.items()})
    finish(store, geometry, read_receipts(store), {"made_by": "make_golden.py"}, 1)


def by_hand(store: Store, fields: Fields) -> None:
    """Write what the format allows and our writers do not choose.

    No powers of two, a resident field of several shards, keys that a reader must ignore, and the other name of
    the bytes dtype.
    """
    parsed, columns = columns_of(fields)
    sizes = {"wave": (3, 12, False), "blob": (6, 12, False), "label": (5, 15, True)}
    count = len(columns["label"])
    layouts, tables = {}, {}
    for codec, (name, (chunk, shard, resident)) in zip(CODECS, sizes.items(), strict=True):
        layout = FieldLayout(parsed[name], chunk, shard, codec, resident)
        entries, stored = [], 0
        for i in range(-(-count // shard)):
            encoded = encode_shard(layout, columns[name][i * shard : (i + 1) * shard])
            store.put(layout.shard_key(name, i), encoded.data)
            entries.append(encoded.entries)
            stored += len(encoded.data)
        nbytes = column_bytes(layout, columns[name])
        layouts[name] = FieldLayout(parsed[name], chunk, shard, codec, resident, nbytes, stored)
        table = np.stack(entries)
        tables[name] = table_digest(table)
        for i, page in enumerate(encode_pages(table, rows_per_page(layout, count))):
            store.put(f"{table_path(name)}/c/{i}/0/0", page)
    provenance = {"source": "by hand", "ratio": 0.5, "who": "Zoë"}
    documents = dataset_documents(Manifest(count, 12, layouts, OrderPin(6, 2, 12), tables, provenance))
    ours = documents[""]["attributes"]["streamloader"]
    ours["later"] = {"a reader": "ignores this"}
    ours["fields"]["wave"]["unit"] = "V"
    documents["blob"]["data_type"] = "bytes"
    for path, document in documents.items():
        store.put(f"{path}/zarr.json" if path else "zarr.json", to_bytes(document))


def make(folder: Path) -> None:
    """Write all golden datasets below `folder`."""
    store = open_store(str(folder))
    url = str(folder)
    all_bulk(store.child("tensors"), DATASETS["tensors"])
    all_bulk(store.child("variable"), DATASETS["variable"])
    small = Layout(shard_size=1 << 14, block_size=1 << 12, chunk_size=1 << 11, samples_per_shard=8)
    with_writer(f"{url}/mixed", DATASETS["mixed"], small)
    with_writer(f"{url}/only_resident", DATASETS["only_resident"], small)
    with_writer(f"{url}/empty", DATASETS["empty"], small)
    with_writer(f"{url}/one", DATASETS["one"], small)
    splits = {name: with_writer(f"{url}/splits/{name}", DATASETS[f"splits/{name}"], small) for name in ("train", "val")}
    write_split_root(store.child("splits"), splits)
    by_hand(store.child("free"), DATASETS["free"])
    expected = {
        name: {
            "num_samples": len(next(iter(fields.values()))[1]),
            "digest": digest_of(folder / name),
            "fields": shown(fields),
        }
        for name, fields in DATASETS.items()
    }
    (folder / "expected.json").write_text(
        json.dumps(expected, indent=None, separators=(",", ":"), sort_keys=True) + "\n"
    )


def shown(fields: Fields) -> dict[str, Any]:
    """Return the fields as they stand in expected.json."""
    return {name: {"spec": spec, "values": values} for name, (spec, values) in fields.items()}


def digest_of(path: Path) -> str:
    """Return the digest that a dataset states: pinned, so that a change of its definition is seen."""
    digest: str = json.loads((path / "zarr.json").read_text())["attributes"]["streamloader"]["digest"]
    return digest


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "golden")
