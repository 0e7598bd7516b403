"""Checks the calls in the table of a page: both packages have the names that are called, and their arguments."""

import builtins
import inspect
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

OURS = "streamloader", "streamloader.pytorch.dataset:StreamingDataset"
CODE = re.compile(r"`((?!--)[^`]*)`")  # no options of the command
CALL = re.compile(r"\b([A-Za-z_]\w*)\(")
ARGUMENT = re.compile(r"(?<![\w.])([a-z_]+)=(?!=)")


def check(page: Path, theirs: Iterable[str]) -> None:
    """Check the second column against objects of their package, `module` or `module:name`, the third against ours."""
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", page.read_text(), re.M)]
    for column, places in enumerate((theirs, OURS), 1):
        objects = [one for place in places for one in found(place)]
        code = " ".join(part for row in rows if len(row) == 3 for part in CODE.findall(row[column]))
        names = {*dir(builtins)} | {name for one in objects for name in (getattr(one, "__name__", ""), *dir(one))}
        arguments = {name for one in objects for name in arguments_of(one)}
        unknown = {*CALL.findall(code)} - names, {*ARGUMENT.findall(code)} - arguments
        assert unknown == (set(), set()), f"{page.name}, column {column}: {unknown}"


def found(place: str) -> Iterable[Any]:
    """An object and its public members."""
    module, _, name = place.partition(":")
    one = getattr(import_module(module), name) if name else import_module(module)
    yield one
    for member in dir(one):
        if not member.startswith("_"):
            yield getattr(one, member, None)


def arguments_of(one: Any) -> set[str]:
    """The names of an object's arguments; none if it cannot be called."""
    try:
        return {*inspect.signature(one).parameters}
    except (TypeError, ValueError):
        return set()
