"""Checks the arguments of `StreamingDataset` and `Mixture`, and derives their defaults from the manifest."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from functools import partial
from itertools import chain
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.dataset import Dataset
from streamloader.engine.executor import Workers
from streamloader.errors import BatchError, FieldError, UsageError
from streamloader.format.clips import Clipped, read_clips
from streamloader.format.deleted import read_lengths
from streamloader.format.geometry import BLOCKS, nearest_power, next_power, order_pin
from streamloader.format.manifest import Field, FieldLayout, Manifest, OrderPin
from streamloader.format.tables import ADD_LENGTHS, LengthTable
from streamloader.loader.batches import OFFSETS
from streamloader.options import (
    IMAGENET,
    ON_BAD_SAMPLE,
    REMAINDERS,
    Cache,
    Clips,
    Collate,
    Decode,
    Join,
    OnBadSample,
    Option,
    Pack,
    Pad,
    Remainder,
    Sampling,
    Shuffle,
    is_whole,
    whole,
)
from streamloader.order.budget import PARTS, Budget, step_scale
from streamloader.order.epoch_order import OrderParams
from streamloader.order.schedule import EpochShare, Gap, Ints, World, skip_steps
from streamloader.order.state import RunState
from streamloader.stats import BatchReport
from streamloader.storage.url import parse_location

if TYPE_CHECKING:  # imported when a dataset needs it
    from streamloader.images.decode import ImageDecoder
    from streamloader.order.packing import Packed
    from streamloader.order.weights import Selection
# the options of `Decode` that name fields, and the last axes that these may have
_TARGETS = {"boxes": ((4,),), "keypoints": ((2,), (3,)), "masks": ((),)}
# a rule for all values of different sizes, one for each field, or a function of the samples of a batch
CollateChoice = None | Collate | Mapping[str, Collate] | Callable[..., Any]
# a field of variable length, or a function from the lengths of samples by field to one number for each
BucketChoice = None | str | Callable[[Mapping[str, NDArray[np.int64]]], Any]
ClipsChoice = None | Mapping[str, Clips]  # of one field of videos
PackChoice = None | Mapping[str, "Pack | int"]
# step numbers by epoch: {3: range(100, 120)}
StepChoice = None | Mapping[int, Iterable[int]]
DecodeChoice = None | bool | str | Decode | Mapping[str, "Decode | str | bool"]
# a condition, a range as text, a slice, a mask with a bool per sample, or sample numbers; masks and numbers may be
# tensors. The samples of arrays are the elements of their sample axis, and slices may have labels of times.
WhereChoice = None | str | slice | Sequence[bool] | Sequence[int] | np.ndarray[Any, Any]
# sample numbers, also as a tensor; or the path or URL of a file, or of a folder if it ends in "/"
ExcludeChoice = None | str | os.PathLike[str] | Sequence[int] | np.ndarray[Any, Any]
# a field with the weight of each sample, or the path or URL of a file of weights; "balanced:field"; {"field": {class:
# weight}}; or a number for each sample of the dataset, also as a tensor
WeightsChoice = (
    None | str | os.PathLike[str] | Mapping[str, Mapping[Any, float]] | Sequence[float] | np.ndarray[Any, Any]
)


@dataclass(frozen=True, eq=False)
class Source(Sampling):
    """A dataset, or a part of one, in a `Mixture` or a `Join`. The arguments are those of `StreamingDataset`.

    Its URL is opened when the mixture or the dataset is created. Raises `UsageError` for invalid values.
    """

    url: str | os.PathLike[str] | Join
    split: str | None = None
    where: WhereChoice = None
    storage_options: Mapping[str, Any] | None = field(default_factory=dict, repr=False)  # may have secrets
    version: int | None = None
    exclude: ExcludeChoice = None
    weights: WeightsChoice = None
    replacement: bool = True

    def __repr__(self) -> str:
        """Return the URL and the arguments that are given, cut at 60 characters each, without storage options."""
        given = [one.name for one in fields_of(self) if one.repr and getattr(self, one.name) is not one.default]
        given.sort(key=("url", "split").__contains__, reverse=True)
        return f"Source({', '.join(f'{name}={getattr(self, name)!r:.60}' for name in given)})"


@dataclass(frozen=True)
class Arguments(Option):
    """The arguments that `StreamingDataset` and `Mixture` share; see `StreamingDataset`.

    Raises `BatchError` and `UsageError` for values that are invalid for any dataset.
    """

    shuffle: bool | Shuffle
    seed: int
    world: Any
    batch_size: int | None
    remainder: Remainder
    with_index: bool
    skip_steps: StepChoice
    steps_per_epoch: int | None
    on_batch: Callable[[BatchReport], None] | None
    fields: Sequence[str] | None
    decode: DecodeChoice
    pack: PackChoice
    transform: Callable[..., Any] | None
    num_workers: Workers
    memory: int | str | None
    on_error: OnBadSample
    max_bad: int | float
    error_log: str | os.PathLike[str] | None
    stall_seconds: float
    collate: CollateChoice
    bucket_by: BucketChoice = None
    bucket_steps: int = 100
    max_tokens: int | None = None
    clips: ClipsChoice = None
    device: Any = None
    ahead: int = 2
    cast: Any = None
    graph_buffers: bool = False
    cache: Cache | None = None

    def _validate(self) -> None:
        size, steps = self.batch_size, self.steps_per_epoch
        if size is not None and not is_whole(size):
            raise BatchError(f"batch_size={size!r}", "give a whole number of at least 1, or None for samples")
        if self.remainder not in REMAINDERS:
            raise UsageError(f"remainder={self.remainder!r}", f"choose one of {', '.join(REMAINDERS)}")
        if self.on_batch is not None and not callable(self.on_batch):
            raise UsageError(f"on_batch={self.on_batch!r} cannot be called", "give a function of a BatchReport")
        transform, workers = self.transform, self.num_workers
        if transform is not None and not callable(transform):
            raise UsageError(f"transform={transform!r} cannot be called", "give a function of a sample")
        if workers != "auto" and not is_whole(workers, 0):
            raise UsageError(f"num_workers={workers!r}", "give a number of processes, 0 for threads, or 'auto'")
        self._validate_errors()
        self._validate_buckets()
        self._validate_device()
        if callable(self.collate) and size is None:
            raise UsageError("collate= with batch_size=None", "give DataLoader(dataset, batch_size=, collate_fn=)")
        if steps is None:
            return
        whole("steps_per_epoch", steps)
        if size is None:
            raise UsageError(f"steps_per_epoch={steps} with batch_size=None", "give a batch_size: a step is a batch")
        if self.remainder == "uneven":  # ranks have different numbers of steps
            raise UsageError(f"steps_per_epoch={steps} with remainder='uneven'", "choose 'pad' or 'drop'")

    def _validate_buckets(self) -> None:
        whole("bucket_steps", self.bucket_steps, 2)
        if self.max_tokens is not None:
            whole("max_tokens", self.max_tokens)
        if self.bucket_by is None:
            if self.max_tokens is not None:
                problem = f"max_tokens={self.max_tokens} without bucket_by="
                raise UsageError(problem, "name the field whose elements it counts: bucket_by='tokens'")
            return
        if not isinstance(self.bucket_by, str) and not callable(self.bucket_by):
            remedy = "give a field of variable length, or a function of the lengths by field"
            raise UsageError(f"bucket_by={self.bucket_by!r:.60}", remedy)
        if self.batch_size is None or self.shuffle is False:
            problem = (
                f"bucket_by={self.bucket_by!r:.60} with {'shuffle=False' if self.batch_size else 'batch_size=None'}"
            )
            raise UsageError(problem, "give a batch_size, and shuffle: it changes which samples a batch has")

    def _validate_device(self) -> None:
        whole("ahead", self.ahead)
        if not isinstance(self.cache, Cache | None):
            raise UsageError(f"cache={self.cache!r:.60}", "give sl.Cache('/local/disk', limit='200GiB')")
        if not isinstance(self.graph_buffers, bool):
            raise UsageError(f"graph_buffers={self.graph_buffers!r:.60}", "give True or False")
        if self.device is None and self.graph_buffers:
            raise UsageError("graph_buffers=True without device=", "give device='cuda'")
        if self.device is not None and self.batch_size is None:
            remedy = "give a batch_size, or copy the batches of a DataLoader: sl.to_device(DataLoader(...), device)"
            raise UsageError(f"device={self.device!r:.60} with batch_size=None", remedy)

    def _validate_errors(self) -> None:
        most, seconds = self.max_bad, self.stall_seconds
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
            raise UsageError(f"stall_seconds={seconds!r:.60}", "give seconds above 0, or math.inf for no message")
        if self.on_error not in ON_BAD_SAMPLE:
            raise UsageError(f"on_error={self.on_error!r:.60}", f"choose one of {', '.join(ON_BAD_SAMPLE)}")
        if not is_whole(most, 0) and not (isinstance(most, float) and 0 <= most <= 1):
            raise UsageError(f"max_bad={most!r:.60}", "give a number of samples, or a share from 0.0 to 1.0")
        if self.on_error == "replace" and self.batch_size is None:
            remedy = "choose 'mask', or give a batch_size: another sample of the batch takes the place of a bad one"
            raise UsageError("on_error='replace' with batch_size=None", remedy)
        if self.error_log is not None and self.on_error == "raise":
            remedy = "choose on_error='mask' or 'replace', or leave error_log= out"
            raise UsageError(f"error_log={self.error_log!r} with on_error='raise'", remedy)


def read_shuffle(shuffle: object) -> Shuffle:
    """Return `shuffle=` as a `Shuffle`. Raises `UsageError` unless it is a bool or a `Shuffle`."""
    if isinstance(shuffle, Shuffle):
        return shuffle
    if isinstance(shuffle, bool):
        return Shuffle()
    window = f"window={shuffle}" if isinstance(shuffle, int) and shuffle > 1 else "window=, lanes=, block="
    problem = f"shuffle={shuffle!r:.60} is neither a bool nor a Shuffle"
    raise UsageError(problem, f"give True, False, or Shuffle({window})")


def lengths_of(dataset: Dataset, name: str) -> NDArray[np.int64]:
    """Return the length of every sample of a field: rows of ragged ones, bytes of others. Raises `FieldError`."""
    side, rows, name = dataset.side(name)
    lengths_table(side, name)
    lengths = read_lengths(side.store, side.manifest, name, side.remaining)
    lengths //= side.manifest.fields[name].field.item_bytes
    return lengths if rows is None else lengths[rows]


def lengths_table(dataset: Dataset, name: str) -> LengthTable:
    """Return the table of lengths of a field. Raises `FieldError` if there is none."""
    manifest = dataset.manifest
    if dataset.arrays is not None or name not in manifest.lengths:
        problem = f"{dataset.store.url} has no table of lengths of field {name!r}"
        layout, fields = manifest.fields.get(name), ", ".join(manifest.lengths) or "none"
        lacks = dataset.arrays is None and layout is not None and layout.can_have_lengths
        raise FieldError(problem, ADD_LENGTHS if lacks else f"fields with one are {fields}")
    return LengthTable(dataset.store, manifest, name)


def choose_lengths(choice: BucketChoice, dataset: Dataset) -> NDArray[np.uint32] | None:
    """Return the lengths by which samples are put in buckets, uint32 of shape (all samples,).

    Raises `FieldError` for a field without a table of lengths, `UsageError` for a function that returns something else.
    """
    if choice is None:
        return None
    if isinstance(choice, str):
        values: Any = lengths_of(dataset, choice)
    else:
        own = () if dataset.arrays is not None else dataset.manifest.lengths
        sides = {name: dataset.side(name) for right, _ in dataset.joined for name in right.names}
        names = [*own, *(name for name, (right, _, stored) in sides.items() if stored in right.manifest.lengths)]
        values = np.asarray(choice({name: lengths_of(dataset, name) for name in names}))
    count = dataset.manifest.num_remaining
    whole_numbers = values.dtype.kind in "iuf" and np.all((values >= 0) & (values < 2**32) & (values % 1 == 0))
    if values.shape != (count,) or not whole_numbers:
        problem = f"bucket_by= returned {values.dtype}{list(values.shape)} for {count} samples"
        raise UsageError(problem, "return one whole number from 0 to 2**32 - 1 for each sample")
    return np.ascontiguousarray(values, np.uint32)


def choose_buckets(given: Arguments, datasets: Sequence[Dataset], batches: str | None) -> dict[str, Any]:
    """Return the values of `RunState` that say how samples are put in buckets; a budget cuts the steps of these.

    `batches`: those of a mixture. A turn of a homogeneous one is a step of the buckets.
    """
    if datasets[0].bucket_digest is None:
        return {}
    if given.max_tokens is None:
        return {"bucket": (given.bucket_steps, 0)}
    if batches == "homogeneous":
        return {"bucket": (given.bucket_steps, 0), "bucket_scale": (1, 1)}
    lengths = [dataset.lengths for dataset in datasets if dataset.lengths is not None and dataset.lengths.size]
    means = [float(each.mean()) for each in lengths]
    fitting = given.max_tokens * len(means) / max(1.0, sum(means))
    scale = step_scale(given.batch_size or 1, fitting, whole=batches is not None)
    return {"bucket": (max(2, given.bucket_steps // PARTS), 0), "bucket_scale": scale}


def choose_budget(given: Arguments, rules: Mapping[str, Collate]) -> Budget | None:
    """Return the budget of `max_tokens=`, which keeps where the steps of the latest two epochs start."""
    if given.max_tokens is None:
        return None
    kept: dict[EpochShare, Ints] = {}

    def starts(share: EpochShare) -> Ints:
        every: Any = share  # a dataclass
        first = replace(every, world=World(0, share.world.size), gaps=(), origin=0)
        key = replace(first, budget=None)  # else the starts would hold themselves
        found = kept.get(key)  # the planner's thread and that of the training loop are here together
        if found is None:
            found = first.budget_starts()
            for old in list(kept)[:-1]:
                kept.pop(old, None)
            kept[key] = found
        return found

    return given.max_tokens, partial(padded_lengths, given.bucket_by, rules), starts


def padded_lengths(choice: BucketChoice, rules: Mapping[str, Collate], lengths: Ints) -> Ints:
    """Return the lengths to which values of a field of buckets are padded if the longest have some lengths."""
    rule = rules.get(choice) if isinstance(choice, str) else None
    if not isinstance(rule, Pad) or rule.to is None:
        return lengths
    found, number = np.unique(lengths, return_inverse=True)
    padded = [rule.padded(length) or length for length in found.tolist()]
    return np.array(padded, np.int64)[number].reshape(lengths.shape)


def check_budget(given: Arguments, dataset: Dataset, rules: Mapping[str, Collate]) -> None:
    """Raise `BatchError` for a selected sample that alone has more than `max_tokens` elements with its padding."""
    if given.max_tokens is None or dataset.lengths is None or not dataset.num_samples:
        return
    chosen: Any = getattr(dataset.selection, "drawn_from", dataset.selection)
    size = PIECE_BYTES // 16
    parts = [slice(None)] if chosen is None else (chosen[at : at + size] for at in range(0, len(chosen), size))
    longest = max(int(dataset.lengths[part].max()) for part in parts)
    padded = int(padded_lengths(given.bucket_by, rules, np.array([longest]))[0])
    if padded > given.max_tokens:
        problem = f"max_tokens={given.max_tokens}, but a sample of {dataset.store.url} has {padded} with its padding"
        raise BatchError(problem, "raise max_tokens=, or leave longer samples out: where= takes a mask of lengths")


def choose_clips(choice: ClipsChoice, dataset: Dataset, *, chosen: bool) -> Dataset:
    """Return the dataset whose samples are the clips of its selected videos.

    It has no field of indexes, unless the fields were `chosen`. Raises `UsageError` for samples that are no selection
    of videos, and as `read_clips`.
    """
    if choice is None:
        return dataset
    given = list(choice.items()) if isinstance(choice, Mapping) else []
    if len(given) != 1 or not isinstance(given[0][1], Clips):
        raise UsageError(f"clips={choice!r:.80}", "name one field of videos: clips={'video': sl.Clips(16, stride=2)}")
    ((name, clips),) = given
    if dataset.arrays is not None or dataset.weights_digest is not None:
        other = "weights=" if dataset.arrays is None else "windows or patches"
        raise UsageError(f"clips= with {other}", "leave one of them out; where= and exclude= select videos")
    opened = dataset.store, dataset.manifest, dataset.remaining
    clipped = read_clips(opened, name, clips, dataset.selection)
    names = tuple(each for each in dataset.names if chosen or each != f"{name}_index")
    if name not in names:
        raise FieldError(f"clips= names {name!r}, which is not fetched", f"add it to fields={list(names)}")
    columns = {f"{name}_start", f"{name}_times"}
    if taken := sorted(columns & set(names)):
        raise FieldError(f"the batch has a column {taken[0]!r} of clips, and the dataset a field", _TWICE)
    return replace(dataset, selection=clipped, names=names)


def sides_of(source: Source, join: Join) -> tuple[Source, Source]:
    """Return the two sources of a join, which `source` has as its URL: its other arguments are those of the left one.

    Storage options are also those of the right one, if that is a URL of the same protocol. Raises `UsageError` for
    arguments that both `source` and the left one have.
    """
    if not isinstance(join.left, Source):
        left = replace(source, url=join.left)
    else:
        left, plain = join.left, Source("")
        names = [each.name for each in fields_of(Source) if each.name not in ("url", "storage_options")]
        given = [name for name in names if getattr(source, name) is not getattr(plain, name)]
        if given := given + ["storage_options"] * bool(source.storage_options):
            raise UsageError(f"{', '.join(given)} of a Join whose left side is a Source", "give them to the Source")
    if isinstance(join.right, Source):
        return left, join.right
    options, urls = leftmost(left).storage_options, (leftmost(left).url, join.right)
    protocols = {parse_location(url, None).protocol for url in urls}  # type: ignore[arg-type] # no joins
    return left, Source(join.right, storage_options=options if len(protocols) == 1 else {})


def leftmost(source: Source) -> Source:
    """Return the source whose samples a source has: that of a join is its left one."""
    while isinstance(source.url, Join):
        source = sides_of(source, source.url)[0]
    return source


def choose_fields(
    known: Mapping[str, FieldLayout], fields: Sequence[str] | None, columns: Sequence[str]
) -> tuple[str, ...]:
    """Return the fields to fetch. Raises `FieldError` for an unknown field, or one with the name of a batch column."""
    names = tuple(known) if fields is None else choose_names(fields)
    for name in names:
        if name not in known:
            raise FieldError(f"there is no field {name!r}", f"choose from {', '.join(known)}")
        if names.count(name) > 1:
            raise FieldError(f"fields names {name!r} {names.count(name)} times", "name each field once")
    check_names(known, names, columns)
    return names


def choose_names(fields: Sequence[str]) -> tuple[str, ...]:
    """Return the names of fields as a tuple. Raises `FieldError` for a single text."""
    if isinstance(fields, str):
        raise FieldError(f"fields={fields!r}", f"give a list: fields=[{fields!r}]")
    return tuple(fields)


def check_names(known: Mapping[str, FieldLayout], names: Sequence[str], columns: Sequence[str]) -> None:
    """Raise `FieldError` for a field with the name of one of the batch's other `columns`."""
    ragged = [name for name in names if name in known and known[name].field.kind == "ragged"]
    taken = {*columns, *(name + OFFSETS for name in ragged)}
    for name in names:
        if name in taken:
            remedy = "leave the field out with fields=, or choose with_index=False or another remainder"
            raise FieldError(f"the dataset has a field {name!r}, and the batch has a column of that name", remedy)


