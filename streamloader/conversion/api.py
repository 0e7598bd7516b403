"""`sl.convert`, and what the functions of `maintenance` share with it."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from streamloader import errors
from streamloader.conversion.executors import parse_engine
from streamloader.conversion.job import Conversion, Listener, Progress, Report, RunOptions, TransformOptions, ignore
from streamloader.conversion.row_order import parse_splits
from streamloader.conversion.shard_task import OnError, Quarantine, SkippedSample
from streamloader.conversion.sources.base import raise_bad
from streamloader.conversion.sources.fields import FieldsOption, flatten, parse_selection
from streamloader.conversion.sources.objects import NAME as PYTHON
from streamloader.conversion.sources.objects import as_samples, class_notes, map_style, qualified_name
from streamloader.conversion.sources.records import PROBED, infer_fields
from streamloader.conversion.transforms import parse_map, parse_recode
from streamloader.format.writer import Writer
from streamloader.options import Layout
from streamloader.storage import Store, open_store
from streamloader.storage.url import url_text


def convert(
    src: str | os.PathLike[str] | Any,
    dst: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - the name of the command's option
    fields: FieldsOption = None,
    fill: Mapping[str, Any] | None = None,
    raw: bool = False,
    rechunk: str | Sequence[str] | None = None,
    sample_axis: str | int | None = None,
    map: str | Callable[[dict[str, Any]], Any] | None = None,  # noqa: A002 - the name of the command's option
    map_batch: int | None = None,
    columns: FieldsOption = None,
    cache_key: str | None = None,
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
    """Convert the source `src` to a dataset at the URL `dst`, and return a `Report`; docs/conversion.md has examples.

    `src`: a path, a URL, a map-style dataset, a dict with an array or list for each field, an iterable of samples, or a
    generator function. `format`: by default detected. `fields`: the fields to keep, and their types. `fill`: values
    that replace missing ones. `raw`: keep packed values (`scale_factor`, ...) as stored. `rechunk`: arrays of a Zarr
    store and slices of them, `"t2m,z@500"`, that become fields along `sample_axis`. `map`: a function of a sample, or
    with `map_batch` of so many as columns. `columns`: the fields to read for it. `cache_key`: a text to change if what
    the function uses changes; a resume also notices its name and source text. `resize`, `quality`: re-encode images.
    `split`: `"train=0.9,val=0.1"` or a mapping; each split is a dataset, with samples assigned at random. `shuffle`:
    the seed of a random order. `on_error`: "raise", "skip" or "quarantine" for bad samples. `engine`: "local", "dask",
    "ray" or "spark", optionally with `=ADDRESS`. `workers`: processes, by default one per core; 0 works in this one.
    `overwrite`: replace a dataset. `resume`: also accept a finished dataset of the same source and options; to resume
    an interrupted conversion, repeat the call. `dry_run`: write nothing. `source_options`: storage options of `src`, by
    default `storage_options` if both URLs have the same protocol.

    Raises `UsageError`, `SourceError`, `SourceChangedError`, `DestinationError`, `EngineError`, or a `StorageError`.
    """
    src = as_samples(src)
    path = os.fspath(src) if isinstance(src, str | os.PathLike) else ""
    selection, splits = parse_selection(fields, fill, raw, rechunk, sample_axis, columns=columns), parse_splits(split)
    recode, mapper = parse_recode(resize, quality), parse_map(map, map_batch, columns, cache_key)
    transforms = TransformOptions(selection, recode, mapper, splits, shuffle, layout or Layout())
    options = RunOptions(workers, on_error, progress or ignore, parse_engine(engine))
    store = open_store(dst, storage_options or {})
    if not path and not map_style(src):
        _check_iterable(transforms, options, resume or dry_run)
        writer = partial(Writer, dst, layout=layout, overwrite=overwrite, storage_options=storage_options)
        return _write_iterable(src, store, writer, transforms, options)
    source_options = default_options(source_options, path, storage_options, dst) if path else {}
    return Conversion(src, path, format, source_options, store, transforms, options).convert(overwrite, resume, dry_run)


def _write_iterable(
    src: Any, store: Store, writer: Callable[..., Writer], transforms: TransformOptions, options: RunOptions
) -> Report:
    """Write the samples of an iterable in their order; `writer` takes the fields and the provenance.

    The fields are inferred from the first 64 samples, as in `open_records`. An interrupted run cannot be resumed: after
    Ctrl-C or an exception of the iterable, the objects written so far are removed.
    """
    name, samples = qualified_name(src), map(flatten, src)
    url = f"{PYTHON}:{name}"
    first = list(islice(samples, PROBED))
    if not first:
        raise errors.SourceError(f"the {name} has no samples", "give at least one")
    probed = [(i, f"sample {i} of the {name}", sample) for i, sample in enumerate(first)]
    fields = infer_fields(url, probed, transforms.selection)
    notes = {"source": {"format": PYTHON, "url": url}, "object": name, **fields.notes, **transforms.selection.notes}
    notes |= class_notes(src, fields.fields, fields.notes)
    bad: list[SkippedSample] = []
    quarantine = Quarantine(store)
    threads = None if options.workers is None else max(1, options.workers)
    with writer(fields.fields, workers=threads, provenance=notes) as out:
        for number, sample in enumerate(chain(first, samples)):
            if number % PROBED == 0:
                options.listener(Progress("write", len(out)))
            try:
                out.write(fields.settled(sample, str(number)))
            except errors.FieldError:
                bad_sample = fields.bad_sample(sample, number, f"sample {number} of the {name}")
                if bad_sample is None:
                    raise  # this sample is good: an earlier shard could not be encoded
                if not options.keep_bad:
                    raise_bad(bad_sample)
                skipped = SkippedSample.of(bad_sample, number)
                bad.append(skipped.without_data())
                if options.on_error == "quarantine":
                    quarantine.add(skipped)
        if not len(out):
            problem = f"all {len(bad)} samples of the {name} are bad; {bad[0].name}: {bad[0].problem}"
            raise errors.SourceError(problem, "fix the samples, or give other fields")
        options.listener(Progress("finish", len(out), len(out)))
    quarantine.flush()
    return Report.of_iterable(store.url, url, out.close(), tuple(bad))


def _check_iterable(transforms: TransformOptions, options: RunOptions, resume_or_dry_run: bool) -> None:
    """Raise `UsageError` for options that need samples by number."""
    given: dict[str, Any] = {"resume or dry_run": resume_or_dry_run, "split": transforms.splits}
    given |= {"shuffle": transforms.shuffle is not None, "map": transforms.mapper}
    given |= {"resize or quality": transforms.recode, "engine": options.engine.name != "local"}
    for name, value in given.items():
        if value:
            problem = f"{name} needs samples by number, which an iterable does not have"
            raise errors.UsageError(problem, "do it in the iterable, or give a map-style dataset")


def default_options(
    options: Mapping[str, Any] | None, url: Any, dataset_options: Mapping[str, Any] | None, dataset: Any
) -> Mapping[str, Any]:
    """Return the storage options of `url`: the given ones, by default those of a `dataset` with the same protocol.

    Raises `UsageError` if `url` is neither a path nor a URL.
    """
    if not isinstance(url, str | os.PathLike):
        problem = f"a {qualified_name(url)} is given, but a path or a URL is required"
        raise errors.UsageError(problem, "convert can write Python objects to a dataset of their own")
    if options is None:
        parts = (url_text(location).partition("://") for location in (url, dataset))
        protocols = {protocol if separator else "file" for protocol, separator, _ in parts}
        options = dataset_options if len(protocols) == 1 else None
    return options or {}
