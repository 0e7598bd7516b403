"""What each page shows: pure values for its template, read when the page is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from streamloader.errors import FormatError, StorageError, StreamloaderError, UsageError
from streamloader.format.dataset import Dataset
from streamloader.format.dataset import open as open_dataset
from streamloader.loader.arguments import Source, leftmost
from streamloader.loader.dataset import NumpyDataset
from streamloader.loader.showing import looks_of
from streamloader.measure.forecast import Forecast, ForecastOptions, forecast
from streamloader.options import Join, Sampling, Shuffle
from streamloader.show.cells import Looks, Row, rows_of
from streamloader.storage import open_store, references_url
from streamloader.storage.buffers import LRUCache
from streamloader.storage.optional import need
from streamloader.storage.process import run_all
from streamloader.view import facts, overview
from streamloader.view.losses import read_losses
from streamloader.view.run import Place, Run, RunOptions, numbered
from streamloader.zarr.sampling import read_normalization

PAGE = 60  # samples of a page
OPENED = 4  # selections of which the loader is kept
KEPT_HISTOGRAMS = 256
THREADS = 16  # that read samples by their numbers
GET_PRICE = 0.0004 / 1000  # USD for a GET request of S3 in us-east-1, November 2026
STEPS_DRAWN = 12  # global steps whose blocks are drawn
VERSIONS = 100  # that are listed
MOST_PLANNED = 1 << 24  # samples of a step of all ranks, whose places a forecast computes

Tokens = Callable[[Sequence[int]], Sequence[str]] | None


@dataclass(frozen=True)
class ViewOptions:
    """What a viewer shows: a `run`, a log of `losses`, and the `live` statistics of a training, by path or URL.

    `tokens`: returns the texts of token numbers.
    """

    run: RunOptions
    losses: str | None = None
    live: str | None = None
    tokens: Tokens = None


def load_tokenizer(name: str) -> Callable[[Sequence[int]], Sequence[str]]:
    """Return what makes texts of token numbers, by a `tokenizer.json` or, for "bytes", as bytes of UTF-8.

    Raises `UsageError` if the package tokenizers is missing, or cannot read the file.
    """
    if name == "bytes":
        return lambda numbers: [chr(n) if 0 <= n < 256 else f"<{n}>" for n in numbers]
    tokenizers = need("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(name)
    except Exception as error:  # the package raises no other class
        raise UsageError(f"the tokenizer {name}: {error}", "give a tokenizer.json, or bytes") from error

    def text(number: int) -> str:
        # not every number is a token: labels have -100 for what the loss leaves out
        known = 0 <= number < 1 << 32
        return (tokenizer.decode([number], skip_special_tokens=False) if known else "") or f"<{number}>"

    return lambda numbers: [text(number) for number in numbers]


class Stored:
    """The stored samples of a selection, opened when they are asked for. Thread-safe. `looks`: those of the run."""

    def __init__(self, source: Source, looks: Looks) -> None:
        self._source, self._looks, self._lock = source, looks, threading.Lock()

    def __len__(self) -> int:
        return self.loader.num_samples

    @cached_property
    def loader(self) -> NumpyDataset:
        """What reads pages of the samples."""
        given: dict[str, Any] = {"shuffle": False, "num_workers": 0, "remainder": "uneven", "world": (0, 1)}
        return numbered(partial(NumpyDataset, **vars(self._source), batch_size=PAGE, **given))

    @cached_property
    def looks(self) -> Looks:
        """How stored columns are shown: with boxes as the run reads them."""
        looks = looks_of(self.loader, self._looks.tokens)
        return replace(looks, boxes={**looks.boxes, **self._looks.boxes})

    @cached_property
    def dataset(self) -> Dataset | None:
        """The dataset for random access to all samples; None for arrays that are read in place."""
        source = self._source
        if source.used:
            return None
        options = {"split": source.split, "version": source.version, "storage_options": source.storage_options}
        return open_dataset(source.url, **options)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the threads of the loader, if it was opened."""
        if "loader" in vars(self):
            self.loader.close()

    def page(self, number: int) -> list[Row]:
        """Return the samples of a page, from 0. Raises `UsageError` for one that there is not."""
        with self._lock:
            batch = next(self.loader.replay(0, [number]))
        return rows_of(batch, self.looks)

    def samples(self, numbers: Iterable[int]) -> dict[int, Row]:
        """Return samples by their numbers, of which those that the dataset does not have are left out."""
        dataset = self.dataset
        chosen = [] if dataset is None else sorted({number for number in numbers if 0 <= number < len(dataset)})
        read = run_all(dataset.__getitem__, chosen, THREADS) if dataset is not None else []
        columns = ({name: [value] for name, value in sample.items()} for sample in read)
        return {number: rows_of(column, self.looks)[0] for number, column in zip(chosen, columns, strict=True)}


