"""Ways through the groups of an HDF5 file that follow no link: only what lies in the file itself is ever opened.

h5py's own `in`, `get` and `[]` open the file that an external link names; a dataset too may lie in any file.
"""

from __future__ import annotations

from typing import Any

from streamloader.conversion.sources.needs import need
from streamloader.conversion.sources.tensors.arrays import LEAVE_OUT
from streamloader.errors import SourceError


def datasets_in(group: Any) -> tuple[list[str], list[str]]:
    """Return the names of the datasets and links right in an h5py group, and those of groups and types, sorted."""
    h5py = need("h5py", "hdf5")
    datasets: list[str] = []
    others: list[str] = []
    for name in sorted(group):
        key = name.encode("utf-8", "surrogateescape")
        hard = group.id.links.get_info(key).type == h5py.h5l.TYPE_HARD
        kept = not hard or h5py.h5o.get_info(group.id, key).type == h5py.h5o.TYPE_DATASET
        (datasets if kept else others).append(name)
    return datasets, others


def child(group: Any, name: str, where: str) -> Any:
    """Return what is right in a group. Raises `SourceError` for a link, and for a dataset that lies in other files."""
    h5py = need("h5py", "hdf5")
    key = name.encode("utf-8", "surrogateescape")
    if group.id.links.get_info(key).type != h5py.h5l.TYPE_HARD:
        target = group.id.links.get_val(key)
        parts = [target] if isinstance(target, bytes) else target
        told = "::".join(part.decode("utf-8", "replace") for part in parts)
        problem = f"{name!r} of {where} is a link to {told}, and links are not followed"
        raise SourceError(problem, f"give what it leads to, or {LEAVE_OUT}")
    node = group[name]
    created = node.id.get_create_plist() if is_dataset(node) else None
    if created and (created.get_layout() == h5py.h5d.VIRTUAL or created.get_external_count()):
        problem = f"{where}::{node.name} lies in other files, and those are not followed"
        raise SourceError(problem, f"give those files, or {LEAVE_OUT}")
    return node


def descend(file: Any, inner: str, where: str) -> Any:
    """Return the group or dataset at the path `inner`. Raises `SourceError` where there is none, or a link leads."""
    node = file
    for name in filter(None, inner.split("/")):
        there = sorted(node) if is_group(node) else []
        if name not in there:
            held = ", ".join(there[:10]) or "nothing"
            raise SourceError(f"{where} has no {inner}", f"its {node.name} holds {held}")
        node = child(node, name, where)
    return node


def is_group(node: Any) -> bool:
    """Return whether it is a group, the file's root for one."""
    h5py = need("h5py", "hdf5")
    return isinstance(node, h5py.Group)


def is_dataset(node: Any) -> bool:
    """Return whether it is a dataset."""
    h5py = need("h5py", "hdf5")
    return isinstance(node, h5py.Dataset)
