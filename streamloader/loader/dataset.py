"""Datasets and mixtures that yield numpy arrays. `StreamingDataset` and `Mixture` make tensors of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any

from streamloader.engine.dataset import Dataset
from streamloader.engine.executor import Workers
from streamloader.errors import FieldError, MixtureError, UsageError
from streamloader.format.deleted import read_lengths
from streamloader.format.tables import ADD_LENGTHS
from streamloader.loader.arguments import (
    PIECE_BYTES,
    Arguments,
    BucketChoice,
    ClipsChoice,
    CollateChoice,
    DecodeChoice,
    ExcludeChoice,
    PackChoice,
    Source,
    StepChoice,
    WeightsChoice,
    WhereChoice,
)
from streamloader.loader.base import Loader
from streamloader.options import (
    Cache,
    Channels,
    Join,
    Normalize,
    OnBadSample,
    Patch,
    Remainder,
    Shuffle,
    Window,
    is_whole,
    whole,
)
from streamloader.order.state import Batches, RunState, check_mixture_options
from streamloader.stats import BatchReport

if TYPE_CHECKING:
    from streamloader.order.mixture import Stop


def _those_of(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """Return a dataclass whose fields are those of the arguments that have their names, others by default."""
    return kind(**{field.name: given[field.name] for field in fields_of(kind) if field.name in given})


class NumpyDataset(Loader):
    """Yields what `StreamingDataset` yields, with the same arguments, as numpy arrays. Imports no torch.

    `world`: (rank, size); default the launcher's environment. A batch's arrays are views of the loader's memory, which
    is not used again while a view of it exists. Not for torch's `DataLoader`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Join,
        *,
        batch_size: int | None,
        fields: Sequence[str] | None = None,
        split: str | None = None,
        where: WhereChoice = None,
        exclude: ExcludeChoice = None,
        weights: WeightsChoice = None,
        replacement: bool = True,
        shuffle: bool | Shuffle = True,
        seed: int = 0,
        remainder: Remainder = "pad",
        decode: DecodeChoice = None,
        pack: PackChoice = None,
        transform: Callable[..., Any] | None = None,
        num_workers: Workers = "auto",
        skip_steps: StepChoice = None,
        steps_per_epoch: int | None = None,
        with_index: bool = False,
        world: Any = None,
        memory: int | str | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
        on_error: OnBadSample = "raise",
        max_bad: int | float = 0.01,
        error_log: str | os.PathLike[str] | None = None,
        stall_seconds: float = 120.0,
        collate: CollateChoice = None,
        bucket_by: BucketChoice = None,
        bucket_steps: int = 100,
        max_tokens: int | None = None,
        clips: ClipsChoice = None,
        device: Any = None,
        ahead: int = 2,
        cast: Any = None,
        graph_buffers: bool = False,
        cache: Cache | None = None,
        storage_options: Mapping[str, Any] | None = None,
        sample_axis: str | int | None = None,
        windows: Window | None = None,
        patches: Patch | None = None,
        channels: Channels | Mapping[str, Channels] | None = None,
        decode_cf: bool | Mapping[str, bool] = True,
        strict: bool | None = None,
        normalize: Normalize = None,
        version: int | None = None,
        zarr_format: int | None = None,
    ) -> None:
        given = locals()
        super().__init__([_those_of(Source, given)], _those_of(Arguments, given))

    @property
    def num_samples(self) -> int:
        """The number of selected samples, or of packed rows, over all ranks; with `weights=` the draws of an epoch."""
        return self._datasets[0].num_samples

    @property
    def dropped(self) -> int:
        """The number of documents that `Pack(split=False)` leaves out, since they are longer than a row."""
        packed = self._datasets[0].packed
        return 0 if packed is None else packed.dropped

    @property
    def unused(self) -> dict[str, int]:
        """The elements of each axis of windows and patches that no sample reads; empty for other datasets.

        Windows that would cross a border are left out, and so is the end of an axis that the stride does not reach.
        """
        return getattr(self._datasets[0].arrays, "unused", {})

    @property
    def left_out(self) -> int:
        """The number of windows that were left out, since their times are not the durations of `Window` apart."""
        return getattr(self._datasets[0].arrays, "left_out", 0)

    def samples(self, epoch: int, step: int, rank: int | None = None, *, workers: int = 1) -> Any:
        """Return the sample numbers (`index`) of a step, without reading data.

        Shape (rows,), int64; for windows, the first element of each. Those of one `rank`, or of all ranks in order.
        Steps count from 0 in each epoch. Give the number of DataLoader `workers`, which determines the composition of
        batches. If a loaded state begins within the epoch, steps are aligned with the steps after it. Raises
        `UsageError` for a step that the epoch does not have.
        """
        return self._convert(self._format.numbers(self._step_numbers(epoch, step, rank, workers)))["index"]


