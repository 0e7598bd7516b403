"""`Loader`, the base of all datasets that iterate: passes, epochs, the position of training, and its states."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import repeat
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.dataset import Dataset, first_samples, numbers_among_all
from streamloader.engine.engine import Engine, Pipeline
from streamloader.engine.executor import choose_workers
from streamloader.engine.faults import Fault
from streamloader.engine.stages import Batch, LoaderConfig, split_steps
from streamloader.errors import MixtureError, PassEndedError, StateError, StreamloaderError, UsageError
from streamloader.format.manifest import Field
from streamloader.loader import arguments
from streamloader.loader.arguments import Arguments, Source
from streamloader.loader.bad_samples import BadSamples
from streamloader.loader.batches import BatchFormat, Columns, split_rows
from streamloader.loader.describe import describe
from streamloader.loader.epochs import Epochs
from streamloader.loader.opening import choose_versions, open_dataset
from streamloader.loader.world import ranks_of_node, ranks_on_this_machine, read_world
from streamloader.options import Join, Pack, is_whole, parse_size, whole
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.schedule import BatchPlan, EpochShare, World
from streamloader.order.state import ORDER_NAMES, PROGRESS_NAMES, Cursor, RunState, SourceIdentity, read_value
from streamloader.show.render import Shown
from streamloader.stats import BatchReport, Counters, Stats, quotient
from streamloader.storage.process import cpu_count, wait_for

REPEATED_ROUND = (
    "the state is within a round of DataLoader workers, and their number, the world or the batch size changed: "
    "{} batches of each rank are repeated"
)
REPEATED_SAMPLES = "the state is within a step of max_tokens=, of which these ranks take equal parts: {} samples repeat"
SEVERAL_WORKERS = (
    "{} DataLoader workers on each rank: an epoch has the same samples, but the composition of its batches depends on "
    "DataLoader(num_workers=); give DataLoader none, and num_workers= to the dataset, whose workers share one plan"
)
REPEATED_EPOCH = (
    "epoch {} begins anew: a loop that ends early does not advance the epoch, so it gets the same batches each time; "
    "let steps_per_epoch= end it, call set_epoch(), or load a state to go on where it stopped"
)

OTHER_DECODER = "the state is of a run with other decoders of images ({}, now {}): pixels differ slightly from here on"

# A pass that yields single samples still loads batches of this size, since the engine's work is per batch.
SAMPLES_AT_ONCE = 64
# Seconds that a transform has taken in all before it may get workers, whose start takes about one.
LEAST_SECONDS = 5.0


def describe_lanes(size: int, before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """Return a warning that a run has more lanes than the dataset, since it has more ranks than lanes."""
    pinned, used = (", ".join(map(str, sorted(set(lanes)))) for lanes in (before, after))
    return (
        f"{size} ranks are more than the dataset's {pinned} lanes: this run uses {used} lanes, so that fewer ranks "
        "read the same block, and its states keep them at any number of ranks; "
        f"set shuffle=Shuffle(lanes={max(after)}) to begin other runs in this order"
    )


def check_guarded() -> None:
    """Raise `UsageError` if a spawned process iterates while it imports the script of its parent."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        problem = "processes of num_workers= import this script, which iterates a dataset on import"
        raise UsageError(problem, "put the training code below `if __name__ == '__main__':`")


def raising(error: BaseException) -> Iterator[Any]:
    """Raise an error where the first item is asked for."""
    raise error
    yield


def _send(send: Callable[[Columns, Sequence[int]], Any], make: Any, masked: Sequence[int]) -> Any:
    """Begin to copy a batch, in which some rows are `masked`, to the device; return what `receive` takes."""
    return send(make(), masked)


Step = tuple[BatchPlan, Mapping[int, Fault]]  # a step that was delivered, with its bad samples by row


