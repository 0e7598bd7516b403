"""A conversion from its beginning to its end: scan, plan, write, finish."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from streamloader.conversion import destination
from streamloader.conversion.engines.engine import parse_engine
from streamloader.conversion.iterables import Writing, convert_iterable
from streamloader.conversion.mapped import parse_map
from streamloader.conversion.means import Means
from streamloader.conversion.plan import Job, first_change, make_job
from streamloader.conversion.progress import Listener, Progress, Report, ignore
from streamloader.conversion.recipe import ON_ERROR, OnError, Recipe
from streamloader.conversion.recode import parse_recode
from streamloader.conversion.run import Run
from streamloader.conversion.sources.base import Source
from streamloader.conversion.sources.files import list_source
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.objects import NAME as PYTHON
from streamloader.conversion.sources.objects import as_samples, map_style, open_object, qualified_name
from streamloader.conversion.sources.wish import parse_wish
from streamloader.conversion.splits import parse_splits
from streamloader.errors import DestinationError, SourceChangedError, StreamloaderError, UsageError
from streamloader.format.manifest import Field
from streamloader.options import Layout
from streamloader.storage import Store, open_store
from streamloader.storage.location import redact

P = ParamSpec("P")
R = TypeVar("R")

# options of the command in remedies: those that may stand with a value, and the others
_VALUED = re.compile(r"--(fill|fields|format|on-error)\b(?: (\"[^\"]*\"|\w(?:[\w=:\[\],]*[\w\]])?))?")
_PLAIN = re.compile(r"--(overwrite|raw|resume|map|resize|quality|workers)\b")


def python_words(remedy: str) -> str:
    """Return the remedy with arguments of `convert` in place of options: `on_error="skip"` for `--on-error skip`."""

    def argument(found: re.Match[str]) -> str:
        name, value = found[1].replace("-", "_"), (found[2] or "").strip('"')
        if value and name == "fill":
            key, _, shown = value.partition("=")
            return f'fill={{"{key}": {shown}}}'
        return f'{name}="{value}"' if value else f"{name}="

    remedy = _VALUED.sub(argument, remedy)
    return _PLAIN.sub(lambda found: f"{found[1]}={'True' * (found[1] in ('overwrite', 'raw', 'resume'))}", remedy)


def _for_python(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with errors in the words of Python; the command calls what it wraps."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        try:
            return function(*args, **options)
        except StreamloaderError as error:
            error.remedy = python_words(error.remedy)
            raise

    return call


@_for_python
def convert(
    src: str | os.PathLike[str] | Any,
    dst: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - as the command's option is called
    fields: str | Iterable[str] | Mapping[str, str | Field | None] | None = None,
    fill: Mapping[str, Any] | None = None,
    raw: bool = False,
    map: str | Callable[[dict[str, Any]], Any] | None = None,  # noqa: A002 - likewise
    map_batch: int | None = None,
    resize: str | int | tuple[int, int] | None = None,
    quality: int | None = None,
    split: str | Mapping[str, float] | None = None,
    shuffle: int | None = None,
    on_error: OnError = "raise",
    engine: str = "local",
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

    `src` is a path, a URL, a map-style dataset, a dict with an array or list for each field, an iterable of samples, or
    a generator function. `fields` chooses fields and types; `fill`
    maps fields to what replaces a missing value; `raw` keeps packed values (`scale_factor`, ...) as stored. `map` is a
    function of a sample, or with `map_batch` of so many at once; `resize` and `quality` encode images anew. `split` is
    `"train=0.9,val=0.1"` or a mapping: each becomes a dataset, with samples dealt at random. `shuffle` is the seed of a
    random order. `on_error` says what becomes of bad samples. `engine` is local, dask, ray or spark, with `=ADDRESS` if
    wanted. `workers` are processes, by default one a core; 0 works in this process. Called again in the same way, it
    resumes; `overwrite` replaces what is there, `resume` takes a finished dataset of the same source as done, `dry_run`
    writes nothing. `source_options` default to `storage_options` where both URLs have one protocol.

    Raises `UsageError`, `SourceError` for what cannot be converted, with the file; `SourceChangedError` or
    `DestinationError` where it cannot go on; a `StorageError` for what the stores refuse.
    """
    recipe = Recipe(
        parse_wish(fields, fill, raw),
        parse_recode(resize, quality),
        parse_map(map, map_batch),
        parse_splits(split),
        shuffle,
        layout or Layout(),
    )
    if on_error not in ON_ERROR:
        raise UsageError(f"on_error={on_error!r}", f"choose one of {', '.join(ON_ERROR)}")
    src = as_samples(src)
    if source_options is None and isinstance(src, str | os.PathLike) and _protocol(src) == _protocol(dst):
        source_options = storage_options
    means = Means(workers, on_error, progress or ignore, parse_engine(engine))
    ends = _Ends(src, format, source_options or {}, dst, storage_options or {}, overwrite, resume, dry_run)
    if isinstance(src, str | os.PathLike) or map_style(src):
        return _convert(ends, recipe, means)
    if resume or dry_run:
        raise UsageError("resume or dry_run of an iterable", "nobody knows how many samples it has: leave them out")
    return convert_iterable(src, dst, recipe, means, Writing(layout, workers, overwrite, storage_options))