Weights = Mapping[Any, float]  # of a URL, a Source, or a mixture
# the share of each source (with sum 1), by the step or what else a schedule counts from which they apply, the first 0
Shares = tuple[tuple[int, tuple[Fraction, ...]], ...]


def _at_step(by_step: Sequence[tuple[int, tuple[Any, ...]]], step: int) -> tuple[Any, ...]:
    return [values for begin, values in by_step if begin <= step][-1]


def choose_sources(
    weights: Weights, schedule: Mapping[int, Weights] | None, schedule_by: str = "steps"
) -> tuple[tuple[Source, ...], Shares]:
    """Return the sources of a mixture, nested ones flattened, and shares. Raises `MixtureError` if it is invalid."""
    from streamloader.order.mixture import exact_shares

    if not isinstance(weights, Mapping) or not weights:
        raise MixtureError(f"a mixture of {weights!r:.60}", "give a weight for each source: Mixture({a: 0.7, b: 0.3})")
    if not isinstance(schedule_by, str):
        raise UsageError(f"schedule_by={schedule_by!r:.60}", "choose 'steps', 'samples', or a field as 'tokens'")
    parts = {key: _part(key, schedule_by) for key in weights}
    phases = {0: weights, **dict(schedule or {})}
    for step, changed in phases.items():
        unknown = [key for key in changed if key not in parts] if isinstance(changed, Mapping) else [changed]
        if not is_whole(step, 0) or unknown:
            remedy = f"give weights of the mixture's own sources, by whole {schedule_by}"
            raise MixtureError(f"schedule={{{step!r}: {changed!r:.60}}}", remedy)
    shares = {int(step): exact_shares([changed.get(key, 0) for key in parts]) for step, changed in phases.items()}
    steps = sorted({*shares, *(step for _, inner in parts.values() for step, _ in inner)})
    flattened = []
    for step in steps:
        outer = shares[max(begin for begin in shares if begin <= step)]
        pairs = zip(outer, parts.values(), strict=True)
        flattened.append((step, tuple(share * each for share, (_, inner) in pairs for each in _at_step(inner, step))))
    return tuple(source for inner, _ in parts.values() for source in inner), tuple(flattened)


def mean_length(dataset: Dataset, name: str) -> Fraction:
    """Return the mean length of the samples of a variable-length field, of a selection by the table of lengths.

    Of packed rows it is the mean number of their elements without padding.

    Raises `FieldError` if there is no such field, or for a selection no table of lengths.
    """
    if dataset.packed is not None and name in dataset.names:
        return Fraction(dataset.packed.real, len(dataset.packed))
    side, rows, name = dataset.side(name)
    layout = side.manifest.fields.get(name)
    if dataset.arrays is not None or layout is None or layout.field.fixed:
        problem = f"{side.store.url} has no variable-length field {name!r} to weigh by"
        known = (
            [] if dataset.arrays is not None else [n for n, of in side.manifest.fields.items() if not of.field.fixed]
        )
        remedy = f"name one of {', '.join(known) or 'none'}; schedule_by= also takes 'steps' and 'samples'"
        raise FieldError(problem, remedy)
    total = layout.nbytes
    if any(each is not None for each in (dataset.selection, side.remaining, rows)):
        if name not in side.manifest.lengths:
            problem = f"{side.store.url} has no table of lengths of field {name!r}, which weighing a selection needs"
            raise FieldError(problem, f"{ADD_LENGTHS}, or leave where= and exclude= out")
        lengths = read_lengths(side.store, side.manifest, name, side.remaining)
        lengths = lengths if rows is None else lengths[rows]
        selection, piece = dataset.selection, PIECE_BYTES // 16
        starts = range(0, dataset.num_samples, piece)
        parts = (slice(start, start + piece) for start in starts)
        total = sum(int(lengths[part if selection is None else selection[part]].sum()) for part in parts)
    return Fraction(total, layout.field.item_bytes * max(1, dataset.num_samples))