def choose_decoders(
    fields: Mapping[str, Field], choice: DecodeChoice, datasets: Sequence[Dataset] = ()
) -> dict[str, ImageDecoder]:
    """Return the decoder of each image field, and of the clips of `datasets`. Raises `FieldError` if there is none."""
    clipped = [dataset.selection for dataset in datasets if isinstance(dataset.selection, Clipped)]
    if clipped:
        from streamloader.images.clips import ClipDecoder

        others = {name: field for name, field in fields.items() if name != clipped[0].name}
        return {**choose_decoders(others, choice), clipped[0].name: ClipDecoder.of(clipped)}
    if choice is None or choice is False:
        return {}
    from streamloader.images.decode import ENCODINGS, ImageDecoder

    images = [name for name, field in fields.items() if field.kind == "bytes" and field.encoding in ENCODINGS]
    each: dict[str, Any] = dict(choice) if isinstance(choice, Mapping) else dict.fromkeys(images, choice)
    for name in each:
        if name not in fields or fields[name].kind != "bytes":
            remedy = f"choose from {', '.join(images) or 'none'}"
            raise FieldError(f"decode names {name!r}, which is not a fetched bytes field", remedy)
    if not each and not isinstance(choice, Mapping):
        raise FieldError(f"decode={choice!r}, and no field holds encoded images", "leave it out, or name the field")
    each = {name: Decode() if value is True else value for name, value in each.items() if value is not False}
    options = {name: value if isinstance(value, Decode) else Decode(value) for name, value in each.items()}
    masks = {given.masks: given for given in options.values() if given.masks is not None}
    for name, given in masks.items():
        options[name] = Decode(given.backend, "L", given.size, orientation=given.orientation)
    _check_targets(fields, options)
    return {name: ImageDecoder.choose(given, name, mask=name in masks) for name, given in options.items()}