@dataclass(frozen=True)
class _Ends:
    """Where samples come from and where they go."""

    src: Any
    format: str | None
    source_options: Mapping[str, Any]
    dst: str | os.PathLike[str]
    storage_options: Mapping[str, Any]
    overwrite: bool
    resume: bool
    dry_run: bool


def _convert(ends: _Ends, recipe: Recipe, means: Means) -> Report:
    store = open_store(ends.dst, ends.storage_options)
    if ends.dry_run:
        return _carry_out(ends, recipe, means, store, None)
    found = destination.look(store, ends.overwrite, ends.resume)
    with means.starting(store.url) as ready:
        return _carry_out(ends, recipe, ready, store, found)


def _carry_out(ends: _Ends, recipe: Recipe, means: Means, store: Store, found: Mapping[str, Any] | None) -> Report:
    name, source = _open(ends, recipe, means, store.url)
    if _inside(store.url, source.url):
        raise DestinationError(
            f"the destination {store.url} lies in the source {source.url}", "choose another destination"
        )
    means.check(recipe, source.url, store.url)
    job = make_job(recipe.apply(source), name, recipe, means.on_error != "raise")
    preview = job.preview()
    means.listener(Progress("scan", preview=preview))
    if ends.dry_run:
        return Report(store.url, name, preview, {}, job.num_shards, 0)
    done = destination.finished(store, job) if ends.resume and found is None else None
    if done is not None:
        return Report(store.url, name, preview, done, job.num_shards, job.num_shards)
    with destination.take(store, job, found, ends.overwrite) as claim:
        run = Run(job, claim, store, means, partial(_check_source, ends, job))
        manifests = run.complete()
    bad = sum(int(manifest.provenance.get("left_out", 0)) for manifest in manifests.values())
    return Report(store.url, name, preview, manifests, job.num_shards, run.kept_shards, run.left_out, bad)


def _open(ends: _Ends, recipe: Recipe, means: Means, url: str) -> tuple[str, Source]:
    """Return the name of the source's format, and the source."""
    if isinstance(ends.src, str | os.PathLike):
        means.listener(Progress("scan", detail=f"looking at {redact(os.fspath(ends.src))}"))
        return open_source(ends.src, ends.format, ends.source_options, recipe.opening)
    means.listener(Progress("scan", detail=f"looking at a {qualified_name(ends.src)}"))
    return PYTHON, open_object(ends.src, recipe.opening, int(means.apart(url)))


def _check_source(ends: _Ends, job: Job) -> None:
    """Raise `SourceChangedError` where a file of the source is not what it was when the job was made."""
    if not isinstance(ends.src, str | os.PathLike):
        return
    known = {info.path for info in job.source.files}
    now = [info for info in list_source(ends.src, ends.source_options).files if info.path in known]
    change = first_change(job.source.files, now)
    if change:
        problem = f"the source {job.source.url} changed while it was converted: {change}"
        raise SourceChangedError(problem, "leave it alone while it is converted, and start again with --overwrite")


def _inside(url: str, folder: str) -> bool:
    return f"{url}/".removeprefix("file://").startswith(f"{folder}/".removeprefix("file://"))


def _protocol(url: str | os.PathLike[str]) -> str:
    text = os.fspath(url)
    return text.partition("://")[0] if "://" in text else "file"
