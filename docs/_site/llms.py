"""`llms.txt`, a list of the pages for language models, and `llms-full.txt`, all of them in one file, as Markdown."""

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import streamloader


def _pages(app: Sphinx, page: str) -> list[str]:
    """Return the pages below a page, in the order of the site."""
    below = app.env.toctree_includes.get(page, [])
    return [name for child in below for name in (child, *_pages(app, child))]


def _write(app: Sphinx, error: Exception | None) -> None:
    if error or app.builder.format != "html":
        return
    root: str = app.config.root_doc
    pages = list(dict.fromkeys(_pages(app, root)))
    index = [f"# {app.config.project}", "", f"> {(streamloader.__doc__ or '').splitlines()[0]}", "", "## Pages", ""]
    index += [f"- [{app.env.titles[page].astext()}](_sources/{page}.md)" for page in pages]
    out = Path(app.outdir)
    (out / "llms.txt").write_text("\n".join([*index, ""]), encoding="utf-8")
    texts = (Path(app.srcdir, f"{page}.md").read_text(encoding="utf-8") for page in pages)
    (out / "llms-full.txt").write_text("\n\n".join(texts), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Write both files when the site is built."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
