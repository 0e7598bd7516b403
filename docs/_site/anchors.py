"""Anchors of codes: a row of a table whose first cell is a code such as `SL305` has the anchor `sl305`."""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def _anchor(app: Sphinx, doctree: nodes.document) -> None:
    for row in doctree.findall(nodes.row):
        code = row[0].astext()
        if re.fullmatch(r"SL\d{3}", code):
            row["ids"].append(code.lower())


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the anchors when a page was read."""
    app.connect("doctree-read", _anchor)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
