"""What is at the destination: nothing, our unfinished job to go on with, or something to leave alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamloader.conversion.plan import Job, first_change, pack_files
from streamloader.errors import (
    AccessError,
    DestinationError,
    FormatError,
    NotFoundError,
    SourceChangedError,
    UsageError,
)
from streamloader.format.destination import erase, prepare, write_job
from streamloader.format.manifest import Manifest
from streamloader.format.opening import ROOT, open_manifest, read_job
from streamloader.storage.protocol import Store

FILES = "_streamloader/files"
_REMEDY = "choose another destination, or give --overwrite"
_DONE = "it is finished: --resume takes it as done if this conversion made it; or --overwrite, or choose another place"


def look(store: Store, overwrite: bool, resume: bool) -> Mapping[str, Any] | None:
    """Return the unfinished conversion's job, or None where a new one may begin.

    Without `overwrite` that is an empty place only; `resume` also passes a finished dataset, see `finished`. Raises
    `DestinationError`; nothing is changed.
    """
    if overwrite and resume:
        raise UsageError("overwrite and resume together", "give one of them")
    try:
        job = read_job(store)
    except FormatError:
        if not overwrite:
            raise
        job = None
    if job is not None and job.get("by") == "convert":
        return job
    if overwrite or (resume and store.head(ROOT) is not None):
        return None
    prepare(store, remedy=_DONE)
    other = next(iter(store.list()), None)
    if other is not None:
        raise DestinationError(f"{store.url} is not empty ({other.path} is there)", _REMEDY)
    return None


def finished(store: Store, job: Job) -> dict[str, Manifest] | None:
    """Return the manifests by split of the dataset that is here, if this job made it; None where there is none.

    Raises `DestinationError` for a dataset of another source, or with other samples or fields.
    """
    if store.head(ROOT) is None:
        return None
    found: dict[str, Manifest] = {}
    for plan in job.splits:
        found[plan.name] = manifest = open_manifest(store, plan.name or None)[0]
        there = {key: value for key, value in manifest.provenance.items() if key != "left_out"}
        fields = {name: layout.field for name, layout in manifest.fields.items()}
        if there != plan.provenance or fields != dict(job.schema.fields):
            problem = f"{store.url} holds a finished dataset of another source, or made in another way"
            raise DestinationError(problem, _REMEDY)
    return found


def take(store: Store, job: Job, found: Mapping[str, Any] | None, overwrite: bool) -> None:
    """Begin the job here, or go on with it; a job that is not the same is erased with `overwrite` only.

    Raises `DestinationError` for other options and `SourceChangedError`, which names the file.
    """
    if found is not None:
        problem = _difference(store, job, found)
        if problem is None:
            if store.head(FILES) is None:  # killed right after the job file was written
                store.put(FILES, pack_files(job.source.files))
            return
        if not overwrite:
            raise problem
        erase(store)
    elif overwrite:
        prepare(store, overwrite=True)
    document = dict(job.document)
    known = {key: document.pop(key) for key in ("fields", "splits", "shards")}
    write_job(store, document.pop("by"), **known, extra=document)
    store.put(FILES, pack_files(job.source.files))


def _difference(store: Store, job: Job, found: Mapping[str, Any]) -> DestinationError | SourceChangedError | None:
    wanted = job.document
    if found == wanted:
        return None
    there, here = _flat(found.get("options")), _flat(wanted["options"])
    if there == here and found.get("source") != wanted["source"]:
        change = _source_change(store, job)
        problem = f"the source {job.source.url} changed since the conversion to {store.url} began: {change}"
        return SourceChangedError(problem, "put it back as it was, or start again with --overwrite")
    if there == here:
        there, here = _flat(found), _flat(wanted)  # the same wishes, but another version decides otherwise
    differing = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    told = "; ".join(f"{name} is {there.get(name)!r} there and {here.get(name)!r} here" for name in differing[:3])
    problem = f"{store.url} holds the unfinished conversion of another job ({told})"
    return DestinationError(problem, "give the same options to go on with it, or --overwrite to begin anew")


def _source_change(store: Store, job: Job) -> str:
    try:
        return first_change(store.get(FILES), job.source.files) or "its files are in another order"
    except NotFoundError:
        return "its files are others"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        key: one for name, each in value.items() for key, one in _flat(each, f"{prefix}.{name}".lstrip(".")).items()
    }


def remove_leftovers(store: Store) -> None:
    """Remove the half-written files and unfinished uploads of killed runs and workers."""
    try:
        store.remove_leftovers()
    except AccessError:
        return  # who may write may not always list uploads: then the bucket's lifecycle rule removes them
