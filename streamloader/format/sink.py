"""What everything that writes a dataset shares: shards, then receipts, then the manifest last.

A shard is written by `write_shard`, by anyone and as often as one likes: the same samples give the same
bytes. `finish` gathers the small fields and publishes; until its last step nothing can be opened. A crash at
any moment is healed by doing the missing shards and `finish` again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FieldError, FormatError, IncompleteError, MissingObjectError, NotFoundError
from streamloader.format.codecs import Column
from streamloader.format.destination import PARTS, Claim, clean, erase, prepare, write_job
from streamloader.format.geometry import Geometry, settle
from streamloader.format.manifest import FieldLayout, Manifest
from streamloader.format.metadata import dataset_documents, split_documents, to_bytes
from streamloader.format.opening import ROOT
from streamloader.format.receipts import (
    FieldReceipt,
    Receipt,
    StoredObject,
    check_receipts,
    read_receipts,
    receipt_path,
)
from streamloader.format.shard import encode_shard
from streamloader.format.table import encode_pages, page_path, rows_per_page, table_digest
from streamloader.format.threads import run_all
from streamloader.storage.protocol import Buffer, Store, body_crc32c

__all__ = [
    "FieldReceipt",
    "Receipt",
    "StoredObject",
    "check_receipts",
    "clean",
    "erase",
    "finish",
    "prepare",
    "prepare_shard",
    "put_shard",
    "read_receipts",
    "write_job",
    "write_shard",
    "write_split_root",
]


@dataclass(frozen=True, eq=False)
class PreparedShard:
    """A shard that is encoded and not yet written: its objects by path, and what its receipt says of its fields."""

    index: int
    num_samples: int
    objects: Mapping[str, Sequence[Buffer]]
    fields: Mapping[str, FieldReceipt]


def write_shard(store: Store, geometry: Geometry, index: int, columns: Mapping[str, Column]) -> Receipt:
    """Write one shard of all fields and then its receipt; `columns` are its samples, in order.

    Raises `FieldError` or `StorageError`.
    """
    return put_shard(store, prepare_shard(geometry, index, dict(columns)))


def prepare_shard(geometry: Geometry, index: int, columns: dict[str, Column]) -> PreparedShard:
    """Encode one shard of all fields. Takes the columns out of `columns`, so that what is encoded can be let go.

    One object for each bulk field, and one part with the rows of all small fields, field after field in the
    order of their names. Raises `FieldError`.
    """
    num_samples = check_columns(geometry, columns)
    objects: dict[str, Sequence[Buffer]] = {}
    fields: dict[str, FieldReceipt] = {}
    part: list[Buffer] = []
    for name, layout in sorted(geometry.layouts.items()):
        column = columns.pop(name)
        if layout.resident:
            part.append(np.asarray(column, little(layout)).tobytes())
            continue
        nbytes = column_bytes(layout, column)
        if isinstance(column, list):
            column = column.copy()  # others may hold the list, and then its items too
        encoded = encode_shard(layout, column, spend=True)
        objects[layout.shard_key(name, index)] = encoded.parts
        fields[name] = FieldReceipt(nbytes, encoded.size, encoded.entries)
    if part:
        objects[f"{PARTS}/{index}"] = part
    return PreparedShard(index, num_samples, objects, fields)


def put_shard(store: Store, shard: PreparedShard, job: str = "") -> Receipt:
    """Write the objects of a shard and then its receipt, which names the job. Raises `StorageError`."""
    objects = {path: put_object(store, path, parts) for path, parts in shard.objects.items()}
    receipt = Receipt(shard.index, shard.num_samples, objects, shard.fields, job)
    store.put(receipt_path(shard.index), receipt.to_json())
    return receipt


def check_columns(geometry: Geometry, columns: Mapping[str, Column]) -> int:
    """Return the number of samples; `FieldError` where a column would be stored as something else."""
    if set(columns) != set(geometry.layouts):
        raise FieldError(f"the columns {sorted(columns)} of a shard", f"give exactly {', '.join(geometry.layouts)}")
    lengths = {name: len(column) for name, column in columns.items()}
    num_samples = next(iter(lengths.values()))
    if set(lengths.values()) != {num_samples} or not 0 < num_samples <= geometry.samples_per_shard:
        problem = f"the columns of a shard of {geometry.samples_per_shard} samples have lengths {lengths}"
        raise FieldError(problem, "give as many values for each field, and no more than a shard has")
    for name, column in columns.items():
        field = geometry.layouts[name].field
        if field.fixed and (np.dtype(field.dtype), field.shape) != (np.asarray(column).dtype, np.shape(column)[1:]):
            problem = f"the column of {name!r} has {np.asarray(column).dtype} {np.shape(column)[1:]}"
            raise FieldError(f"{problem}, the field is {field}", f"give {field}")
    return num_samples


def column_bytes(layout: FieldLayout, column: Column) -> int:
    """Return the decoded bytes of a column."""
    if layout.field.fixed:
        return len(column) * layout.field.item_bytes
    return sum(len(item) for item in column)


def finish(
    store: Store,
    geometry: Geometry,
    receipts: Mapping[int, Receipt],
    provenance: Mapping[str, Any],
    threads: int,
    *,
    claim: Claim | None = None,
) -> Manifest:
    """Gather the small fields, write tables, array documents and last the root; then remove parts and receipts.

    A lost `claim` ends it before the root is written, with a `DestinationError`.

    Holds the resident fields (256 MB at most) and a part for each thread. Raises `IncompleteError` where a
    shard is missing, `MissingObjectError` or `FormatError` where a part is not what was written.
    """
    num_samples = _count(store, geometry, receipts)
    stored = {name: 0 for name, layout in geometry.layouts.items() if not layout.resident}
    for receipt in receipts.values():
        for name, one in receipt.fields.items():
            stored[name] += one.stored
    decoded = sum(one.nbytes for receipt in receipts.values() for one in receipt.fields.values())
    final = settle(geometry, num_samples, stored, decoded)
    fields = {name: {shard: receipt.fields[name] for shard, receipt in receipts.items()} for name in stored}
    fields |= _gather(store, geometry, final, receipts, threads)
    tables: dict[str, str] = {}
    layouts: dict[str, FieldLayout] = {}
    for name, layout in final.layouts.items():
        entries = np.zeros((layout.num_shards(num_samples), layout.chunks_per_shard, 2), np.uint32)
        for shard, one in fields[name].items():
            entries[shard] = one.entries
        tables[name] = write_table(store, name, layout, entries, threads=threads)
        sums = [(one.nbytes, one.stored) for one in fields[name].values()]
        layouts[name] = replace(layout, nbytes=sum(n for n, _ in sums), stored=sum(s for _, s in sums))
    manifest = Manifest(num_samples, final.samples_per_shard, layouts, final.order, tables, provenance)
    documents = dataset_documents(manifest)
    root = documents.pop("")
    run_all(lambda path: store.put(f"{path}/{ROOT}", to_bytes(documents[path])), documents, threads)
    if claim is not None:
        claim.check()
    store.put(ROOT, to_bytes(root))
    clean(store, claim)
    return manifest


def write_table(
    store: Store, name: str, layout: FieldLayout, entries: NDArray[np.uint32], *, threads: int, generation: int = 1
) -> str:
    """Write the pages of a field's chunk table, uint32 (shards, chunks, 2); return its SHA-256."""
    rows = rows_per_page(layout, len(entries) * layout.shard)
    pages = [(page_path(name, i, generation), page) for i, page in enumerate(encode_pages(entries, rows))]
    run_all(lambda page: store.put(*page), pages, threads)
    return table_digest(entries)