def _means(datasets: Sequence[Dataset], name: str) -> list[Fraction]:
    return [mean_length(dataset, name) for dataset in datasets]


def _part(key: Any, schedule_by: str) -> tuple[tuple[Source, ...], Shares]:
    if isinstance(key, NumpyMixture):
        if len(key._shares) > 1 and key._schedule_by != schedule_by:
            problem = f"schedule_by={schedule_by!r} with a nested mixture whose schedule counts {key._schedule_by}"
            raise MixtureError(problem, "let the schedules of both count the same")
        return key.sources, key._shares
    if not isinstance(key, str | os.PathLike | Source | Join):
        raise MixtureError(f"a source {key!r:.60}", "give a URL, a Source, a Join, or a Mixture")
    return (key if isinstance(key, Source) else Source(key),), ((0, (Fraction(1),)),)


def check_same_fields(sources: Sequence[Source], datasets: Sequence[Dataset], with_index: bool) -> None:
    """Raise `MixtureError`, which states the difference, unless all sources have the same fields."""
    fields = datasets[0].fields
    if with_index and "source" in fields:
        raise FieldError("the datasets have a field 'source', and so has the batch", "leave it out with fields=")
    for source, dataset in zip(sources, datasets, strict=True):
        if (dataset.arrays is None) != (datasets[0].arrays is None):
            problem = f"{sources[0].url} and {source.url} are not both read as arrays"
            raise MixtureError(problem, "give sample_axis= of each Source, or of none")
        if not dataset.num_samples:
            raise MixtureError(f"the source {source.url} has no samples", "leave it out")
        if missing := set(fields) ^ set(dataset.names):
            problem = f"{source.url} and {sources[0].url} do not both have {', '.join(sorted(missing))}"
            raise MixtureError(problem, "name the fields that all sources have in fields=")
        for name, field in fields.items():
            if field != dataset.fields[name] or _targets(dataset, name) != _targets(datasets[0], name):
                problem = f"{name} is {field} in {sources[0].url} and {dataset.fields[name]} in {source.url}"
                raise MixtureError(problem, "mix datasets with the same fields, or leave this one out with fields=")


def _targets(dataset: Dataset, name: str) -> list[tuple[tuple[int, ...], int]]:
    """Return the shape, and the number of parts, of each column that a field of arrays makes."""
    outputs = () if dataset.arrays is None else dataset.arrays.columns[name].outputs
    return [(output.shape, len(output.parts)) for output in outputs]


