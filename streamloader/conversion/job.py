"""A conversion from its beginning to its end: scan, plan, write, finish."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from streamloader.conversion import destination
from streamloader.conversion.mapped import parse_map
from streamloader.conversion.plan import make_job
from streamloader.conversion.progress import Listener, Progress, Report, ignore
from streamloader.conversion.recipe import ON_ERROR, OnError, Recipe
from streamloader.conversion.recode import parse_recode
from streamloader.conversion.run import Means, Run
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.wish import parse_wish
from streamloader.conversion.splits import parse_splits
from streamloader.errors import DestinationError, UsageError
from streamloader.format.manifest import Field
from streamloader.format.threads import cpu_count
from streamloader.options import Layout
from streamloader.storage import open_store


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - as the command's option is called
    fields: str | Iterable[str] | Mapping[str, str | Field | None] | None = None,
    map: str | Callable[[dict[str, Any]], Any] | None = None,  # noqa: A002 - likewise
    map_batch: int | None = None,
    resize: str | int | tuple[int, int] | None = None,
    quality: int | None = None,
    split: str | Mapping[str, float] | None = None,
    shuffle: int | None = None,
    on_error: OnError = "raise",
    layout: Layout | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
    progress: Listener | None = None,
) -> Report:
    """Convert what lies at `src` into a dataset at the URL `dst`; docs/conversion.md says more of each argument.

    `fields` chooses fields and types; `map` is a function of a sample, or with `map_batch` of so many at once;
    `resize` and `quality` encode images anew. `split` is `"train=0.9,val=0.1"` or a mapping: each becomes a dataset of
    its own, with samples dealt out at random by row number. `shuffle` is the seed of a random order. `on_error` says
    what becomes of bad samples. `workers` are processes, by default one a core; 0 works in this process. An
    interrupted conversion goes on when it is called again in the same way, to the same bytes; `overwrite` replaces
    what is there, `resume` takes a finished dataset of the same source as done, `dry_run` writes nothing.
    `source_options` default to `storage_options` where both URLs have one protocol.

    Raises `UsageError`, `SourceError` for what cannot be converted, with the file; `SourceChangedError` or
    `DestinationError` where it cannot go on; a `StorageError` for what the stores refuse.
    """
    recipe = Recipe(
        parse_wish(fields),
        parse_recode(resize, quality),
        parse_map(map, map_batch),
        parse_splits(split),
        shuffle,
        layout or Layout(),
    )
    if workers is not None and workers < 0:
        raise UsageError(f"workers={workers}", "give the number of processes; 0 works in this one")
    if on_error not in ON_ERROR:
        raise UsageError(f"on_error={on_error!r}", f"choose one of {', '.join(ON_ERROR)}")
    if source_options is None and _protocol(src) == _protocol(dst):
        source_options = storage_options
    listener = progress or ignore
    store = open_store(dst, storage_options)
    found = None if dry_run else destination.look(store, overwrite, resume)
    listener(Progress("scan", detail=f"looking at {os.fspath(src)}"))
    name, source = open_source(src, format, source_options or {}, recipe.opening)
    if _inside(store.url, source.url):
        raise DestinationError(
            f"the destination {store.url} lies in the source {source.url}", "choose another destination"
        )
    job = make_job(recipe.apply(source), name, recipe)
    preview = job.preview()
    listener(Progress("scan", preview=preview))
    if dry_run:
        return Report(store.url, name, preview, {}, job.num_shards, 0)
    done = destination.finished(store, job) if resume and found is None else None
    if done is not None:
        return Report(store.url, name, preview, done, job.num_shards, job.num_shards)
    destination.take(store, job, found, overwrite)
    run = Run(job, store, Means(_count_workers(workers, source.url, store.url), on_error, listener))
    manifests = run.complete()
    return Report(store.url, name, preview, manifests, job.num_shards, run.kept_shards, run.left_out)


def _inside(url: str, folder: str) -> bool:
    return f"{url}/".removeprefix("file://").startswith(f"{folder}/".removeprefix("file://"))


def _protocol(url: str | os.PathLike[str]) -> str:
    text = os.fspath(url)
    return text.partition("://")[0] if "://" in text else "file"


def _count_workers(workers: int | None, *urls: str) -> int:
    """Return the number of processes: none where a store lives in this process's memory."""
    if any(url.startswith("memory:") for url in urls):
        return 0
    return cpu_count() if workers is None else workers
