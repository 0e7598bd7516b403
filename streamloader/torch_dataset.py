"""`StreamingDataset`: a sharded, shuffled dataset on object storage as a torch `IterableDataset`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from streamloader.engine.passes import PassPlan
from streamloader.engine.session import Wish
from streamloader.format.manifest import Field
from streamloader.format.reader import open_manifest
from streamloader.options import Remainder, Shuffle
from streamloader.plan.cursor import Cursor
from streamloader.plan.order import EpochOrder
from streamloader.plan.world import Share, World
from streamloader.stats import BatchReport
from streamloader.storage import open_store
from streamloader.torch_choices import (
    DecodeChoice,
    check_arguments,
    check_batch,
    check_block,
    choose_decoders,
    choose_fields,
    choose_layouts,
    choose_memory,
    choose_order,
    chosen_names,
)
from streamloader.torch_packing import PackChoice, choose_packs
from streamloader.torch_pass import Position
from streamloader.torch_selection import WhereChoice, choose_selection, read_where
from streamloader.torch_session import ProcessSession, Wanted
from streamloader.torch_steps import StepChoice, read_steps, samples_of
from streamloader.torch_stream import Manner, Streamed
from streamloader.torch_tensors import Shape
from streamloader.torch_world import resolve_world

if TYPE_CHECKING:
    from streamloader.torch_world import WorldChoice


class StreamingDataset(Streamed):
    """Batches of a streamloader dataset, in an order that depends on the seed and epoch alone.

    Iterate it, or give it to `DataLoader(ds, batch_size=None)`. It yields dicts: a tensor for each fixed-shape
    field, lists for bytes and text, `name` and `name_offsets` for ragged fields, `valid` (bool, False for rows
    that only fill up the last batch) with `remainder="pad"`, and `index` (int64) with `with_index`.

    `batch_size`: samples of each rank's batch; None yields samples, for `DataLoader(ds, batch_size=64)`.
    `fields`: names to fetch, default all. `split`: of a dataset that has splits. `where`: the samples that take part: a
    condition on fields of one number (`"label == 'cat' and width >= 256"`), a slice, a mask, or sample numbers.
    `shuffle`: True, False, or `Shuffle(window=, lanes=, block=)`. `seed`: below 2^64. `remainder`: what the last,
    incomplete step does: "pad", "drop" or "uneven". `decode`: how encoded images become tensors: True, a backend's
    name, a `Decode`, or one of these for each field. `pack`: ragged fields whose documents
    come as rows of one length, `{"tokens": 2049}` or `{"tokens": Pack(2049, pad=)}`. `transform(sample[, rng])`: called
    with each sample, a dict of numpy arrays, bytes and str; `rng` is keyed by seed, epoch and position.
    `transform_workers`: processes that run it. `skip_steps`: what to leave out, by epoch: `{0: range(100, 120)}`.
    `steps_per_epoch`: each `for` yields so many batches, and goes on where the last one stopped.
    `world`: (rank, size), a process group, or a `DeviceMesh` with the names of its data-parallel dimensions,
    `(mesh, "dp")`; default torch.distributed's, else the launcher's environment.
    `memory`: bytes this rank's loader may use, beside Python and torch, also as "2GiB"; default what the window needs.
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
        steps_per_epoch: int | None = None,
        with_index: bool = False,
        world: WorldChoice = None,
        memory: int | str | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_arguments(batch_size, remainder, transform, transform_workers, shuffle, on_batch=on_batch)
        condition = read_where(where)  # before anything is opened
        limit = choose_memory(memory)
        skips = read_steps("skip_steps", skip_steps)
        rank = None if world is None else resolve_world(world)
        root = open_store(url, storage_options)
        self._manifest, store = open_manifest(root, split)
        self._names = choose_fields(self._manifest, fields, with_index, remainder == "pad")
        decoders = choose_decoders(self.fields, decode)
        packs = choose_packs(self.fields, pack, batch_size=batch_size, transformed=transform is not None)
        self._selection = choose_selection(condition, self._manifest, store)
        check_batch(batch_size or 1, self.num_samples, root.url)
        start = Cursor(
            digest=self._manifest.digest,
            params=choose_order(self._manifest, shuffle, self._selection),
            given=chosen_names(shuffle),
            fresh=True,
            split=split,
            shuffle=shuffle is not False,
            remainder=remainder,
            seed=seed,
            selection=None if self._selection is None else self._selection.digest,
        )
        self._order(start)  # refuses a seed that does not fit
        wish = Wish(decoders, packs, transform, transform_workers, limit)
        session = ProcessSession([Wanted(store, self._manifest, self._selection)], self._names, wish)
        layouts = choose_layouts(decoders, transform is not None)
        shape = Shape(batch_size is None, with_index, remainder == "pad", channels_first=layouts)
        super().__init__(start, Manner(batch_size, shape, skips, on_batch, steps_per_epoch), session, rank)

    _first: Cursor

    @property
    def fields(self) -> dict[str, Field]:
        """The fields that are fetched, by name."""
        return {name: self._manifest.fields[name].field for name in self._names}

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """Class names by field: `classes["label"][3]` is the name of label 3. Empty where none were recorded."""
        return self._manifest.classes

    @property
    def num_samples(self) -> int:
        """The samples of the dataset that take part, over all ranks."""
        return self._manifest.num_samples if self._selection is None else len(self._selection)

    def samples(self, epoch: int, step: int, rank: int | None = None, *, workers: int = 1) -> torch.Tensor:
        """Return the numbers of the samples that a step of an epoch delivers, as `index` has them; reads nothing.

        int64 (rows,): of one `rank`, or of all, one after the other. Steps count from 0 in each epoch; with DataLoader
        `workers` say how many: the composition of batches depends on it. In an epoch that a loaded state begins in the
        middle, steps lie as they were delivered from there on. Raises `UsageError` for a step that is not there.
        """
        world = resolve_world(self._world)
        start = self._from(epoch, world, workers)
        turn, number = divmod(step, max(1, workers))
        worlds = (World(one, world.size) for one in (range(world.size) if rank is None else [rank]))
        shares = [self._share(start, one.consumer(number, workers)) for one in worlds]
        found = samples_of(self._order(start), shares, start.position, turn)
        return torch.from_numpy(found if self._selection is None else self._selection.samples[found])

    def _settled(self, start: Cursor, world: World, workers: int) -> Cursor:  # noqa: ARG002 - a mixture needs them
        return start.settled(self.num_samples, world.size)

    def _share(self, start: Cursor, world: World) -> Share:
        lanes = start.params.lanes if start.shuffle else 1
        return Share(self.num_samples, lanes, self._manner.batch_size or 1, world, start.remainder)

    def _course(self, begin: Position, steps_at_once: int) -> PassPlan:
        start = begin.start
        unit = self._session.here().opened[0].unit(start.params)
        share = self._share(start, begin.share.world)
        place = begin.position(0)
        return PassPlan(self._order(start), share, place, unit, steps_at_once, self._selection, begin.gaps)

    def _read(self, state: dict[str, Any], *, force: bool) -> Cursor:
        cursor = Cursor.from_dict(state)
        cursor.check(self._first, self.num_samples, force=force)
        check_block(self._manifest, cursor.params.block, self._selection)
        return replace(cursor, digest=self._manifest.digest)

    def _order(self, cursor: Cursor) -> EpochOrder:
        return EpochOrder(self.num_samples, cursor.params, cursor.seed, cursor.epoch, cursor.shuffle)