class NumpyMixture(Loader):
    """Yields what `Mixture` yields, with the same arguments, as numpy arrays. Imports no torch."""

    def __init__(
        self,
        sources: Weights,
        *,
        batch_size: int | None,
        schedule: Mapping[int, Weights] | None = None,
        schedule_by: str = "steps",
        stop: Stop = "first",
        batches: Batches = "mixed",
        unit: int | None = None,
        weigh: str | None = None,
        fields: Sequence[str] | None = None,
        shuffle: bool | Shuffle = True,
        seed: int = 0,
        remainder: Remainder = "pad",
        decode: DecodeChoice = None,
        pack: PackChoice = None,
        transform: Callable[..., Any] | None = None,
        num_workers: Workers = "auto",
        skip_steps: StepChoice = None,
        steps_per_epoch: int | None = None,
        with_index: bool = False,
        world: Any = None,
        memory: int | str | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
        on_error: OnBadSample = "raise",
        max_bad: int | float = 0.01,
        error_log: str | os.PathLike[str] | None = None,
        stall_seconds: float = 120.0,
        collate: CollateChoice = None,
        clips: ClipsChoice = None,
        device: Any = None,
        ahead: int = 2,
        cast: Any = None,
        graph_buffers: bool = False,
        bucket_by: BucketChoice = None,
        bucket_steps: int = 100,
        max_tokens: int | None = None,
        cache: Cache | None = None,
    ) -> None:
        given = _those_of(Arguments, locals())
        if remainder == "uneven":
            raise MixtureError('remainder="uneven" of a mixture', 'choose "pad" or "drop": a mixture has no end')
        unit = None if unit is None else whole("unit", unit)
        check_mixture_options(stop, batches, unit)
        chosen, self._shares = choose_sources(sources, schedule, schedule_by)
        self._keys, self._schedule_by = tuple(sources), schedule_by
        if weigh is not None and len(chosen) > len(sources):
            raise MixtureError(f"weigh={weigh!r} of nested mixtures", "give it to the inner ones, or name all sources")
        self._weigh, self._unweighed = weigh, self._shares
        super().__init__(chosen, given, stop=stop, batches=batches, unit=unit)
        if len(self._shares) > 1:
            self._check_schedule("a schedule")
        check_same_fields(chosen, self._datasets, with_index)

    def _weighed(self, datasets: Sequence[Dataset]) -> dict[str, Any]:
        from streamloader.order.mixture import position_after, whole_weights

        self._shares = self._of_samples(self._unweighed, datasets)
        counts_elements = self._schedule_by not in ("steps", "samples")
        self._means = _means(datasets, self._schedule_by) if counts_elements else []
        weights_by_step = [(step, whole_weights(each)) for step, each in self._shares]
        if len(weights_by_step) == 1 or self._schedule_by == "steps":
            return {"weights_by_step": tuple(weights_by_step)}
        positions = weights_by_step
        if counts_elements:
            positions = weights_by_step[:1]
            for elements, weights in weights_by_step[1:]:
                positions.append((position_after(elements, positions, self._means), weights))
        return {"weights_by_step": tuple(dict(positions).items()), "by_samples": True}

    def _of_samples(self, shares: Shares, datasets: Sequence[Dataset]) -> Shares:
        """Return the shares of samples; with `weigh=`, those given are of the elements of a field."""
        from streamloader.order.mixture import exact_shares

        if self._weigh is None:
            return shares
        means = _means(datasets, self._weigh)
        if not all(means):
            raise MixtureError(f"all samples of a source have no {self._weigh}", "leave it out, or leave weigh= out")
        counts = ((step, map(Fraction.__truediv__, each, means)) for step, each in shares)
        return tuple((step, tuple(exact_shares(list(each)))) for step, each in counts)

    def _mixed(self) -> dict[str, Any]:
        options = {name: getattr(self._first, name) for name in ("stop", "batches", "unit")}
        return {"shares": self._shares, "schedule_by": self._schedule_by, **options}

    def set_weights(self, weights: Weights, *, at: int | None = None) -> int:
        """Give the sources other weights from `at` on, which counts what `schedule_by` names. Return `at`.

        The keys are those of `Mixture()`, or all are of `sources`; one that is not listed has the weight 0. `at` counts
        from the beginning of the run; None is the earliest: after the batches that were returned, and with `bucket_by=`
        after their window, or their epoch if it is the last window. Later weights of the schedule stay. Call it on all
        ranks after the same batch with the same arguments, otherwise they go on with different orders. The state has
        the weights from now on, so a run that resumes has them, also before `at`. A running pass goes on by a new plan,
        and reads what it had prefetched again.

        If a source has no weight at the end that had one, or has one that had none, the current epoch may begin again
        here. Raises `MixtureError` for invalid weights and an `at` before the earliest, which it names; `UsageError`
        in `on_batch`, and with DataLoader workers.
        """
        from streamloader.order.mixture import whole_weights

        self._check_schedule("set_weights()")
        owners = (self._keys, self._sources) if isinstance(weights, Mapping) else ()
        keys: Sequence[Any] = next((own for own in owners if all(key in own for key in weights)), ())
        if not keys or not (at is None or is_whole(at, 0)):
            problem = f"set_weights({weights!r:.60}, at={at!r:.20})"
            own = "give weights of the mixture's own sources, by the keys of Mixture() or (in a copy) by its `sources`"
            raise MixtureError(problem, f"{own}, and whole {self._schedule_by}")
        _, shares = choose_sources({key: weights.get(key, 0) for key in keys}, None, self._schedule_by)
        if len(shares) > 1:
            raise MixtureError("set_weights() with a nested mixture that has a schedule", "give weights by `sources`")
        ((_, counts),) = self._of_samples(shares, self._datasets)
        chosen = []

        def change(state: RunState) -> RunState:
            earliest, position_of = self._count(state)
            chosen.append(earliest if at is None else int(at))
            if chosen[0] < earliest:
                problem = f"set_weights(at={at}): batches up to {self._schedule_by} {earliest} were returned"
                raise MixtureError(problem, f"give at={earliest} or later, or leave it out")
            return state.with_weights(position_of(chosen[0]), whole_weights(counts), self._iteration.state.epoch)

        self._change_order(change)
        return chosen[0]

    def _check_schedule(self, what: str) -> None:
        """Raise `UsageError` if weights change by steps, whose positions a budget makes known late."""
        if self._options.max_tokens is not None and self._schedule_by == "steps":
            remedy = "let schedule_by= be 'samples', or a field such as 'tokens'"
            raise UsageError(f"{what} by steps with max_tokens=, whose steps have different numbers of samples", remedy)

    def _count(self, state: RunState) -> tuple[int, Callable[[int], int]]:
        """Return how much of what the schedule counts comes before weights may change, and what gives its position."""
        from streamloader.order.mixture import elements_before, position_after

        now, size = state.earliest_change, self._rank.size * (self._options.batch_size or 1)
        if self._schedule_by in ("steps", "samples"):
            unit = size if self._schedule_by == "steps" else 1
            return -(-now // unit), unit.__mul__
        means, numbers = self._means, range(len(self._datasets))
        phases = [(phase.start, [phase.weight(number) for number in numbers]) for phase in state.phases]
        return ceil(elements_before(now, phases, means)), lambda count: position_after(count, phases, means)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for workers, without nested mixtures."""
        nested = any(isinstance(key, NumpyMixture) for key in self._keys)
        return super().__getstate__() | {"_keys": () if nested else self._keys}

    def shares(self, field: str | None = None, *, step: int = 0) -> dict[Source, float]:
        """Return the share of each source in the samples of a step, or in the elements of a variable-length `field`.

        `step` counts what the schedule counts: see `schedule_by`. In a run that has other weights, by a state that was
        loaded or by `set_weights`, the shares are those of the first turn there.
        """
        from streamloader.order.mixture import whole_weights

        state, weights = self._at.state, whole_weights(_at_step(self._shares, step))
        if state.phases and state.phases != self._settled(self._first).phases:
            start, _ = state.turn_at(self._count(state)[1](step))
            _, phase = state.turn_at(start)
            weights = tuple(map(phase.weight, range(len(weights))))
        means = [Fraction(1)] * len(weights) if field is None else _means(self._datasets, field)
        counts = [weight * mean for weight, mean in zip(weights, means, strict=True)]
        total = sum(counts) or 1  # of samples that are all empty
        return {source: float(count / total) for source, count in zip(self.sources, counts, strict=True)}

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources, including those of nested mixtures; `source` is an index into them."""
        return self._sources

    def samples(self, epoch: int, step: int, rank: int | None = None, *, workers: int = 1) -> dict[str, Any]:
        """Return `source` and `index` of the samples of a step, without reading data.

        The arguments are those of `StreamingDataset.samples`. Raises `UsageError` for a step that the epoch lacks.
        """
        return self._convert(self._format.numbers(self._step_numbers(epoch, step, rank, workers)))
