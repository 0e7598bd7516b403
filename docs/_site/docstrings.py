"""Docstrings for autodoc: paragraphs with `code` and lists, as the package has them, become reStructuredText.

A sentence that begins "`name`: ..." describes an argument or an attribute, and becomes an item of a list. Names of
public classes become links.
"""

import re
import textwrap
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import signature, stringify_signature

import streamloader as sl

# where a description of arguments begins: "`name`: ", "`a`, `b`: " or "`call(x)`: ", after another sentence
_NAME = re.compile(r"(?:^|(?<=[.;:] ))(?=`\w+(?:\([^`]*\))?`(?:, `\w+`)*: )")
_RAISES = re.compile(r"(?<=[.] )(?=Raises )")
_CODE = re.compile(r"`([^`]+)`")
_SPECIAL = re.compile(r"([\\*|_])")


def _link(code: str) -> str | None:
    """Return the public object that a name is of, or None."""
    if code in sl.errors.__all__:
        return f"streamloader.errors.{code}"
    name = code.removeprefix("sl.")
    # names of functions are also words: only those of classes are clear
    return f"streamloader.{name}" if name in sl.__all__ and (name[0].isupper() or code != name) else None


def _inline(text: str) -> str:
    """Return the text of a paragraph with its code marked, as reStructuredText."""
    parts = _CODE.split(" ".join(text.split()))
    for number, part in enumerate(parts):
        if number % 2 == 0:
            parts[number] = _SPECIAL.sub(r"\\\1", part)
        elif target := _link(part):
            parts[number] = rf"\ :py:obj:`{part} <{target}>`\ "
        else:
            parts[number] = rf"\ ``{part}``\ "
    return "".join(parts)


def _paragraph(text: str) -> list[str]:
    """Return the lines of a paragraph: its text, a list of what it describes, and what is raised."""
    text = " ".join(text.split())
    first, *described = _NAME.split(text) if _NAME.search(text) else [text]
    last: list[str] = []
    if described:
        described[-1], *last = _RAISES.split(described[-1], maxsplit=1)
    lines = [_inline(first), ""] if first.strip() else []
    for item in described:
        lines += [f"- {_inline(item)}"]
    return [*lines, "", *(line for text in last for line in (_inline(text), ""))]


def to_rst(docstring: str) -> list[str]:
    """Return a docstring, without indentation, as lines of reStructuredText."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", docstring.strip("\n")):
        if "|-- " in block:
            lines += ["::", "", *textwrap.indent(block, "    ").splitlines(), ""]
        elif block.startswith("    "):
            lines += [".. code-block:: python", "", *textwrap.indent(textwrap.dedent(block), "    ").splitlines(), ""]
        elif block.startswith("- "):
            items = re.split(r"^- ", block, flags=re.MULTILINE)[1:]
            lines += [*(f"- {_inline(item)}" for item in items), ""]
        else:
            lines += _paragraph(block)
    return lines


def _process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = to_rst("\n".join(lines))


def _sign(app: Sphinx, what: str, name: str, obj: Any, options: Any, given: str | None, returns: str | None) -> Any:
    """Return the signature of a class as Python finds it: that of `__init__` where a base has a `__new__`."""
    if what != "class" or not given or not given.startswith("(*"):
        return None
    text = stringify_signature(signature(obj), show_return_annotation=False, unqualified_typehints=True)
    return text, returns


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to autodoc."""
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-process-signature", _sign)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
