"""The state of a run over a dataset or a mixture, as JSON values that any world size can resume from (rules 9 and 10).

A `Cursor` is how far a pass is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import pairwise, repeat
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from zlib import crc32

from streamloader.errors import BatchError, StateError, UsageError
from streamloader.options import REMAINDERS, Remainder
from streamloader.order.epoch_order import EpochOrder, OrderParams, params_for_world
from streamloader.order.groups import window_bounds
from streamloader.order.schedule import EpochShare, Gap, Share, World

if TYPE_CHECKING:  # imported on demand, since most runs have no mixture
    from streamloader.order.mixture import Mix, Phase, Stop


STATE_FORMAT = 1
ORDER_NAMES = ("block", "lanes", "window")
# the values of a state that change during a run
PROGRESS_NAMES = ("epoch", "position", "extra", "workers", "ranks", "batch")
# Default samples per turn: the ranks of a machine take equal parts of each turn, and the shares of a batch are exact to
# about as many samples.
DEFAULT_UNIT = 8

LARGEST = 2**63  # the progress is shared with workers as int64

_NEW_RUN = "load a state from streamloader's state_dict(), or start without a state"

Batches = Literal["mixed", "homogeneous"]
Weights = tuple[tuple[int, tuple[int, ...]], ...]  # (first step or position, a whole number for each source)
_TEXTS = ("weights", "packed", "bucket_lengths")


class SourceIdentity(NamedTuple):
    """A dataset that a run reads, its selected samples, their order, and its version, 0 if that is not known.

    `excluded`: the number of samples that `exclude=` left out of the selection. `weights`: what identifies the weights
    that samples are drawn by, of which an epoch has `num_samples`. `packed`: what identifies the rows that the selected
    samples are packed into, of which there are `num_samples`. `bucket_lengths`: what identifies the lengths by which
    samples are put in buckets. `joined`: the digest and the version of each dataset that is joined, and the digest of
    the numbers of its samples, "" for those of this dataset.
    """

    digest: str
    split: str | None
    selection: str | None
    num_samples: int
    params: OrderParams
    version: int = 0
    excluded: int = 0
    weights: str | None = None
    packed: str | None = None
    bucket_lengths: str | None = None
    joined: tuple[tuple[str, int, str], ...] = ()

    @property
    def matched(self) -> tuple[str, ...]:
        """The digests of the numbers of joined samples."""
        return tuple(numbers for _, _, numbers in self.joined)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        named = {"digest": self.digest, "split": self.split, "selection": self.selection}
        others = {name: value for name in ("version", "excluded", *_TEXTS) if (value := getattr(self, name))}
        others |= {"joined": list(map(list, self.joined))} if self.joined else {}
        return {**named, "samples": self.num_samples, **others, "order": asdict(self.params)}

    @classmethod
    def from_dict(cls, values: Any) -> SourceIdentity:
        """Return the source that `to_dict` wrote. Raises `StateError` for invalid values."""
        if not isinstance(values, dict):
            raise StateError(f"the state's source is {values!r:.60}", _NEW_RUN)
        split, selection = (read_value(values, name, str, type(None)) for name in ("split", "selection"))
        order = read_value(values, "order", dict)
        try:
            params = OrderParams(*(read_value(order, name, int) for name in ORDER_NAMES))
        except UsageError as error:
            raise StateError(f"the state's order is invalid: {error.problem}", _NEW_RUN) from error
        digest, samples = read_value(values, "digest", str), read_value(values, "samples", int)
        version, excluded = (read_value({name: 0, **values}, name, int) for name in ("version", "excluded"))
        texts = (read_value({name: None, **values}, name, str, type(None)) for name in _TEXTS)
        identity = cls(digest, split, selection, samples, params, version, excluded, *texts)
        return identity._replace(joined=_read_joined(values))

    def differences(self, current: SourceIdentity, names: Collection[str], *, force: bool) -> list[str]:
        """Return how this source of a state differs from one of the run, `current`.

        Of the order, only the parameters `names` are compared. `force` ignores digests, for a copy of the dataset with
        the same samples.
        """
        same_order = all(getattr(self.params, name) == getattr(current.params, name) for name in names)
        samples = ["selection", "num_samples", *_TEXTS]
        samples += ["excluded"] * (self.selection != current.selection)
        digests = ("matched",) if force else ("digest", "joined")
        compared = (*digests, "split", *samples) + ("params",) * (not same_order)
        return _differences({name: getattr(self, name) for name in compared}, current)


_REOPEN = "open the dataset as it was when the state was saved, or start without the state"


def _remedy(differing: Sequence[str], saved: SourceIdentity, current: SourceIdentity) -> str:
    """Return what to do about a state with the source `saved` that cannot be loaded because of what is `differing`."""
    if len(differing) == 1 and differing[0].startswith("digest"):
        return "open the dataset that the state is of, or pass force=True if this is a copy of it"
    if saved.digest != current.digest and saved.version not in (0, current.version):
        return f"open version {saved.version}, which the state is of; if it was erased, start without the state"
    if any(each.startswith("selection") for each in differing):
        return f"{_REOPEN}; skip_steps= leaves out steps of a run that has begun"
    return _REOPEN


def _differences(saved: dict[str, Any], current: object) -> list[str]:
    pairs = [(name, value, getattr(current, name)) for name, value in saved.items()]
    return [f"{name} {value!r} instead of {expected!r}" for name, value, expected in pairs if value != expected]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The progress of an endless run over `sources`: it has delivered everything before `position` of `epoch`.

    The state is the same on every rank, and valid at every world size. `skipped`: the steps that the run skipped.

    `workers`: the DataLoader workers, which deliver in turn; 1 without workers. `extra`: how many of them have
    delivered a batch from `position` on, on each of `ranks` ranks, with `batch` samples. Between two rounds of the
    workers these three are 0. `inside`: whether this is the state of one of several workers, which does not know the
    progress of the others.

    A mixture also has a `stop`, its weights from a step on, `weights_by_step`, or `by_samples` from a position on, and
    the samples of a turn, `unit` (None for the default). Once the global batch is known, `settled` makes `phases` from
    these, in positions of the run, which fix the order from then on. `anchor`: see `Mix`. `before`: the positions that
    its epoch had before the anchor, where the epoch begins again.

    `bucket`: the steps of a window in which samples are put in buckets, and the positions of a step, 0 until it is
    settled; None without buckets.

    `decoders`: the image fields that a device decodes, each with the name of its decoder.

    Three values of this process are not saved. `bucket_scale`: (n, d), a step of the buckets has n / d times the
    positions of a step of the run, whose budget cuts it; None without a budget. `fresh`: whether the run has not begun,
    so its lanes can still follow the number of ranks. `given`: the parameters of the order that the caller chose and a
    loaded state must have; the others are taken from that state.
    """

    sources: tuple[SourceIdentity, ...]
    shuffle: bool
    remainder: Remainder
    seed: int
    stop: Stop | None = None
    batches: Batches = "mixed"
    weights_by_step: Weights = ()
    by_samples: bool = False
    unit: int | None = None
    phases: tuple[Phase, ...] = ()  # of a settled mixture
    anchor: tuple[int, int] = (0, 0)
    before: int = 0
    epoch: int = 0
    position: int = 0
    extra: int = 0
    workers: int = 1
    ranks: int = 0
    batch: int = 0
    inside: bool = False
    skipped: tuple[Gap, ...] = ()
    bucket: tuple[int, int] | None = None
    decoders: tuple[tuple[str, str], ...] = ()
    bucket_scale: tuple[int, int] | None = None
    fresh: bool = True
    given: tuple[str, ...] = ORDER_NAMES

    @property
    def pin(self) -> int:
        """A checksum that identifies the versions of the datasets, and a settled mixture; 0 before it is settled."""
        if self.stop and not self.phases:
            return 0
        order = (self.phases, self.anchor, self._params) if self.stop else None
        return crc32(repr(([(source.digest, source.joined) for source in self.sources], order)).encode())

    @property
    def _params(self) -> list[OrderParams]:
        return [source.params for source in self.sources]

    @property
    def order(self) -> tuple[int, ...]:
        """(block, lanes, window) of a settled run over a single dataset, else zeros."""
        return (0, 0, 0) if self.fresh or self.stop else astuple(self.sources[0].params)

    @property
    def progress(self) -> list[int]:
        """The values of `PROGRESS_NAMES`."""
        return [getattr(self, name) for name in PROGRESS_NAMES]

    @property
    def lanes(self) -> tuple[int, ...]:
        """The number of lanes of each source; empty without shuffle."""
        return tuple(source.params.lanes for source in self.sources) if self.shuffle else ()

    @property
    def num_samples(self) -> int:
        """The number of positions of the epoch. A mixture must be settled."""
        begin, end = self.mix().bounds(self.epoch) if self.stop else (0, self.sources[0].num_samples)
        return end - begin

    def with_order(self, *order: int) -> RunState:
        """Return the state with the `order` of another process. Zeros change nothing."""
        return self._with_params([OrderParams(*order)]) if any(order) else self

    def _with_params(self, params: Sequence[OrderParams]) -> RunState:
        sources = (source._replace(params=pinned) for source, pinned in zip(self.sources, params, strict=True))
        return replace(self, sources=tuple(sources), fresh=False)

    def mix(self, units: Sequence[int] = ()) -> Mix:
        """Return the settled mixture. `units`: samples per fetch without shuffle, for each source."""
        from streamloader.order.mixture import Mix

        assert self.phases
        assert self.stop is not None
        return Mix(self._orders(0), tuple(units or [1] * len(self.sources)), self.phases, self.stop, self.anchor)

    def _orders(self, epoch: int) -> tuple[EpochOrder, ...]:
        """Return the order of an epoch of each source."""
        total = sum(source.num_samples for source in self.sources)
        strides = (total if source.weights else 0 for source in self.sources)
        columns = zip(self.sources, strides, strict=True)
        return tuple(EpochOrder(of.num_samples, of.params, self.seed, epoch, self.shuffle, n) for of, n in columns)

    def share(self, batch: int, world: World, units: Sequence[int] = ()) -> EpochShare:
        """Return a rank's part of the epoch of a settled run, in batches of `batch` samples. `units`: see `mix`."""
        if self.stop is not None:
            from streamloader.order.mixture import MixShare

            return MixShare(self.mix(units), self.epoch, batch, world, self.remainder)
        return Share(self._orders(self.epoch)[0], batch, world, self.remainder, units[0] if units else 1)

    def settled(self, global_batch: int, workers: int = 1, ranks: int = 1) -> RunState:
        """Return the state with its order fixed for steps of `global_batch` samples.

        A new run chooses its lanes for the number of ranks. Raises `BatchError` if the steps of a mixture cut turns.
        """
        settled = self._with_lanes(ranks) if self.fresh else self
        if self.bucket is not None and not self.bucket[1]:
            more, fewer = self.bucket_scale or (1, 1)
            settled = replace(settled, bucket=(self.bucket[0], global_batch * more // fewer))
        if self.stop is None:
            return settled
        unit = self._unit(global_batch, workers)
        if not self.phases:
            return replace(settled, phases=self._new_phases(global_batch, workers))
        if self.phases[-1].unit == unit:
            return settled
        return self._changed(self.phases, unit).settled(global_batch, workers)

    def _with_lanes(self, ranks: int) -> RunState:
        if not self.shuffle or "lanes" in self.given:
            return self._with_params(self._params)
        return self._with_params(
            [params_for_world(source.num_samples, source.params, ranks) for source in self.sources]
        )

    def _unit(self, global_batch: int, workers: int = 1) -> int:
        if self.batches == "homogeneous":
            return global_batch * workers  # a round of the workers, each of which takes a part of every turn
        default = self.phases[-1].unit if self.phases else DEFAULT_UNIT
        unit = self.unit or gcd(global_batch, default)
        if global_batch % unit:
            remedy = f"choose batch_size so that the batches of all ranks are a multiple of {unit}, or another unit="
            raise BatchError(f"a global batch of {global_batch} samples cuts turns of {unit}", remedy)
        return unit

    def _new_phases(self, global_batch: int, workers: int = 1) -> tuple[Phase, ...]:
        from streamloader.order.mixture import Phase, phases_from

        unit = self._unit(global_batch, workers)
        size = 1 if self.by_samples else global_batch
        phases = (Phase.of_all(step * size, unit, weights) for step, weights in self.weights_by_step)
        return phases_from(tuple(phases), 0, unit)

    def _changed(self, later: tuple[Phase, ...], unit: int) -> RunState:
        """Return the state with the phases `later`, in turns of `unit` samples, from its position on.

        Raises `StateError` inside a window of buckets, whose samples have exchanged their positions.
        """
        from streamloader.order.mixture import phases_from

        start = self.run_position
        earlier = (phase for phase in self.phases if phase.start < start)
        changed = self._begun_again((*earlier, *phases_from(later, start, unit)))
        return replace(changed, bucket=self.bucket and (self.bucket[0], 0))

    def _begun_again(self, phases: tuple[Phase, ...]) -> RunState:
        """Return the state with other phases, with which its epoch begins again here."""
        anchor, before = (self.epoch, self.run_position), self.position + self.begun_before(self.epoch)
        changed = replace(self, phases=phases, anchor=anchor, before=before)
        return self._checked(replace(changed, position=0, extra=0, ranks=0, batch=0))

    def begun_before(self, epoch: int) -> int:
        """Return how many positions an epoch had before it began again; 0 if it did not."""
        return self.before if epoch == self.anchor[0] else 0

    def _checked(self, changed: RunState) -> RunState:
        """Return `changed`, which has another order from here on.

        Raises `StateError` if a window of buckets that has begun would have other samples than those that exchange.
        """
        if self.bucket is None:
            return changed
        old, new = (window_bounds(*self.bucket, of.num_samples, of.position) for of in (self, changed))
        inside = old[0] < self.position < old[1]
        if (changed.anchor == self.anchor and new == old) or (not inside and new[0] == changed.position):
            return changed
        problem = f"the mixture changes at position {self.position} of an epoch, inside the bucket window {old}"
        steps, positions = self.bucket[0], self.bucket[0] * self.bucket[1]
        counted = "" if self.bucket_scale is not None else f"bucket_steps={steps} steps, "
        after = f"a multiple of {counted}{positions} samples of an epoch"
        raise StateError(problem, f"change weights, sources and turns (give unit=) after {after}, or at its end")

    def with_weights(self, position: int, weights: tuple[int, ...], since: int) -> RunState:
        """Return the state of a mixture with other weights from the first turn at or after a position of the run on.

        Later phases stay. Epochs are counted as before, if those from `since` on began where they did, and this one is
        not over: which sources the last phase has decides that. Otherwise this epoch begins again here.
        """
        from streamloader.order.mixture import Phase

        start, before = self.turn_at(position)
        earlier = [phase for phase in self.phases if phase.start < start]
        later = [phase for phase in self.phases if phase.start > start]
        changed = replace(self, phases=(*earlier, Phase.of_all(start, before.unit, weights), *later))
        old, new, epochs = self.mix(), changed.mix(), range(max(since, self.anchor[0]), self.epoch + 1)
        same = all(old.bounds(epoch)[0] == new.bounds(epoch)[0] for epoch in epochs)
        if same and self.run_position < new.bounds(self.epoch)[1]:
            return self._checked(changed)
        return self._begun_again(changed.phases)

    def turn_at(self, position: int) -> tuple[int, Phase]:
        """Return where the first turn at or after a position of the run begins, and the phase of the turn before it."""
        phase = next(phase for phase in reversed(self.phases) if phase.start <= position)
        return phase.start + -(-(position - phase.start) // phase.unit) * phase.unit, phase

    @property
    def earliest_change(self) -> int:
        """The first position of the run from which a mixture may change: after a window of buckets that has begun.

        After the last window of an epoch it is the end of the epoch, since a change before that would move this end.
        """
        if self.bucket is None:
            return self.run_position
        steps, group = self.bucket
        end = -(-self.position // (steps * group)) * steps * group  # of the window; between two, the position
        end = end if end <= self.num_samples // group * group else self.num_samples
        return self.run_position - self.position + end

    @property
    def run_position(self) -> int:
        """The position of a settled mixture over all epochs of the run."""
        return self.mix().bounds(self.epoch)[0] + self.position

    def advance(self, batches: int, share: EpochShare) -> RunState:
        """Return the state after `batches` more batches of every rank, at most to the end of the epoch.

        `share` is that of a consumer: a rank, or a DataLoader worker (whose world is `workers` times as large). After
        the last step, the state is at position 0 of the next epoch. Raises `UsageError` if the batches go past the end.
        """
        if not batches:
            return self
        rounds, extra = divmod(self.extra + batches, self.workers)
        last, position = (share.walk(self.position, count) for count in (max(0, rounds - 1), rounds))
        if (rounds and not share.global_steps(last)) or (extra and not share.global_steps(position)):
            problem = f"{batches} batches from position {self.position} go past the end of the epoch"
            raise UsageError(problem, "advance by fewer batches")
        ranks, batch = (share.world.size // self.workers, share.batch) if extra else (0, 0)
        return replace(self.moved(position, share), extra=extra, ranks=ranks, batch=batch)

    def moved(self, position: int, share: EpochShare) -> RunState:
        """Return the state at a later position of this epoch, from `share.walk`; past the end, at the next epoch."""
        ended = not share.global_steps(position)
        skipped = (gap for gap in share.gaps_after(self.position) if ended or gap.stop <= position)
        state = self.next_epoch() if ended else replace(self, position=position)
        return replace(state, skipped=(*self.skipped, *skipped))

    def next_epoch(self) -> RunState:
        """Return the state at the start of the next epoch."""
        return self.beginning(self.epoch + 1)

    def beginning(self, epoch: int) -> RunState:
        """Return the state at the start of an epoch."""
        return replace(self, epoch=epoch, position=0, extra=0, ranks=0, batch=0, inside=False)

    def with_workers(self, workers: int, ranks: int, batch: int) -> tuple[RunState, int]:
        """Return (state, repeated) for `workers` DataLoader workers on each of `ranks` ranks, with `batch` samples.

        A state within a round of other numbers resumes at the start of that round, since the batches of one round do
        not fill a part of the other: `repeated` batches of each rank come again. Raises `StateError` if such a state is
        of a single worker, since it does not know which batches of the round were delivered.
        """
        if workers < 1:
            raise UsageError(f"workers={workers} is invalid", "give 1 or more")
        same = (workers, ranks, batch) == (self.workers, self.ranks, self.batch)
        if self.inside and not same:
            saved = f"{self.workers} DataLoader workers on each of {self.ranks} ranks with batch_size={self.batch}"
            current = f"{workers} on each of {ranks} with batch_size={batch}"
            problem = f"the state was saved inside one of {saved}, this run has {current}"
            raise StateError(problem, "load it with the same numbers, or save state_dict(batches=, workers=) instead")
        if same or (workers == self.workers and not self.ranks):
            return self, 0
        return replace(self, extra=0, ranks=0, batch=0, workers=workers), self.extra

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that `resumed` reads. A mixture must be settled."""
        names = ["shuffle", "remainder", "seed", *PROGRESS_NAMES[: 6 if self.ranks else 4], *["inside"] * self.inside]
        if self.stop:
            assert self.phases
            phases = [[phase.start, phase.unit, list(phase.weights), list(phase.sources)] for phase in self.phases]
            values = {
                "sources": [source.to_dict() for source in self.sources],
                "phases": phases,
                "anchor": list(self.anchor),
                "wishes": [[step, list(weights)] for step, weights in self.weights_by_step],
            }
            values |= {name: value for name in ("by_samples", "before") if (value := getattr(self, name))}
            names = ["stop", "batches", *names]
        else:
            values = self.sources[0].to_dict()
            if values["selection"] is None:
                del values["selection"]
        values |= {name: getattr(self, name) for name in names}
        if self.bucket is not None:
            cut = {"cut": True} if self.bucket_scale is not None else {}
            values["bucket"] = dict(zip(_BUCKET, self.bucket, strict=True)) | cut
        if self.decoders:
            values["decoders"] = dict(self.decoders)
        if self.skipped:
            values["skipped"] = [list(gap) for gap in self.skipped]
        return {"format": STATE_FORMAT, **values}

    def resumed(self, state: Any, global_batch: int = 1, *, force: bool = False) -> RunState:
        """Return the state of this run when it resumes at a saved `state`.

        Only the parameters of the order that the caller chose (`given`) are compared. A mixture, whose steps have
        `global_batch` samples, may have new sources and other weights than the state; these hold from its position on.
        `force` ignores digests, for copies of the datasets with the same samples, if the state has their number. Raises
        `StateError`, with both values, if the state is of another run, and if a value is missing or invalid.
        """
        sources = self.saved_sources(state)
        progress = _read_progress(state)
        compared = {name: read_value(state, name, str) for name in ("stop", "batches") if self.stop}
        compared |= {"shuffle": read_value(state, "shuffle", bool)}
        differing = _differences(compared | {name: progress[name] for name in ("remainder", "seed")}, self)
        bucket = _read_bucket(state)
        if bucket and (saved := "cut" in state["bucket"]) != (self.bucket_scale is not None):
            differing.append(f"steps {'by' if saved else 'without'} max_tokens= instead of the other way")
        elif (bucket and bucket[0]) != (self.bucket and self.bucket[0]):
            differing.append(f"bucket {bucket} instead of {self.bucket}")
        counted = bool(self.stop) or "samples" in state  # states of earlier releases have no number of samples
        force = force and counted
        if not self.stop:
            differing = sources[0].differences(self.sources[0], self.given, force=force) + differing
        if differing:
            remedy = _remedy(differing, sources[0], self.sources[0]) if counted else _REOPEN
            raise StateError(f"the state is of another run: it has {', '.join(differing)}", remedy)
        numbers, params = self._match_sources(sources, force=force), self._params
        for number, source in zip(numbers, sources, strict=True):
            params[number] = source.params
        resumed = replace(self._with_params(params), **progress, bucket=bucket)
        return self._resumed(state, resumed, numbers, global_batch)

    def saved_sources(self, state: Any) -> list[SourceIdentity]:
        """Return the sources of a saved state. Raises `StateError` if they are invalid, or not of such a run."""
        if not isinstance(state, dict):
            raise StateError(f"a state is a dict, not {state!r:.60}", _NEW_RUN)
        if (version := state.get("format")) != STATE_FORMAT:
            raise StateError(f"the state has format {version!r}, this version reads {STATE_FORMAT}", _NEW_RUN)
        if "sources" in state and not self.stop:
            raise StateError("the state is of a mixture", "load it into a Mixture of the same sources")
        if "sources" not in state and self.stop:
            raise StateError("the state is of a single dataset", "load it into a StreamingDataset")
        if self.stop:
            sources = read_value(state, "sources", list)
            if not sources:
                raise StateError("the state has no sources", _NEW_RUN)
            return [SourceIdentity.from_dict(source) for source in sources]
        return [SourceIdentity.from_dict({"selection": None, "samples": self.sources[0].num_samples, **state})]

    def _resumed(self, state: dict[str, Any], resumed: RunState, numbers: list[int], global_batch: int) -> RunState:
        """Return `resumed` with the order of a mixture: that of the state, then that of this run."""
        if self.stop:
            anchor = tuple(read_list(state, "anchor", (int, int)))
            before = read_value({"before": 0, **state}, "before", int)
            resumed = replace(resumed, phases=_read_phases(state, numbers), anchor=anchor, before=before)
        if resumed.position > resumed.num_samples:
            problem = f"the state has position {resumed.position}, but its epoch has {resumed.num_samples} samples"
            raise StateError(problem, "load a state that was saved with this dataset")
        if not self.stop:
            return resumed
        by_samples = read_value({"by_samples": False, **state}, "by_samples", bool)
        saved = _read_weights(state, numbers, len(self.sources)), by_samples
        if saved == (self.weights_by_step, self.by_samples):
            return resumed
        return resumed._changed(self._new_phases(global_batch), self._unit(global_batch))

    def _match_sources(self, sources: Sequence[SourceIdentity], *, force: bool) -> list[int]:
        """Return the number of the source of this run that equals each source of a state."""
        numbers: list[int] = []
        for source in sources:
            others = [number for number in range(len(self.sources)) if number not in numbers]
            equal = [n for n in others if not source.differences(self.sources[n], self.given, force=force)]
            if not equal:
                expected = [current.to_dict() for current in self.sources]
                problem = f"the state has a source {source.to_dict()}, which is none of this run's: {expected}"
                raise StateError(problem, "open all sources as they were; give a source that you drop the weight 0")
            numbers.append(equal[0])
        return numbers


class Cursor(NamedTuple):
    """How far a consumer is: the state `start`, and the `steps` delivered since, in a pass over `share` if one began.

    DataLoader workers are consumers like ranks. `ahead`: the number of steps by which this one is ahead of the state.
    `before`: the steps of the run before `start`. `loaded`: `start` is a state that was loaded.
    """

    start: RunState
    before: int = 0
    loaded: bool = False
    share: EpochShare = None  # type: ignore[assignment]  # until a pass begins
    ahead: int = 0
    steps: int = 0

    @property
    def total(self) -> int:
        """The steps of the run."""
        return self.before + self.steps

    @property
    def position(self) -> int:
        """The global position of this consumer's next step."""
        return self.share.walk(self.start.position + self.ahead * self.share.global_batch, self.steps)

    @property
    def step(self) -> int:
        """The number of this consumer's next step, from epoch 0 on; with `max_tokens=` from the start of its epoch."""
        return self.share.steps_before + self.share.steps_between(0, self.position)

    @property
    def steps_left(self) -> int:
        """The number of steps of all ranks from this consumer's next one on."""
        share = self.share
        parts = share.parts(self.position)
        return sum(
            share.global_steps(start) if stop is None else share.steps_between(start, stop) for start, stop in parts
        )

    @property
    def state(self) -> RunState:
        """The state here; with workers, only this worker resumes there."""
        if not self.steps:
            return self.start
        share, position = self.share, self.position
        if self.ahead and share.global_steps(position):
            position -= self.ahead * share.global_batch
        state = self.start.moved(position, share)
        if self.start.workers == 1:
            return state
        return replace(state, inside=True, ranks=share.world.size // self.start.workers, batch=share.batch)


def _read_progress(state: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a state that change during a run. Raises `StateError` for missing and invalid values."""
    state = {"ranks": 0, "batch": 0, "inside": False, "skipped": [], **state}
    remainder = read_value(state, "remainder", str)
    if remainder not in REMAINDERS:
        raise StateError(f"the state's remainder is {remainder!r}, not one of {', '.join(REMAINDERS)}", _NEW_RUN)
    numbers = {name: read_value(state, name, int) for name in ("seed", *PROGRESS_NAMES)}
    most = max(numbers[name] for name in PROGRESS_NAMES)
    if min(numbers.values()) < 0 or not numbers["extra"] < numbers["workers"] or most >= LARGEST:
        raise StateError(f"the state {state} is invalid", _NEW_RUN)
    skipped = tuple(Gap(*gap) for gap in read_list(state, "skipped", [(int, int, int)]))
    return {"remainder": remainder, **numbers, "inside": read_value(state, "inside", bool), "skipped": skipped}


def _read_joined(state: dict[str, Any]) -> tuple[tuple[str, int, str], ...]:
    joined = read_value({"joined": [], **state}, "joined", list)
    for each in joined:
        if not isinstance(each, list) or list(map(type, each)) != [str, int, str]:
            raise StateError(f"the state's joined is {joined!r:.120}, which is invalid", _NEW_RUN)
    return tuple(map(tuple, joined))


_BUCKET = ("steps", "positions")


def _read_bucket(state: dict[str, Any]) -> tuple[int, int] | None:
    if "bucket" not in state:
        return None
    values = read_value(state, "bucket", dict)
    steps, positions = (read_value(values, name, int) for name in _BUCKET)
    if min(steps, positions) < 1:
        raise StateError(f"the state's bucket is {values!r:.120}, which is invalid", _NEW_RUN)
    return steps, positions


def read_list(state: dict[str, Any], name: str, shape: Any) -> Any:
    """Return a list of a state. Raises `StateError` if the value does not have the shape, see `_has_shape`."""
    value = read_value(state, name, list)
    if not _has_shape(value, shape):
        raise StateError(f"the state's {name} is {value!r:.120}, which is invalid", _NEW_RUN)
    return value


def _has_shape(value: Any, shape: Any) -> bool:
    """Return whether a value has a shape: `int` is one >= 0 of 64 bits, `[s]` any list, `(s, t)` one of two."""
    if shape is int:
        return type(value) is int and 0 <= value < LARGEST
    if not isinstance(value, list) or (isinstance(shape, tuple) and len(shape) != len(value)):
        return False
    return all(map(_has_shape, value, shape if isinstance(shape, tuple) else repeat(shape[0])))


def read_value(state: dict[str, Any], name: str, *types: type) -> Any:
    """Return a value of a state. Raises `StateError` if it is missing or of another type."""
    if name not in state:
        raise StateError(f"the state has no {name!r}", _NEW_RUN)
    value = state[name]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        expected = " or ".join(kind.__name__ for kind in types)
        raise StateError(f"the state's {name} is {value!r}, not of type {expected}", _NEW_RUN)
    return value


def _read_phases(state: dict[str, Any], numbers: Sequence[int]) -> tuple[Phase, ...]:
    """Return the phases of a state. `numbers`: the number among this run's sources of each of the state's."""
    from streamloader.order.mixture import MAX_PARTS, Phase

    phases = read_list(state, "phases", [(int, int, [int], [int])])
    valid = all(
        unit
        and 0 < sum(weights) <= MAX_PARTS + len(weights)
        and len(weights) == len(sources) == len(set(sources))
        and max(sources) < len(numbers)
        for _, unit, weights, sources in phases
    ) and all(after[0] > before[0] and not (after[0] - before[0]) % before[1] for before, after in pairwise(phases))
    if not phases or phases[0][0] or not valid:
        raise StateError(f"the state's phases {phases!r:.120} of {len(numbers)} sources are invalid", _NEW_RUN)
    read = (Phase(start, unit, tuple(weights), tuple(numbers[i] for i in ids)) for start, unit, weights, ids in phases)
    return tuple(read)


def _read_weights(state: dict[str, Any], numbers: Sequence[int], count: int) -> Weights:
    """Return the weights of a state from each step on, for this run's sources; `numbers` as in `_read_phases`."""
    weights_by_step = []
    for step, weights in read_list(state, "wishes", [(int, (int,) * len(numbers))]):
        by_source = dict(zip(numbers, weights, strict=True))
        weights_by_step.append((step, tuple(by_source.get(source, 0) for source in range(count))))
    return tuple(weights_by_step)


def check_mixture_options(stop: str, batches: str, unit: int | None) -> None:
    """Raise `UsageError` for invalid options of a mixture."""
    if stop not in ("first", "last"):
        raise UsageError(f"stop={stop!r}", 'choose "first" or "last"')
    if batches not in ("mixed", "homogeneous"):
        raise UsageError(f"batches={batches!r}", 'choose "mixed" or "homogeneous"')
    if unit is not None and batches == "homogeneous":
        raise UsageError(f"unit={unit} with homogeneous batches", "leave it out: a turn is a whole batch")