def normalized_by_channel(sources: Sequence[Source]) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return (mean, std) of the fields for which `normalize=` has a number for each channel, by name.

    Batches are normalised by them, not samples. Raises `UsageError` for invalid values, and if sources differ.
    """
    each = [source.normalize if isinstance(source.normalize, Mapping) else {} for source in sources]
    found = [{name: _by_channel(name, of) for name, of in given.items() if _has_channels(of)} for given in each]
    for other in found:
        if other.keys() != found[0].keys() or any(not np.array_equal(of, found[0][name]) for name, of in other.items()):
            raise UsageError("normalize= by channel differs between the sources", "give all the same values")
    return {name: (pair[0], pair[1]) for name, pair in found[0].items()}


def _by_channel(name: str, given: Any) -> NDArray[np.float64]:
    """Return the mean and the std of channels, of shape (2, channels)."""
    pair = np.asarray(IMAGENET, np.float64) * 255 if isinstance(given, str) else None
    with suppress(ValueError, TypeError):  # also channels of different numbers
        pair = np.asarray(given, np.float64) if pair is None else pair
    if pair is None or pair.ndim != 2 or len(pair) != 2 or not np.isfinite(pair).all() or (pair[1] <= 0).any():
        remedy = "give (mean, std), each a number for each channel, with std above 0; or 'imagenet'"
        raise UsageError(f"normalize= has {given!r:.60} for {name!r}", remedy)
    return pair


def _has_channels(value: object) -> bool:
    if isinstance(value, str):
        return value == "imagenet"
    return isinstance(value, Sequence | np.ndarray) and any(isinstance(each, Sequence | np.ndarray) for each in value)


def without_channels(source: Source, names: Container[str]) -> Source:
    """Return a source whose `normalize=` has only what is computed for each sample."""
    if not isinstance(source.normalize, Mapping):
        return source
    return replace(source, normalize={name: of for name, of in source.normalize.items() if name not in names} or None)


def check_channels(given: Arguments, fields: Mapping[str, Field], chosen: Mapping[str, Sequence[Any]]) -> None:
    """Raise `UsageError` unless fields can be normalised by channel, when they are in batches."""
    if chosen and (given.batch_size is None or given.transform is not None or callable(given.collate)):
        option = "batch_size=None" if given.batch_size is None else "transform= or a function collate="
        raise UsageError(f"normalize= by channel with {option}", "normalise there, or after the batches are made")
    for name, (mean, _) in chosen.items():
        field = fields.get(name)
        if field is None or field.kind != "tensor" or field.shape[-1:] != (len(mean),):
            problem = f"normalize= has {len(mean)} channels of {name!r}, which is {field or 'not fetched'}"
            raise UsageError(problem, "name a field of fixed shape whose last axis is that of the channels")


def normalize_later(
    decoders: Mapping[str, ImageDecoder], rules: Mapping[str, Collate]
) -> tuple[dict[str, ImageDecoder], dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]]:
    """Return decoders that do not normalise what becomes one array, and by column (scale, shift) of x * scale + shift.

    These broadcast to batches of the layout that `Decode` has. Images that are padded are left to their decoders.
    """
    chosen, affine = dict(decoders), dict[str, Any]()
    for name, decoder in decoders.items():
        normalization = getattr(decoder.options, "normalization", None)
        if normalization is None or name in rules:
            continue
        mean, std = np.asarray(normalization, np.float64)
        shape = (-1, 1, 1) if decoder.options.channels_first else (-1,)
        pair = ((1 / (255 * std)).reshape(shape).astype(np.float32), (-mean / std).reshape(shape).astype(np.float32))
        sizes = tuple((samples, replace(each, values=None)) for samples, each in decoder.by_samples)
        chosen[name] = replace(decoder, values=None, by_samples=sizes)
        affine |= dict.fromkeys(decoder.columns, pair)
    return chosen, affine


def with_device(given: Arguments) -> Arguments:
    """Return the arguments with the `device=` on which images are decoded. Raises `UsageError` for two devices."""
    each = given.decode.values() if isinstance(given.decode, Mapping) else [given.decode]
    devices = {option.device for option in each if isinstance(option, Decode)} - {None}
    chosen = devices | ({str(given.device)} if devices and given.device is not None else set())
    if len(chosen) > 1:
        remedy = "name one device, or leave the dataset's device= out"
        raise UsageError(f"Decode(device=) and device= name {', '.join(sorted(map(repr, chosen)))}", remedy)
    return replace(given, device=next(iter(chosen))) if chosen else given


def device_decoders(decoders: Mapping[str, ImageDecoder]) -> tuple[tuple[str, str], ...]:
    """Return the fields that a device decodes, each with the name that its decoder has in states."""
    devices = ((name, decoder.options.device) for name, decoder in decoders.items())
    return tuple((name, "whole" if place.startswith("cpu") else "nvjpeg") for name, place in devices if place)


def check_devices(decoders: Mapping[str, ImageDecoder], given: Arguments, tensors: str) -> None:
    """Raise `UsageError` if images are decoded on a device that cannot do it, or for what needs them on the CPU."""
    for device in (decoder.options.device for decoder in decoders.values()):
        if device is None:
            continue
        if not tensors:
            raise UsageError(f"Decode(device={device!r}) without torch", "use StreamingDataset, or leave device= out")
        if given.transform is not None or callable(given.collate):
            function = "transform=" if given.transform is not None else "a function as collate="
            remedy = "leave device= out, or do what it does on the batches"
            raise UsageError(f"Decode(device={device!r}) with {function}, which gets samples on the CPU", remedy)
        resolve_name(f"{tensors}:check_device")(device)


def _check_targets(fields: Mapping[str, Field], options: Mapping[str, Decode]) -> None:
    """Raise `FieldError` unless fields can be moved with their images, `UsageError` if boxes would stay behind."""
    given = [(getattr(decode, option), option) for decode in options.values() for option in _TARGETS]
    named = [(name, option) for name, option in given if name is not None]
    for name, option in named:
        field = fields.get(name)
        if field is None or (field.kind == "bytes") != (option == "masks") or field.shape[-1:] not in _TARGETS[option]:
            problem = f"Decode({option}={name!r}) names a field that is {field or 'not fetched'}"
            known = [
                each
                for each, of in fields.items()
                if (of.kind == "bytes") == (option == "masks") and of.shape[-1:] in _TARGETS[option]
            ]
            remedy = f"choose from {', '.join(known) or 'none'}: boxes have 4 numbers, key points 2 or 3"
            raise FieldError(problem, f"{remedy}, and masks are encoded images")
    moved = [name for name, _ in named]
    viewed = [f"{name}_{view}" for name, decode in options.items() for view in decode.views or ()]
    replaced = {name for name, decode in options.items() if decode.views}
    columns = [*(fields.keys() - moved - replaced), *moved, *viewed]
    columns += [f"{name}_crop" for name in options if options[name].with_crop]
    columns += [f"{name}_valid" for name, option in named if option != "masks"]
    twice = sorted(column for column in set(columns) if columns.count(column) > 1)
    if twice:
        raise UsageError(f"a batch would have the column {twice[0]!r} twice", "name it for one image, or leave it out")
    boxes = fields.get("boxes", Field("text"))
    resized = any(decode.size or decode.views for decode in options.values())
    resized = resized and not any(decode.with_crop for decode in options.values())
    if resized and "boxes" not in moved and (boxes.kind, boxes.shape) == ("ragged", (4,)):
        option = "views" if viewed else "size"
        problem = f"Decode({option}=) moves the pixels, and the field 'boxes' would keep its coordinates"
        remedy = "give Decode(boxes='boxes') to move it too, Decode(with_crop=True) to get the crops, or other fields="
        if viewed:
            remedy = "leave the field out with fields=, since each view has a crop of its own"
        raise UsageError(problem, remedy)


def choose_layouts(decoders: Mapping[str, ImageDecoder], *, transformed: bool) -> frozenset[str]:
    """Return the columns of images whose tensors are channels first.

    Raises `UsageError` if `layout='CHW'` is combined with a transform, which determines the layout itself.
    """
    if not transformed:
        first = [decoder.columns for decoder in decoders.values() if decoder.options.channels_first]
        return frozenset(chain.from_iterable(first))
    for name, decoder in decoders.items():
        if decoder.options.layout == "CHW":
            problem = f"Decode(layout='CHW') of {name!r} with a transform, which gets height x width x channels"
            raise UsageError(problem, "omit layout, and let the transform return image.transpose(2, 0, 1)")
    return frozenset()


def choose_order(dataset: Dataset, config: Shuffle) -> OrderParams:
    """Return the dataset's order with the overrides of `Shuffle`. Raises `UsageError` for a block that cuts chunks.

    A selection gets the order of a dataset of its size. Its blocks have about the bytes of the dataset's blocks, or
    fewer if it is small; lanes and window follow from that. Packed rows have an order of their own likewise, and joined
    samples blocks of the dataset whose samples are largest.
    """
    manifest, selection = dataset.manifest, dataset.selection
    pinned = manifest.order if selection is None else _order_of(manifest, selection, config.block)
    if dataset.joined and config.block is None:
        pinned = _order_of_join(dataset, pinned)
    if dataset.packed is not None:
        pinned = _order_of_rows(dataset, dataset.packed, pinned.block / dataset.num_documents, config.block)
    if config.block is config.window is None and dataset.arrays is not None and dataset.arrays.order is not None:
        pinned = dataset.arrays.order
    block = config.block or pinned.block
    window = config.window or max(pinned.window // block, 2 if config.block is None else 4) * block
    check_block(dataset, block)
    return OrderParams(block, config.lanes or pinned.lanes, window)


def check_block(dataset: Dataset, block: int) -> None:
    """Raise `UsageError` for a block that cuts chunks. Any is valid with a selection, of packed rows, and of joins."""
    chunk = largest_chunk(dataset.manifest)
    whole = dataset.selection is None and dataset.packed is None and not dataset.joined
    if whole and block % chunk:
        raise UsageError(f"Shuffle(block={block}) cuts chunks of {chunk} samples", f"give a multiple of {chunk}")


def largest_chunk(manifest: Manifest) -> int:
    """Return the number of samples in the largest chunk of the streamed fields, 1 if all fields are resident."""
    return max((layout.chunk for layout in manifest.fields.values() if not layout.resident), default=1)


def _order_of(manifest: Manifest, selection: Selection | Clipped, block: int | None) -> OrderPin:
    """Return the order of the selected samples, in blocks of `block` of them (None: depends on their density)."""
    count, chunk = len(selection), largest_chunk(manifest)
    if isinstance(selection, Clipped):
        return order_pin(count, block or selection.block)
    if block is None:
        chunk_samples = count / _count_chunks(selection, chunk)  # selected ones, on average
        block_samples = nearest_power(chunk_samples * manifest.order.block / chunk)
        block = max(nearest_power(chunk_samples), min(block_samples, next_power(count) // BLOCKS))
    decoded = sum(layout.nbytes for layout in manifest.fields.values()) * count // manifest.num_samples
    order = order_pin(count, block, decoded)
    return replace(order, lanes=min(order.lanes, manifest.order.lanes))


def _order_of_join(dataset: Dataset, pinned: OrderPin) -> OrderPin:
    """Return the order of joined samples, which is that of the left dataset, `pinned`, if its blocks have fewest."""
    sides = [(dataset.manifest, pinned.block)] + [(of.manifest, of.manifest.order.block) for of, _ in dataset.joined]
    layouts = [[*manifest.fields.values()] for manifest, _ in sides]
    streamed = (not all(layout.resident for layout in each) for each in layouts)
    block = min((block for (_, block), some in zip(sides, streamed, strict=True) if some), default=pinned.block)
    if block == pinned.block:
        return pinned
    order = order_pin(dataset.num_samples, block, sum(layout.nbytes for each in layouts for layout in each))
    return replace(order, lanes=min(order.lanes, pinned.lanes))


def _order_of_rows(dataset: Dataset, packed: Packed, share: float, block: int | None) -> OrderPin:
    """Return the order of packed rows, in blocks of `block` of them, or by default of a `share` of them.

    A block reads about a group and a chunk more documents than its rows have, so by default it has several of these.
    """
    from streamloader.order.packing import GROUP_ROWS

    count, documents = len(packed), dataset.num_documents
    if block is None:
        chunk_rows = max(layout.chunk for layout in dataset.layouts.values()) * count / documents
        least = nearest_power(LEAST_CHUNKS * max(GROUP_ROWS, chunk_rows))
        block = min(nearest_power(share * count), max(1, next_power(count) // BLOCKS))
        block = max(block, min(least, next_power(count) // LEAST_BLOCKS), 1)
    order = order_pin(count, block, packed.real * sum(field.item_bytes for field in dataset.fields.values()))
    return replace(order, lanes=min(order.lanes, dataset.manifest.order.lanes))


def _count_chunks(samples: Selection, chunk: int) -> int:
    """Return the number of chunks with some of these ascending samples, without another array of their size.

    Of samples that are drawn by weights, those of epoch 0 count.
    """
    if hasattr(samples, "count_chunks"):
        return samples.count_chunks(chunk)
    count, last = 0, -1
    for first in range(0, len(samples), PIECE_BYTES // 16):
        chunks = samples[first : first + PIECE_BYTES // 16] // chunk
        count += int(chunks[0] != last) + int(np.count_nonzero(chunks[1:] != chunks[:-1]))
        last = int(chunks[-1])
    return count


def check_share(share: EpochShare) -> None:
    """Raise `BatchError` if `remainder='drop'` drops the only step."""
    if share.remainder == "drop" and share.num_samples and not share.global_steps(0):
        taken = share.global_batch if share.budget is None else f"at least {share.world.size}"
        step = f"{share.world.size} consumers with batch_size={share.batch} take {taken} samples per step"
        problem = f"{step}, the dataset has {share.num_samples}, and remainder='drop' leaves nothing"
        smaller = "a smaller batch_size" if share.budget is None else "fewer ranks"
        raise BatchError(problem, f"give {smaller}, or another remainder")


def aligned(start: RunState, share: EpochShare) -> tuple[RunState, int]:
    """Return (state, repeated samples): where ranks resume that cannot share the next step by a budget.

    A state of another number of ranks may leave a step with fewer samples than there are ranks.
    """
    position, size = start.position, share.world.size
    if share.budget is None or share.bucket is None or share.after(position, 1) - position >= size:
        return start, 0
    back = position % share.bucket[1] % size
    return replace(start, position=position - back), back


# Chunks and groups in a block of packed rows, unless an epoch then has fewer blocks than the least.
LEAST_CHUNKS = 8
LEAST_BLOCKS = 16
# The numbers of samples are handled in pieces of this many bytes.
PIECE_BYTES = 32 << 20


def choose_packs(
    fields: Mapping[str, Field], choice: PackChoice, *, batch_size: int | None, transformed: bool
) -> dict[str, Pack]:
    """Return a `Pack` for each field of `choice`, in which an int is the length of the rows.

    Raises `UsageError` if batches cannot be packed, or for a length below 1, and `FieldError` for a field that is not
    fetched, is not a sequence of numbers, or whose dtype cannot represent the padding.
    """
    choice = {} if choice is None else choice
    if not isinstance(choice, Mapping):
        raise UsageError(f"pack={choice!r} names no field", "give a dict, like pack={'tokens': 2049}")
    if choice and batch_size is None:
        raise UsageError(f"pack={dict(choice)} with batch_size=None", "give a batch_size: rows are cut from a batch")
    if choice and transformed:
        raise UsageError(f"pack={dict(choice)} with a transform", "leave one of them out: a transform gets documents")
    return {name: _pack(name, fields.get(name), config) for name, config in choice.items()}


def _pack(name: str, field: Field | None, config: Pack | int) -> Pack:
    pack = config if isinstance(config, Pack) else Pack(config)
    if field is None or field.kind != "ragged" or field.shape:
        description = "is not a fetched field" if field is None else f"is {field}"
        raise FieldError(f"pack names {name!r}, which {description}", "name a field of documents, like ragged:int32")
    if not _holds(np.dtype(field.dtype), pack.pad):
        raise FieldError(f"pack fills {name!r} with {pack.pad}, which is not {field.dtype}", "give another Pack(pad=)")
    return pack


def choose_rules(
    fields: Mapping[str, Field], given: Arguments, decoders: Mapping[str, ImageDecoder]
) -> dict[str, Collate]:
    """Return how values of different sizes form batches, by field. Raises `FieldError` and `UsageError`.

    One rule for all is that of the fields of variable length, and of images that keep their sizes. A transform may
    return other fields.
    """
    choice = given.collate
    if choice is None or callable(choice):
        return {}
    if given.batch_size is None:
        raise UsageError(f"collate={choice!r:.60} with batch_size=None", "give a batch_size: it forms batches")
    images = [name for name, decoder in decoders.items() if decoder.fixed_bytes is None]
    variable = [name for name, field in fields.items() if field.kind == "ragged"] + images
    each = choice if isinstance(choice, Mapping) else dict.fromkeys(variable, choice)
    rules: dict[str, Collate] = {}
    for name, rule in each.items():
        if rule not in ("pad", "list", "nested") and not isinstance(rule, Pad):
            remedy = "choose 'pad', Pad(...), 'list' or 'nested', or give a function of a list of samples"
            raise UsageError(f"collate={{{name!r}: {rule!r:.60}}}", remedy)
        if name not in variable and given.transform is None:
            remedy = f"choose from {', '.join(variable) or 'none: all have one size'}"
            raise FieldError(f"collate names {name!r}, whose values have one size or are not fetched", remedy)
        rules[name] = _image_rule(name, rule) if name in images else Pad() if rule == "pad" else rule
        if isinstance(rule, Pad) and name in fields and fields[name].kind == "ragged":
            _check_pad(name, fields[name], rule)
    rules |= _valid_rules(rules, given, decoders)
    columns = [f"{name}_lengths" for name, rule in rules.items() if isinstance(rule, Pad)]
    columns += [f"{name}_mask" for name, rule in rules.items() if isinstance(rule, Pad) and rule.mask]
    if taken := sorted(fields.keys() & set(columns)):
        raise FieldError(f"the batch has a column {taken[0]!r} of lengths or masks, and the dataset a field", _TWICE)
    return rules


_TWICE = "leave the field out with fields="


def _valid_rules(
    rules: Mapping[str, Collate], given: Arguments, decoders: Mapping[str, ImageDecoder]
) -> dict[str, Collate]:
    """Return the rules of the columns that say which boxes or key points are valid: those of these.

    They are padded together with these, unless a transform comes between.
    """
    options = [decoder.options for decoder in decoders.values()]
    moved = {name for each in options for name in (each.boxes, each.keypoints)}
    valid: dict[str, Collate] = {}
    for name, rule in rules.items():
        if name in moved and not isinstance(rule, Pad):
            valid[f"{name}_valid"] = rule
        elif name in moved and isinstance(rule, Pad) and given.transform is not None:
            valid[f"{name}_valid"] = replace(rule, value=0, mask=False)
    return valid


def _image_rule(name: str, rule: Collate) -> Collate:
    """Return the rule of images that keep their sizes. Raises `UsageError` for one that does not fit images."""
    if rule == "nested":
        remedy = "choose 'pad' or 'list': nested tensors have one axis of different lengths"
        raise UsageError(f"collate={{{name!r}: 'nested'}} of images", remedy)
    pad = Pad() if rule == "pad" else rule
    if isinstance(pad, Pad) and pad.truncate:
        raise UsageError(f"Pad(truncate=True) of images {name!r}", "give Decode(size=) to make them smaller")
    return replace(pad, axes=2) if isinstance(pad, Pad) else pad


def _check_pad(name: str, field: Field, pad: Pad) -> None:
    if pad.axes != 1:
        raise UsageError(f"Pad(axes={pad.axes}) of {name!r}, which is {field}", "leave axes= out: one axis differs")
    if not _holds(np.dtype(field.dtype), pad.value):
        raise FieldError(f"Pad fills {name!r} with {pad.value}, which is not {field.dtype}", "give another value=")


def _holds(dtype: np.dtype[Any], pad: int | float) -> bool:
    if dtype.kind == "f":
        most = float(np.finfo(dtype).max)
        return -most <= pad <= most or pad in (math.inf, -math.inf) or math.isnan(pad)
    low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    return low <= pad <= high and pad == int(pad)


def read_steps(name: str, choice: StepChoice) -> dict[int, tuple[int, ...]]:
    """Return the steps of each epoch, ascending. Raises `UsageError` for an invalid number of an epoch or step."""
    if choice is None:
        return {}
    if not isinstance(choice, Mapping):
        raise UsageError(f"{name}={choice!r:.60}", f"give steps by epoch: {name}={{0: range(100, 120)}}")
    steps_by_epoch: dict[int, tuple[int, ...]] = {}
    for epoch, steps in choice.items():
        numbers = list(steps) if isinstance(steps, Iterable) else [None]
        if not all(is_whole(number, 0) for number in (epoch, *numbers)):
            raise UsageError(f"{name}={{{epoch!r}: {steps!r:.60}}}", "give whole numbers of at least 0")
        steps_by_epoch[int(epoch)] = tuple(sorted(set(map(int, numbers))))
    return steps_by_epoch


def skip(skips: Mapping[int, Sequence[int]], start: RunState, share: EpochShare) -> EpochShare:
    """Return the share without the steps to skip, from the epoch of `start` on.

    Where that epoch began again, with other weights, its steps count from where it began first. Raises `UsageError`
    for a step that the epoch does not have, for an epoch without other steps, and with several DataLoader workers,
    since each of their batches is a part of several steps.
    """
    if skips and start.workers > 1:
        remedy = "give num_workers= to the dataset, not to DataLoader"
        raise UsageError(f"skip_steps with {start.workers} DataLoader workers", remedy)
    gaps = share.gaps
    for epoch in sorted(epoch for epoch in skips if epoch >= start.epoch and skips[epoch]):
        of_epoch = share if epoch == share.epoch else share.at_epoch(epoch)
        offset = of_epoch.first_start(start.position) if epoch == start.epoch else 0
        begun = start.begun_before(epoch)
        if begun and share.budget is not None:  # the steps of that order are no longer known
            problem = f"skip_steps of epoch {epoch} with max_tokens=, which set_weights() began again"
            raise UsageError(problem, "leave the steps of this epoch out")
        before = begun // share.global_batch
        count, last = of_epoch.global_steps(offset) + before, skips[epoch][-1]
        if last >= count:
            raise UsageError(f"skip_steps names step {last} of epoch {epoch}, which has {count} steps", "leave it out")
        if len(skips[epoch]) == count:
            raise UsageError(f"skip_steps leaves nothing of epoch {epoch}", f"begin with epoch {epoch + 1}: set_epoch")
        left = [step - before for step in skips[epoch] if step >= before]
        gaps += skip_steps(of_epoch, left, offset)
    return share.skipping(gaps)


def skip_all_but(steps: Sequence[int], offset: int, share: EpochShare) -> EpochShare:
    """Return the share with these steps of its epoch only. Raises `UsageError` for a step that it does not have."""
    count = share.global_steps(offset)
    if not steps or steps[-1] >= count:
        raise UsageError(
            f"steps {list(steps)[-3:]} of epoch {share.epoch}, which has {count} steps", f"give 0 to {count - 1}"
        )
    end = share.after(offset, count)
    parts = share.skipping(skip_steps(share, steps, offset)).parts(offset)
    others = (Gap(share.epoch, start, end if stop is None else stop) for start, stop in parts)
    return share.skipping(tuple(gap for gap in others if gap.start < gap.stop))
