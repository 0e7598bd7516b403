"""More samples behind those of a finished dataset: scan, check, write, publish."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamloader.conversion.after.appending import (
    Appending,
    check_claim,
    fitting_base,
    is_published,
    read_claim,
    take_claim,
)
from streamloader.conversion.after.relabel import classes_of, merged_classes, relabel
from streamloader.conversion.engines.engine import parse_engine
from streamloader.conversion.mapped import parse_map
from streamloader.conversion.means import Means
from streamloader.conversion.plan import files_digest
from streamloader.conversion.progress import Listener, Progress, ignore
from streamloader.conversion.recipe import Recipe
from streamloader.conversion.recode import parse_recode
from streamloader.conversion.rows import SampleRows
from streamloader.conversion.sources.base import Source
from streamloader.conversion.sources.choose import choose
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import DestinationError, FieldError, FormatError, UsageError
from streamloader.format.extend import plan_extension
from streamloader.format.manifest import Manifest
from streamloader.format.metadata import Document, group_document
from streamloader.format.opening import Opened, open_root, read_root
from streamloader.format.publish import (
    clean_append,
    finish_extension,
    publish,
    publish_split,
    undo_extension,
)
from streamloader.storage import open_store
from streamloader.storage.location import redact
from streamloader.storage.protocol import Store

THREADS = 8
MIXED = "mixed"  # the encoding of a field whose files are of several: any other may join them


@dataclass(frozen=True)
class Wishes:
    """What is asked of the source of an append; names and meanings are those of `convert`."""

    format: str | None = None
    map: str | Callable[[dict[str, Any]], Any] | None = None
    map_batch: int | None = None
    resize: str | int | tuple[int, int] | None = None
    quality: int | None = None
    shuffle: int | None = None
    source_options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class AppendReport:
    """What an append made: the manifest that is there now, of the split that was asked for.

    `added` samples came behind the `before` that were there; `added` is 0 where the source is empty. `shards_kept` of
    the `shards` were written by an earlier, interrupted run.
    """

    url: str
    format: str
    manifest: Manifest
    before: int
    added: int
    shards: int
    shards_kept: int


def append(
    url: str | os.PathLike[str],
    src: str | os.PathLike[str],
    *,
    split: str | None = None,
    wishes: Wishes | None = None,
    engine: str = "local",
    workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Listener | None = None,
) -> AppendReport:
    """Add the samples of `src` behind those of the finished dataset at `url`, or of one `split` of it.

    The fields are the dataset's: the source must have each of them, and its types are cast where nothing is lost; what
    else it has is left out. Class numbers become those of the dataset, new classes come behind. A bad sample ends the
    append. Until the end everybody reads the version that was there; who has opened it reads it afterwards, too. An
    interrupted append goes on when it is called again in the same way, to the same bytes.

    Raises `FieldError` where the fields do not agree, `SourceError` for the source, `DestinationError` where another
    append is under way or was published meanwhile, what opening the dataset raises, and `StorageError`.
    """
    asked = wishes or Wishes()
    if workers is not None and workers < 0:
        raise UsageError(f"workers={workers}", "give the number of processes; 0 works in this one")
    root = open_store(url, storage_options)
    opened = open_root(root, split)
    means = Means(workers, "raise", progress or ignore, parse_engine(engine))
    means.listener(Progress("scan", detail=f"looking at {redact(os.fspath(src))}"))
    source_options = asked.source_options
    if source_options is None and _protocol(src) == _protocol(url):
        source_options = storage_options
    recipe = _recipe(asked, opened.manifest)
    name, source = open_source(src, asked.format, source_options or {}, recipe.opening)
    own = source.notes.get("splits")
    if own:
        problem = f"{source.url} has the splits {', '.join(own)} of its own"
        raise UsageError(problem, "append each of its folders to the split that it belongs to")
    means.check(recipe, source.url, opened.store.url)
    source = _agreed(recipe.apply(relabel(source, classes_of(opened.manifest.provenance))), opened.manifest)
    run = _Run(root, opened, split, name, source, recipe)
    report = run.done() or run.complete(means)
    means.listener(Progress("finish", report.added, report.added))
    return report


def abandon(
    url: str | os.PathLike[str], *, split: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> bool:
    """End an append that was interrupted: the dataset stays as it was, to the byte. False where there is none.

    Only while nobody appends. Raises what opening raises, and what is wrong with shards that it puts back.
    """
    root = open_store(url, storage_options)
    opened = open_root(root, split)
    store, base = opened.store, opened.manifest
    try:
        claim = read_claim(store)
    except FormatError:  # nobody can go on with it
        claim = {"generation": base.generation + 1}
    if claim is None:
        return False
    if not is_published(claim, base):
        undo_extension(store, plan_extension(store, base, 0), _split_document(root, split) if split else None)
    clean_append(store)
    return True


@dataclass(frozen=True, eq=False)
class _Run:
    """One append from what is there to what it makes."""

    root: Store
    opened: Opened
    split: str | None
    format: str
    source: Source
    recipe: Recipe

    @property
    def _about(self) -> dict[str, Any]:
        source = self.source
        digest = files_digest(source.files)
        return {"format": self.format, "url": source.url, "files": len(source.files), "digest": digest}

    def _claim(self) -> dict[str, Any]:
        options = {key: value for key, value in self.recipe.options().items() if key in ("recode", "map", "shuffle")}
        base = self.opened.manifest
        source = {**self._about, "samples": self.source.num_samples}
        return {
            "by": "append",
            "base": base.digest,
            "generation": base.generation + 1,
            "source": source,
            "options": options,
        }

    def done(self) -> AppendReport | None:
        """Return the report where there is nothing to do: no samples, or published already by a run that was killed."""
        base, store = self.opened.manifest, self.opened.store
        if not self.source.num_samples:
            return AppendReport(store.url, self.format, base, base.num_samples, 0, 0, 0)
        found, claim = read_claim(store), self._claim()
        if found is None or not is_published(found, base) or any(found.get(key) != claim[key] for key in _SAME):
            return None
        clean_append(store)
        return self._published(base)

    def complete(self, means: Means) -> AppendReport:
        """Write, publish, clean up. A run with the same claim beside this one makes the same: then all is well."""
        store, base = self.opened.store, self.opened.manifest
        fitting = fitting_base(base, self.source)
        claim = take_claim(store, self._claim(), base)
        try:
            self._check_base()
            extension = plan_extension(store, fitting, self.source.num_samples)
            rows = SampleRows.of(range(self.source.num_samples), self.recipe.shuffle)
            work = Appending(self.source, rows, store, extension, claim)
            receipts, kept = work.write(means)
            means.listener(Progress("finish", extension.added, extension.added))
            check_claim(store, claim)
            manifest = finish_extension(store, extension, receipts, self._provenance(), THREADS)
            publish(store, base.digest, manifest, THREADS)
            if self.split is not None:
                publish_split(self.root, self.split, base.digest, manifest)
        except (DestinationError, FormatError):
            twin = open_root(self.root, self.split).manifest
            if twin.generation != base.generation + 1 or twin.provenance != self._provenance():
                raise
            return self._published(twin)
        clean_append(store)
        return AppendReport(
            store.url, self.format, manifest, base.num_samples, extension.added, len(extension.shards), kept
        )

    def _check_base(self) -> None:
        """Raise `DestinationError` where another append was published before this one had its claim."""
        base, now = self.opened.manifest, open_root(self.root, self.split).manifest
        if now.digest == base.digest:
            return
        if is_published(self._claim(), now):
            clean_append(self.opened.store)
        problem = f"{self.opened.store.url} was changed by another run: {base.digest} became {now.digest}"
        raise DestinationError(problem, "run the append again")

    def _published(self, manifest: Manifest) -> AppendReport:
        added, size = self.source.num_samples, manifest.samples_per_shard
        before = manifest.num_samples - added
        shards = -(-manifest.num_samples // size) - before // size
        return AppendReport(self.opened.store.url, self.format, manifest, before, added, shards, shards)

    def _provenance(self) -> dict[str, Any]:
        """Return what the new manifest tells: as the old one, the new classes, and where the samples are from."""
        told = dict(self.opened.manifest.provenance)
        classes = merged_classes(classes_of(told), classes_of(self.source.notes))
        shuffle = {} if self.recipe.shuffle is None else {"shuffle": {"seed": self.recipe.shuffle}}
        one = {"source": self._about, "num_samples": self.source.num_samples, **shuffle}
        before = told.get("appended")
        told["appended"] = [*(before if isinstance(before, list) else []), one]
        return told | ({"classes": classes} if classes else {})


_SAME = ("source", "options")


def _recipe(asked: Wishes, base: Manifest) -> Recipe:
    """Return what is made of the source. What kind of bytes it has is seen at the end, when images are encoded anew."""
    fields = {name: layout.field for name, layout in base.fields.items()}
    kinds = {name: None if field.kind == "bytes" else field for name, field in fields.items()}
    wish = Wish.again(kinds, base.provenance)
    recode, mapper = parse_recode(asked.resize, asked.quality), parse_map(asked.map, asked.map_batch)
    return Recipe(wish, recode, mapper, shuffle=asked.shuffle)


def _agreed(source: Source, base: Manifest) -> Source:
    """Return the source with exactly the dataset's fields. Raises `FieldError`, which names the first difference."""
    for name, layout in base.fields.items():
        wanted, have = layout.field, source.fields[name]
        alike = wanted.encoding in ("", have.encoding) or (wanted.encoding == MIXED and have.encoding)
        if not alike:
            problem = f"field {name!r} is {have} in {source.url}, the dataset has {wanted}"
            raise FieldError(problem, "encode it alike (--quality makes JPEGs), or convert all of it anew")
    return choose(source, Wish({name: layout.field for name, layout in base.fields.items()}))


def _split_document(root: Store, split: str) -> Document:
    """Return the root document of a split, as the root of splits has it."""
    nodes = read_root(root)["consolidated_metadata"]["metadata"]
    below = {path.removeprefix(f"{split}/"): node for path, node in nodes.items() if path.startswith(f"{split}/")}
    return group_document(nodes[split]["attributes"], below)


def _protocol(url: str | os.PathLike[str]) -> str:
    text = os.fspath(url)
    return text.partition("://")[0] if "://" in text else "file"
