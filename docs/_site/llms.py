"""`llms.txt`, a list of the pages for language models, and `llms-full.txt`, all of them in one file, as Markdown."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import streamloader


def _pages(app: Sphinx, page: str) -> Iterator[tuple[str, str]]:
    """Yield the caption of its list and the name of each page below a page, in the order of the site."""
    for toctree in app.env.get_doctree(page).findall(addnodes.toctree):
        for below in toctree["includefiles"]:
            yield toctree["caption"] or "", below
            yield from (("", name) for _, name in _pages(app, below))


def _line(app: Sphinx, page: str) -> str:
    """Return the link to the source of a page, with its first sentence."""
    first = next(iter(app.env.get_doctree(page).findall(nodes.paragraph)), nodes.paragraph())
    sentence = " ".join(first.astext().split()).split(". ")[0].rstrip(".:")
    return f"- [{app.env.titles[page].astext()}](_sources/{page}.md): {sentence}"


def _write(app: Sphinx, error: Exception | None) -> None:
    if error or app.builder.format != "html":
        return
    index = [f"# {app.config.project}", "", f"> {(streamloader.__doc__ or '').splitlines()[0]}"]
    texts: dict[str, str] = {}
    for caption, page in _pages(app, app.config.root_doc):
        if page in texts:
            continue
        if caption and f"## {caption}" not in index:
            index += ["", f"## {caption}", ""]
        index.append(_line(app, page))
        texts[page] = Path(app.srcdir, f"{page}.md").read_text(encoding="utf-8")
    out = Path(app.outdir)
    (out / "llms.txt").write_text("\n".join([*index, ""]), encoding="utf-8")
    (out / "llms-full.txt").write_text("\n\n".join(texts.values()), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Write both files when the site is built."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