def write_split_root(store: Store, manifests: Mapping[str, Manifest], claim: Claim | None = None) -> None:
    """Publish the finished datasets of the child groups as splits; then remove the job file.

    Raises `DestinationError` where the `claim` is lost.
    """
    if claim is not None:
        claim.check()
    store.put(ROOT, to_bytes(split_documents(manifests)))
    clean(store, claim)


def put_object(store: Store, path: str, parts: Sequence[Buffer]) -> StoredObject:
    """Write an object and return what the receipt says of it."""
    info = store.put(path, parts)
    return StoredObject(info.size, info.etag, body_crc32c(parts))


def little(layout: FieldLayout) -> np.dtype[Any]:
    """Return the field's dtype as it is stored."""
    return np.dtype(layout.field.dtype).newbyteorder("<")


def _count(store: Store, geometry: Geometry, receipts: Mapping[int, Receipt]) -> int:
    """Return the number of samples. All shards must be there, and only the last may be short."""
    total = sum(receipt.num_samples for receipt in receipts.values())
    expected = range(-(-total // geometry.samples_per_shard))
    full = all(receipts[i].num_samples == geometry.samples_per_shard for i in expected[:-1] if i in receipts)
    if sorted(receipts) != list(expected) or not full:
        problem = f"{store.url} has the shards {sorted(receipts)[:20]} with {total} samples"
        raise IncompleteError(f"{problem} in shards of {geometry.samples_per_shard}", "write the missing shards first")
    return total


def _gather(
    store: Store, geometry: Geometry, final: Geometry, receipts: Mapping[int, Receipt], threads: int
) -> dict[str, dict[int, FieldReceipt]]:
    """Turn the parts into shards of the small fields; return their rows of the tables by field and shard."""
    small = [name for name, layout in sorted(geometry.layouts.items()) if layout.resident]
    num_samples = sum(receipt.num_samples for receipt in receipts.values())
    out: dict[str, dict[int, FieldReceipt]] = {name: {} for name in small}
    resident = {
        name: np.empty((num_samples, *final.layouts[name].field.shape), little(final.layouts[name]))
        for name in small
        if final.layouts[name].resident
    }

    def take(receipt: Receipt) -> None:
        layouts = [final.layouts[name] for name in small]
        data = read_part(store, f"{PARTS}/{receipt.shard}", receipt, layouts, "run the same conversion again")
        at, first = 0, receipt.shard * geometry.samples_per_shard
        for name in small:
            layout = final.layouts[name]
            size = receipt.num_samples * layout.field.item_bytes
            rows = np.frombuffer(data, little(layout), size // little(layout).itemsize, at)
            rows = rows.reshape(-1, *layout.field.shape)
            at += size
            if name in resident:
                resident[name][first : first + len(rows)] = rows
            else:
                out[name][receipt.shard] = _write(store, name, layout, receipt.shard, rows)

    def write(task: tuple[str, int]) -> None:
        name, shard = task
        layout = final.layouts[name]
        rows = resident[name][shard * layout.shard : (shard + 1) * layout.shard]
        out[name][shard] = _write(store, name, layout, shard, rows)

    if small:
        run_all(take, receipts.values(), threads)
        tasks = [(name, shard) for name in resident for shard in range(final.layouts[name].num_shards(num_samples))]
        run_all(write, tasks, threads)
    return out


def _write(store: Store, name: str, layout: FieldLayout, shard: int, rows: NDArray[Any]) -> FieldReceipt:
    encoded = encode_shard(layout, rows)
    info = store.put(layout.shard_key(name, shard), encoded.parts)
    return FieldReceipt(column_bytes(layout, rows), info.size, encoded.entries)


def read_part(store: Store, path: str, receipt: Receipt, layouts: Iterable[FieldLayout], remedy: str) -> bytes:
    """Return the rows of a shard's small fields, whose size the layouts give: no more than that is read.

    Raises `MissingObjectError` or `FormatError` where the object is not what the receipt says.
    """
    size = receipt.num_samples * sum(layout.field.item_bytes for layout in layouts)
    try:
        data = store.get_range(path, 0, size + 1)
    except NotFoundError as error:
        raise MissingObjectError(f"{store.url}/{path} is missing", remedy) from error
    written = receipt.objects.get(path)
    if written is None or not size == len(data) == written.size or crc32c.crc32c(data) != written.crc32c:
        raise FormatError(f"{store.url}/{path} is not what was written", remedy)
    return data
