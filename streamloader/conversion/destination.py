"""What is at the destination: nothing, our unfinished job to go on with, or something to leave alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamloader.conversion.plan import Job, SplitPlan, first_change, pack_files, unpack_files
from streamloader.errors import (
    AccessError,
    DestinationError,
    FormatError,
    NotFoundError,
    SourceChangedError,
    UsageError,
)
from streamloader.format.destination import Claim, check_not_running, prepare, take_over, write_job
from streamloader.format.geometry import settle
from streamloader.format.manifest import Manifest
from streamloader.format.opening import ROOT, get_document, open_manifest, read_job
from streamloader.format.parse import parse_json
from streamloader.storage.protocol import Store

FILES = "_streamloader/files"
RECORD = "_streamloader/conversion.json"  # of a finished dataset: how it was made, where the manifest does not say it
_REMEDY = "choose another destination, or give --overwrite"
_DONE = "it is finished: --resume takes it as done if this conversion made it; or --overwrite, or choose another place"


def look(store: Store, overwrite: bool, resume: bool) -> Mapping[str, Any] | None:
    """Return the unfinished conversion's job, or None where a new one may begin.

    Without `overwrite` that is an empty place only; `resume` also passes a finished dataset, see `finished`. Raises
    `DestinationError`, also where another run is at work here; nothing is changed.
    """
    if overwrite and resume:
        raise UsageError("overwrite and resume together", "give one of them")
    try:
        job = read_job(store)
    except FormatError:
        if not overwrite:
            raise
        job = None
    check_not_running(store, job)
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

    Raises `DestinationError` for a dataset of another source, or made in another way, which it names.
    """
    if store.head(ROOT) is None:
        return None
    found: dict[str, Manifest] = {}
    for plan in job.splits:
        found[plan.name] = manifest = open_manifest(store, plan.name or None)[0]
        difference = _other_samples(plan, job, manifest) or _other_options(store, job) or _other_cut(plan, manifest)
        if difference:
            problem = f"{store.url} holds a finished dataset of another source, or made in another way: {difference}"
            raise DestinationError(problem, _REMEDY)
    return found


def _other_samples(plan: SplitPlan, job: Job, manifest: Manifest) -> str:
    """Return how the samples of the dataset differ from the plan, in words; nothing where they do not."""
    there = {key: value for key, value in manifest.provenance.items() if key != "left_out"}
    if there.get("source") != plan.provenance["source"]:
        return "its source differs"
    if there != plan.provenance:
        keys = sorted(key for key in {*there, *plan.provenance} if there.get(key) != plan.provenance.get(key))
        return f"its {', '.join(keys)} differ"
    if {name: layout.field for name, layout in manifest.fields.items()} != dict(job.schema.fields):
        return "its fields differ"
    return ""


def _other_cut(plan: SplitPlan, manifest: Manifest) -> str:
    """Return how the layout of the dataset differs from the plan, in words; nothing where it does not."""
    stored = {name: manifest.fields[name].stored for name, one in plan.geometry.layouts.items() if not one.resident}
    wanted = settle(plan.geometry, manifest.num_samples, stored)
    cuts = {"samples_per_shard": (manifest.samples_per_shard, wanted.samples_per_shard)}
    cuts["block"] = (manifest.order.block, wanted.order.block)
    for name, layout in wanted.layouts.items():
        for key in ("chunk", "shard", "codec", "resident"):
            cuts[f"{name}.{key}"] = getattr(manifest.fields[name], key), getattr(layout, key)
    return ", ".join(f"{key} is {have} there and {want} here" for key, (have, want) in cuts.items() if have != want)


def _other_options(store: Store, job: Job) -> str:
    """Return which options of the finished dataset were others; nothing where they were those of the job."""
    if job.unknown:
        return job.unknown
    try:
        data = get_document(store, RECORD)
    except NotFoundError:
        data = b"{}"
    try:
        found: Any = parse_json(data)
    except (ValueError, RecursionError):
        found = {}
    there, here = (_flat(one) for one in (found, job.record))
    keys = sorted(key for key in {*there, *here} if there.get(key) != here.get(key))
    return f"its options differ or are not known ({', '.join(keys)})" if keys else ""


def take(store: Store, job: Job, found: Mapping[str, Any] | None, overwrite: bool) -> Claim:
    """Begin the job here, or go on with it; a job that is not the same is erased with `overwrite` only.

    Raises `DestinationError` for other options and `SourceChangedError`, which names the file.
    """
    claim = None
    if found is not None:
        problem = _difference(store, job, found)
        if problem is None:
            claim = take_over(store, found)
            if store.head(FILES) is None:  # killed right after the job file was written
                store.put(FILES, pack_files(job.source.files))
            return claim
        if not overwrite:
            raise problem
    if overwrite:
        claim = prepare(store, overwrite=True)
    document = dict(job.document)
    known = {key: document.pop(key) for key in ("fields", "splits", "shards")}
    claim = write_job(store, document.pop("by"), **known, extra=document, claim=claim)
    store.put(FILES, pack_files(job.source.files))
    return claim


def _difference(store: Store, job: Job, found: Mapping[str, Any]) -> DestinationError | SourceChangedError | None:
    wanted = job.document
    found = {key: value for key, value in found.items() if key != "run"}
    if found == wanted:
        return None
    if job.unknown:
        problem = f"the unfinished conversion at {store.url} cannot be resumed: {job.unknown}"
        return DestinationError(problem, "make it a function without such state, or begin anew with --overwrite")
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
        return first_change(unpack_files(store, FILES), job.source.files) or "its files are in another order"
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
