"""Renders cells as HTML, and what notebooks display."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from streamloader.show.cells import Cell, Looks, rows_of, seen
from streamloader.show.media import Media

MOST_EMBEDDED = 4 << 20  # bytes of a sound or a video
MOST_COLUMNS = 100  # of a dict that is taken for a batch


class Shown:
    """HTML that a notebook displays; `html` is its text. What it shows is escaped."""

    def __init__(self, html: str) -> None:
        self.html = html

    def _repr_html_(self) -> str:
        return self.html


@cache
def environment() -> Any:
    """Return the templates, which escape every value."""
    from jinja2 import Environment, PackageLoader, PrefixLoader, StrictUndefined

    folders = {name: PackageLoader(f"streamloader.{name}") for name in ("show", "view")}
    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    templates = Environment(loader=PrefixLoader(folders), undefined=StrictUndefined, **options)
    templates.filters["seen"] = seen
    return templates


def render(template: str, **values: Any) -> str:
    """Return a template, such as `show/batch.html`, with these values."""
    html: str = environment().get_template(template).render(**values)
    return html.encode(errors="replace").decode()  # JSON may have surrogates, which no page can


def data_uri(media: Media) -> str:
    """Return a file as an address that has all its bytes."""
    return f"data:{media.type};base64,{b64encode(media.read()).decode()}"


def _embedded(cell: Cell) -> Cell:
    """Return a cell as a notebook saves it: without a sound or a video that would fill its file."""
    if cell.kind not in ("audio", "video") or cell.media[0].nbytes <= MOST_EMBEDDED:
        return cell
    return Cell("bytes", f"{cell.text}: too large for a notebook, streamloader view plays it")


def show_batch(batch: Mapping[str, Any], looks: Looks, title: str = "", most: int = 16) -> Shown:
    """Return the first `most` samples of a batch, a dict as loaders yield."""
    rows = rows_of(batch, looks)
    shown = [replace(row, cells={name: _embedded(each) for name, each in row.cells.items()}) for row in rows[:most]]
    about = f"{len(rows):,} samples" + (f", the first {most} shown" if len(rows) > most else "")
    return Shown(render("show/batch.html", rows=shown, src=data_uri, title=title, about=about))


def batch_html(value: Mapping[Any, Any]) -> str | None:
    """Return a batch as HTML; None for another dict, which a notebook then shows as text."""
    columns = [each for each in value.values() if len(getattr(each, "shape", ())) > 0]
    is_batch = columns and len(value) < MOST_COLUMNS and all(isinstance(name, str) for name in value)
    return show_batch(value, Looks()).html if is_batch else None


def show_table(title: str, titles: Sequence[str], rows: Sequence[Sequence[object]]) -> Shown:
    """Return a table, as for the fields of a dataset."""
    return Shown(render("show/table.html", title=title, titles=titles, rows=rows))
