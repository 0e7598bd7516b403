"""The end of an append: small fields, tables and documents of the new version, and last its manifest, at once.

Until the root document is replaced everybody reads the version that was there; who opened that one goes on reading it
afterwards, since nothing that its manifest and tables speak of has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import (
    DestinationError,
    FormatError,
    IncompleteError,
    ObjectExistsError,
)
from streamloader.format.extend import APPEND, Extension, part_path, read_tail, write_object
from streamloader.format.geometry import order_pin
from streamloader.format.manifest import FORMAT, FieldLayout, Manifest
from streamloader.format.metadata import dataset_documents, split_documents, to_bytes
from streamloader.format.opening import ROOT, get_document
from streamloader.format.parse import manifest_from_json, parse_json
from streamloader.format.receipts import FieldReceipt, Receipt
from streamloader.format.shard import encode_index
from streamloader.format.sink import little, read_part, write_table
from streamloader.format.table import open_table, tables_path
from streamloader.format.threads import run_all
from streamloader.storage.protocol import Store

CLAIM = "_streamloader/append.json"  # who appends: there is one at a time
ROUNDS = 5  # other splits of one root may be appended to at the same time


def finish_extension(
    store: Store, extension: Extension, receipts: Mapping[int, Receipt], provenance: Mapping[str, Any], threads: int
) -> Manifest:
    """Write the small fields' shards and the tables; return the new manifest, which is not published yet.

    Holds the new rows of the resident fields (256 MB at most) and whole tables. Raises `IncompleteError` where a shard
    is missing, `FormatError` for what is not as it was written, or for more than a reader would open.
    """
    counts = {shard: stop - start for shard in extension.shards for start, stop in [extension.samples(shard)]}
    if {shard: receipt.num_samples for shard, receipt in receipts.items()} != counts:
        problem = f"{store.url} has {sorted(receipts)[:20]} of the shards {extension.shards} of an append"
        raise IncompleteError(problem, "write the missing shards first")
    base, generation = extension.base, extension.base.generation + 1
    written = {
        name: {shard: receipt.fields[name] for shard, receipt in receipts.items()}
        for name, layout in base.fields.items()
        if not layout.resident
    }
    written |= _write_resident(store, extension, receipts, threads)
    tables: dict[str, str] = {}
    layouts: dict[str, FieldLayout] = {}
    for name, layout in base.fields.items():
        layouts[name] = _grown(extension, name, written[name])
        entries = np.zeros((layout.num_shards(extension.num_samples), layout.chunks_per_shard, 2), np.uint32)
        before = open_table(store, base, name).read()
        entries[: len(before)] = before
        for shard, one in written[name].items():
            entries[shard] = one.entries
        tables[name] = write_table(store, name, layout, entries, threads=threads, generation=generation)
    wide = base.order.window > 4 * base.order.block  # a small dataset, whose windows are whole lanes
    decoded = sum(layout.nbytes for layout in layouts.values()) if wide else None
    order = order_pin(extension.num_samples, base.order.block, decoded)
    manifest = replace(
        base,
        num_samples=extension.num_samples,
        fields=layouts,
        order=order,
        tables=tables,
        provenance=provenance,
        generation=generation,
    )
    return manifest_from_json(manifest.to_json(), store.url)  # what readers would refuse is never published


def publish(store: Store, base: str, manifest: Manifest, threads: int) -> None:
    """Write the documents of the new version, and last its root in place of that with the digest `base`.

    Safe to repeat. Raises `DestinationError` where another version was published meanwhile.
    """
    documents = dataset_documents(manifest)
    root = documents.pop("")
    before = get_document(store, ROOT)
    _check_digest(store, _ours(store, before).get("digest"), base, manifest)
    run_all(lambda path: store.put(f"{path}/{ROOT}", to_bytes(documents[path])), documents, threads)
    try:
        store.replace(ROOT, to_bytes(root), before)
    except ObjectExistsError:
        raise _lost(store, _ours(store, get_document(store, ROOT)).get("digest"), base) from None


def publish_split(root: Store, split: str, base: str, manifest: Manifest) -> None:
    """Let the root of splits list the new version of a split, in place of that with the digest `base`.

    Safe to repeat, and safe beside appends to other splits. Raises `DestinationError` as `publish`.
    """
    fresh = split_documents({split: manifest})
    for _ in range(ROUNDS):
        before = get_document(root, ROOT)
        document = parse_json(before)
        listed = _ours(root, before).get("splits", {})
        _check_digest(root, listed.get(split, {}).get("digest"), base, manifest)
        nodes = document["consolidated_metadata"]["metadata"]
        others = {path: node for path, node in nodes.items() if path.partition("/")[0] != split}
        nodes = others | fresh["consolidated_metadata"]["metadata"]
        document["consolidated_metadata"]["metadata"] = dict(sorted(nodes.items()))
        document["attributes"][FORMAT]["splits"] |= fresh["attributes"][FORMAT]["splits"]
        try:
            root.replace(ROOT, to_bytes(document), before)
        except ObjectExistsError:
            continue
        return
    raise DestinationError(f"the root of {root.url} changes again and again", "run the same append again")


def clean_append(store: Store) -> None:
    """Remove what only an append under way needs. Safe to repeat: the claim goes last."""
    store.delete([info.path for info in store.list(APPEND)])
    store.delete([CLAIM])


def undo_extension(store: Store, extension: Extension, document: Mapping[str, Any] | None = None) -> None:
    """Put everything back as it was before an append that was not published, to the byte; `clean_append` comes next.

    `extension.base` is the version that is to stay. `document` is the root document of a split that may have been
    replaced already. Only while nobody appends.
    """
    base = extension.base
    for name, layout in base.fields.items():
        held = base.num_samples // layout.shard
        tail = extension.tails.get(name)
        path = layout.shard_key(name, held)
        info = store.head(path) if tail is not None else None
        if tail is not None and (info is None or info.size != tail.size(layout)):  # it only ever grows
            old = read_tail(store, name, layout, held, tail)
            store.put(path, old + encode_index(tail.entries, tail.skips))
        keep = {layout.shard_key(name, shard) for shard in range(layout.num_shards(base.num_samples))}
        store.delete([info.path for info in store.list(f"{name}/c") if info.path not in keep])
    documents = dataset_documents(base)
    for name in base.fields:
        store.put(f"{name}/{ROOT}", to_bytes(documents[name]))
    if document is not None:
        store.put(ROOT, to_bytes(dict(document)))
    store.delete([info.path for info in store.list(tables_path(base.generation + 1))])


def _ours(store: Store, root: bytes) -> dict[str, Any]:
    try:
        return dict(parse_json(root)["attributes"][FORMAT])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{store.url}/{ROOT} is damaged", "copy or convert the dataset again") from error


def _check_digest(store: Store, there: Any, base: str, manifest: Manifest) -> None:
    if there not in (base, manifest.digest):
        raise _lost(store, there, base)


def _lost(store: Store, there: Any, base: str) -> DestinationError:
    problem = f"{store.url} was changed by another run: it has the digest {there}, the append was made for {base}"
    return DestinationError(problem, "run the append again")


def _grown(extension: Extension, name: str, written: Mapping[int, FieldReceipt]) -> FieldLayout:
    """Return the layout of a field with its new sizes and skips."""
    layout, tail = extension.base.fields[name], extension.tails.get(name)
    nbytes = layout.nbytes + sum(one.nbytes for one in written.values())
    stored = layout.stored + sum(one.stored for one in written.values())
    if tail is None:
        return replace(layout, nbytes=nbytes, stored=stored)
    shard = extension.base.num_samples // layout.shard
    skips = tuple(skip for skip in layout.skips if skip[0] != shard)
    skips += tuple((shard, chunk, size) for chunk, size in tail.next_skips(layout))
    return replace(layout, nbytes=nbytes, stored=stored - tail.size(layout), skips=skips)


def _write_resident(
    store: Store, extension: Extension, receipts: Mapping[int, Receipt], threads: int
) -> dict[str, dict[int, FieldReceipt]]:
    """Turn the parts into shards of the resident fields; return their rows of the tables by field and shard."""
    before = extension.base.num_samples
    small = {name: layout for name, layout in sorted(extension.base.fields.items()) if layout.resident}
    rows = {name: np.empty((extension.added, *one.field.shape), little(one)) for name, one in small.items()}

    def take(receipt: Receipt) -> None:
        data = read_part(store, part_path(receipt.shard), receipt, small.values(), "run the same append again")
        at = 0
        start, stop = extension.samples(receipt.shard)
        for name, layout in small.items():
            flat: NDArray[Any] = rows[name][start:stop].reshape(-1)
            flat[:] = np.frombuffer(data, little(layout), len(flat), at)
            at += flat.nbytes

    def write(task: tuple[str, int]) -> tuple[str, int, FieldReceipt]:
        name, shard = task
        size = small[name].shard
        column = rows[name][max(0, shard * size - before) : (shard + 1) * size - before]
        return name, shard, write_object(store, extension, name, shard, column)[0]

    out: dict[str, dict[int, FieldReceipt]] = {name: {} for name in small}
    if small:
        run_all(take, receipts.values(), threads)
    shards = {name: range(before // one.shard, one.num_shards(extension.num_samples)) for name, one in small.items()}
    tasks = [(name, shard) for name in small for shard in shards[name]]
    for name, shard, receipt in run_all(write, tasks, threads):
        out[name][shard] = receipt
    return out
