"""The state of a run over a dataset or a mixture, as plain values that any world size can resume from (rules 9 and 10).

`Gaps` are the steps that a run leaves out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import accumulate, pairwise, repeat
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from zlib import crc32

from streamloader.errors import BatchError, StateError, UsageError
from streamloader.options import REMAINDERS, Remainder, is_whole
from streamloader.order.epoch_order import EpochOrder, OrderParams, lanes_for_world
from streamloader.order.schedule import Part, Share, World

if TYPE_CHECKING:  # most runs have no mixture, and do not wait for its module
    from streamloader.order.mixture import EpochShare, Mix, Phase, SourceOrder, Stop


class Gap(NamedTuple):
    """The global positions [start, stop) of an epoch: whole steps of the run that leaves them out."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Gaps:
    """Gaps of one or more epochs, in their order; between two of an epoch there is a step at least."""

    each: tuple[Gap, ...] = ()

    @classmethod
    def of_steps(cls, epoch: int, steps: Collection[int], offset: int, global_batch: int) -> Gaps:
        """Return the gaps in place of some steps of an epoch; step i starts at `offset` + i * `global_batch`."""
        found: list[Gap] = []
        for step in sorted(set(steps)):
            start = offset + step * global_batch
            if found and found[-1].stop == start:
                start = found.pop().start
            found.append(Gap(epoch, start, offset + (step + 1) * global_batch))
        return cls(tuple(found))

    @classmethod
    def of_all_but(cls, epoch: int, steps: Collection[int], count: int, offset: int, global_batch: int) -> Gaps:
        """Return the gaps that leave only these of an epoch's `count` steps."""
        wanted = sorted(set(steps))
        bounds = zip([0, *(step + 1 for step in wanted)], [*wanted, count], strict=True)
        edges = [(offset + first * global_batch, offset + stop * global_batch) for first, stop in bounds]
        return cls(tuple(Gap(epoch, start, stop) for start, stop in edges if start < stop))

    def __add__(self, other: Gaps) -> Gaps:
        return Gaps(self.each + other.each)

    def after(self, epoch: int) -> Gaps:
        """Return those of later epochs."""
        return Gaps(tuple(gap for gap in self.each if gap.epoch > epoch))

    def parts(self, epoch: int, position: int) -> Iterator[tuple[int, int | None]]:
        """Yield what is left of an epoch from a position on: (start, stop) of each part, None for the epoch's end."""
        for gap in self._of(epoch, position):
            if position < gap.start:
                yield position, gap.start
            position = gap.stop
        yield position, None  # perhaps beyond the end, where the last step is left out

    def walk(self, epoch: int, position: int, steps: int, global_batch: int) -> int:
        """Return where the next step starts after so many from a position on; the epoch's end or more, if none does."""
        for gap in self._of(epoch, position):
            before = max(0, gap.start - position) // global_batch
            if steps < before:
                break
            steps -= before
            position = gap.stop
        return position + steps * global_batch

    def steps(self, share: Part, epoch: int, position: int) -> int:
        """Return how many steps with a row of the share's rank are left from a position on."""
        return sum(
            share.num_steps(start) if stop is None else (stop - start) // share.global_batch
            for start, stop in self.parts(epoch, position)
        )

    def passed(self, epoch: int, start: int, stop: int | None) -> tuple[Gap, ...]:
        """Return the gaps that a run left out on its way from `start` to `stop`, None for the end."""
        return tuple(gap for gap in self._of(epoch, start) if stop is None or gap.stop <= stop)

    def _of(self, epoch: int, position: int) -> Iterator[Gap]:
        """The gaps of an epoch that do not lie before a position."""
        return (gap for gap in self.each if gap.epoch == epoch and gap.stop > position)


NO_GAPS = Gaps()


STATE_FORMAT = 1
ORDER_NAMES = ("block", "lanes", "window")
# Samples of a turn by default: the ranks of one machine take equal parts of each turn, and the shares of a
# batch are exact to about so many samples.
USUAL_UNIT = 8

