"""Where a dataset is about to be written: what is there, the job file, and removing what is ours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from streamloader.errors import DestinationError, FormatError, NotADatasetError, NotFoundError, ObjectExistsError
from streamloader.format.manifest import FORMAT, NAME
from streamloader.format.opening import JOB, RECEIPTS, ROOT, read_job
from streamloader.storage.protocol import Store

OURS = "_streamloader"
PARTS = f"{OURS}/parts"
BAD = f"{OURS}/bad"  # what shards with bad samples leave in place of a receipt
_ARRAY_OBJECT = re.compile(r"zarr\.json|c/[0-9]+(/0)*")


def prepare(store: Store, overwrite: bool = False, remedy: str = "choose another destination, or overwrite it") -> None:
    """Make sure that there is no dataset at the destination; `overwrite` removes one, finished or not.

    `remedy` is what the error for a finished dataset advises.
    Raises `DestinationError` for a dataset without `overwrite`, and for a Zarr that is not ours in any case.
    """
    document = _root(store)
    attributes = document.get("attributes") if document else None
    if document is not None and not (isinstance(attributes, dict) and FORMAT in attributes):
        raise DestinationError(
            f"{store.url} holds a Zarr that streamloader did not write", "choose another destination"
        )
    if overwrite:
        erase(store)
    elif document is not None:
        raise DestinationError(f"{store.url} holds a dataset", remedy)
    elif read_job(store) is not None:
        raise DestinationError(f"{store.url} holds an unfinished dataset", "finish it, or overwrite it")


def write_job(
    store: Store,
    by: str,
    fields: Iterable[str],
    *,
    splits: Iterable[str] = (),
    shards: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write `_streamloader/job.json`: there is an unfinished dataset. `extra` is the writer's own.

    `by` "convert" can be resumed, "writer" cannot; `shards` is the total over all splits, where it is known.
    Raises `DestinationError` where there is a job already.
    """
    job = {**(extra or {}), "by": by, "fields": sorted(fields), "splits": sorted(splits), "shards": shards}
    try:
        store.create(JOB, json.dumps(job, sort_keys=True, indent=1).encode())
    except ObjectExistsError as error:
        problem = f"{store.url} is being written by someone else, or holds an unfinished dataset"
        raise DestinationError(problem, "finish it, or overwrite it") from error


def erase(store: Store) -> None:
    """Delete the dataset that is here, finished or not, and nothing else: its manifest first, its job last.

    What belongs to it stands in its manifest or its job, so that other things below the same URL stay. A crash
    in the middle leaves a job, from which the next call goes on.
    """
    document, job = _root(store), _job(store)
    fields, splits = _contents(document, job)
    if document is not None:
        store.put(JOB, json.dumps({"by": "writer", "fields": fields, "splits": splits, "shards": None}).encode())
        store.delete([ROOT])
    groups = ["", *(f"{split}/" for split in splits)]
    store.delete([f"{group}{ROOT}" for group in groups])
    for group in groups:
        for field in fields:
            below = f"{group}{field}"
            found = [info.path for info in store.list(below)]
            store.delete([path for path in found if _ARRAY_OBJECT.fullmatch(path, len(below) + 1)])
        store.delete([info.path for info in store.list(f"{group}{OURS}") if info.path != JOB])
    store.delete([JOB])


def clean(store: Store) -> None:
    """Remove what only an unfinished dataset needs. Safe to repeat: a crash in it is healed by the next call."""
    store.delete([info.path for folder in (PARTS, RECEIPTS, BAD) for info in store.list(folder)])
    store.delete([JOB])


def _root(store: Store) -> dict[str, Any] | None:
    try:
        document = json.loads(store.get(ROOT))
    except NotFoundError:
        return None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise DestinationError(f"{store.url}/{ROOT} is damaged, nobody knows what belongs to it", "delete it yourself")
    return document


def _job(store: Store) -> dict[str, Any]:
    try:
        return read_job(store) or {}
    except FormatError:
        return {}


def _contents(document: dict[str, Any] | None, job: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of fields and splits that the manifest or the job tells of."""
    fields, splits = set(job.get("fields") or ()), set(job.get("splits") or ())
    if document is not None:
        try:
            nodes = document["consolidated_metadata"]["metadata"]
            splits |= set(document["attributes"][FORMAT].get("splits") or ())
            fields |= {path.rpartition("/")[2] for path, node in nodes.items() if node["node_type"] == "array"}
        except (KeyError, TypeError, AttributeError) as error:
            raise NotADatasetError("the manifest here does not say what belongs to it", "delete it yourself") from error
    return _names(fields), _names(splits)


def _names(raw: Iterable[Any]) -> list[str]:
    return sorted(name for name in raw if isinstance(name, str) and NAME.match(name))