class Viewer:
    """The pages of a dataset and a run. Thread-safe."""

    def __init__(self, options: ViewOptions) -> None:
        self.options, self._lock = options, threading.Lock()
        run = options.run
        losses = None if options.losses is None else read_losses(options.losses, run.storage_options)
        if losses is not None and run.description is None:
            run = replace(run, description=losses.run, state=losses.state if run.state is None else run.state)
        self.losses = losses
        self.run = Run(run)
        loader = self.run.loader
        source, manifest = leftmost(loader._sources[0]), loader._datasets[0].manifest
        # that of a state, whose samples may have other numbers than those of the newest version
        pinned = source.version if source.used or source is not loader._sources[0] else manifest.generation
        self.source = replace(source, version=pinned)
        self.looks: Looks = looks_of(loader, options.tokens)
        self._stored = LRUCache[tuple[str | None, str | None], Stored](OPENED)
        self._histograms = LRUCache[str, facts.Histogram](KEPT_HISTOGRAMS)

    @property
    def url(self) -> str:
        """The URL of the dataset, without secrets."""
        return self.run.loader._datasets[0].store.url

    @property
    def dataset(self) -> Dataset | None:
        """The dataset for random access; None for arrays that are read in place."""
        return self.stored(None, None).dataset

    @property
    def has_numbers(self) -> bool:
        """Whether the numbers in the run's batches are those of stored samples: not of packed rows, clips or arrays."""
        options = self.run.loader._options
        return not (len(self.run.loader._datasets) > 1 or self.source.used or options.pack or options.clips)

    def step(self, place: Place) -> dict[str, Any]:
        """Return the batch of a step, as trained."""
        batch = self.run.batch(place)
        return {
            "rows": rows_of(batch, self.looks),
            "unit": "packed rows" if self.run.loader._options.pack else "samples",
            "losses": self.losses_of(place),
            "steps": self.run.steps(place.epoch),
            "overview": self._overview,
            "patches": [] if self._overview is None else overview.patches(self._overview, batch),
        }

    @cached_property
    def _overview(self) -> overview.Overview | None:
        return overview.read(self.run.loader)

    def losses_of(self, place: Place) -> dict[int, float]:
        """Return the losses of the rows of a step, as far as they are among the largest that are kept."""
        # the losses of documents are those of no row
        found = [] if self.losses is None or self.run.of_documents else self.losses.largest
        return {each.row: each.loss for each in found if each[1:4] == (place.epoch, place.step, place.rank)}

    def stored(self, split: str | None, where: str | None) -> Stored:
        """Return the stored samples of a split that a condition selects. Raises `SelectionError` for another text."""
        source = replace(self.source, split=split or self.source.split, where=where, exclude=None, weights=None)
        return self._stored.add((source.split, where), Stored(source, self.looks), 1)

    def fields(self) -> dict[str, Any]:
        """Return the fields, classes, splits and versions."""
        from streamloader.maintenance.versions import log

        dataset, loader = self.dataset, self.run.loader
        if dataset is None:
            columns = [{"name": name, "type": str(field)} for name, field in loader.fields.items()]
            return {"columns": columns, "classes": loader.classes, "splits": (), "versions": [], "manifest": None}
        versions: list[Any] = []
        if dataset.manifest.generation <= VERSIONS:
            options = {"split": self.source.split, "storage_options": self.source.storage_options}
            with suppress(FormatError, StorageError):
                versions = log(self.source.url, **options)  # type: ignore[arg-type]
        return {
            "columns": facts.field_rows(dataset),
            "classes": dataset.classes,
            "splits": dataset.splits,
            "versions": versions,
            "manifest": dataset.manifest,
        }

    def statistics(self, name: str) -> facts.Histogram:
        """Return the histogram of a field. Raises `UsageError` for an unknown one."""
        if name not in self.run.loader.fields:
            raise UsageError(f"field {name!r:.60}", f"choose one of {', '.join(self.run.loader.fields)}")
        found, classes = self._histograms.get(name), self.run.loader.classes.get(name, ())
        if found is None:
            if self.dataset is not None and name in self.dataset.fields:
                found = facts.statistics(self.dataset, name)
            else:
                found = facts.sampled_statistics(self.run.spread(facts.SAMPLED_STEPS), name, classes)
            found = self._histograms.add(name, found if classes else facts.with_saved(found, self.saved), 1)
        return found

    @cached_property
    def saved(self) -> Mapping[str, Any]:
        """What `streamloader stats --save` has saved in the dataset, by field; empty if there is nothing."""
        url: Any = self.source.url  # of no join: it is the leftmost source
        store = open_store(references_url(url), self.source.storage_options)
        with suppress(UsageError, FormatError, StorageError):
            return read_normalization(store, True)
        return {}

    def order(self, place: Place) -> dict[str, Any]:
        """Return the blocks of the samples of the steps from one on, and the order of each source of the run."""
        steps = range(place.step, min(self.run.steps(place.epoch), place.step + STEPS_DRAWN))
        orders = self.run.orders(place.epoch)
        blocks = self.run.blocks(place.epoch, steps)
        return {"steps": blocks, "orders": orders, "blocks": sum(each["blocks"] for each in orders)}

    def forecast_options(self) -> ForecastOptions:
        """Return the run's own plan: what the sliders begin at. Raises `UsageError` for a mixture."""
        loader, source = self.run.loader, self.source
        given = loader._options
        if len(loader._sources) > 1 or isinstance(loader._sources[0].url, Join):
            raise UsageError("the plan of a mixture or a join", "run streamloader plan with its URLs and --weights")
        chosen = {name: getattr(source, name) for name in ("split", "where", "exclude", "weights", "replacement")}
        buckets = given.bucket_by if isinstance(given.bucket_by, str) else None
        return ForecastOptions(
            world_size=self.run.size,
            batch_size=given.batch_size or 1,
            fields=loader._fields,
            shuffle=given.shuffle,
            storage_options=source.storage_options or {},
            sampling=Sampling(**{name: getattr(source, name) for name in vars(Sampling())}),
            pack=given.pack,
            clips=given.clips,
            bucket_by=buckets,
            bucket_steps=given.bucket_steps,
            max_tokens=given.max_tokens if buckets else None,
            **chosen,
        )

    def plan(self, changes: Mapping[str, int]) -> dict[str, Any]:
        """Return the forecast of an epoch with other lanes, window, ranks, memory or batch size, or why it cannot be.

        `changes`: "lanes", "window", "block", "world_size", "batch_size", and "memory" in MiB.
        """
        options = self.forecast_options()
        order = {name: changes[name] for name in ("lanes", "window", "block") if name in changes}
        if "window" in order:  # a slider does not know that it is of whole blocks
            block = order.get("block") or self.run.loader._start_of(0).sources[0].params.block
            order["window"] = max(2, round(order["window"] / block)) * block
        if order:
            before = vars(options.shuffle) if isinstance(options.shuffle, Shuffle) else {}
            options = replace(options, shuffle=Shuffle(**before | order))
        sizes = {name: changes.get(name, getattr(options, name)) for name in ("world_size", "batch_size")}
        if (rows := sizes["world_size"] * sizes["batch_size"]) > MOST_PLANNED:
            return {"problem": f"a step of {rows:,} samples: give at most {MOST_PLANNED:,}", "planned": None}
        memory = changes["memory"] << 20 if "memory" in changes else None
        url = str(self.source.url)
        try:
            planned: Forecast = forecast(url, replace(options, memory=memory, **sizes))
        except StreamloaderError as error:
            return {"problem": str(error), "planned": None}
        return {"problem": "", "planned": planned, "price": planned.requests * GET_PRICE}

    def close(self) -> None:
        """End all threads."""
        self.run.close()
        for stored in self._stored.values():
            stored.close()