_NEW_RUN = "load a state that streamloader's state_dict() gave, or start without one"
_OF_THIS_RUN = "open the dataset as it was when the state was saved, or start without the state"

Batches = Literal["mixed", "homogeneous"]
Weights = tuple[tuple[int, tuple[int, ...]], ...]  # whole numbers, one for each source, from a step on


class SourceIdentity(NamedTuple):
    """A dataset that a run reads, the samples of it that take part, and their order."""

    digest: str
    split: str | None
    selection: str | None
    num_samples: int
    params: OrderParams

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        named = {"digest": self.digest, "split": self.split, "selection": self.selection}
        return {**named, "samples": self.num_samples, "order": asdict(self.params)}

    @classmethod
    def from_dict(cls, values: Any) -> SourceIdentity:
        """Return the source that `to_dict` wrote. Raises `StateError` for invalid values."""
        if not isinstance(values, dict):
            raise StateError(f"the state's source is {values!r:.60}", _NEW_RUN)
        split, selection = (get(values, name, str, type(None)) for name in ("split", "selection"))
        order = get(values, "order", dict)
        try:
            params = OrderParams(*(get(order, name, int) for name in ORDER_NAMES))
        except UsageError as error:
            raise StateError(f"the state's order is invalid: {error.problem}", _NEW_RUN) from error
        return cls(get(values, "digest", str), split, selection, get(values, "samples", int), params)

    def differences(self, here: SourceIdentity, names: Collection[str], *, force: bool) -> list[str]:
        """Return how this source of a state differs from one `here`: of the order's parameters those of `names` count.

        `force` lets digests differ: for a copy of the dataset with the same samples.
        """
        same_order = all(getattr(self.params, name) == getattr(here.params, name) for name in names)
        compared = ("digest",) * (not force) + ("split", "selection", "num_samples") + ("params",) * (not same_order)
        return _differences({name: getattr(self, name) for name in compared}, here)


