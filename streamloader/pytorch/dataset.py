"""`StreamingDataset` and `Mixture`: shuffled, sharded datasets on object storage as a torch `IterableDataset`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from streamloader.engine.dataset import Dataset
from streamloader.errors import FieldError, MixtureError
from streamloader.format.lengths import LengthTable
from streamloader.options import Channels, Normalize, Patch, Remainder, Shuffle, Window, is_whole, whole
from streamloader.order.state import Batches, check_mixture_options
from streamloader.pytorch.arguments import Arguments, DecodeChoice, PackChoice, Source, StepChoice, WhereChoice
from streamloader.pytorch.base import BaseDataset
from streamloader.pytorch.distributed import WorldChoice
from streamloader.pytorch.tensors import numbers
from streamloader.stats import BatchReport

if TYPE_CHECKING:
    from streamloader.order.mixture import Stop


class StreamingDataset(BaseDataset):
    """Yields batches of a streamloader dataset, in an order that depends only on the seed and the epoch.

    Iterate it, or pass it to `DataLoader(ds, batch_size=None)`. It yields dicts: a tensor for each fixed-shape
    field, lists for bytes and text, `name` and `name_offsets` for ragged fields, `valid` (bool, False for rows
    that pad the last batch) with `remainder="pad"`, and `index` (int64) with `with_index`.

    `batch_size`: the number of samples in a rank's batch; None yields samples, for `DataLoader(ds, batch_size=64)`.
    `fields`: names of the fields to fetch, default all. `split`: the split of a dataset that has splits.
    `where`: the samples to use: a condition on fields with one number per sample
    (`"label == 'cat' and width >= 256"`), a slice, a mask, or sample numbers.
    `shuffle`: True, False, or `Shuffle(window=, lanes=, block=)`. `seed`: below 2^64.
    `remainder`: what happens to the last, incomplete step: "pad", "drop" or "uneven".
    `decode`: how encoded images become tensors: True, a backend's name, a `Decode`, or a dict of these by field.
    `pack`: ragged fields whose documents are packed into rows of one length, `{"tokens": 2049}` or
    `{"tokens": Pack(2049, pad=)}`. `transform(sample[, rng])`: called with each sample, a dict of numpy arrays, bytes
    and str; `rng` is keyed by seed, epoch and position. `transform_workers`: the number of processes that run it.
    `skip_steps`: steps to skip, by epoch: `{0: range(100, 120)}`.
    `steps_per_epoch`: each iteration yields this many batches, and resumes where the last one stopped.
    `world`: (rank, size), a process group, or a `DeviceMesh` with the names of its data-parallel dimensions,
    `(mesh, "dp")`; default torch.distributed's, else the launcher's environment.
    `memory`: bytes that this rank's loader may use, excluding Python and torch, also as "2GiB"; default the window's
    need. `version`: the version of a dataset that was appended to, default the last; a state resumes on its own.
    `on_batch(report)`: called with a `BatchReport` for each batch, for example to log how long training waited.
    `storage_options`: passed to fsspec.

    To read arrays of any Zarr store in place: `sample_axis`: the dimension that samples lie along, by name or number.
    `windows`: a `Window` of several elements of it. `patches`: a `Patch` of other dimensions. `channels`: arrays that
    are stacked into one tensor, `Channels(...)` or a dict of these by name. `decode_cf`: unpack values by their
    attributes, as netCDF's conventions say; in a dict of bools by array, other arrays are True. `strict`: True:
    a missing chunk is an error; None: only if a field has none; False: its elements have the fill value. `zarr_format`:
    2 or 3, if it is not to be found out. `normalize`: (mean, std) by name of an array or a channel,
    for (x - mean) / std as floats; or the path or URL of the file that `streamloader stats` writes; True reads what it
    saved in the dataset. Then `where` selects elements of the sample axis, also by times, `slice("2001-01", None)`.
    All of these read the fields of fixed shape of a streamloader dataset too, without `sample_axis`.

    A complete pass advances the epoch. Raises a `StreamloaderError`: the constructor for invalid arguments, iteration
    at the batch that an error belongs to.
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
        given = Arguments(
            *(batch_size, remainder, with_index, skip_steps, steps_per_epoch, on_batch),
            *(fields, decode, pack, transform, transform_workers, memory),
        )
        source = Source(
            *(url, split, where, storage_options, version),
            sample_axis=sample_axis,
            windows=windows,
            patches=patches,
            channels=channels,
            decode_cf=decode_cf,
            strict=strict,
            normalize=normalize,
            zarr_format=zarr_format,
        )
        super().__init__([source], given, shuffle=shuffle, seed=seed, world=world)

    @property
    def num_samples(self) -> int:
        """The number of selected samples, over all ranks."""
        return self._datasets[0].num_samples

    @property
    def unused(self) -> dict[str, int]:
        """The elements of each axis of windows and patches that no sample reads; empty for other datasets.

        Windows that would cross a border are left out, and so is the end of an axis that the stride does not reach.
        """
        arrays = self._datasets[0].arrays
        return {} if arrays is None else arrays.unused

    @property
    def left_out(self) -> int:
        """The number of windows that were left out, since their times are not the durations of `Window` apart."""
        arrays = self._datasets[0].arrays
        return 0 if arrays is None else arrays.left_out

    def samples(self, epoch: int, step: int, rank: int | None = None, *, workers: int = 1) -> torch.Tensor:
        """Return the sample numbers (`index`) of a step, without reading data.

        Shape (rows,), int64; for windows, the first element of each. Those of one `rank`, or of all ranks in order.
        Steps count from 0 in each epoch. Give the number of DataLoader `workers`, which determines the composition of
        batches. If a loaded state begins within the epoch, steps are aligned with the steps after it. Raises
        `UsageError` for a step that the epoch does not have.
        """
        return numbers(self._step_numbers(epoch, step, rank, workers), (), self._format.indexes)["index"]


