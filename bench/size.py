"""Prints the size of the project: code lines (without blanks, comments and docstrings) and files, by folder.

    python bench/size.py [--json]

A code line is one on which a token begins that is neither a comment nor a docstring.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(path: Path) -> int:
    """Return the number of lines of code of a Python file."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.update(range(first.lineno, (first.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def sizes() -> dict[str, dict[str, int]]:
    """Return lines and files by folder: of the package by its own folders, and of the tests."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in sorted((ROOT / "streamloader").rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        for name in ("streamloader", parts[1].removesuffix(".py")):
            lines[name] += code_lines(path)
            files[name] += 1
    for path in sorted((ROOT / "tests").rglob("*.py")):
        lines["tests"] += code_lines(path)
        files["tests"] += 1
    return {name: {"lines": lines[name], "files": files[name]} for name in lines}


def main() -> None:
    """Print the table, or one line of JSON."""
    found = sizes()
    if "--json" in sys.argv:
        print(json.dumps(found))
        return
    for name, size in found.items():
        print(f"{name:14} {size['lines']:6} lines {size['files']:4} files")
    both = found["conversion"]["lines"] + found["maintenance"]["lines"]
    print(f"{'conversion and maintenance':14} {both} lines")


if __name__ == "__main__":
    main()
