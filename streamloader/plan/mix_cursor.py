"""Where a run over a mixture stands, as plain values that any world size can go on from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, Literal
from zlib import crc32

from streamloader.errors import BatchError, MixtureError, StateError, UsageError
from streamloader.plan.blend import Blend, Phase
from streamloader.plan.cursor import (
    STATE_FORMAT,
    Standing,
    get,
    order_dict,
    read_format,
    read_order,
    read_place,
    same_order,
)
from streamloader.plan.mixture import Mix, Stop, Stream
from streamloader.plan.order import OrderParams, lanes_for_world

__all__ = ["Batches", "MixCursor", "Pin"]

Batches = Literal["mixed", "homogeneous"]

# Samples of a turn, unless told otherwise: the ranks of one machine take equal parts of each turn, and the shares of a
# batch are exact to about so many samples.
USUAL_UNIT = 8

_NEW_RUN = "open the mixture as it was when the state was saved, or start without the state"


@dataclass(frozen=True)
class Pin:
    """A source of a mixture: its dataset, the samples of it that take part, and their order."""

    digest: str
    split: str | None
    selection: str | None
    num_samples: int
    params: OrderParams

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "digest": self.digest,
            "split": self.split,
            "selection": self.selection,
            "samples": self.num_samples,
            "order": order_dict(self.params),
        }

    def is_one(self, other: Pin, names: Collection[str]) -> bool:
        """Return whether these are the same samples, in an order of the same parameters as far as named."""
        return replace(self, params=other.params) == other and same_order(self.params, other.params, names)

    @classmethod
    def from_dict(cls, values: Any) -> Pin:
        """Return the source that `to_dict` wrote. Raises `StateError` for what cannot be."""
        if not isinstance(values, dict):
            raise StateError(f"the state's source is {values!r:.60}", _NEW_RUN)
        split, selection = (get(values, name, str, type(None)) for name in ("split", "selection"))
        return cls(get(values, "digest", str), split, selection, get(values, "samples", int), read_order(values))


@dataclass(frozen=True, kw_only=True)
class MixCursor(Standing):
    """Where a run over a mixture stands.

    `wishes` are the weights, in whole numbers, from a step on; `unit` the samples of a turn, None for the usual. From
    these `settled` makes the `blend`, once the global batch is known, in positions of the run, which pin the order from
    then on. `anchor`: see `Mix`.
    """

    pins: tuple[Pin, ...]
    shuffle: bool
    stop: Stop
    batches: Batches
    wishes: tuple[tuple[int, tuple[int, ...]], ...]
    unit: int | None = None
    blend: Blend | None = None
    anchor: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for pin in self.pins:
            if self.pins.count(pin) > 1:
                raise MixtureError(f"the mixture has the same samples of {pin.digest} twice", "name each source once")

    def mix(self, units: Sequence[int] | None = None) -> Mix:
        """Return the settled mixture; `units`: samples fetched at once without shuffle, of each source."""
        assert self.blend is not None
        starts = [0, *accumulate(pin.num_samples for pin in self.pins)]
        streams = tuple(
            Stream(pin.num_samples, pin.params, self.seed, self.shuffle, start, unit)
            for pin, start, unit in zip(self.pins, starts, units or [1] * len(self.pins), strict=False)
        )
        return Mix(streams, self.blend, self.stop, self.anchor)

    @property
    def pin(self) -> int:
        """A number that tells this blend from others; 0 where there is none yet."""
        if self.blend is None:
            return 0
        return crc32(repr((self.blend, self.anchor, [order_dict(pin.params) for pin in self.pins])).encode())

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes of each source; none without shuffle."""
        return tuple(pin.params.lanes for pin in self.pins) if self.shuffle else ()

    def settled(self, global_batch: int, workers: int = 1, world_size: int = 1) -> MixCursor:
        """Return the cursor for steps of so many samples on so many ranks, read by so many DataLoader workers.

        A run that begins takes its lanes for these ranks. Raises `BatchError` where such steps cut turns.
        """
        unit = self._unit(global_batch, workers)
        if self.blend is None:
            return replace(self._spread(world_size), blend=self._wished(global_batch, workers))
        present = [phase for phase in self.blend.phases if phase.start <= self._at()][-1]
        if present.unit == unit:
            return self
        later = [replace(phase, unit=unit) for phase in self.blend.phases if phase.start > self._at()]
        return self._changed([replace(present, start=self._at(), unit=unit), *later])

    def _spread(self, world_size: int) -> MixCursor:
        if not self.shuffle or "lanes" in self.given:
            return self
        lanes = [lanes_for_world(pin.num_samples, pin.params, world_size) for pin in self.pins]
        orders = [replace(pin.params, lanes=count) for pin, count in zip(self.pins, lanes, strict=True)]
        return replace(self, pins=_with_orders(self.pins, orders))

    def _unit(self, global_batch: int, workers: int) -> int:
        if self.batches == "homogeneous":
            return global_batch * workers  # a round of the workers: each takes a part of every turn
        unit = self.unit or gcd(global_batch, USUAL_UNIT if self.blend is None else self.blend.phases[-1].unit)
        if global_batch % unit:
            raise BatchError(
                f"a global batch of {global_batch} samples cuts turns of {unit}",
                f"give a batch_size that is with all ranks a multiple of {unit}, or another unit=",
            )
        return unit

    def _wished(self, global_batch: int, workers: int = 1) -> Blend:
        unit = self._unit(global_batch, workers)
        starts = [-(-step * global_batch // unit) * unit for step, _ in self.wishes]
        phases = (Phase.of_all(at, unit, wish[1]) for at, wish in zip(starts, self.wishes, strict=True))
        return Blend(tuple(phases), len(self.pins))

    def _at(self) -> int:
        """The position of the run, over all its epochs."""
        return self.mix().bounds(self.epoch)[0] + self.position

    def _changed(self, phases: Sequence[Phase]) -> MixCursor:
        """From here on these phases: the epoch goes on, counted from here."""
        assert self.blend is not None
        at = self._at()
        before = tuple(phase for phase in self.blend.phases if phase.start < at)
        blend = Blend((*before, *phases), len(self.pins))
        return replace(self, blend=blend, anchor=(self.epoch, at), position=0, extra=0, ranks=0, batch=0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, which `taken_up` reads. The mixture must be settled."""
        assert self.blend is not None
        return {
            "format": STATE_FORMAT,
            "sources": [pin.to_dict() for pin in self.pins],
            "phases": [
                [phase.start, phase.unit, list(phase.weights), list(phase.sources)] for phase in self.blend.phases
            ],
            "anchor": list(self.anchor),
            "wishes": [[step, list(weights)] for step, weights in self.wishes],
            "shuffle": self.shuffle,
            "stop": self.stop,
            "batches": self.batches,
            "remainder": self.remainder,
            "seed": self.seed,
            **self.place(),
        }

    def taken_up(self, state: Any, global_batch: int, *, force: bool = False) -> MixCursor:
        """Return the cursor at which a run with these sources and weights goes on from a state.

        Sources may have been added, and weights changed: from the state's place on the mixture is as it is wanted now.
        Raises `StateError`, with both values, where the state is not of these sources, order or seed; `force` lets
        digests differ: for copies of the datasets with the same samples.
        """
        read_format(state)
        if "sources" not in state:
            raise StateError("the state is of a single dataset", "load it into a StreamingDataset")
        moved = read_place(state)
        found = {name: get(state, name, kind) for name, kind in (("shuffle", bool), ("stop", str), ("batches", str))}
        found |= {name: moved[name] for name in ("seed", "remainder")}
        differing = [name for name in found if found[name] != getattr(self, name)]
        if differing:
            pairs = [f"{name} {found[name]!r} and not {getattr(self, name)!r}" for name in differing]
            raise StateError(f"the state was saved with {', '.join(pairs)} as here", _NEW_RUN)
        pins = [Pin.from_dict(one) for one in get(state, "sources", list)]
        places = self._places(pins, force=force)
        anchor, phases = _numbers(get(state, "anchor", list), 2), _phases(state, places)
        orders = [pin.params for pin in self.pins]
        for place, pin in zip(places, pins, strict=True):
            orders[place] = pin.params
        blend, mine = Blend(phases, len(self.pins)), _with_orders(self.pins, orders)
        old = replace(self, pins=mine, blend=blend, anchor=(anchor[0], anchor[1]), **moved)
        if old.position > old.mix().bounds(old.epoch)[1] - old.mix().bounds(old.epoch)[0]:
            raise StateError(f"the state has position {old.position}, behind the end of its epoch", _NEW_RUN)
        if _wishes(state, places, len(self.pins)) == self.wishes:
            return old
        wanted, at = self._wished(global_batch).phases, old._at()
        now = [phase for phase in wanted if phase.start <= at][-1]
        return old._changed([replace(now, start=at), *(phase for phase in wanted if phase.start > at)])

    def _places(self, pins: Sequence[Pin], *, force: bool) -> list[int]:
        """Return which source of this mixture each source of a state is."""
        mine = [replace(pin, digest="") if force else pin for pin in self.pins]
        places: list[int] = []
        for pin in (replace(pin, digest="") if force else pin for pin in pins):
            same = [i for i, one in enumerate(mine) if i not in places and pin.is_one(one, self.given)]
            if not same:
                raise StateError(
                    f"the state has a source {pin.to_dict()}, which is none of {[one.to_dict() for one in mine]}",
                    "open all sources as they were; one that is no longer wanted gets the weight 0",
                )
            places.append(same[0])
        return places


def _with_orders(pins: Sequence[Pin], orders: Sequence[OrderParams]) -> tuple[Pin, ...]:
    return tuple(replace(pin, params=params) for pin, params in zip(pins, orders, strict=True))


def _phases(state: dict[str, Any], places: Sequence[int]) -> tuple[Phase, ...]:
    found = []
    for one in get(state, "phases", list):
        if not isinstance(one, list) or len(one) != 4 or not isinstance(one[3], list):
            raise StateError(f"the state's phase is {one!r:.60}", _NEW_RUN)
        sources = _numbers(one[3], len(one[3]))
        if sorted(set(sources)) != sorted(sources) or max(sources, default=len(places)) >= len(places):
            raise StateError(f"the state's phase is {one!r:.60} of {len(places)} sources", _NEW_RUN)
        start, unit = _numbers(one[:2], 2)
        found.append(Phase(start, unit, tuple(_numbers(one[2], len(sources))), tuple(places[i] for i in sources)))
    whole = all(phase.unit and any(phase.weights) for phase in found)
    if not found or found[0].start or not whole or not all(_follows(*pair) for pair in pairwise(found)):
        raise StateError(f"the state's phases {state['phases']!r:.120} cannot be", _NEW_RUN)
    return tuple(found)


def _follows(before: Phase, after: Phase) -> bool:
    return after.start > before.start and (after.start - before.start) % before.unit == 0


def _wishes(state: dict[str, Any], places: Sequence[int], count: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """What a state says was wanted, with a weight for each of `count` sources."""
    found = []
    for one in get(state, "wishes", list):
        if not isinstance(one, list) or len(one) != 2:
            raise StateError(f"the state's wish is {one!r:.60}", _NEW_RUN)
        weights = dict(zip(places, _numbers(one[1], len(places)), strict=True))
        found.append((_numbers(one[:1], 1)[0], tuple(weights.get(source, 0) for source in range(count))))
    return tuple(found)


def _numbers(values: Any, count: int) -> list[int]:
    if not isinstance(values, list) or len(values) != count or not all(type(i) is int and i >= 0 for i in values):
        raise StateError(f"the state has {values!r:.60} in place of {count} whole numbers", _NEW_RUN)
    return values


def check_shape(stop: str, batches: str, unit: int | None) -> None:
    """Raise `UsageError` for what no mixture has."""
    if stop not in ("first", "last"):
        raise UsageError(f"stop={stop!r}", 'choose "first" or "last"')
    if batches not in ("mixed", "homogeneous"):
        raise UsageError(f"batches={batches!r}", 'choose "mixed" or "homogeneous"')
    if unit is not None and (isinstance(unit, bool) or not isinstance(unit, int) or unit < 1):
        raise UsageError(f"unit={unit!r}", "give a whole number of samples, at least 1")
    if unit is not None and batches == "homogeneous":
        raise UsageError(f"unit={unit} with homogeneous batches", "leave it out: a turn is a whole batch")