Weights = Mapping[Any, float]  # of a URL, a Source, or a Mixture


class MixtureSpec(NamedTuple):
    """The sources of a mixture, and the shares of each (with sum 1) by the step from which they apply, the first 0."""

    sources: tuple[Source, ...]
    shares: tuple[tuple[int, tuple[Fraction, ...]], ...]

    @property
    def weights_by_step(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The shares as integer weights."""
        from streamloader.order.mixture import whole_weights

        return tuple((step, whole_weights(shares)) for step, shares in self.shares)

    def at(self, step: int) -> tuple[Fraction, ...]:
        """Return the shares at a step."""
        return [shares for begin, shares in self.shares if begin <= step][-1]


def choose_sources(weights: Weights, schedule: Mapping[int, Weights] | None) -> MixtureSpec:
    """Return the sources of a mixture, nested ones flattened. Raises `MixtureError` for an invalid mixture."""
    from streamloader.order.mixture import exact_shares

    if not isinstance(weights, Mapping) or not weights:
        raise MixtureError(f"a mixture of {weights!r:.60}", "give a weight for each source: Mixture({a: 0.7, b: 0.3})")
    parts = {key: _part(key) for key in weights}
    phases = {0: weights, **dict(schedule or {})}
    for step, changed in phases.items():
        unknown = [key for key in changed if key not in parts] if isinstance(changed, Mapping) else [changed]
        if not is_whole(step, 0) or unknown:
            remedy = "give weights of the mixture's own sources, by whole steps"
            raise MixtureError(f"schedule={{{step!r}: {changed!r:.60}}}", remedy)
    shares = {int(step): exact_shares([changed.get(key, 0) for key in parts]) for step, changed in phases.items()}
    steps = sorted({*shares, *(step for part in parts.values() for step, _ in part.shares)})
    flattened = []
    for step in steps:
        outer = shares[max(begin for begin in shares if begin <= step)]
        pairs = zip(outer, parts.values(), strict=True)
        flattened.append((step, tuple(share * inner for share, part in pairs for inner in part.at(step))))
    return MixtureSpec(tuple(source for part in parts.values() for source in part.sources), tuple(flattened))


def mean_length(dataset: Dataset, name: str) -> Fraction:
    """Return the mean length of the samples of a variable-length field, of a selection by the table of lengths."""
    layout = dataset.manifest.fields.get(name)
    if dataset.arrays is not None or layout is None or layout.field.fixed:
        problem = f"{dataset.store.url} has no variable-length field {name!r} to weigh by"
        raise FieldError(problem, "name a field like ragged:int32, bytes or text")
    total = layout.nbytes
    if dataset.selection is not None:
        if name not in dataset.manifest.lengths:
            problem = f"{dataset.store.url} has no table of lengths of field {name!r}, which weighing a selection needs"
            raise FieldError(problem, "convert the dataset again, or leave where= out")
        total = int(LengthTable(dataset.store, dataset.manifest, name).read()[dataset.selection.samples].sum())
    return Fraction(total, layout.field.item_bytes * max(1, dataset.num_samples))


def _part(key: Any) -> MixtureSpec:
    nested = getattr(key, "_spec", None)
    if isinstance(nested, MixtureSpec):
        return nested
    if not isinstance(key, str | os.PathLike | Source):
        raise MixtureError(f"a source {key!r:.60}", "give a URL, a Source, or a Mixture")
    return MixtureSpec((key if isinstance(key, Source) else Source(key),), ((0, (Fraction(1),)),))


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


class Mixture(BaseDataset):
    """Yields batches of several datasets with the same fields, in exact proportions: `Mixture({a: 0.7, b: 0.3}, ...)`.

    A key is a URL, a `Source`, or another mixture, whose sources divide its weight in their own proportions.
    Sources take turns of `unit` samples, spread so evenly that the count of each source in any window is off by less
    than two turns; `unit` is 8, or the largest divisor of 8 that divides the global batch.
    `weigh="tokens"`: the weights count the elements of this variable-length field, and not samples; see `shares`.
    `batches="homogeneous"`: each global batch comes from one source. `schedule`: other weights from a step on,
    `{10_000: {a: 0.5, b: 0.5}}`; a source that is not listed has the weight 0.

    Each source has its own epochs, each with its own order. An epoch of the mixture ends when the first source
    (`stop="first"`) or the last one (`stop="last"`) completes an epoch; the others continue where they are. The last
    step is padded with the samples that follow, False in `valid` (`remainder="pad"`), or dropped ("drop").

    `with_index=True` adds `source`, the index in `sources`, and `index`, the sample's number within the source.
    Everything else is as in `StreamingDataset`: the same global batches at every world size, exact resume. A mixture
    with more sources or other weights may load a state, and uses them from there on.
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
        weigh: str | None = None,
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
        given = Arguments(
            *(batch_size, remainder, with_index, skip_steps, steps_per_epoch, on_batch),
            *(fields, decode, pack, transform, transform_workers, memory),
        )
        if remainder == "uneven":
            raise MixtureError('remainder="uneven" of a mixture', 'choose "pad" or "drop": a mixture has no end')
        unit = None if unit is None else whole("unit", unit)
        check_mixture_options(stop, batches, unit)
        self._spec: MixtureSpec = choose_sources(sources, schedule)
        self._given = self._spec
        if weigh is not None and len(self._spec.sources) > len(sources):
            raise MixtureError(f"weigh={weigh!r} of nested mixtures", "give it to the inner ones, or name all sources")
        self._weigh = weigh
        mixture = {"stop": stop, "batches": batches, "unit": unit, "weights_by_step": self._spec.weights_by_step}
        super().__init__(self.sources, given, shuffle=shuffle, seed=seed, world=world, **mixture)
        check_same_fields(self.sources, self._datasets, with_index)

    def _weighed(self, datasets: Sequence[Dataset]) -> dict[str, Any]:
        from streamloader.order.mixture import exact_shares

        if self._weigh is None:
            return {}
        means = [mean_length(dataset, self._weigh) for dataset in datasets]
        if not all(means):
            raise MixtureError(f"all samples of a source have no {self._weigh}", "leave it out, or leave weigh= out")
        phases = [
            (step, tuple(share / mean for share, mean in zip(shares, means, strict=True)))
            for step, shares in self._given.shares
        ]
        self._spec = self._given._replace(shares=tuple((step, tuple(exact_shares(each))) for step, each in phases))
        return {"weights_by_step": self._spec.weights_by_step}

    def shares(self, field: str | None = None, *, step: int = 0) -> dict[Source, float]:
        """Return the share of each source in the samples of a step, or in the elements of a variable-length `field`."""
        weights = [weights for begin, weights in self._first.weights_by_step if begin <= step][-1]
        means = [1 if field is None else mean_length(dataset, field) for dataset in self._datasets]
        counts = [weight * mean for weight, mean in zip(weights, means, strict=True)]
        total = sum(counts) or 1  # of samples that are all empty
        return {source: float(count / total) for source, count in zip(self.sources, counts, strict=True)}

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources, including those of nested mixtures; `source` is an index into them."""
        return self._spec.sources

    def samples(self, epoch: int, step: int, rank: int | None = None, *, workers: int = 1) -> dict[str, torch.Tensor]:
        """Return `source` and `index` of the samples of a step, without reading data.

        The arguments are those of `StreamingDataset.samples`. Raises `UsageError` for a step that the epoch lacks.
        """
        return numbers(self._step_numbers(epoch, step, rank, workers), self._format.firsts, self._format.indexes)
