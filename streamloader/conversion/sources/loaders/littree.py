"""The tree of a LitData sample: what its leaves are called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

BARE = "data"  # a sample that is one leaf
_DICTS = ("builtins.dict", "collections.OrderedDict")
_LISTS = ("builtins.list", "builtins.tuple", "collections.deque")
_MAX_DEPTH = 50


def leaf_names(spec: Any, count: int) -> list[str]:
    """Return the names of the `count` leaves that a tree specification (JSON text) has: keys of mappings and positions
    in lists, joined by `_`. Where it is not understood, or two would be the same, they are numbered.
    """
    try:
        protocol, tree = json.loads(spec)
        names = ["_".join(path) or BARE for path in _paths(tree, (), 0)] if protocol == 1 else []
    except (ValueError, TypeError, KeyError, RecursionError):
        names = []
    if len(names) != count or len(set(names)) < count:
        return [BARE] if count == 1 else [str(number) for number in range(count)]
    return names


def _paths(tree: Any, path: tuple[str, ...], depth: int) -> Iterator[tuple[str, ...]]:
    kind, children = tree["type"], tree["children_spec"]
    if kind is None:
        yield path
        return
    if kind in _DICTS:
        keys = [str(key) for key in json.loads(tree["context"])]
    elif kind in _LISTS:
        keys = [str(number) for number in range(len(children))]
    else:
        raise ValueError(f"{kind} is no tree that is known")
    if depth > _MAX_DEPTH or len(keys) != len(children):
        raise ValueError("no tree")
    for key, child in zip(keys, children, strict=True):
        yield from _paths(child, (*path, key), depth + 1)
