"""`StreamingDataset` and `Mixture`: sharded, shuffled datasets on object storage as a torch `IterableDataset`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from streamloader.engine.dataset import Dataset
from streamloader.errors import BatchError, FieldError, MixtureError
from streamloader.options import Remainder, Shuffle, is_whole
from streamloader.order.state import Batches, check_mixture_options
from streamloader.pytorch.arguments import Arguments, DecodeChoice, PackChoice, Source, StepChoice, WhereChoice
from streamloader.pytorch.base import Streamed
from streamloader.pytorch.distributed import WorldChoice
from streamloader.pytorch.tensors import numbers
from streamloader.stats import BatchReport

if TYPE_CHECKING:
    from streamloader.order.mixture import Stop


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
    `steps_per_epoch`: each `for` yields so many batches, and resumes where the last one stopped.
    `world`: (rank, size), a process group, or a `DeviceMesh` with the names of its data-parallel dimensions,
    `(mesh, "dp")`; default torch.distributed's, else the launcher's environment.
    `memory`: bytes this rank's loader may use, besides Python and torch, also as "2GiB"; default what the window needs.
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
        given = Arguments(
            *(batch_size, remainder, with_index, skip_steps, steps_per_epoch, on_batch),
            *(fields, decode, pack, transform, transform_workers, memory),
        )
        source = Source(url, split, where, storage_options)
        super().__init__([source], given, shuffle=shuffle, seed=seed, world=world)
        if (batch_size or 1) > max(1, self.num_samples):
            samples = f"{self.num_samples} samples of {self._datasets[0].store.url}"
            raise BatchError(f"batch_size={batch_size} is more than the {samples}", "choose a smaller one")

    @property
    def num_samples(self) -> int:
        """The samples of the dataset that take part, over all ranks."""
        return self._datasets[0].num_samples

    def samples(self, epoch: int, step: int, rank: int | None = None, *, workers: int = 1) -> torch.Tensor:
        """Return the numbers of the samples that a step of an epoch delivers, as `index` has them; reads nothing.

        int64 (rows,): of one `rank`, or of all, one after the other. Steps count from 0 in each epoch. Give the number
        of DataLoader `workers`: the composition of batches depends on it. In an epoch that a loaded state begins in the
        middle, steps lie as they were delivered from there on. Raises `UsageError` for a step that is not there.
        """
        return torch.from_numpy(self._step_numbers(epoch, step, rank, workers))


Weights = Mapping[Any, float]  # of a URL, a Source, or a Mixture


class MixtureSpec(NamedTuple):
    """Sources, and the shares that are wanted of each from a step on: the first from step 0, together 1."""

    sources: tuple[Source, ...]
    shares: tuple[tuple[int, tuple[Fraction, ...]], ...]

    @property
    def whole(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The same in whole numbers."""
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
    shares = {step: exact_shares([changed.get(key, 0) for key in parts]) for step, changed in phases.items()}
    steps = sorted({*shares, *(step for part in parts.values() for step, _ in part.shares)})
    found = []
    for step in steps:
        outer = shares[max(begin for begin in shares if begin <= step)]
        pairs = zip(outer, parts.values(), strict=True)
        found.append((step, tuple(share * inner for share, part in pairs for inner in part.at(step))))
    return MixtureSpec(tuple(one for part in parts.values() for one in part.sources), tuple(found))


def _part(key: Any) -> MixtureSpec:
    nested = getattr(key, "_spec", None)
    if isinstance(nested, MixtureSpec):
        return nested
    if not isinstance(key, str | os.PathLike | Source):
        raise MixtureError(f"a source {key!r:.60}", "give a URL, a Source, or a Mixture")
    return MixtureSpec((key if isinstance(key, Source) else Source(key),), ((0, (Fraction(1),)),))


def check_alike(sources: Sequence[Source], datasets: Sequence[Dataset], with_index: bool) -> None:
    """Raise `MixtureError`, which names the difference, unless all sources have the same fields."""
    fields = datasets[0].fields
    if with_index and "source" in fields:
        raise FieldError("the datasets have a field 'source', and the batch a column of that name", "leave it out")
    for source, dataset in zip(sources, datasets, strict=True):
        if not dataset.num_samples:
            raise MixtureError(f"the source {source.url} has no samples", "leave it out")
        if missing := set(fields) ^ set(dataset.names):
            problem = f"{source.url} and {sources[0].url} do not both have {', '.join(sorted(missing))}"
            raise MixtureError(problem, "name the fields that all sources have in fields=")
        for name, field in fields.items():
            if field != dataset.fields[name]:
                problem = f"{name} is {field} in {sources[0].url} and {dataset.fields[name]} in {source.url}"
                raise MixtureError(problem, "mix datasets with the same fields, or leave this one out with fields=")


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
        given = Arguments(
            *(batch_size, remainder, with_index, skip_steps, steps_per_epoch, on_batch),
            *(fields, decode, pack, transform, transform_workers, memory),
        )
        if remainder == "uneven":
            raise MixtureError('remainder="uneven" of a mixture', 'choose "pad" or "drop": a mixture has no end')
        check_mixture_options(stop, batches, unit)
        self._spec: MixtureSpec = choose_sources(sources, schedule)
        mixture = {"stop": stop, "batches": batches, "unit": unit, "weights_by_step": self._spec.whole}
        super().__init__(self.sources, given, shuffle=shuffle, seed=seed, world=world, **mixture)
        check_alike(self.sources, self._datasets, with_index)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources, those of nested mixtures too; `source` counts them."""
        return self._spec.sources

    def samples(self, epoch: int, step: int, rank: int | None = None, *, workers: int = 1) -> dict[str, torch.Tensor]:
        """Return `source` and `index` of the samples that a step of an epoch delivers; reads nothing.

        As `StreamingDataset.samples` does. Raises `UsageError` for a step that is not there.
        """
        return numbers(self._step_numbers(epoch, step, rank, workers), self._numbers.all_from)
