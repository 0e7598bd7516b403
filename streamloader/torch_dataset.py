"""`StreamingDataset`: a sharded, shuffled dataset on object storage as a torch `IterableDataset`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from streamloader.engine.session import Wish
from streamloader.errors import StateError
from streamloader.format.manifest import Field
from streamloader.format.reader import open_manifest
from streamloader.options import Remainder, Shuffle
from streamloader.plan.cursor import Cursor
from streamloader.plan.order import EpochOrder
from streamloader.plan.world import Share, World
from streamloader.stats import BatchReport, Stats
from streamloader.storage import open_store
from streamloader.torch_choices import (
    DecodeChoice,
    check_arguments,
    check_batch,
    check_epoch,
    check_share,
    choose_decoders,
    choose_fields,
    choose_order,
)
from streamloader.torch_epochs import Place, SharedEpochs
from streamloader.torch_packing import PackChoice, choose_packs
from streamloader.torch_pass import Follow, Pass, Position, Shape, warn_of_costs
from streamloader.torch_selection import WhereChoice, choose_selection, read_where
from streamloader.torch_session import ProcessSession
from streamloader.torch_steps import StepChoice, choose_gaps, only, read_steps, samples_of
from streamloader.torch_world import in_worker, resolve_world, worker

if TYPE_CHECKING:
    from streamloader.torch_world import WorldChoice


class StreamingDataset(IterableDataset[dict[str, Any]]):
    """Batches of a streamloader dataset, in an order that depends on the seed and epoch alone.

    Iterate it, or give it to `DataLoader(ds, batch_size=None)`. It yields dicts: a tensor for each fixed-shape
    field, lists for bytes and text, `name` and `name_offsets` for ragged fields, `valid` (bool, False for rows
    that only fill up the last batch) with `remainder="pad"`, and `index` (int64) with `with_index`.

    `batch_size`: samples of each rank's batch; None yields samples, for `DataLoader(ds, batch_size=64)`.
    `fields`: names to fetch, default all. `split`: of a dataset that has splits. `where`: the samples that take part: a
    condition on fields of one number (`"label in (1, 2) and width >= 256"`), a slice, a mask, or sample numbers.
    `shuffle`: True, False, or `Shuffle(window=, lanes=, block=)`. `seed`: below 2^64. `remainder`: what the last,
    incomplete step does: "pad", "drop" or "uneven". `decode`: how encoded images become uint8 tensors (height, width,
    channels): True, a backend's name, a `Decode`, or one of these for each field. `pack`: ragged fields whose documents
    come as rows of one length, `{"tokens": 2049}` or `{"tokens": Pack(2049, pad=)}`. `transform(sample[, rng])`: called
    with each sample, a dict of numpy arrays, bytes and str; `rng` is keyed by seed, epoch and position.
    `transform_workers`: processes that run it. `skip_steps`: what to leave out, by epoch: `{0: range(100, 120)}`.
    `world`: (rank, size), a process group, or a `DeviceMesh` with the names of its data-parallel dimensions,
    `(mesh, "dp")`; default torch.distributed's, else the launcher's environment.
    `memory`: bytes this rank's loader may use, beside Python and torch; default what the window needs.
    `on_batch(report)`: called with a `BatchReport` for each batch, say to log how long training waited for it.
    `storage_options`: for the store, as fsspec takes them.

    A complete pass advances the epoch. Raises a `StreamloaderError`: here for what is known to be wrong, at the
    batch where it belongs for what is found on the way.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        batch_size: int | None,
        fields: Sequence[str] | None = None,
        split: str | None = None,
        where: WhereChoice = None,
        shuffle: bool | Shuffle = True,
        seed: int = 0,
        remainder: Remainder = "pad",
        decode: DecodeChoice = None,
        pack: PackChoice = None,
        transform: Callable[..., Any] | None = None,
        transform_workers: int = 0,
        skip_steps: StepChoice = None,
        with_index: bool = False,
        world: WorldChoice = None,
        memory: int | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_arguments(batch_size, remainder, transform, transform_workers, memory, on_batch=on_batch)
        condition = read_where(where)  # before anything is opened
        self._skips = read_steps("skip_steps", skip_steps)
        self._on_batch = on_batch
        self._batch_size = batch_size
        self._with_index = with_index
        self._world = None if world is None else resolve_world(world)
        root = open_store(url, storage_options)
        self._manifest, store = open_manifest(root, split)
        self._names = choose_fields(self._manifest, fields, with_index, remainder == "pad")
        decoders = choose_decoders(self.fields, decode)
        packs = choose_packs(self.fields, pack, batch_size=batch_size, transformed=transform is not None)
        self._selection = choose_selection(condition, self._manifest, store)
        wish = Wish(decoders, packs, transform, transform_workers, memory, selection=self._selection)
        self._session = ProcessSession(store, self._manifest, self._names, wish)
        check_batch(batch_size or 1, self.num_samples, root.url)
        self._start = Cursor(
            digest=self._manifest.digest,
            params=choose_order(self._manifest, shuffle, self.num_samples),
            split=split,
            shuffle=shuffle is not False,
            remainder=remainder,
            seed=seed,
            selection=None if self._selection is None else self._selection.digest,
        )
        self._order(self._start)  # refuses a seed that does not fit
        self._now = self._start
        self._loaded = False
        self._epochs = SharedEpochs()
        self._pass: weakref.ref[Pass] | None = None

    @property
    def fields(self) -> dict[str, Field]:
        """The fields that are fetched, by name."""
        return {name: self._manifest.fields[name].field for name in self._names}

    @property
    def num_samples(self) -> int:
        """The samples of the dataset that take part, over all ranks."""
        return self._manifest.num_samples if self._selection is None else len(self._selection)

    @property
    def epoch(self) -> int:
        """The epoch that the next pass delivers; during one its own, until its last batch was handed out."""
        return self._epochs.next_epoch()

    def __len__(self) -> int:
        """This rank's batches in the whole of the next epoch (samples with `batch_size=None`), read without workers."""
        share, whole = self._share(resolve_world(self._world)), replace(self._from(self.epoch), position=0, workers=1)
        return choose_gaps(self._skips, whole, share).steps(share, whole.epoch, 0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin a pass: at the start of the epoch, or where a loaded state stands. Ends the pass before it."""
        self._end_pass()
        start = self._begin()
        rank, (number, count) = resolve_world(self._world), worker()
        start, repeated = start.with_workers(count, self._share(rank.consumer(number, count)).global_batch)
        begin = Position.of_worker(start, rank, number, self._share)
        check_share(begin.share)
        begin = replace(begin, gaps=choose_gaps(self._skips, start, begin.share))
        warn_of_costs(begin.share, count, repeated, fresh=start.position == 0)
        self._epochs.begin(number, count, start.epoch)
        self._start = self._now = start
        return self._run(begin, Follow(self._deliver, self._complete, self._on_batch))

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass deliver this epoch, from its beginning unless it is the present one already.

        Raises `StateError` where a state was just loaded and says another epoch: frameworks that number their
        epochs anew would lose the place.
        """
        check_epoch(epoch)
        present = self.epoch
        if self._loaded and epoch != present:
            raise StateError(
                f"set_epoch({epoch}) right after a state of epoch {present} was loaded",
                "go on with the loaded epoch, or do not load the state",
            )
        if epoch != present:
            self._choose(self._start.beginning(epoch))
            if self._running() is None:
                self._now = self._start

    def state_dict(self, batches: int | None = None, *, workers: int = 1) -> dict[str, Any]:
        """Return where training stands, as JSON-able values that are the same on every rank.

        Without arguments: after the batches handed out. `batches=k`: after k batches of the present pass were
        trained, for frameworks that fetch ahead; with DataLoader workers also say how many `workers`.
        Raises `StateError` in a parent whose DataLoader workers did the reading: it cannot know what they did.
        """
        if batches is not None:
            share = self._share(World(0, resolve_world(self._world).size * workers))
            # workers pass on without the parent: it knows where their first pass began, not which one they are at
            start = self._from(self._epochs.begun) if self._read_by_workers() else self._start
            start = start.with_workers(workers, share.global_batch)[0]
            return start.advance(batches, share, choose_gaps(self._skips, start, share)).to_dict()
        if self._read_by_workers():
            raise StateError(
                "this copy of the dataset was handed to DataLoader workers, which read since",
                "save state_dict(batches=<trained>, workers=<num_workers>), or use torchdata's StatefulDataLoader",
            )
        return self._now.to_dict()

    def load_state_dict(self, state: dict[str, Any], *, force: bool = False) -> None:
        """Let the next pass go on where the state stands, at any world size.

        Raises `StateError` where it belongs to another dataset, split, order or seed; `force` accepts a copy of
        the dataset with another digest.
        """
        cursor = Cursor.from_dict(state)
        cursor.check(self._start, self.num_samples, force=force)
        self._end_pass()
        self._choose(replace(cursor, digest=self._manifest.digest))
        self._now = self._start
        self._loaded = True

    def samples(self, epoch: int, step: int, rank: int | None = None, *, workers: int = 1) -> torch.Tensor:
        """Return the numbers of the samples that a step of an epoch delivers, as `index` has them; reads nothing.

        int64 (rows,): of one `rank`, or of all, one after the other. Steps count from 0 in each epoch; with DataLoader
        `workers` say how many: the composition of batches depends on it. In an epoch that a loaded state begins in the
        middle, steps lie as they were delivered from there on. Raises `UsageError` for a step that is not there.
        """
        size = resolve_world(self._world).size
        start = self._from(epoch)
        turn, number = divmod(step, max(1, workers))
        worlds = (World(one, size) for one in (range(size) if rank is None else [rank]))
        shares = [self._share(world.consumer(number, workers)) for world in worlds]
        found = samples_of(self._order(start), shares, start.position, turn)
        return torch.from_numpy(found if self._selection is None else self._selection.samples[found])

    def replay(self, epoch: int, steps: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Begin to deliver some steps of an epoch again, ascending, with the crops they had; `samples` counts them.

        A pass under way ends; where training stands does not change. Raises `UsageError` for a step that is not there.
        """
        self._end_pass()
        world = resolve_world(self._world)
        share, start = self._share(world), self._from(epoch)
        start = replace(start, position=start.position % share.global_batch, extra=0, workers=1, round=0)
        gaps = only(read_steps("steps", {epoch: steps})[epoch], epoch, start.position, share)
        return self._run(Position(world, share, start, 0, gaps), None)

    def stats(self) -> Stats:
        """Return what this process's loader did so far, with a verdict on what limits it."""
        return self._session.here().counters.snapshot()

    def close(self) -> None:
        """End the present pass and its threads."""
        self._end_pass()
        self._session.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for workers: the rank is resolved here, since a spawned worker cannot ask torch.distributed."""
        return self.__dict__ | {"_pass": None, "_world": resolve_world(self._world)}

    def _choose(self, start: Cursor) -> None:
        self._start = start
        self._epochs.choose(start.epoch)
        if not in_worker():  # a worker that is given a state, by StatefulDataLoader, has a place of its own
            self._epochs.tell(Place(start.epoch, start.position, start.extra, start.workers, start.round))

    def _begin(self) -> Cursor:
        news = self._epochs.news() if in_worker() else None
        if news is not None:  # a worker that lives on learns what its parent chose meanwhile
            self._start = replace(self._start, **news._asdict())
        return self._from(self._epochs.next_epoch())

    def _from(self, epoch: int) -> Cursor:
        """Where a pass of this epoch begins: where it stands if a state said so."""
        return self._start if epoch == self._start.epoch else self._start.beginning(epoch)

    def _read_by_workers(self) -> bool:
        return self._epochs.read_elsewhere and self._running() is None and not in_worker()

    def _deliver(self, cursor: Cursor) -> None:
        self._loaded = False
        self._now = cursor

    def _complete(self, epoch: int) -> None:
        self._epochs.complete(worker()[0], epoch)
        self._start = replace(self._start, skipped=self._now.skipped)
        self._now = self._start.next_epoch() if self._start.epoch == epoch else self._start  # set_epoch chose meanwhile
        self._pass = None

    def _running(self) -> Pass | None:
        return self._pass() if self._pass is not None else None

    def _end_pass(self) -> None:
        if (run := self._running()) is not None:
            run.end()
        self._pass = None

    def _order(self, cursor: Cursor) -> EpochOrder:
        return EpochOrder(self.num_samples, cursor.params, cursor.seed, cursor.epoch, cursor.shuffle)

    def _share(self, world: World) -> Share:
        lanes = self._start.params.lanes if self._start.shuffle else 1
        return Share(self.num_samples, lanes, self._batch_size or 1, world, self._start.remainder)

    def _run(self, begin: Position, follow: Follow | None) -> Pass:
        shape = Shape(self._batch_size is None, self._with_index, self._start.remainder == "pad")
        run = Pass(self._session.here(), self._order(begin.start), begin, follow, shape)
        self._pass = weakref.ref(run)
        return run