class Pass(Iterator[Columns]):
    """Yields batches or samples of a loader. Deleting the pass ends its threads.

    Several threads may share it: each item goes to one of them. `left`: the number of batches, with which it goes on in
    the epochs after this one. `advances`: whether it moves the loader's position, and reports to `on_batch`.
    """

    def __init__(self, loader: Loader, begin: Cursor, left: int | None = None, *, advances: bool = True) -> None:
        self._lock, self._taking = threading.RLock(), False
        self._format, self._left = loader._format, left
        self._reported = time.perf_counter()
        # with the samples that are still to be reported, and the step whose bad samples are still to be counted
        # (columns, what makes them, what the device gets, or the error of a batch that was to be sent there early)
        self._waiting: deque[tuple[Any, int, Step | None]] = deque()
        self._loader, self._delivered = loader if advances else None, loader._delivered
        self._transfers = loader._open_transfers()  # to a device, if batches are copied to one
        self._begin(loader, begin)

    def _begin(self, loader: Loader, begin: Cursor) -> Pipeline:
        self._cursor, self._last_step = begin, begin.steps + begin.steps_left
        pipeline = loader._start_pipeline(begin)
        self._pipeline: Pipeline | None = pipeline  # None once ended, so that a reference to this pass keeps no memory
        loader._pass = weakref.ref(self)
        return pipeline

    def go_on(self, change: Callable[[], Cursor]) -> None:
        """Go on at the cursor that `change` returns, by a new plan; the batches that were prefetched are dropped.

        Raises `UsageError` while a batch is being returned, as in `on_batch`.
        """
        wait_for(lambda seconds: self._lock.acquire(timeout=seconds))
        try:
            if self._taking or self._loader is None:
                raise UsageError("set_weights() while a batch is being returned", "call it between two batches")
            loader, cursor = self._loader, change()
            self.end()
            self._begin(loader, cursor)
        finally:
            self._lock.release()

    def continued(self, loader: Loader, left: int) -> Pass:
        """Return a pass over the `left` batches after those of this one, which has none left."""
        following = copy(self)
        following._loader, following._left = loader, left
        self._pipeline = None
        loader._pass = weakref.ref(following)
        return following

    def __next__(self) -> Columns:
        """Return the next batch or sample. Raises its error."""
        wait_for(lambda seconds: self._lock.acquire(timeout=seconds))
        try:
            self._taking = True
            return self._take()
        finally:
            self._taking = False
            self._lock.release()

    def _take(self) -> Columns:
        if self._left == 0:
            raise StopIteration
        pipeline = self._pipeline
        if pipeline is None:
            raise PassEndedError
        waiting, transfers = self._waiting, self._transfers  # another thread may call `end`
        if transfers is not None:
            transfers.begin_wait()
        asked = time.perf_counter()
        if waiting:
            pipeline.check_process()  # as `next` does
        else:
            pipeline = self._wait(pipeline, asked)
        batch, unreported, step = self._first()
        waited = time.perf_counter() - asked  # for the batch, not for room on the device
        if transfers is not None:
            if unreported:
                pipeline.counters.delivered(unreported, 1, asked)
            self._send_ahead(pipeline, transfers)
        if unreported or step is not None:
            waiting[0] = batch, 0, None
            self._report(unreported, waited)
            self._count_bad(step)
        delivered: Columns = batch if transfers is None else transfers.receive(batch)
        self._delivered[:] = (self._cursor,)
        cursor = tuple.__new__(Cursor, (*self._cursor[:-1], self._cursor.steps + 1))  # a quarter of `_replace`'s time
        # A caller that knows the number of batches does not ask for one more, so the last batch completes the pass.
        if len(waiting) == 1 and cursor.steps >= self._last_step:
            next(pipeline, None)
        self._advance(cursor, completed=pipeline.completed)
        waiting.popleft()
        return delivered

    def _wait(self, pipeline: Pipeline, asked: float) -> Pipeline:
        """Wait for batches, those of the next epoch if this one is over and some are left; return their pipeline."""
        try:
            made = next(pipeline, None)
        except StreamloaderError:
            pipeline.counters.failed(asked)
            raise
        if made is None:
            pipeline, made = self._begin_following()
        if self._transfers is None:  # otherwise some are not returned at once
            pipeline.count(made, asked)
        self._waiting.extend(self._converted(made))
        return pipeline

    def _first(self) -> tuple[Any, int, Step | None]:
        """Return the first batch that waits, made; on its way to the device if there is one. Raises its error."""
        batch, unreported, step = self._waiting[0]
        if isinstance(batch, StreamloaderError):
            self._waiting.clear()
            try:
                raise batch
            finally:
                del batch  # see `Pipeline._finish`
        if isinstance(batch, partial):
            batch = self._made(batch)
            self._waiting[0] = batch, unreported, step
        return batch, unreported, step

    def _send_ahead(self, pipeline: Pipeline, transfers: Any) -> None:
        """Begin to copy the batches after the first one to the device, as far as they are finished.

        This waits for none of them, and what fails now is an error of its batch, not of the first one.
        """
        waiting = self._waiting
        for number in range(1, transfers.ahead):
            if number == len(waiting):
                if self._cursor.steps + number >= self._last_step or not pipeline.is_ready():
                    return
                transfers.make_room()
                try:
                    made = next(pipeline, None)
                    if made is None:
                        return
                    waiting.extend(self._converted(made))
                except StreamloaderError as error:
                    waiting.append((error.with_traceback(None), 0, None))  # which would refer to `waiting`
                except BaseException:
                    self.end()  # this batch may be lost, and a later one must not take its place
                    raise
            batch, unreported, step = waiting[number]
            if isinstance(batch, partial):
                try:
                    waiting[number] = batch(), unreported, step
                except Exception:  # noqa: BLE001 - it is made again, and raised, once it is the first
                    return

    def _advance(self, cursor: Cursor, *, completed: bool) -> None:
        self._cursor = cursor
        if self._loader is not None:
            self._loader._at = cursor
        if completed:
            self._complete()
        if self._left is not None and self._loader is not None:
            self._left -= 1
            if not self._left:
                self._loader._paused, self._loader = self, None

    def _begin_following(self) -> tuple[Pipeline, Batch]:
        """Complete the epoch; if batches are left, return the pipeline of the next epoch, and its first batch."""
        self._complete()
        loader = self._loader
        if loader is None:
            raise StopIteration
        pipeline = self._begin(loader, loader._begin_pass())
        made = next(pipeline, None)
        if made is None:
            self._complete()
            self._left = 0
            raise StopIteration
        return pipeline, made

    @property
    def ready(self) -> int:
        """The number of batches that `next` returns without asking the engine."""
        return max(0, len(self._waiting) - self._taking)

    def end(self) -> None:
        """End the threads of this pass; `next` raises from now on."""
        pipeline, self._pipeline = self._pipeline, None
        self._waiting = deque()
        if pipeline is not None:
            pipeline.close()

    def _converted(self, batch: Batch) -> Iterable[tuple[Columns | partial[Columns], int, Step | None]]:
        """Return samples, or what makes a batch once it is asked for: many lists at once take three times as long."""
        made: list[tuple[Columns | partial[Columns], int]]
        try:
            if self._format.samples:
                samples = self._format.each_sample(batch)
                made = [(sample, 0 if number else len(samples)) for number, sample in enumerate(samples)]
                plans: Iterable[BatchPlan] = batch.plan.steps()
            else:
                steps = list(split_steps(batch))
                made = [(partial(self._format.batch, columns, plan), len(plan.samples)) for plan, columns in steps]
                if self._transfers is not None:
                    size, masked = batch.plan.step_rows, sorted(batch.masked)
                    zeros = ([row % size for row in masked if row // size == number] for number in range(len(steps)))
                    send = partial(_send, self._transfers.send)
                    made = [(partial(send, make, rows), of) for (make, of), rows in zip(made, zeros, strict=True)]
                plans = (plan for plan, _ in steps)
            return [(*each, step) for each, step in zip(made, self._counted(batch, plans), strict=False)]
        except BaseException:
            self.end()  # this batch is lost, and a later one must not take its place
            raise

    def _made(self, make: partial[Columns]) -> Columns:
        """Return a batch. Ends the pass if that fails."""
        try:
            return make()
        except BaseException:
            self.end()  # this batch is lost, and a later one must not take its place
            raise

    def _report(self, samples: int, waited: float) -> None:
        loader, cursor = self._loader, self._cursor
        if not samples or loader is None or loader._options.on_batch is None:
            return
        before, self._reported = self._reported, time.perf_counter()
        loader._options.on_batch(
            BatchReport(
                epoch=cursor.start.epoch,
                step=cursor.step,
                samples=samples,
                wait_seconds=waited,
                seconds=self._reported - before,
                worker=loader._worker[0],
            )
        )

    def _counted(self, batch: Batch, plans: Iterable[BatchPlan]) -> Iterable[Step | None]:
        """Return the plans of steps, each with its bad samples by row; None each if bad samples end the pass."""
        if self._loader is None or not self._loader._config.tolerant:
            return repeat(None)
        faults: dict[int, dict[int, Fault]] = {}
        for row, fault in batch.faults.items():
            number, row_of_step = divmod(row, batch.plan.step_rows)
            faults.setdefault(number, {})[row_of_step] = fault
        return ((plan, faults.get(number, {})) for number, plan in enumerate(plans))

    def _count_bad(self, step: Step | None) -> None:
        """Count and log the bad samples of a step. Raises `BadSamplesError` if they are too many, and ends the pass."""
        loader, cursor = self._loader, self._cursor
        if step is None or loader is None:
            return
        plan, faults = step
        rows = loader._bad.count(plan, faults, cursor.share.num_samples)
        if rows:
            try:
                loader._log_bad(plan, cursor, {row: faults[row] for row in rows})
            except BaseException:
                self.end()
                raise

    def _complete(self) -> None:
        if self._loader is not None:
            self._loader._complete(self._cursor.start.epoch)
        if self._left is None:
            self._loader = None


class Loader:
    """The base of datasets that iterate: passes over one or several datasets, in one process.

    Yields arrays, and knows nothing of torch; `pytorch` replaces the methods up to `_check_caller`.
    `mixture`: the fields of `RunState` that only a mixture has.
    """

    _tensors: ClassVar[str] = ""  # the module that handles those that a transform returns
    _convert: Callable[[Columns], Columns] = dict  # the arrays of a batch
    _split: Callable[[NDArray[Any], NDArray[np.int64]], list[Any]] = staticmethod(split_rows)  # a ragged column
    _resolve_world: Callable[[Any], World] = staticmethod(read_world)
    _new_epochs: Callable[[], Epochs] = Epochs
    _worker_info: Callable[[], tuple[int, int] | None] = staticmethod(lambda: None)  # (number, count) in workers

    def _page_lock(self) -> Callable[[NDArray[np.uint8]], object] | None:
        """Return what is called with new memory of batches, if a device is to copy from it."""
        return None

    def _open_transfers(self) -> Any:
        """Return what copies the batches of passes to a device, None without one: see `pytorch/device.py`."""
        return None

    def _check_caller(self) -> None:
        """Raise `UsageError` for a loader that would batch batches, or split the samples of a rank."""

    def __init__(self, sources: Sequence[Source], given: Arguments, **mixture: Any) -> None:
        seed, given = whole("seed", given.seed, 0), arguments.with_device(given)
        EpochOrder(1, OrderParams(1, 1, 2), seed, 0)  # raises for a seed that does not fit
        self._order = arguments.read_shuffle(given.shuffle)
        # workers get a pickled copy; steps and fields may be generators or views, and a process group stays here
        self._options = replace(given, skip_steps=None, fields=None, world=None)
        self._skips = arguments.read_steps("skip_steps", given.skip_steps)
        self._world = None if given.world is None else self._resolve_world(given.world)
        tolerant = given.on_error != "raise"
        columns = ("index",) * given.with_index + ("valid",) * (tolerant or given.remainder == "pad")
        columns += {"raise": (), "mask": ("error",), "replace": ("replaced",)}[given.on_error]
        memory = None if given.memory is None else parse_size(given.memory, "memory=")
        self._open_dataset = partial(
            open_dataset,
            columns=columns,
            memory=memory,
            shuffle=given.shuffle is not False,
            seed=seed,
            cache=given.cache,
        )
        self._sources = tuple(sources)
        self._channels = arguments.normalized_by_channel(sources)
        # None: all of the version that is open
        self._fields = given.fields if given.fields is None else arguments.choose_names(given.fields)
        self._datasets = self._open(self._sources, self._fields)
        self._config = self._choose_config(given, memory)
        self._budget = arguments.choose_budget(given, self._config.rules)
        log = None if given.error_log is None else os.fspath(given.error_log)
        self._bad = BadSamples(given.max_bad, log, arguments.leftmost(self._sources[0]).storage_options)
        identities = self._identities(self._datasets)
        if len(set(identities)) < len(identities):
            raise MixtureError("the mixture has the same samples of a dataset twice", "name each source once")
        start = RunState(
            sources=identities,
            shuffle=given.shuffle is not False,
            remainder=given.remainder,
            seed=seed,
            given=tuple(name for name in ORDER_NAMES if getattr(self._order, name) is not None),
            decoders=arguments.device_decoders(self._config.decoders),
            **arguments.choose_buckets(given, self._datasets, mixture.get("batches")),
            **mixture | self._weighed(self._datasets),
        )
        self._format = self._choose_format(given, mixed=bool(mixture))
        self._cached_engine: Engine | None = None
        self._transfers: Any = None  # of this process, once a pass began
        self._first = self._start = start  # of a new run; of the next pass
        self._delivered: list[Cursor] = []  # where the batch that was returned last begins, if there is one
        self._at = self._iteration = Cursor(start)  # the position of training; that at which the iteration began
        self._own = False  # whether this copy, in a worker of StatefulDataLoader, has loaded a state of its own
        self._epochs = self._new_epochs()
        self._pass: weakref.ref[Pass] | None = None
        self._paused: Pass | None = None  # between two iterations of `steps_per_epoch`
        self._before_change = 0  # batches of this iteration before `_start` and `_iteration`, if its order changed

    def _choose_config(self, given: Arguments, memory: int | None) -> LoaderConfig:
        decoders = arguments.choose_decoders(self.fields, given.decode, self._datasets)
        if given.batch_size is None and any(decoder.by_samples for decoder in decoders.values()):
            remedy = "give a batch_size, since the size changes between two batches"
            raise UsageError("Decode(size=) by samples with batch_size=None", remedy)
        arguments.check_devices(decoders, given, self._tensors)
        rules = arguments.choose_rules(self.fields, given, decoders)
        if "nested" in rules.values() and not self._tensors:
            raise UsageError("collate='nested' without torch", "use StreamingDataset, or choose 'pad' or 'list'")
        arguments.check_channels(given, self.fields, self._channels)
        if (given.device is not None or given.cast is not None or self._channels) and not self._tensors:
            problem = "device=, cast= or normalize= by channel without torch"
            raise UsageError(problem, "use StreamingDataset or Mixture")
        # how values of batches are computed, on the device if there is one, by column: x * scale + shift
        self._affine: dict[str, Any] = {
            name: ((1 / std).astype(np.float32), (-mean / std).astype(np.float32))
            for name, (mean, std) in self._channels.items()
        }
        if given.device is not None and given.transform is None and not callable(given.collate):
            decoders, affine = arguments.normalize_later(decoders, rules)
            self._affine |= affine
        for dataset in self._datasets:
            arguments.check_budget(given, dataset, rules)
        return LoaderConfig(
            decoders=decoders,
            packs=self._choose_packs(self.fields),
            transform=given.transform,
            rules=rules,
            collate=given.collate if callable(given.collate) else None,
            workers=given.num_workers,
            spawns=given.num_workers != "auto",
            memory=memory,
            on_error=given.on_error,
            stall_seconds=given.stall_seconds,
            ahead=given.ahead if given.device is not None or self._affine else 0,
        )

    def _choose_packs(self, fields: Mapping[str, Field]) -> dict[str, Pack]:
        given = self._options
        options: dict[str, Any] = {"batch_size": given.batch_size, "transformed": given.transform is not None}
        return arguments.choose_packs(fields, given.pack, **options)

    def _choose_format(self, given: Arguments, *, mixed: bool) -> BatchFormat:
        config, rules = self._config, self._config.rules.items()
        transformed = config.transform is not None or config.collate is not None
        return BatchFormat(
            samples=given.batch_size is None,
            with_index=given.with_index,
            with_valid=config.tolerant or given.remainder == "pad",
            firsts=first_samples(self._datasets, selected=False) if mixed else (),
            indexes=tuple(None if data.arrays is None else data.arrays.indexes for data in self._datasets),
            channels_first=arguments.choose_layouts(config.decoders, transformed=transformed),
            lists=frozenset(name for name, rule in rules if rule == "list"),
            nested=frozenset(name for name, rule in rules if rule == "nested"),
            convert=self._convert,
            split=self._split,
        )

    def _open(self, sources: Sequence[Source], fields: Sequence[str] | None) -> tuple[Dataset, ...]:
        clips, chosen = self._options.clips, fields is not None
        opened = (self._open_dataset(arguments.without_channels(each, self._channels), fields) for each in sources)
        datasets = tuple(arguments.choose_clips(clips, dataset, chosen=chosen) for dataset in opened)
        choice = self._options.bucket_by
        packs = self._choose_packs(datasets[0].fields)
        if any(pack.fit is not None for pack in packs.values()):
            if clips is not None:
                raise UsageError("clips= with pack= of rows, Pack(fit=)", "leave one of them out")
            from streamloader.loader.packing import pack_rows

            return pack_rows(datasets, packs, self._options)
        return (
            datasets
            if choice is None
            else tuple(replace(dataset, lengths=arguments.choose_lengths(choice, dataset)) for dataset in datasets)
        )

    def _weighed(self, datasets: Sequence[Dataset]) -> dict[str, Any]:  # noqa: ARG002 - of a mixture
        """Return the values of the state that depend on the lengths of samples."""
        return {}

    def _identities(self, datasets: Sequence[Dataset]) -> tuple[SourceIdentity, ...]:
        identities = []
        for source, dataset in zip(map(arguments.leftmost, self._sources), datasets, strict=True):
            manifest, version = dataset.manifest, 0 if dataset.arrays else dataset.manifest.generation
            samples = dataset.selection_digest, dataset.num_samples
            params = arguments.choose_order(dataset, self._order)
            excluded, weights = dataset.excluded, dataset.weights_digest
            packed = None if dataset.packed is None else dataset.packed.digest
            chosen = manifest.digest, source.split, *samples, params, version, excluded, weights, packed
            identities.append(SourceIdentity(*chosen, dataset.bucket_digest, dataset.joined_digests))
        return tuple(identities)

    def __repr__(self) -> str:
        urls = ", ".join(store.url for dataset in self._datasets for store in dataset.stores)
        fields = ", ".join(f"{name}: {field}" for name, field in self.fields.items())
        count = sum(data.num_samples for data in self._datasets)
        samples, packs = f"{count} samples", [data.packed for data in self._datasets if data.packed is not None]
        if packs:
            left_out = sum(packed.dropped for packed in packs)
            samples = f"{count} rows of {packs[0].length}" + (f", without {left_out} documents" if left_out else "")
        return f"{type(self).__name__}({urls}: {samples}, {fields})"

    @property
    def epoch(self) -> int:
        """The epoch of the current pass until its last batch is delivered, then that of the next pass.

        With `steps_per_epoch` it counts iterations; the state has the epoch of the data.
        """
        steps = self._options.steps_per_epoch
        return self._epochs.next_epoch() if steps is None else self._at.total // steps

    @property
    def fields(self) -> dict[str, Field]:
        """The fields that are fetched, by name."""
        return self._datasets[0].fields

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """Class names by field: `classes["label"][3]` is the name of label 3. Empty if none were recorded.

        A mixture has the fields whose class names are the same in all sources.
        """
        first, *others = (dataset.classes for dataset in self._datasets)
        return {name: names for name, names in first.items() if all(other.get(name) == names for other in others)}

    def __len__(self) -> int:
        """Return the number of batches of this rank in the next epoch (of samples with `batch_size=None`)."""
        return self._options.steps_per_epoch or sum(self._lengths(1))

    def _lengths(self, workers: int) -> list[int]:
        """Return the number of batches of each of the workers in the next epoch."""
        world = self._rank
        start = replace(self._start_of(self.epoch, workers), position=0, extra=0, workers=workers)
        shares = [self._share(start, world.consumer(number, workers)) for number in range(workers)]
        return [arguments.skip(self._skips, start, share).count_steps(0) for share in shares]

    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Raise `UsageError`: only iteration yields samples."""
        remedy = "read single samples with sl.open(url, split=...)[i], and batches with `for batch in dataset`"
        raise UsageError(f"a {type(self).__name__} has no random access: [{index!r:.40}]", remedy)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin a pass at the start of the epoch, or at the position of a loaded state. Ends the previous pass.

        With `steps_per_epoch`, resume where the last iteration stopped.
        """
        self._check_caller()
        check_guarded()
        steps, self._before_change = self._options.steps_per_epoch, 0
        if steps is None:
            at_border = self._own and not self._start.position
            try:
                return self._resume_at_border() if at_border else Pass(self, self._begin_pass())
            except StreamloaderError as error:
                if self._in_worker:  # a persistent worker would end, and torch would not say why
                    return raising(error)
                raise
        self._check_no_workers(self._worker[1], self._in_worker)
        self._iteration = self._at
        paused, left = self._paused, steps - self._at.total % steps
        if paused is None or paused is not self._running():
            return Pass(self, self._begin_pass(), left)
        self._paused = None
        return paused.continued(self, left)

    def _resume_at_border(self) -> Iterator[dict[str, Any]]:
        """Begin the epoch of a worker's state, unless other workers are still in the one before, which is over here.

        It is asked for a batch once every worker has loaded its state.
        """
        if self._epochs.first_loaded(self._worker[1]) == self._start.epoch:
            yield from Pass(self, self._begin_pass())
        self._own = False

    def _begin_pass(self) -> Cursor:
        """End the current pass, and return where the next one begins."""
        self._end_pass()
        with self._epochs.choosing(self._worker[1]):
            return self._begin_epoch()

    def _begin_epoch(self) -> Cursor:
        """Return where the pass of this worker begins, and let the other workers begin there too."""
        rank, (number, count) = self._rank, self._worker
        if (steps := self._options.steps_per_epoch) is not None:
            self._start = self._at.state
        start = self._begin(count)
        if count > 1 and start.bucket is not None:
            remedy = "give num_workers= to the dataset, not to DataLoader"
            option = "bucket_by=" if self._options.bucket_by is not None else "Pack(balance='attention')"
            raise UsageError(f"{option} with {count} DataLoader workers, which divide its batches", remedy)
        lanes = self._start.lanes
        start, repeated = start.with_workers(count, rank.size, self._options.batch_size or 1)
        # DataLoader asks worker 0 first. If `extra` workers have delivered already in this round, worker 0 takes the
        # part of the next worker in turn, and the parts of the `extra` workers are a round ahead.
        part = (number + start.extra) % count
        share = self._share(start, rank.consumer(part, count))
        arguments.check_share(share)
        start, back = arguments.aligned(start, share)
        share = arguments.skip(self._skips, start, share)
        again = self._epochs.begin(number, count, start.epoch)
        # the batches of the pass before, if it is incomplete; one may be a look at the data
        left = self._at.steps or int(self._in_worker)
        if (rank.rank, number) == (0, 0):  # the others would say the same
            texts = (
                REPEATED_ROUND.format(repeated) if repeated else "",
                REPEATED_SAMPLES.format(back) if back else "",
                SEVERAL_WORKERS.format(count) if count > 1 else "",
                share.describe_rereads(shuffle=bool(start.lanes)),
                describe_lanes(rank.size, lanes, start.lanes) if start.lanes != lanes else "",
                self._describe_joins(start),
                REPEATED_EPOCH.format(start.epoch) if again and left and again + left > 2 and not steps else "",
            )
            for text in filter(None, texts):
                warnings.warn(text, stacklevel=4)
        loaded = self._at.loaded and not self._at.steps
        self._start = start
        self._at = Cursor(start, self._at.total, loaded, share, int(part < start.extra))
        return self._at

    def _describe_joins(self, start: RunState) -> str:
        """Return a warning if blocks read far more than their samples of a joined dataset, else ""."""
        pairs = [pair for pair in zip(self._datasets, start.sources, strict=True) if pair[0].joined]
        if not pairs:
            return ""
        from streamloader.loader.join import describe_reads

        return next(filter(None, (describe_reads(dataset, source.params.block) for dataset, source in pairs)), "")

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass deliver this epoch from its beginning. Does nothing if it is the current epoch.

        Raises `StateError` if a state of another epoch was just loaded: frameworks that number epochs from 0 would lose
        its position. With `steps_per_epoch`, `UsageError` unless `epoch` is the current number of iterations.
        """
        if not is_whole(epoch, 0) or epoch >= 2**63:
            raise UsageError(f"set_epoch({epoch!r})", "give a whole number of at least 0, below 2**63")
        epoch, current, steps = int(epoch), self.epoch, self._options.steps_per_epoch
        if epoch == current:
            return
        if steps is not None:
            problem = f"set_epoch({epoch}) with steps_per_epoch={steps} before iteration {current}"
            raise UsageError(problem, f"call set_epoch({current}), or leave it out: each iteration resumes the last")
        if self._at.loaded and not self._at.steps:
            problem = f"set_epoch({epoch}) right after a state of epoch {current} was loaded"
            raise StateError(problem, "resume with the loaded epoch, or do not load the state")
        self._set_start(self._start.beginning(epoch))
        if self._running() is None:
            self._at = Cursor(self._start, self._at.total)

    def state_dict(self, batches: int | None = None, *, workers: int = 1) -> dict[str, Any]:
        """Return the position of training, as JSON-serializable values that are the same on every rank.

        By default, the position after the batches delivered. `batches=k`: after k batches of the current pass, for
        frameworks that fetch ahead; with DataLoader workers also give their number, `workers`. Raises `StateError`
        without `batches` if DataLoader workers read, since this process does not know their positions.
        """
        world, workers = self._rank, whole("workers", workers)
        batches = None if batches is None else whole("batches", batches, 0) - self._before_change
        if batches is not None and batches < 0:
            given = batches + self._before_change
            problem = f"state_dict(batches={given}) is before set_weights(), after {self._before_change} batches"
            raise StateError(problem, "save the state of a later batch: the epoch begins again with these weights")
        if self._options.steps_per_epoch is not None:
            self._check_no_workers(workers, self._read_by_workers())
            now = self._at if batches is None else self._after(batches)
            return {**self._settled(now.state).to_dict(), "steps": now.total}
        if batches is not None:
            # workers begin passes by themselves: this process knows the start of their first pass only
            epoch = self._epochs.begun if self._read_by_workers() else self._start.epoch
            start = self._start_of(epoch, workers)
            share = self._share(start, World(0, world.size * workers))
            start = start.with_workers(workers, world.size, share.batch)[0]
            return start.advance(batches, arguments.skip(self._skips, start, share)).to_dict()
        if self._read_by_workers():
            remedy = "save state_dict(batches=<trained>, workers=<num_workers>), or use torchdata's StatefulDataLoader"
            raise StateError("DataLoader workers read this dataset, and this process does not know how far", remedy)
        return self._settled(self._at.state, self._worker[1]).to_dict()

    def load_state_dict(self, state: dict[str, Any], *, force: bool = False) -> None:
        """Let the next pass resume at the state, at any world size.

        If samples were appended to a dataset since, opens the version that the state names. Raises `StateError` if it
        belongs to another dataset, split, order or seed; `force` accepts a copy of the dataset with another digest.
        """
        sources, datasets, first = list(self._sources), self._datasets, self._first
        if not force:
            sources = choose_versions(sources, datasets, first.saved_sources(state))
        if sources != list(self._sources):
            datasets = self._open(sources, self._fields)
            first = replace(first, sources=self._identities(datasets), **self._weighed(datasets))
        size = self._rank.size * (self._options.batch_size or 1)
        start = first.resumed(state, size, force=force)
        saved = read_value({"decoders": {}, **state}, "decoders", dict)
        if saved != dict(start.decoders):
            warnings.warn(OTHER_DECODER.format(saved or "the CPU's", dict(start.decoders) or "the CPU's"), stacklevel=2)
        for dataset, source in zip(datasets, start.sources, strict=True):
            arguments.check_block(dataset, source.params.block)
        steps = read_value(state, "steps", int) if "steps" in state else 0
        self._end_pass()
        if datasets is not self._datasets:
            self.close()
            self._datasets, self._first, self._cached_engine = datasets, first, None
            self._config = self._choose_config(self._options, self._config.memory)  # it may have other fields
            self._budget = arguments.choose_budget(self._options, self._config.rules)
            self._format = self._choose_format(self._options, mixed=bool(self._format.firsts))
        self._set_start(start)
        self._delivered.clear()
        self._at = self._iteration = Cursor(start, max(0, steps), loaded=True)
        self._before_change = 0

    def _change_order(self, change: Callable[[RunState], RunState]) -> None:
        """Let the run, also a running pass, go on from here with the order that `change` gives its state."""
        if self._read_by_workers() or self._in_worker:
            problem = "set_weights() with DataLoader workers, which have plans of their own"
            raise UsageError(problem, "give num_workers= to the dataset, not to DataLoader")
        if self._paused is not None:
            self._end_pass()
        run = self._running()
        if run is not None and run._loader is not None:
            run.go_on(lambda: self._changed(change, running=True))
        else:
            self._changed(change, running=False)

    def _changed(self, change: Callable[[RunState], RunState], *, running: bool) -> Cursor:
        """Change the order of all states, and return where training is."""
        at, begun = self._at, self._settled(self._at.start)
        new = change(self._settled(at.state))
        if new.anchor == begun.anchor:  # epochs are counted as before
            start, iteration = (
                replace(self._settled(state), phases=new.phases) for state in (self._start, self._iteration.state)
            )
            moved, before = Cursor(iteration, self._iteration.total), self._before_change
            now = at._replace(start=replace(begun, phases=new.phases))
        else:
            start = replace(self._settled(self._start), phases=new.phases, anchor=new.anchor, before=new.before)
            start = new if self._epochs.next_epoch() == new.epoch else start
            now = moved = Cursor(new, at.total)
            steps = at.steps if self._options.steps_per_epoch is None else at.total - self._iteration.total
            before = self._before_change + steps
        if running:
            share = self._share(now.start, self._rank)
            now = now._replace(share=arguments.skip(self._skips, now.start, share))
        else:
            now = Cursor(new, at.total, at.loaded and not at.steps)
        self._start, self._iteration, self._at, self._before_change = start, moved, now, before
        self._publish()
        return now

    def replay(self, epoch: int, steps: Iterable[int], *, rank: int | None = None) -> Iterator[dict[str, Any]]:
        """Deliver some steps of an epoch again, ascending and with the same crops; steps count as in `samples`.

        `rank`: the steps of another rank than this one. Ends the current pass; the position of training does not
        change. Raises `UsageError` for an invalid step, and `WorldError` for an invalid rank.
        """
        epoch = whole("epoch", epoch, 0)
        self._end_pass()
        world = self._rank if rank is None else replace(self._rank, rank=whole("rank", rank, 0))
        start = self._start_of(epoch)
        share = self._share(start, world)
        start = replace(start, position=share.first_start(start.position), extra=0, workers=1, ranks=0, batch=0)
        chosen = arguments.read_steps("steps", {epoch: steps})[epoch]
        return Pass(self, Cursor(start, share=arguments.skip_all_but(chosen, start.position, share)), advances=False)

    def show(
        self,
        batch: Mapping[str, Any] | None = None,
        *,
        step: int = 0,
        epoch: int = 0,
        rank: int | None = None,
        samples: int = 16,
    ) -> Shown:
        """Return a batch as HTML that notebooks display: images, plots, texts and heat maps.

        Without `batch`, it is the one of a step of an epoch, as trained, with the same crops; `rank` as in `replay`. At
        most so many `samples` are shown. The current pass goes on. Raises what `replay` raises.
        """
        from streamloader.loader.showing import show_batch, show_step

        return show_step(self, (epoch, step, rank), samples) if batch is None else show_batch(self, batch, samples)

    def _repr_html_(self) -> str:
        from streamloader.loader.showing import fields_table

        return fields_table(self).html

    def describe(self) -> dict[str, Any]:
        """Return the arguments that decide which samples each step has, and their versions, as JSON values.

        With them, `streamloader view --run` opens steps of this run as they were trained. Storage options and secrets
        are not among them. Functions and arrays of more than 100,000 numbers are left out: "left_out" names them.
        """
        sources = [
            replace(source, version=None if source.used or isinstance(source.url, Join) else data.manifest.generation)
            for source, data in zip(self._sources, self._datasets, strict=True)
        ]
        given = replace(self._options, skip_steps=self._skips or None, fields=self._fields)
        return {**describe(sources, given, **self._mixed()), "world_size": self._rank.size}

    def _mixed(self) -> dict[str, Any]:
        """Return the arguments that only a mixture has."""
        return {}

    def batch_rng(self) -> np.random.Generator:
        """Return the random generator of the batch that was returned last, at its beginning, for example for MixUp.

        It depends on the seed, the epoch, the position in the epoch at which the batch begins, which is `position` of
        the state before it, and the rank, and so is the same after a resume and with any `num_workers=`. It has
        exactly the bits of

            key = np.array([seed, epoch], np.uint64)
            counter = np.array([0, rank, 2, position], np.uint64)
            np.random.Generator(np.random.Philox(key=key, counter=counter))

        Those of crops and transforms start at other counters, see `draws`: they never share a number. Raises
        `StateError` if no batch was returned, or if DataLoader workers read, since this process does not know their
        positions.
        """
        last = self._last("batch_rng()")
        key = np.array([last.start.seed, last.start.epoch], np.uint64)
        counter = np.array([0, last.share.world.rank, 2, last.position], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))

    def last_step(self) -> dict[str, int]:
        """Return "epoch", "step" and "rank" of the batch that was returned last, as `replay` and `samples` take them.

        Raises `StateError` as `batch_rng` does.
        """
        last = self._last("last_step()")
        step = last.share.steps_between(last.share.first_start(last.position), last.position)
        return {"epoch": last.start.epoch, "step": step, "rank": last.share.world.rank}

    def _last(self, call: str) -> Cursor:
        """Return where the batch that was returned last begins. Raises `StateError` if this process does not know."""
        if self._read_by_workers():
            problem = "DataLoader workers read this dataset, and this process does not know which batch is the last"
            raise StateError(problem, "give num_workers= to the dataset, not to DataLoader")
        if not self._delivered:
            raise StateError(f"{call} before the first batch", "call it after a batch was returned")
        (last,) = self._delivered
        return last

    def stats(self) -> Stats:
        """Return the statistics of this process's loader, with a verdict on its bottleneck. Any thread may call it."""
        engine, run, world = self._cached_engine, self._running(), self._resolve_world(self._world)
        urls = ", ".join(store.url for dataset in self._datasets for store in dataset.stores)
        current: dict[str, Any] = {"rank": world.rank, "world_size": world.size, "worker": self._worker[0], "url": urls}
        for last in tuple(self._delivered):
            current |= {"epoch": last.start.epoch, "step": last.step}
        if engine is None or not engine.owner.here:  # one that was made here could take the place of a new pass's
            return Stats(**current)
        return engine.counters.snapshot(**current, **engine.current(0 if run is None else run.ready))

    def close(self) -> None:
        """End the current pass and its threads."""
        self._end_pass()
        self._bad.close()
        if self._cached_engine is not None and self._cached_engine.owner.here:
            self._cached_engine.close()
        if self._transfers is not None:
            self._transfers.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for workers. Resolves the rank, since a spawned worker cannot ask torch.distributed."""
        self._check_caller()  # a spawned worker does not see which loader splits its batches
        here = dict.fromkeys(("_pass", "_paused", "_cached_engine", "_transfers"))
        return self.__dict__ | here | {"_world": self._rank}

    def _log_bad(self, plan: BatchPlan, cursor: Cursor, faults: Mapping[int, Fault]) -> None:
        """Log the bad samples of a step by row. Raises `BadSamplesError` if there are too many."""
        rank, firsts, lines = self._rank.rank, first_samples(self._datasets, selected=False), []
        step = cursor.share.steps_between(0, cursor.position)
        for row, (number, name, error, _) in faults.items():
            at = bisect_right(firsts, number) - 1
            dataset, sample = self._datasets[at], number - firsts[at]
            line = {"epoch": plan.epoch, "step": step, "rank": rank, "position": int(plan.positions[row])}
            stored = {"object": dataset.object_of(name, sample) if name else None}
            lines.append({**line, "source": dataset.store.url, "sample": sample, "field": name or None, **stored})
            lines[-1]["error"] = str(error)
        self._engine().counters.add(bad_samples=len(lines))
        self._bad.write(f"{plan.epoch:06}-{step:08}-{cursor.share.world.rank:05}.jsonl", lines)
        self._bad.check(faults[max(faults)], rank)

    def _engine(self) -> Engine:
        """Return the engine of this process: threads and clients survive neither a fork nor a pickle."""
        engine = self._cached_engine
        return engine if engine is not None and engine.owner.here else self._new_engine(Counters())

    def _new_engine(self, counters: Counters) -> Engine:
        """Return an engine with as many workers as now seem best, the present one if it has no fewer."""
        engine, stats = self._cached_engine, counters.snapshot()
        ranks_here = ranks_on_this_machine() * self._worker[1]
        cores, config = max(1, cpu_count() // ranks_here), self._config
        layouts = [layout for dataset in self._datasets for layout in dataset.layouts.values()]
        stores = [store for dataset in self._datasets for store in dataset.stores]
        slow = stats.transform_seconds >= LEAST_SECONDS
        workers, reason = choose_workers(
            config.workers,
            cores,
            [store.url for store in stores],
            in_worker=self._in_worker,
            private=any(store.location.is_private for store in stores),
            computes=bool(config.decoders) or config.transform is not None or any(of.codec != "none" for of in layouts),
            transform_seconds=quotient(stats.transform_seconds, stats.samples) if slow else 0.0,
        )
        if engine is not None and engine.counters is counters and workers <= engine.executor.workers:
            return engine
        if engine is not None and engine.owner.here:
            engine.close()
        config = replace(config, ranks_here=ranks_here, rank=self._rank.rank, tensors=self._tensors, workers=workers)
        config = replace(config, page_lock=self._page_lock())
        self._cached_engine = engine = Engine(list(map(replace, self._datasets)), config, counters)
        counters.note(cores=workers or cores, workers=workers)
        counters.workers_reason = reason
        return engine

    @property
    def _worker(self) -> tuple[int, int]:
        return self._worker_info() or (0, 1)

    @property
    def _in_worker(self) -> bool:
        return self._worker_info() is not None

    @property
    def _rank(self) -> World:
        """The rank of this process, with those that share its cache if it has one."""
        world = self._resolve_world(self._world)
        shares = self._options.cache is not None and not world.node
        return replace(world, node=ranks_of_node(world)) if shares else world

    def _settled(self, start: RunState, workers: int = 1) -> RunState:
        """Return the same position, with the values that depend on the world size."""
        size = self._rank.size
        return start.settled(size * (self._options.batch_size or 1), workers, size)

    def _share(self, start: RunState, world: World) -> EpochShare:
        """Return a rank's part of the epoch of `start`."""
        units = [dataset.unit(source.params) for dataset, source in zip(self._datasets, start.sources, strict=True)]
        share = start.share(self._options.batch_size or 1, world, units)
        if start.bucket is None:
            return share
        lengths: Any = tuple(dataset.lengths_of for dataset in self._datasets)
        bucket = (*start.bucket, lengths if start.stop else lengths[0])
        begun = {"budget": self._budget, "origin": start.position if self._budget else 0}
        return replace(share, bucket=bucket, **begun)  # type: ignore[type-var] # a dataclass

    def _first_share(self) -> EpochShare:
        """Return this rank's part of epoch 0 of a new run."""
        return self._share(self._settled(self._first), self._rank)

    def _step_numbers(self, epoch: int, step: int, rank: int | None, workers: int) -> NDArray[np.int64]:
        """Return the sample numbers of a step, of one rank or of all."""
        return numbers_among_all(self._datasets)(self._positions(epoch, step, rank, workers))

    def _positions(self, epoch: int, step: int, rank: int | None, workers: int) -> NDArray[np.int64]:
        """Return the numbers of a step among the selected samples of all sources."""
        world, workers = self._rank, whole("workers", workers)
        rank = None if rank is None else whole("rank", rank, 0)
        start = self._start_of(whole("epoch", epoch, 0), workers)
        turn, number = divmod(whole("step", step, 0), workers)
        samples = []
        for each_rank in range(world.size) if rank is None else [rank]:
            share = self._share(start, World(each_rank, world.size).consumer(number, workers))
            samples.append(share.samples(share.after(share.first_start(start.position), turn)))
        return np.concatenate(samples)

    def _set_start(self, start: RunState) -> None:
        """Let the next pass begin at `start`, also in workers."""
        self._start, self._own = start, self._in_worker
        if self._own:
            self._epochs.load(*self._worker, start.epoch)
        else:
            self._epochs.choose(start.epoch)
            self._publish()

    def _publish(self) -> None:
        """Tell persistent workers where the next pass begins."""
        group = self._start.bucket[1] if self._start.bucket else 0
        self._epochs.publish((*self._start.progress, self._start.pin, group, *self._start.order))

    def _begin(self, workers: int) -> RunState:
        """Return where the next pass begins."""
        values = self._epochs.update() if self._in_worker else None
        if values is not None:  # the parent of a persistent worker set a new start
            *progress, pin, group, block, lanes, window = values
            if pin not in (0, self._start.pin):
                problem = "a loaded state or set_weights() has sources, versions or weights that this worker lacks"
                raise StateError(problem, "make a new DataLoader, with new workers")
            now: dict[str, Any] = dict(zip(PROGRESS_NAMES, progress, strict=True))
            if group and self._start.bucket:
                now["bucket"] = (self._start.bucket[0], group)
            self._start = replace(self._start, **now).with_order(block, lanes, window)
        own, self._own = self._own, False
        return self._start_of(self._start.epoch if own else self._epochs.next_epoch(), workers)

    def _start_of(self, epoch: int, workers: int = 1) -> RunState:
        """Return where a pass of this epoch begins: at its start, or at a loaded state of this epoch."""
        start = self._start if epoch == self._start.epoch else self._start.beginning(epoch)
        return self._settled(start, workers)

    def _read_by_workers(self) -> bool:
        return self._epochs.begun_elsewhere and self._running() is None and not self._in_worker

    def _complete(self, epoch: int) -> None:
        self._epochs.complete(self._worker[0], epoch)
        self._start = replace(self._start, skipped=self._at.state.skipped)
        # another epoch was chosen if set_epoch was called during the pass
        after = self._start.next_epoch() if self._start.epoch == epoch else self._start
        self._at = Cursor(after, self._at.total)
        self._pass = None

    def _running(self) -> Pass | None:
        return self._pass() if self._pass is not None else None

    def _end_pass(self) -> None:
        if (run := self._running()) is not None:
            run.end()
        self._pass = self._paused = None

    def _check_no_workers(self, workers: int, elsewhere: bool) -> None:
        if workers > 1 or elsewhere:
            steps = f"steps_per_epoch={self._options.steps_per_epoch}"
            problem = f"{steps} with DataLoader workers, which do not know where the previous workers stopped"
            raise UsageError(problem, "give num_workers= to the dataset, not to DataLoader")

    def _after(self, batches: int) -> Cursor:
        """Return the position after this many batches of the current iteration."""
        state, total = self._iteration.state, self._iteration.total + batches
        while batches:
            state = self._settled(state)
            share = self._share(state, self._rank)
            state = state.with_workers(1, share.world.size, share.batch)[0]
            share = arguments.skip(self._skips, state, share)
            count = min(batches, max(1, share.count_steps(state.position)))
            state, batches = state.advance(count, share), batches - count
        return Cursor(state, total)

    def _start_pipeline(self, begin: Cursor) -> Pipeline:
        engine = self._new_engine(self._engine().counters)  # by now it is known how long the transform takes
        share = engine.widened(begin.share)
        steps = SAMPLES_AT_ONCE if self._format.samples else engine.steps_at_once(share)
        if self._options.cache is not None:
            start, world = begin.start, share.world
            order = start.seed, start.shuffle, start.sources, start.phases, world.size, world.node
            run = sha256(repr(order).encode()).hexdigest()
            for store in {store for dataset in self._datasets for store in dataset.stores}:
                if store.cache is not None:
                    store.cache.begin(run, share.epochs)
        return engine.start(share, begin.position, begin.start.seed, steps)
