"""`streamloader inspect`."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import click

from streamloader.cli.options import parse_options, show_bytes

if TYPE_CHECKING:
    from streamloader.format.manifest import FieldLayout, Manifest
    from streamloader.storage.protocol import Store

SHOWN = 60  # characters of a value


@click.command()
@click.argument("url")
@click.option("--split", help="One split only; all of them by default.")
@click.option(
    "--storage-option", "storage", multiple=True, metavar="NAME=VALUE", help="An option of the store; repeat."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def inspect(url: str, split: str | None, storage: tuple[str, ...], as_json: bool) -> None:
    """Show the fields, shapes, sizes, codecs, splits and one sample of the dataset at URL."""
    from streamloader.storage import open_store

    options = parse_options(storage)
    store = open_store(url, options)
    names = [split] if split is not None else _split_names(store)
    found = [_facts(store, url, name, options) for name in names]
    if as_json:
        click.echo(json.dumps({"url": store.url, "datasets": found}, indent=1))
    else:
        _print(store.url, found)


def _split_names(store: Store) -> list[str] | list[None]:
    """Return the splits of a root, or [None] for one dataset; opening says what is wrong with any of them."""
    from streamloader.format.opening import open_root, read_root

    attributes = read_root(store).get("attributes")
    ours = attributes.get("streamloader") if isinstance(attributes, dict) else None
    splits = ours.get("splits") if isinstance(ours, dict) else None
    return list(open_root(store, next(iter(splits))).splits) if isinstance(splits, dict) and splits else [None]


def _facts(store: Store, url: str, split: str | None, options: dict[str, Any]) -> dict[str, Any]:
    from streamloader.dataset import open as open_dataset
    from streamloader.format.opening import open_root

    manifest = open_root(store, split).manifest
    dataset = open_dataset(url, split=split, storage_options=options)
    sample = dataset[0] if manifest.num_samples else {}
    order = manifest.order
    return {
        "split": split,
        "num_samples": manifest.num_samples,
        "generation": manifest.generation,
        "digest": manifest.digest,
        "samples_per_shard": manifest.samples_per_shard,
        "order": {"block": order.block, "lanes": order.lanes, "window": order.window},
        "fields": {name: _field_facts(layout, manifest) for name, layout in manifest.fields.items()},
        "provenance": dict(manifest.provenance),
        "sample": {name: _show(value, manifest.fields[name]) for name, value in sample.items()},
    }


def _field_facts(layout: FieldLayout, manifest: Manifest) -> dict[str, Any]:
    return {
        "kind": layout.field.kind,
        "dtype": layout.field.dtype,
        "shape": list(layout.field.shape),
        "encoding": layout.field.encoding,
        "spec": str(layout.field),
        "codec": layout.codec,
        "nbytes": layout.nbytes,
        "stored": layout.stored,
        "ratio": round(layout.nbytes / layout.stored, 3) if layout.stored else None,
        "chunk": layout.chunk,
        "chunks": -(-manifest.num_samples // layout.chunk),
        "shard": layout.shard,
        "shards": layout.num_shards(manifest.num_samples),
        "resident": layout.resident,
    }


def _show(value: Any, layout: FieldLayout) -> str:
    """Return a value in a few words: an image by its format and size, an array by its shape and first values."""
    if isinstance(value, bytes):
        return _show_image(value) or f"{len(value)} bytes"
    if isinstance(value, str):
        return value if len(value) <= SHOWN else f"{value[:SHOWN]}... ({len(value)} characters)"
    if not layout.field.shape and layout.field.kind == "tensor":
        return str(value)
    first = ", ".join(str(one) for one in value.ravel()[:4])
    more = ", ..." if value.size > 4 else ""
    return f"{value.dtype}{list(value.shape)} [{first}{more}]"


def _show_image(data: bytes) -> str:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            return f"{image.format} {image.width}x{image.height} {image.mode}, {len(data)} bytes"
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""


def _print(url: str, found: list[dict[str, Any]]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # a pipe has no width: do not fold columns at 80
    for facts in found:
        console.print(f"{url}{' split ' + facts['split'] if facts['split'] else ''}", markup=False, soft_wrap=True)
        console.print(_headline(facts), markup=False, soft_wrap=True)
        console.print(_table(facts))
        for name, classes in _classes(facts).items():
            listed = ", ".join(map(str, classes[:10]))
            more = f", ... ({len(classes)})" if len(classes) > 10 else ""
            console.print(f"classes of {name}: {listed}{more}", markup=False, soft_wrap=True)


def _headline(facts: dict[str, Any]) -> str:
    order = facts["order"]
    stored = sum(field["stored"] for field in facts["fields"].values())
    nbytes = sum(field["nbytes"] for field in facts["fields"].values())
    ratio = f", compression {nbytes / stored:.2f}" if stored else ""
    parts = f"block {order['block']}, lanes {order['lanes']}, window {order['window']}"
    size = f"{show_bytes(nbytes)} decoded, {show_bytes(stored)} stored{ratio}"
    version = f"version {facts['generation']}, " if facts["generation"] > 1 else ""
    return f"{version}{facts['num_samples']:,} samples, {size}; order: {parts}; digest {facts['digest']}"


def _classes(facts: dict[str, Any]) -> dict[str, list[Any]]:
    classes = facts["provenance"].get("classes")
    return {str(name): list(names) for name, names in classes.items()} if isinstance(classes, dict) else {}


def _table(facts: dict[str, Any]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for title in ("field", "kind", "decoded", "stored", "ratio", "codec", "chunks", "shards", "held", "sample 0"):
        table.add_column(title, justify="right" if title in ("decoded", "stored", "ratio") else "left")
    for name, field in facts["fields"].items():
        cells = [
            name,
            field["spec"],
            show_bytes(field["nbytes"]),
            show_bytes(field["stored"]),
            f"{field['ratio']:.2f}" if field["ratio"] else "",
            field["codec"],
            f"{field['chunks']} of {field['chunk']}",
            f"{field['shards']} of {field['shard']}",
            "in memory" if field["resident"] else "",
            facts["sample"].get(name, ""),
        ]
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table