def _differences(found: dict[str, Any], here: object) -> list[str]:
    pairs = [(name, value, getattr(here, name)) for name, value in found.items()]
    return [f"{name} {value!r} and not {other!r}" for name, value, other in pairs if value != other]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What an endless run over `sources` has delivered: everything before `position` of `epoch`.

    The same on every rank and at every world size. `workers` DataLoader workers deliver in turn; `extra` of them have
    delivered one batch each from `position` on, on each of `ranks` ranks, of `batch` samples. Without workers these are
    1 and 0; where no round is under way, the last two are 0. `inside`: the state of one of several workers, which does
    not know how far the others are. `skipped` are the steps that the run left out.

    A mixture also has a `stop`: `weights_by_step` are its weights from a step on, `unit` the samples of a turn, None
    for the default. `settled` makes `source_order` from these once the global batch is known: in positions of the run,
    which pin the order from then on. `anchor`: see `Mix`.

    Two values belong to this process and to no state. `fresh`: the run has not begun, so its lanes may still follow the
    number of ranks. `given`: the parameters of the order that the caller chose, so that a state must have the same;
    the others are taken from a state.
    """

    sources: tuple[SourceIdentity, ...]
    shuffle: bool
    remainder: Remainder
    seed: int
    stop: Stop | None = None
    batches: Batches = "mixed"
    weights_by_step: Weights = ()
    unit: int | None = None
    source_order: SourceOrder | None = None
    anchor: tuple[int, int] = (0, 0)
    epoch: int = 0
    position: int = 0
    extra: int = 0
    workers: int = 1
    ranks: int = 0
    batch: int = 0
    inside: bool = False
    skipped: tuple[Gap, ...] = ()
    fresh: bool = True
    given: tuple[str, ...] = ORDER_NAMES

    @property
    def pin(self) -> int:
        """A number that tells this mixture from others; 0 for a single dataset, and where there is none yet."""
        if self.source_order is None:
            return 0
        return crc32(repr((self.source_order, self.anchor, [asdict(one.params) for one in self.sources])).encode())

    @property
    def order(self) -> tuple[int, ...]:
        """Block, lanes and window of a run over one dataset, once they are settled; else zeros."""
        return (0, 0, 0) if self.fresh or self.stop else astuple(self.sources[0].params)

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes of each source; none without shuffle."""
        return tuple(one.params.lanes for one in self.sources) if self.shuffle else ()

    @property
    def num_samples(self) -> int:
        """The positions of the epoch. A mixture must be settled."""
        begin, end = self.mix().bounds(self.epoch) if self.stop else (0, self.sources[0].num_samples)
        return end - begin

    def with_order(self, *order: int) -> RunState:
        """The same place in the order that `order` of another process gave; zeros change nothing."""
        return self._with_params([OrderParams(*order)]) if any(order) else self

    def _with_params(self, params: Sequence[OrderParams]) -> RunState:
        sources = (source._replace(params=one) for source, one in zip(self.sources, params, strict=True))
        return replace(self, sources=tuple(sources), fresh=False)

    def mix(self, units: Sequence[int] = ()) -> Mix:
        """Return the settled mixture; `units`: samples fetched at once without shuffle, of each source."""
        from streamloader.order.mixture import Mix, Stream

        assert self.source_order is not None
        assert self.stop is not None
        starts = accumulate((one.num_samples for one in self.sources[:-1]), initial=0)
        streams = tuple(
            Stream(EpochOrder(one.num_samples, one.params, self.seed, 0, self.shuffle), start, unit)
            for one, start, unit in zip(self.sources, starts, units or [1] * len(self.sources), strict=True)
        )
        return Mix(streams, self.source_order, self.stop, self.anchor)

    def share(self, batch: int, world: World, units: Sequence[int] = ()) -> EpochShare:
        """Return a rank's part of the epoch, in batches of `batch`; `units` as for `mix`. Must be settled."""
        if self.stop is not None:
            from streamloader.order.mixture import MixShare

            return MixShare(self.mix(units), self.epoch, batch, world, self.remainder)
        source = self.sources[0]
        order = EpochOrder(source.num_samples, source.params, self.seed, self.epoch, self.shuffle)
        return Share(order, batch, world, self.remainder, *units)

    def settled(self, global_batch: int, workers: int = 1, ranks: int = 1) -> RunState:
        """Return the state for steps of so many samples on so many ranks, read by so many DataLoader workers.

        A run that begins takes its lanes for these ranks. Raises `BatchError` where such steps cut turns.
        """
        settled = self._with_lanes(ranks) if self.fresh else self
        if self.stop is None:
            return settled
        unit = self._unit(global_batch, workers)
        if self.source_order is None:
            return replace(settled, source_order=self._new_source_order(global_batch, workers))
        present = [phase for phase in self.source_order.phases if phase.start <= self._at()][-1]
        if present.unit == unit:
            return self
        later = [replace(phase, unit=unit) for phase in self.source_order.phases if phase.start > self._at()]
        return self._changed([replace(present, start=self._at(), unit=unit), *later])

    def _with_lanes(self, ranks: int) -> RunState:
        params = [one.params for one in self.sources]
        if self.shuffle and "lanes" not in self.given:
            lanes = [lanes_for_world(one.num_samples, one.params, ranks) for one in self.sources]
            params = [replace(one, lanes=count) for one, count in zip(params, lanes, strict=True)]
        return self._with_params(params)

    def _unit(self, global_batch: int, workers: int) -> int:
        if self.batches == "homogeneous":
            return global_batch * workers  # a round of the workers: each takes a part of every turn
        usual = USUAL_UNIT if self.source_order is None else self.source_order.phases[-1].unit
        unit = self.unit or gcd(global_batch, usual)
        if global_batch % unit:
            remedy = f"give a batch_size that is with all ranks a multiple of {unit}, or another unit="
            raise BatchError(f"a global batch of {global_batch} samples cuts turns of {unit}", remedy)
        return unit

    def _new_source_order(self, global_batch: int, workers: int = 1) -> SourceOrder:
        from streamloader.order.mixture import Phase, SourceOrder

        unit = self._unit(global_batch, workers)
        starts = [(-(-step * global_batch // unit) * unit, weights) for step, weights in self.weights_by_step]
        return SourceOrder(tuple(Phase.of_all(at, unit, weights) for at, weights in starts), len(self.sources))

    def _at(self) -> int:
        """The position of a mixture's run, over all its epochs."""
        return self.mix().bounds(self.epoch)[0] + self.position

    def _changed(self, phases: Sequence[Phase]) -> RunState:
        """Return the state with these phases from here on: the epoch continues, counted from here."""
        assert self.source_order is not None
        at = self._at()
        before = tuple(phase for phase in self.source_order.phases if phase.start < at)
        source_order = replace(self.source_order, phases=(*before, *phases))
        return replace(self, source_order=source_order, anchor=(self.epoch, at), position=0, extra=0, ranks=0, batch=0)

    def advance(self, batches: int, share: Part, gaps: Gaps = NO_GAPS) -> RunState:
        """Return the state when `batches` more were delivered on every rank, at most to the end of the epoch.

        `share` is that of the consumer: the rank's, or with DataLoader workers that of a worker (its world is
        `workers` times as large). After the last step it is at position 0 of the next epoch.
        """
        if not batches:
            return self
        rounds, extra = divmod(self.extra + batches, self.workers)
        last, position = (
            gaps.walk(self.epoch, self.position, count, share.global_batch) for count in (max(0, rounds - 1), rounds)
        )
        if (rounds and not share.global_steps(last)) or (extra and not share.global_steps(position)):
            raise UsageError(f"{batches} batches from position {self.position} go past the end", "advance less at once")
        ranks, batch = (share.world.size // self.workers, share.batch) if extra else (0, 0)
        return replace(self.moved(position, share, gaps), extra=extra, ranks=ranks, batch=batch)

    def moved(self, position: int, share: Part, gaps: Gaps = NO_GAPS) -> RunState:
        """Return the state at a later position of this epoch, which `gaps.walk` gave; past the end, of the next one."""
        over = not share.global_steps(position)
        skipped = (*self.skipped, *gaps.passed(self.epoch, self.position, None if over else position))
        if over:
            return replace(self.next_epoch(), skipped=skipped)
        return replace(self, position=position, skipped=skipped)

    def next_epoch(self) -> RunState:
        """The beginning of the next epoch: the state of a run that has delivered all its batches."""
        return self.beginning(self.epoch + 1)

    def beginning(self, epoch: int) -> RunState:
        """The beginning of an epoch."""
        return replace(self, epoch=epoch, position=0, extra=0, ranks=0, batch=0, inside=False)

    def with_workers(self, workers: int, ranks: int, batch: int) -> tuple[RunState, int]:
        """Return (state, repeated): this state for so many workers on each of so many ranks, and batches of `batch`.

        Within a round of other numbers, it resumes from that round's beginning, and `repeated` batches
        of each rank come again: the batches of one round do not fill a part of the other.
        Raises StateError for such a state of one worker: which batches of the round were delivered, it does not know.
        """
        if workers < 1:
            raise UsageError(f"{workers} consumers are invalid", "give 1 or more")
        same = (workers, ranks, batch) == (self.workers, self.ranks, self.batch)
        if self.inside and not same:
            saved = f"{self.workers} DataLoader workers on each of {self.ranks} ranks with batch_size={self.batch}"
            problem = f"the state was saved inside one of {saved}, here are {workers} on each of {ranks} with {batch}"
            raise StateError(problem, "load it with the same numbers, or save state_dict(batches=, workers=) instead")
        if same or (workers == self.workers and not self.ranks):
            return self, 0
        return replace(self, extra=0, ranks=0, batch=0, workers=workers), self.extra

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, which `resumed` reads. A mixture must be settled."""
        found = self.sources[0].to_dict()
        del found["samples"]
        if found["selection"] is None:
            del found["selection"]
        if self.stop:
            assert self.source_order is not None
            phases = [[one.start, one.unit, list(one.weights), list(one.sources)] for one in self.source_order.phases]
            found = {
                "sources": [source.to_dict() for source in self.sources],
                "phases": phases,
                "anchor": list(self.anchor),
                "wishes": [[step, list(weights)] for step, weights in self.weights_by_step],
                "stop": self.stop,
                "batches": self.batches,
            }
        names = ["shuffle", "remainder", "seed", "epoch", "position", "extra", "workers"]
        names += ["ranks", "batch"] * bool(self.ranks) + ["inside"] * self.inside
        found |= {name: getattr(self, name) for name in names}
        if self.skipped:
            found["skipped"] = [list(gap) for gap in self.skipped]
        return {"format": STATE_FORMAT, **found}

    def resumed(self, state: Any, global_batch: int = 1, *, force: bool = False) -> RunState:
        """Return the state from which a run with these sources, order and seed resumes; steps of a mixture have
        `global_batch` samples.

        Of the order's parameters those that the caller chose (`given`) are compared. Sources of a mixture may have been
        added, and weights changed: from the state's place on it is as it is wanted now. Raises `StateError`, with both
        values, for a state of another run, for what is missing and for what is invalid; `force` lets digests differ:
        for copies of the datasets with the same samples.
        """
        if not isinstance(state, dict):
            raise StateError(f"a state is a dict, not {state!r:.60}", _NEW_RUN)
        if (version := state.get("format")) != STATE_FORMAT:
            raise StateError(f"the state has format {version!r}, this version reads {STATE_FORMAT}", _NEW_RUN)
        if "sources" in state and not self.stop:
            raise StateError("the state is of a mixture", "load it into a Mixture of the same sources")
        if "sources" not in state and self.stop:
            raise StateError("the state is of a single dataset", "load it into a StreamingDataset")
        place = _read_place(state)
        compared = {name: get(state, name, str) for name in ("stop", "batches") if self.stop}
        compared |= {"shuffle": get(state, "shuffle", bool), "remainder": place["remainder"], "seed": place["seed"]}
        if self.stop:
            sources = [SourceIdentity.from_dict(one) for one in get(state, "sources", list)]
            differing = _differences(compared, self)
        else:
            here = self.sources[0]
            sources = [SourceIdentity.from_dict({"selection": None, **state, "samples": here.num_samples})]
            differing = sources[0].differences(here, self.given, force=force) + _differences(compared, self)
        if differing:
            copy = len(differing) == 1 and differing[0].startswith("digest")
            remedy = "open the dataset that the state is of, or pass force=True if this is a copy of it"
            problem = f"the state was saved with {', '.join(differing)} as here"
            raise StateError(problem, remedy if copy else _OF_THIS_RUN)
        return self._resumed(state, place, sources, self._places(sources, force=force), global_batch)

    def _resumed(
        self,
        state: dict[str, Any],
        place: dict[str, Any],
        sources: list[SourceIdentity],
        places: list[int],
        global_batch: int,
    ) -> RunState:
        params = [one.params for one in self.sources]
        for number, source in zip(places, sources, strict=True):
            params[number] = source.params
        found = replace(self._with_params(params), **place)
        if self.stop:
            anchor = tuple(read_list(state, "anchor", (int, int)))
            found = replace(found, source_order=_read_source_order(state, places, len(self.sources)), anchor=anchor)
        if found.position > found.num_samples:
            problem = f"the state has position {found.position}, its epoch {found.num_samples} samples"
            raise StateError(problem, "load a state that was saved with this dataset")
        if not self.stop or _read_weights(state, places, len(self.sources)) == self.weights_by_step:
            return found
        wanted, at = self._new_source_order(global_batch).phases, found._at()
        now = [phase for phase in wanted if phase.start <= at][-1]
        return found._changed([replace(now, start=at), *(phase for phase in wanted if phase.start > at)])

    def _places(self, sources: Sequence[SourceIdentity], *, force: bool) -> list[int]:
        """Return which source of this run each source of a state is."""
        places: list[int] = []
        for source in sources:
            same = [
                number
                for number, here in enumerate(self.sources)
                if number not in places and not source.differences(here, self.given, force=force)
            ]
            if not same:
                mine = [one.to_dict() for one in self.sources]
                remedy = "open all sources as they were; give one that is no longer wanted the weight 0"
                raise StateError(f"the state has a source {source.to_dict()}, which is none of {mine}", remedy)
            places.append(same[0])
        return places


def _read_place(state: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a state that change during a run. Raises StateError for what is missing or invalid."""
    state = {"ranks": 0, "batch": 0, "inside": False, "skipped": [], **state}
    remainder = get(state, "remainder", str)
    if remainder not in REMAINDERS:
        raise StateError(f"the state's remainder is {remainder!r}, not one of {', '.join(REMAINDERS)}", _NEW_RUN)
    names = ("seed", "epoch", "position", "extra", "workers", "ranks", "batch")
    numbers = {name: get(state, name, int) for name in names}
    if min(numbers.values()) < 0 or not numbers["extra"] < numbers["workers"]:
        raise StateError(f"the state {state} is invalid", _NEW_RUN)
    skipped = tuple(Gap(*one) for one in read_list(state, "skipped", [(int, int, int)]))
    return {"remainder": remainder, **numbers, "inside": get(state, "inside", bool), "skipped": skipped}


def read_list(state: dict[str, Any], name: str, shape: Any) -> Any:
    """Return a list of a state. As `shape`, `int` is a whole number >= 0, `[s]` a list of any length, `(s, t)` a pair.

    Raises StateError where the value has another shape.
    """

    def fits(value: Any, shape: Any) -> bool:
        if shape is int:
            return type(value) is int and value >= 0
        if not isinstance(value, list) or (isinstance(shape, tuple) and len(shape) != len(value)):
            return False
        return all(map(fits, value, shape if isinstance(shape, tuple) else repeat(shape[0])))

    value = get(state, name, list)
    if not fits(value, shape):
        raise StateError(f"the state's {name} is {value!r:.120}, which is invalid", _NEW_RUN)
    return value


def get(state: dict[str, Any], name: str, *types: type) -> Any:
    """The value of a key; StateError where it is missing or of another type."""
    if name not in state:
        raise StateError(f"the state has no {name!r}", _NEW_RUN)
    value = state[name]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        wanted = " or ".join(kind.__name__ for kind in types)
        raise StateError(f"the state's {name} is {value!r}, not of type {wanted}", _NEW_RUN)
    return value


def _read_source_order(state: dict[str, Any], places: Sequence[int], count: int) -> SourceOrder:
    from streamloader.order.mixture import Phase, SourceOrder

    phases = read_list(state, "phases", [(int, int, [int], [int])])
    valid = all(
        unit and any(weights) and len(weights) == len(sources) == len(set(sources)) and max(sources) < len(places)
        for _, unit, weights, sources in phases
    ) and all(after[0] > before[0] and not (after[0] - before[0]) % before[1] for before, after in pairwise(phases))
    if not phases or phases[0][0] or not valid:
        raise StateError(f"the state's phases {phases!r:.120} of {len(places)} sources are invalid", _NEW_RUN)
    found = [Phase(at, unit, tuple(weights), tuple(places[i] for i in mixed)) for at, unit, weights, mixed in phases]
    return SourceOrder(tuple(found), count)


def _read_weights(state: dict[str, Any], places: Sequence[int], count: int) -> Weights:
    """The weights that a state asks for from each step on, one for each of `count` sources."""
    found = []
    for step, weights in read_list(state, "wishes", [(int, (int,) * len(places))]):
        by_source = dict(zip(places, weights, strict=True))
        found.append((step, tuple(by_source.get(source, 0) for source in range(count))))
    return tuple(found)


def check_shape(stop: str, batches: str, unit: int | None) -> None:
    """Raise `UsageError` for what no mixture has."""
    if stop not in ("first", "last"):
        raise UsageError(f"stop={stop!r}", 'choose "first" or "last"')
    if batches not in ("mixed", "homogeneous"):
        raise UsageError(f"batches={batches!r}", 'choose "mixed" or "homogeneous"')
    if unit is not None and not is_whole(unit):
        raise UsageError(f"unit={unit!r}", "give a whole number of samples, at least 1")
    if unit is not None and batches == "homogeneous":
        raise UsageError(f"unit={unit} with homogeneous batches", "leave it out: a turn is a whole batch")
