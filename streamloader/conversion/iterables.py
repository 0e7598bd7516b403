"""Samples that come one after another, and nobody knows how many: generators, torch's iterable datasets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from streamloader.conversion.means import Means
from streamloader.conversion.progress import Listener, Preview, Progress, Report, ignore
from streamloader.conversion.recipe import Recipe
from streamloader.conversion.refused import Quarantine, RefusedSample, packed
from streamloader.conversion.sources.base import BadSample, Refuse, refuse_all
from streamloader.conversion.sources.infer import flatten
from streamloader.conversion.sources.objects import NAME, qualified_name
from streamloader.conversion.sources.records import PROBED, SampleFields, infer_fields
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import FieldError, SourceError, UsageError
from streamloader.format.manifest import Manifest
from streamloader.format.writer import Writer
from streamloader.options import Layout
from streamloader.storage import open_store


@dataclass(frozen=True)
class Writing:
    """How `write_iterable` writes: as `Writer` does, but for `workers`, threads, of which 0 are 1."""

    layout: Layout | None = None
    workers: int | None = None
    overwrite: bool = False
    storage_options: Mapping[str, Any] | None = None


def write_iterable(
    samples: Iterable[Any],
    url: str | os.PathLike[str],
    *,
    wish: Wish | None = None,
    writing: Writing | None = None,
    refuse: Refuse = refuse_all,
    progress: Listener = ignore,
) -> Manifest:
    """Write all samples, in their order, as a dataset at `url`; return its manifest.

    The fields are inferred from the first 64 samples, as `open_records` does; `wish` chooses and types them. A sample
    that does not fit goes to `refuse`, whose `position` is its number. Samples are taken in this thread, a shard for
    each of the workers is held. This cannot be gone on with: Ctrl-C, and whatever the iterable or `refuse` raise, end
    it, and what was written is removed.

    Raises `SourceError` where there is no sample, or none that fits; `FieldError` as `open_records`; `DestinationError`
    and `StorageError` as `Writer`.
    """
    writing, name = writing or Writing(), qualified_name(samples)
    fields, coming = _begin(samples, name, wish or Wish())
    renamed = {field: key for field, key in fields.originals.items() if field != key}
    with Writer(
        url,
        fields.fields,
        layout=writing.layout,
        workers=None if writing.workers is None else max(1, writing.workers),
        overwrite=writing.overwrite,
        storage_options=writing.storage_options,
        provenance={
            "source": {"format": NAME, "url": f"{NAME}:{name}"},
            "object": name,
            **({"keys": renamed} if renamed else {}),
            **(wish or Wish()).notes,
        },
    ) as out:
        for number, sample in enumerate(_told(coming, out, progress)):
            try:
                out.write(fields.settled(sample, str(number)))
            except FieldError:
                bad = fields.refusal(sample, number, _called(name, number))
                if bad is None:
                    raise  # not of this sample: an earlier shard could not be encoded
                refuse(bad)
        if not len(out):
            raise SourceError(f"all samples of the {name} are bad", "look at the reasons")
        progress(Progress("finish", len(out), len(out)))
    return out.close()


def convert_iterable(
    samples: Iterable[Any], url: str | os.PathLike[str], recipe: Recipe, means: Means, writing: Writing
) -> Report:
    """Convert an iterable: `write_iterable` with what `sl.convert` was asked for.

    Raises `UsageError` for what needs samples by number: splits, a shuffle, a function, images anew, an engine.
    """
    asked = {
        "split": recipe.splits,
        "shuffle": recipe.shuffle is not None,
        "map": recipe.mapper,
        "resize or quality": recipe.recode,
        "engine": means.engine.name != "local",
    }
    refused = next((name for name, value in asked.items() if value), None)
    if refused is not None:
        remedy = "do it in the iterable, or give a map-style dataset"
        raise UsageError(f"{refused} of an iterable, which has no samples by number", remedy)
    bad: list[RefusedSample] = []
    store = open_store(url, writing.storage_options)
    quarantine = Quarantine(store)

    def note(one: BadSample) -> None:
        if means.on_error == "raise":
            refuse_all(one)
        bad.append(RefusedSample(one.position, one.name, one.problem).without_data())
        if means.on_error == "quarantine":
            quarantine.add(replace(bad[-1], data=packed(one.data)))

    manifest = write_iterable(samples, url, wish=recipe.wish, writing=writing, refuse=note, progress=means.listener)
    quarantine.flush()
    layouts, count = manifest.fields, max(1, manifest.num_samples)
    shards = -(-manifest.num_samples // manifest.samples_per_shard)
    preview = Preview(
        url=manifest.provenance["source"]["url"],
        format=NAME,
        files=0,
        fields={name: layout.field for name, layout in layouts.items()},
        codecs={name: layout.codec for name, layout in layouts.items()},
        sizes={name: layout.stored / count for name, layout in layouts.items()},
        splits={"": manifest.num_samples},
        shards=shards,
    )
    return Report(store.url, NAME, preview, {"": manifest}, shards, 0, {"": tuple(bad)}, len(bad))


def _begin(samples: Iterable[Any], name: str, wish: Wish) -> tuple[SampleFields, Iterator[Mapping[str, Any]]]:
    """Return the fields, from the first samples, and all samples, those again."""
    coming = map(flatten, samples)
    first = list(islice(coming, PROBED))
    if not first:
        raise SourceError(f"the {name} gives no sample", "give at least one")
    fields = infer_fields(f"{NAME}:{name}", list(enumerate(first)), wish, lambda number: _called(name, number))
    return fields, chain(first, coming)


def _told(samples: Iterable[Mapping[str, Any]], out: Writer, progress: Listener) -> Iterator[Mapping[str, Any]]:
    """Yield the samples, and tell how far it is each few of them."""
    for number, sample in enumerate(samples):
        if number % PROBED == 0:
            progress(Progress("write", len(out)))
        yield sample


def _called(name: str, number: int) -> str:
    return f"sample {number} of the {name}"
