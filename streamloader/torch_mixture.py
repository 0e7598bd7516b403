"""`Mixture`: several datasets in given proportions as one torch `IterableDataset`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streamloader.engine.passes import MixPass, Numbers
from streamloader.engine.session import Wish
from streamloader.errors import MixtureError
from streamloader.format.manifest import Field
from streamloader.format.reader import open_manifest
from streamloader.options import Remainder, Shuffle
from streamloader.plan.ledger import check_step
from streamloader.plan.mix_cursor import Batches, MixCursor, Pin, check_shape
from streamloader.plan.mixture import MixShare, Stop
from streamloader.plan.order import EpochOrder
from streamloader.plan.world import World
from streamloader.stats import BatchReport
from streamloader.storage import open_store
from streamloader.torch_choices import (
    DecodeChoice,
    check_arguments,
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
from streamloader.torch_selection import choose_selection, read_where
from streamloader.torch_session import ProcessSession, Wanted
from streamloader.torch_sources import Source, Weights, Wishes, check_alike, choose_sources
from streamloader.torch_steps import StepChoice, read_steps
from streamloader.torch_stream import Manner, Streamed
from streamloader.torch_tensors import Shape, numbers
from streamloader.torch_world import resolve_world

if TYPE_CHECKING:
    from streamloader.torch_world import WorldChoice


class Mixture(Streamed):
    """Batches of several datasets with the same fields, in exact proportions: `Mixture({a: 0.7, b: 0.3}, ...)`.

    A key is a URL, a `Source`, or another mixture, whose sources then share its weight in their own proportions.
    Sources give turns of `unit` samples, spread so evenly that in any window each is off by less than two turns; `unit`
    is 8, or what of it divides the global batch. `batches="homogeneous"`: each global batch is of one source.
    `schedule`: other weights from a step on, `{10_000: {a: 0.5, b: 0.5}}`; a source that is left out has the weight 0.

    Each source has epochs of its own, each in an order of its own. An epoch of the mixture is over when the first of
    them is through with one (`stop="first"`), or the last (`stop="last"`); the others go on where they are. The last
    step is filled up with what comes next, False in `valid` (`remainder="pad"`), or left out ("drop").

    `with_index=True` adds `source`, the place of the source among `sources`, and `index`, the sample's number in it.
    Everything else is as with `StreamingDataset`: the same global batches at every world size, exact resume. A state
    may be taken up with more sources or other weights: from there on.
    """

    def __init__(
        self,
        sources: Weights,
        *,
        batch_size: int | None,
        schedule: Mapping[int, Weights] | None = None,
        stop: Stop = "first",
        batches: Batches = "mixed",
        unit: int | None = None,
        fields: Sequence[str] | None = None,
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
    ) -> None:
        check_arguments(batch_size, remainder, transform, transform_workers, shuffle, on_batch=on_batch)
        if remainder == "uneven":
            raise MixtureError('remainder="uneven" of a mixture', 'choose "pad" or "drop": a mixture has no end')
        check_shape(stop, batches, unit)
        self._wishes: Wishes = choose_sources(sources, schedule)
        conditions = [read_where(one.where) for one in self.sources]
        skips = read_steps("skip_steps", skip_steps)
        rank = None if world is None else resolve_world(world)
        wanted = self._wanted = [_open(*one) for one in zip(self.sources, conditions, strict=True)]
        manifests = [one.manifest for one in wanted]
        each = [choose_fields(manifest, fields, with_index, remainder == "pad") for manifest in manifests]
        self._names = check_alike(self.sources, manifests, each, with_index)
        decoders = choose_decoders(self.fields, decode)
        layouts = choose_layouts(decoders, transform is not None)
        packs = choose_packs(self.fields, pack, batch_size=batch_size, transformed=transform is not None)
        wish = Wish(decoders, packs, transform, transform_workers, choose_memory(memory))
        pins = tuple(_pin(source, one, shuffle) for source, one in zip(self.sources, wanted, strict=True))
        EpochOrder(1, pins[0].params, seed, 0)  # refuses a seed that does not fit
        self._numbers = _numbers(wanted, pins)
        start = MixCursor(
            pins=pins,
            shuffle=shuffle is not False,
            stop=stop,
            batches=batches,
            wishes=self._wishes.whole,
            unit=unit,
            given=chosen_names(shuffle),
            remainder=remainder,
            seed=seed,
        )
        shape = Shape(batch_size is None, with_index, remainder == "pad", self._numbers.all_from, layouts)
        manner = Manner(batch_size, shape, skips, on_batch, steps_per_epoch)
        super().__init__(start, manner, ProcessSession(wanted, self._names, wish), rank)

    _first: MixCursor

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources, those of nested mixtures too; `source` counts them."""
        return self._wishes.sources

    @property
    def fields(self) -> dict[str, Field]:
        """The fields that are fetched, by name."""
        manifest = self._wanted[0].manifest
        return {name: manifest.fields[name].field for name in self._names}

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """Class names by field, of the fields for which all sources have the same."""
        first, *others = (one.manifest.classes for one in self._wanted)
        return {name: names for name, names in first.items() if all(one.get(name) == names for one in others)}

    def samples(self, epoch: int, step: int, rank: int | None = None, *, workers: int = 1) -> dict[str, torch.Tensor]:
        """Return `source` and `index` of the samples that a step of an epoch delivers; reads nothing.

        As `StreamingDataset.samples` does. Raises `UsageError` for a step that is not there.
        """
        world = resolve_world(self._world)
        start = self._from(epoch, world, workers)
        turn, number = divmod(step, max(1, workers))
        worlds = (World(one, world.size) for one in (range(world.size) if rank is None else [rank]))
        found = []
        for one in worlds:
            share = self._share(start, one.consumer(number, workers))
            position = start.position % share.global_batch + turn * share.global_batch
            check_step(share, position)
            found.append(share.samples(position))
        return numbers(self._numbers.of(np.concatenate(found)), self._numbers.all_from)

    def _settled(self, start: MixCursor, world: World, workers: int) -> MixCursor:
        return start.settled(world.size * (self._manner.batch_size or 1), workers, world.size)

    def _share(self, start: MixCursor, world: World) -> MixShare:
        return MixShare(start.mix(), start.epoch, self._manner.batch_size or 1, world, start.remainder)

    def _course(self, begin: Position, steps_at_once: int) -> MixPass:
        opened = self._session.here().opened
        units = [one.unit(pin.params) for one, pin in zip(opened, begin.start.pins, strict=True)]
        share = replace(self._share(begin.start, begin.share.world), mix=begin.start.mix(units))
        return MixPass(share, begin.position(0), steps_at_once, begin.start.seed, self._numbers, begin.gaps)

    def _read(self, state: dict[str, Any], *, force: bool) -> MixCursor:
        size = resolve_world(self._world).size
        found = self._first.taken_up(state, size * (self._manner.batch_size or 1), force=force)
        for wanted, pin in zip(self._session.wanted, found.pins, strict=True):
            check_block(wanted.manifest, pin.params.block, wanted.selection)
        return found


def _open(source: Source, condition: Any) -> Wanted:
    manifest, store = open_manifest(open_store(source.url, source.storage_options), source.split)
    return Wanted(store, manifest, choose_selection(condition, manifest, store))


def _pin(source: Source, wanted: Wanted, shuffle: bool | Shuffle) -> Pin:
    selection = wanted.selection
    count = wanted.manifest.num_samples if selection is None else len(selection)
    if not count:
        raise MixtureError(f"the source {source.url} has no samples", "leave it out")
    digest = None if selection is None else selection.digest
    params = choose_order(wanted.manifest, shuffle, selection)
    return Pin(wanted.manifest.digest, source.split, digest, count, params)


def _numbers(wanted: Sequence[Wanted], pins: Sequence[Pin]) -> Numbers:
    chosen = accumulate((pin.num_samples for pin in pins[:-1]), initial=0)
    every = accumulate((one.manifest.num_samples for one in wanted[:-1]), initial=0)
    return Numbers(tuple(one.selection for one in wanted), tuple(chosen), tuple(every))
