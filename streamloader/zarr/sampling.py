"""Opens arrays as samples: which arrays become which columns, and where their windows and patches lie."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import isfinite, lcm, prod
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FieldError, FormatError, MemoryBudgetError, NotFoundError, SelectionError, UsageError
from streamloader.format.geometry import order_pin, previous_power
from streamloader.format.manifest import FORMAT, Field, FieldLayout, Manifest, OrderPin, class_names, read_manifest
from streamloader.format.opening import STATISTICS, read_object
from streamloader.options import Channels, Extent, Normalize, Sampling, Window
from streamloader.order.anchors import (
    CELL_BYTES,
    LEAST_CELLS,
    Anchors,
    Axis,
    anchor_runs,
    choose_cells,
    expand_anchors,
    runs_of,
    segment_anchors,
    split_segments,
)
from streamloader.samples import distinct
from streamloader.storage import Store, open_store, split_url
from streamloader.zarr import coordinates
from streamloader.zarr.cf import Unpacking, unpacking_of
from streamloader.zarr.columns import ArrayFields, Member, Output, Part, RegionColumn, RegionReader, Slice, wider_block
from streamloader.zarr.coordinates import TIME_CHANNELS, Coordinate, Span
from streamloader.zarr.metadata import POSITIONAL, SPARSE, ZarrGroup, read_group, read_rechunked
from streamloader.zarr.reader import ArrayReader, find_index, parse_channel

if TYPE_CHECKING:
    from streamloader.format.conditions import Condition

Ints = NDArray[np.int64]
# The default order keeps at most this many bytes of regions in memory, but at least a window of two blocks.
WINDOW_BYTES = 4 << 30
BLOCK_BYTES = WINDOW_BYTES // 8  # of a block that is more than one cell, so that two lanes fit
LEAST_BLOCKS = 16  # of an epoch whose blocks are more than one cell
PINNED_WINDOW_BYTES = 1 << 30
WINDOW_REQUESTS = 2048  # that the first batch waits for at most, unless two blocks take more
MAX_CELLS = 1 << 26  # their numbers of samples are kept: 512 MiB at most
INDICES = "_indices"  # ends the name of the column with those of a sparse matrix
ROWS = "element"  # the dimension of the arrays of a sparse matrix
ROW_CHUNKS = 16  # twice the speed of 4: bench/NOTES.md, "Arrays in place"
SAMPLES = "sample"  # the sample axis of a dataset that streamloader wrote


@dataclass(frozen=True, eq=False)
class OpenedArrays:
    """The arrays of a group, while columns and samples are made from them.

    `manifest`: that of a dataset that streamloader wrote, else None. `statistics`: where `normalize=True` finds them.
    """

    group: ZarrGroup
    sampling: Sampling
    manifest: Manifest | None
    statistics: Store
    named: tuple[str, ...] = ("",)  # fields and the arrays of channels, if any are given

    @cached_property
    def sample_axis(self) -> str:
        """The name of the sample axis, "" if samples are patches only. Raises `UsageError` if it is not given."""
        axis, rechunked = self.sampling.sample_axis, self.group.sample_axis
        patches_only = axis is None and self.sampling.patches is not None and self.sampling.windows is None
        if self.manifest and axis in (None, SAMPLES) and not (patches_only and rechunked):
            return rechunked or SAMPLES
        if patches_only:
            return ""
        if axis is None:
            names = dict.fromkeys(dim for array in self.group.arrays.values() for dim in array.dims)
            raise UsageError(f"{self.group.url} has no sample axis", f"give sample_axis=, one of {', '.join(names)}")
        return f"{POSITIONAL}{axis}" if isinstance(axis, int) else axis

    @property
    def anchored(self) -> list[str]:
        """The names of the axes along which windows and patches lie."""
        return [*([self.sample_axis] if self.sample_axis else []), *self.sampling.patch_dims]

    def near(self, name: str) -> str | None:
        """Return the name of an array along the sample axis: as given, or of a group that fields are in."""
        found = (self.group.beside(field, name) for field in self.named)
        return next((each for each in found if each is not None), None)

    def unpacking(self, name: str) -> Unpacking | None:
        """Return how the values of an array are unpacked."""
        array = self.group.array(name)
        choice, name_there = self.sampling.decode_cf, (array.document.get("channels") or [[name]])[0][0]
        decoded = choice.get(name_there, True) if isinstance(choice, Mapping) else choice
        if not decoded and array.document.get("unpacked"):
            problem = f"decode_cf={choice!r:.60}, and the conversion to {self.group.url} unpacked {name!r}"
            raise UsageError(problem, "convert with rechunk= and raw=True (--raw)")
        if not decoded or array.values.kind != "tensor":
            return None
        return unpacking_of(array.netcdf_attributes, array.dtype, f"the array {name!r} of {self.group.url}")

    @cached_property
    def _normalization(self) -> Mapping[str, Any]:
        return read_normalization(self.statistics, self.sampling.normalize)

    def check_normalization(self, names: Collection[str], floats: Collection[str]) -> None:
        """Raise `UsageError` for values of `normalize=` that belong to none of these arrays and channels.

        Warn of those of `floats` that have none.
        """
        given, known = set(self._normalization), set(names)
        of_file = not isinstance(self.sampling.normalize, Mapping)
        unknown = given - known if not of_file or not given & known else set()
        if unknown:
            has, of = ", ".join(sorted(unknown)), ", ".join(sorted(known))
            problem = f"normalize= has {has}, and the arrays and channels are {of}"
            raise UsageError(problem, "name them as in fields= and channels=")
        if given and (missing := [name for name in dict.fromkeys(floats) if name not in given]):
            problem = f"normalize= has no mean and standard deviation of {', '.join(missing)}, which stay as they are"
            warnings.warn(f"{problem}: give (0, 1) if they should", stacklevel=2)

    def affine(self, name: str) -> tuple[float, float] | None:
        """Return the (mean, std) of an array or a channel, None if it is not normalised. Raises `UsageError`."""
        given = self._normalization.get(name)
        if given is None:
            return None
        pair = (given.get("mean"), given.get("std")) if isinstance(given, Mapping) else given
        pair = tuple(pair) if isinstance(pair, Sequence | np.ndarray) else (pair,)
        valid = len(pair) == 2 and all(isinstance(x, Real) and isfinite(x) for x in pair) and pair[1] > 0
        if not valid:
            problem = f"normalize= has {given!r:.60} for {name!r}"
            raise UsageError(problem, "give (mean, std), with std above 0; leave out arrays that are constant")
        return float(pair[0]), float(pair[1])

    def coordinate(self, length: int) -> Coordinate:
        """Return the coordinate of the sample axis, which has a length. Raises `FieldError`."""
        return coordinates.read_coordinate(self.group, self.named, self.sample_axis, length, self.read)

    @property
    def strict(self) -> bool | None:
        """Whether a missing chunk is an error; None: only if all chunks of a field are missing."""
        return True if self.manifest is not None else self.sampling.strict

    def classes(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the class names of those arrays that have them."""
        found = {} if self.manifest is None else class_names(self.manifest.provenance)
        for name in names:
            if array := self.group.parts.get(f"{name}/categories"):
                found[name] = list(map(str, ArrayReader(self.group.store, array, strict=True).read_all().tolist()))
        return found

    def read(self, name: str) -> NDArray[Any]:
        """Return all values of an array as they are stored, or as float64 if some are packed, or missing: NaN.

        float32 would round times.
        """
        values = ArrayReader(self.group.store, self.group.array(name), strict=self.strict).read_all()
        unpacking = self.unpacking(name)
        if unpacking is not None:
            packed = unpacking.scale is not None or unpacking.offset is not None
            exact = not packed and not unpacking.missing(values).any()
            values = values.view(unpacking.view) if exact else unpacking.unpack(values)
        if mask := self.group.parts.get(f"{name}/mask"):
            missing = ArrayReader(self.group.store, mask, strict=True).read_all().astype(bool)
            values = np.where(missing, np.nan, values.astype(np.float64))
        return values

    def default_fields(self) -> list[str]:
        """Return the arrays that are fields without `fields=`: with the sample axis, and numbers, but no coordinates.

        Sparse matrices are fields too, instead of their arrays.

        Raises `FieldError` if there are none, and for a field of a dataset that is not an array of numbers.
        """
        needed = set(self.anchored)
        parts = {name: [self.group.arrays.get(f"{name}/{part}") for part in SPARSE] for name in self.group.sparse}
        names = sorted(name for name, found in parts.items() if all(part and part.holds_numbers for part in found))
        for name in (name for name, kind in self.group.groups.items() if kind == "csc_matrix"):
            self.group.array(name)  # an error
        for name, array in self.group.dense.items():
            if needed <= set(array.dims) and name not in array.dims and array.holds_numbers:
                names.append(name)
        own = {} if self.manifest is None else self.manifest.fields
        if left := [f"{name} ({layout.field})" for name, layout in own.items() if not layout.field.fixed]:
            problem = f"{self.group.url} has {', '.join(left)}, and arrays of fixed shape are read in place"
            raise FieldError(problem, f"leave them out: fields={names}")
        if not names:
            found = "; ".join(f"{name}: {', '.join(a.dims)}" for name, a in list(self.group.arrays.items())[:20])
            problem = f"no array of {self.group.url} has numbers along {', '.join(sorted(needed))}"
            raise FieldError(problem, f"choose sample_axis= from the dimensions of its arrays ({found or 'none'})")
        return names


def read_normalization(store: Store, normalize: Normalize) -> Mapping[str, Any]:
    """Return the values of `normalize=`: given, or from the JSON of `streamloader stats`, by name.

    True reads those that were saved in the dataset, and is a `UsageError` if there are none. Raises `NotFoundError`,
    and `FormatError` for other documents.
    """
    if normalize is None or normalize is False:
        return {}
    if isinstance(normalize, Mapping):
        return normalize
    folder, name = store, STATISTICS
    if not isinstance(normalize, bool):
        parent, name = split_url(normalize)
        folder = open_store(parent, store.location.options if "://" in parent else None)
    try:
        document = read_object(folder, name, "write it again with streamloader stats")
    except NotFoundError as error:
        if normalize is not True:
            raise
        remedy = f"fit and save them: streamloader stats {store.url} --save, with the options of these samples"
        raise UsageError(f"normalize=True, and {store.url} has no statistics", remedy) from error
    found = document.get("statistics")
    if not isinstance(found, Mapping):
        raise FormatError(f"{folder.url}/{name} has no statistics", "write it with streamloader stats")
    return found


def own_manifest(group: ZarrGroup) -> Manifest | None:
    """Return the manifest of a group that streamloader wrote, None for another one.

    Raises `FieldError` for the root of splits, `VersionError` and `FormatError`.
    """
    attributes = group.attributes.get(FORMAT)
    if not isinstance(attributes, Mapping):
        return None
    if isinstance(splits := attributes.get("splits"), Mapping):
        raise FieldError(f"{group.url} has the splits {', '.join(splits)}; no split was given", "open one with split=")
    manifest = read_manifest(attributes, group.url)
    if manifest.deleted is not None:
        problem = f"samples were deleted from {group.url}, whose arrays still have them"
        raise FieldError(problem, "open it without sample_axis=, windows= and patches=, or convert it again")
    return manifest


def open_arrays(
    store: Store,
    sampling: Sampling,
    fields: Sequence[str] | None,
    where: Any,
    *,
    aligned: bool = True,
    memory: int | None = None,
    statistics: Store | None = None,
) -> tuple[Store, Manifest, ArrayFields]:
    """Return the arrays at the store's URL as a dataset: their store, a manifest, and the columns and samples.

    `where`: a condition, a slice of elements or of labels of the coordinate, a mask or numbers of elements of the
    sample axis. `aligned`: see `Anchors`. `statistics`: where `normalize=True` finds them, by default there. Raises
    `UsageError`, `FieldError`, `SelectionError` or `FormatError` for arguments that do not fit the arrays, before
    samples are read; `MemoryBudgetError` for a chunk above `memory`.
    """
    channels = (name.partition("@")[0] for column in sampling.columns.values() for name in column.names)
    named = dict.fromkeys([*(fields or ()), *(name for name in channels if name not in TIME_CHANNELS)])
    of_window = [] if sampling.windows is None or sampling.windows.group is None else [sampling.windows.group]
    beside, decoded = [*getattr(where, "fields", ()), *of_window], sampling.decode_cf
    choices = decoded if isinstance(decoded, Mapping) else {}
    others = [*beside, *choices]
    group = read_group(store, [*named, *others], beside, zarr_format=sampling.zarr_format, listing=not named)
    manifest = own_manifest(group)
    stored = None if manifest is None else manifest.provenance.get("beside")
    if isinstance(stored, list):
        group = read_rechunked(store, group, list(map(str, stored)))
    opened = OpenedArrays(group, sampling, manifest, statistics or store, tuple(named) or ("",))
    if opened.sample_axis in sampling.patch_dims:
        raise UsageError(f"patches along {opened.sample_axis!r}, the sample axis", "give windows=Window(...) for it")
    known = {channel[0] for channel in group.slices}
    for name in choices.keys() - known:
        group.array(name)
    columns = _columns(opened, fields)
    length = _sample_length(opened, columns)
    coordinate = opened.coordinate(length) if opened.sample_axis else None
    segments = _segments(opened, coordinate, where, length)
    outputs = _window_parts(sampling.windows, coordinate, segments)
    samples, left_out = _window_axis(opened, coordinate, segments, outputs)
    axes = _axes(opened, columns, samples)
    columns = {name: _with_outputs(column, axes, outputs) for name, column in columns.items()}
    arrays = ArrayFields(columns, Anchors(axes, aligned), opened.strict, outputs.first, left_out)
    _check_chunks(columns.values(), memory)
    manifest, order = _manifest(group.store, arrays)
    return group.store, replace(manifest, provenance={"classes": opened.classes(columns)}), replace(arrays, order=order)


def _columns(opened: OpenedArrays, fields: Sequence[str] | None) -> dict[str, RegionColumn]:
    """Return the columns, before their samples are known."""
    stacked = opened.sampling.columns
    names = list(fields) if fields is not None else [] if stacked else opened.default_fields()
    for name in names:
        if names.count(name) > 1 or name in stacked:
            raise FieldError(f"fields names {name!r} twice", "name each field once, and channels differently")
    columns: dict[str, RegionColumn] = {}
    given = {f"{name}{INDICES}": name for name in names if name in opened.group.sparse}
    for column, name in given.items():
        if column in opened.group.arrays or column in stacked:
            problem = f"{column!r} is an array or a column, and the indices of the sparse matrix {name!r}"
            raise FieldError(problem, "read one of them alone")
    for name in names:
        if name in opened.group.sparse:
            columns |= _sparse(name, opened)
        if name in opened.group.sparse or name in given:
            continue
        array, unpacking = opened.group.array(name), opened.unpacking(name)
        missing = set(opened.anchored) - set(array.dims)
        if missing:
            problem = f"the array {name!r} of {opened.group.url} has the dimensions {', '.join(array.dims) or 'none'}"
            remedy = f"leave it out of fields=, or repeat it by Channels(...): it lacks {', '.join(sorted(missing))}"
            raise FieldError(problem, remedy)
        affine = opened.affine(name)
        member = Member(array.dims, (Slice({}, None, affine),), array, unpacking)
        dtype = _float_if(member.dtype, affine is not None)
        if f"{name}/mask" in opened.group.parts:
            member = Member(array.dims, (Slice({}, None),), constant=_scaled(opened.read(name), affine))
            dtype = "float64"
        columns[name] = RegionColumn(name, array.lengths, dtype, (member,), opened.sample_axis)
    columns |= {name: _stack(name, opened, channels) for name, channels in stacked.items()}
    channels = [channel for column in stacked.values() for channel in column.names]
    floats = [name for name in names if name in columns and np.dtype(columns[name].dtype).kind == "f"]
    floats += [channel for channel in channels if channel not in TIME_CHANNELS]
    opened.check_normalization({*names, *channels}, floats)
    return columns


def _sparse(name: str, opened: OpenedArrays) -> dict[str, RegionColumn]:
    """Return the columns of a matrix in compressed sparse rows: its values, and `_indices`, their columns.

    Raises `UsageError` for declarations that need dense rows, and `FormatError` for arrays that do not fit together.
    """
    if opened.sampling.windows is not None or opened.sampling.patches is not None or opened.affine(name) is not None:
        problem = f"windows=, patches= or normalize= of {name!r}, a sparse matrix"
        raise UsageError(problem, "read its rows as they are, or write it as a dense array")
    firsts = {array.dims[0] for array in opened.group.dense.values() if array.dims}
    if opened.sample_axis not in {f"{POSITIONAL}0", *firsts}:
        problem = f"sample_axis={opened.sampling.sample_axis!r} of {name!r}, a sparse matrix"
        raise UsageError(problem, "give sample_axis=0, its rows")
    rows = opened.read(f"{name}/indptr").astype(np.int64, copy=False)
    ascending = rows.ndim == 1 and rows.size and rows[0] == 0 and (rows[1:] >= rows[:-1]).all()
    columns = {}
    for column, part in ((name, "data"), (f"{name}{INDICES}", "indices")):
        array = opened.group.array(f"{name}/{part}")
        if not ascending or array.shape != (rows[-1],):
            problem = f"indptr of the sparse matrix {name!r} does not fit its {part}, of the shape {array.shape}"
            raise FormatError(problem, "write the matrix again")
        member = Member((ROWS,), array=array)
        lengths, axis = {opened.sample_axis: rows.size - 1}, opened.sample_axis
        columns[column] = RegionColumn(column, lengths, array.dtype.name, (member,), axis, rows=rows)
    return columns


def _stack(name: str, opened: OpenedArrays, channels: Channels) -> RegionColumn:
    """Return the column of stacked arrays. Raises `FieldError` if their dimensions differ."""
    members: dict[str, Member] = {}
    shapes: dict[str, dict[str, int]] = {}
    for number, channel in enumerate(channels.names):
        source, member, shape = _channel(opened, channel, number)
        shapes[channel] = shape
        others = members[source].slices if source in members else ()
        members[source] = replace(member, slices=others + member.slices)
    first = max(shapes.values(), key=len)
    constants = {channel for channel, member in members.items() if member.constant is not None}
    for channel, shape in shapes.items():
        subset = {dim: n for dim, n in first.items() if dim in shape} if channel in constants else first
        if list(shape.items()) != list(subset.items()):
            problem = f"the channel {channel!r} of {name!r} has the dimensions {shape}, another one {first}"
            raise FieldError(problem, "select one element of other dimensions, as in 'z@500', or leave it out")
    dtype = np.result_type(*(each for member in members.values() for each in _channel_dtypes(member))).name
    return RegionColumn(name, first, dtype, tuple(members.values()), opened.sample_axis, len(channels.names))


def _channel_dtypes(member: Member) -> list[str]:
    """Return the dtypes that hold the channels of a member: constants are float32, unless that rounds integers."""
    if member.constant is None:
        return [_float_if(member.dtype, each.affine is not None) for each in member.slices]
    values = member.constant
    rounded = values.dtype.kind in "iu" and not np.array_equal(values.astype(np.float32), values)
    return ["float32", values.dtype.name] if rounded else ["float32"]


def _float_if(dtype: str, needed: bool) -> str:
    """Return the dtype; if floats are `needed`, float32 for integers of up to 16 bits, and float64 for wider ones."""
    return np.result_type(dtype, np.float32).name if needed and np.dtype(dtype).kind != "f" else dtype


def _channel(opened: OpenedArrays, channel: str, number: int) -> tuple[str, Member, dict[str, int]]:
    """Return the key of a channel's member, the member, and the lengths of its dimensions."""
    sliced = opened.group.slices.get(parse_channel(channel))
    source = sliced or channel.partition("@")[0]
    axis, affine = opened.sample_axis, opened.affine(channel)
    if source in TIME_CHANNELS and source not in opened.group.arrays:
        coordinate = opened.coordinate(_sample_length(opened, {}))
        values = _scaled(coordinate.fractions(source, channel), affine)
        return channel, Member((axis,), (Slice({}, number),), constant=values), {axis: len(values)}
    array = opened.group.array(source)
    picks = find_index(opened.group, sliced or channel, opened.anchored)
    shape = {dim: n for dim, n in array.lengths.items() if dim not in picks}
    if set(opened.anchored) <= set(shape) and len(shape) > 1:
        slices = (Slice(picks, number, affine),)
        return source, Member(array.dims, slices, array, opened.unpacking(source)), shape
    values = opened.read(source)[tuple(picks.get(dim, slice(None)) for dim in array.dims)]
    stored = [dim for dim in array.dims if dim not in picks]
    constant = _scaled(values.transpose([stored.index(dim) for dim in shape]), affine)
    return channel, Member(tuple(shape), (Slice({}, number),), constant=constant), shape


def _scaled(values: NDArray[Any], affine: tuple[float, float] | None) -> NDArray[Any]:
    return values if affine is None else np.asarray((values - affine[0]) / affine[1], np.float32)


def _sample_length(opened: OpenedArrays, columns: Mapping[str, RegionColumn]) -> int:
    """Return the length of the sample axis. Raises `FieldError` if arrays have different lengths."""
    axis = opened.sample_axis
    if not axis:
        return 0
    lengths = {name: column.lengths[axis] for name, column in columns.items() if axis in column.lengths}
    if not lengths:
        arrays = {n: a for n, a in opened.group.arrays.items() if axis in a.dims}
        arrays = {n: a for n, a in arrays.items() if n in opened.named} or arrays
        lengths = {n: a.lengths[axis] for n, a in arrays.items()}
    if not lengths:
        dims = dict.fromkeys(dim for array in opened.group.arrays.values() for dim in array.dims)
        problem = f"no array of {opened.group.url} has the dimension {axis!r}"
        raise FieldError(problem, f"choose sample_axis= from {', '.join(dims) or 'none'}")
    if len(set(lengths.values())) > 1 and columns:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        problem = f"the arrays of {opened.group.url} have different lengths along {axis!r}: {counts}"
        raise FieldError(problem, "name arrays of one length in fields=")
    return next(iter(lengths.values()))


class WindowParts(NamedTuple):
    """The elements of a window: those of the column `name` and of `name_target`, and the extent of all of them.

    `first`: the element that is first in time, the last one where times descend. `spans`: the steps that durations
    determine. `every`: the stride in units of the coordinate if it is a duration, else 0.
    """

    parts: tuple[Part, ...] = (Part(0, 0, 0, 1),)
    target: tuple[Part, ...] = ()
    extent: int = 1
    stride: int = 1
    first: int = 0
    spans: tuple[Span, ...] = ()
    every: float = 0.0

    @property
    def offsets(self) -> Ints:
        """The elements that a window reads, from its first one on, ascending."""
        spans = [part.offset + part.step * np.arange(max(1, part.length)) for part in self.parts + self.target]
        return distinct(np.concatenate(spans))

    def reverse(self) -> WindowParts:
        """Return the same elements in the opposite order, for times that descend."""
        last = self.extent - 1
        parts, target = (
            tuple(part._replace(offset=last - part.offset, step=-part.step) for part in each)
            for each in (self.parts, self.target)
        )
        spans = tuple(span._replace(offset=last - span.offset - span.steps * span.step) for span in self.spans)
        return self._replace(parts=parts, target=target, first=last, spans=spans)


def _window_parts(window: Window | None, coordinate: Coordinate | None, segments: Ints) -> WindowParts:
    """Return the elements of a window. Durations count the usual step of the segments."""
    if window is None:
        return WindowParts()
    if coordinate is None:
        raise UsageError("windows without a sample axis", "give sample_axis=")
    usual, spans = abs(coordinate.usual(segments)), []

    def elements(name: str, value: Extent, unit: int = 1) -> int:
        nonlocal usual
        if isinstance(value, int):
            return value
        count, usual = coordinate.elements(f"Window({name}={value!r})", value, usual, unit)
        return count

    def check(offset: int, steps: int, step: int, *extents: Extent) -> None:
        if any(isinstance(extent, str) for extent in extents):
            spans.append(Span(offset, steps, step, step * usual))

    step, stride = elements("step", window.step), elements("stride", window.stride)
    name, inputs = ("history", window.history) if window.length is None else ("length", window.length)
    assert inputs is not None
    count = elements(name, inputs, step)
    present, leads, target = (count - 1) * step, [0], list[Part]()
    check(0, count - 1, step, window.step, inputs)
    if isinstance(window.lead, tuple):
        leads = [elements("lead", lead) for lead in window.lead]
        target = [Part(at, present + lead, 1, 1) for at, lead in enumerate(leads)]
        for lead, given in zip(leads, window.lead, strict=True):
            check(present, 1, lead, given)
    elif window.lead is not None:
        ahead = elements("lead", window.lead, step)
        leads, target = [ahead * step], [Part(0, present + step, ahead, step)]
        check(present, ahead, step, window.step, window.lead)
    extent, every = present + max(leads) + 1, stride * usual if isinstance(window.stride, str) else 0.0
    found = WindowParts((Part(0, 0, count, step),), tuple(target), extent, stride, 0, tuple(spans), every)
    descends = coordinate.units is not None and coordinate.usual(segments) < 0
    return found.reverse() if descends else found


def _segments(opened: OpenedArrays, coordinate: Coordinate | None, where: Any, length: int) -> Ints:
    """Return the runs of elements that are selected, and of one group."""
    if coordinate is None:
        if where is not None:
            raise UsageError("where= without a sample axis", "give sample_axis=")
        return np.array([[0, 0]], np.int64)
    segments = np.array([[0, length]], np.int64)
    if where is not None:
        where = _compare(opened, coordinate.name, where) if hasattr(where, "with_values") else where
        segments = runs_of(coordinates.select_elements(coordinate, where))
    window = opened.sampling.windows
    if window is not None and window.group is not None:
        groups = opened.read(opened.near(window.group) or window.group)
        if groups.shape != (length,):
            problem = f"Window(group={window.group!r}) names an array of the shape {groups.shape}"
            raise FieldError(problem, f"name one with a number for each of the {length} elements")
        segments = split_segments(segments, np.flatnonzero(groups[1:] != groups[:-1]) + 1)
    return segments


def _compare(opened: OpenedArrays, axis: str, condition: Condition) -> NDArray[np.bool_]:
    """Return for which elements of the sample axis a condition is true. Raises `SelectionError` for unknown arrays."""
    paths, arrays = dict[str, str](), opened.group.arrays
    for name in condition.fields:
        path = opened.near(name)
        if path is None or arrays[path].dims != (axis,):
            known = [n for n, a in arrays.items() if a.dims == (axis,)]
            problem = f"where={condition.text!r} uses {name!r}, which is not an array along {axis!r}"
            raise SelectionError(problem, f"use {', '.join(known) or 'a slice or a mask'}")
        paths[name] = path
    texts = [name for name, path in paths.items() if arrays[path].values.kind == "text"]
    classes = {name: opened.classes([path]).get(path, ()) for name, path in paths.items()}
    labels = {} if opened.manifest is None else coordinates.time_labels(opened.manifest)
    units = {name: coordinates.time_units(arrays[path]) for name, path in paths.items()}
    labels |= {name: each.number for name, each in units.items() if each is not None}
    condition = condition.with_values(classes, texts, labels)
    return condition.mask({name: opened.read(path) for name, path in paths.items()})


def _window_axis(
    opened: OpenedArrays, coordinate: Coordinate | None, segments: Ints, outputs: WindowParts
) -> tuple[Axis | None, int]:
    """Return the sample axis, whose windows cross no gap and last as long as their durations, and how many do not.

    Raises `UsageError` if there is no window.
    """
    if coordinate is None:
        return None, 0
    if outputs.extent > 1:
        segments = split_segments(segments, coordinate.gaps(segments))
    stride = 1 if outputs.every else outputs.stride
    starts, counts = segment_anchors(segments, outputs.extent, stride)
    if not counts.size:
        longest = int((segments[:, 1] - segments[:, 0]).max(initial=0))
        problem = f"windows of {outputs.extent} elements: the longest part of {coordinate.name!r} has {longest}"
        remedy = "give shorter windows; parts end at gaps of the coordinate, groups, and the ends of where="
        raise UsageError(problem, remedy)
    left_out = 0
    if outputs.every or outputs.spans:
        anchors, of = expand_anchors(starts, counts, stride)
        kept = coordinate.keep_spans(outputs.spans, anchors)
        if outputs.every:  # from the first window of each segment on
            first = np.append(anchors[kept], of[-1:])[np.searchsorted(anchors[kept], of)]
            on_time = coordinate.keep_stride(first, anchors, outputs.every)
            anchors, kept = anchors[on_time], kept[on_time]
        left_out = int(kept.size - np.count_nonzero(kept))
        starts, counts = anchor_runs(anchors[kept], outputs.stride)
        if not counts.size:
            problem = f"no window along {coordinate.name!r} has the durations of {opened.sampling.windows}"
            raise UsageError(problem, "the steps of its times differ: give numbers of elements, or select a part")
    found = coordinate.name, coordinate.length, starts, counts, outputs.stride, outputs.extent, 1
    return Axis(*found, offsets=outputs.offsets), left_out


def _axes(opened: OpenedArrays, columns: Mapping[str, RegionColumn], samples: Axis | None) -> tuple[Axis, ...]:
    """Return the anchored axes. Raises `UsageError` if a patch does not fit, and `FieldError` for too few dimensions.

    Their lengths are those of the first column that has all of them.
    """
    first = next((column for column in columns.values() if set(opened.anchored) <= set(column.lengths)), None)
    if first is None:
        problem = f"no field of {opened.group.url} has {', '.join(opened.anchored)}"
        raise FieldError(problem, "name an array that has them")
    lengths = {dim: first.lengths[dim] for dim in opened.anchored}
    found = [] if samples is None else [samples]
    found += [_patch_axis(opened, columns, dim, lengths[dim]) for dim in opened.sampling.patch_dims]
    having = {dim: [column for column in columns.values() if dim in column.lengths] for dim in lengths}
    chunks = {dim: max(_reference_chunk(column, dim, lengths[dim]) for column in having[dim]) for dim in lengths}
    volume = sum(_element_bytes(column, lengths) for column in columns.values())
    cells = choose_cells([replace(axis, cell=chunks[axis.name]) for axis in found], volume)
    count = prod(-(-axis.length // cell) for axis, cell in zip(found, cells, strict=True))
    if count > MAX_CELLS:
        problem = f"{count} boxes of chunks of {next(iter(columns))!r} are more than {MAX_CELLS}"
        raise FormatError(problem, "read a part of the array, or one with larger chunks")
    return tuple(replace(axis, cell=cell) for axis, cell in zip(found, cells, strict=True))


def _patch_axis(opened: OpenedArrays, columns: Mapping[str, RegionColumn], dim: str, length: int) -> Axis:
    patch = opened.sampling.patches
    assert patch is not None
    size, stride, margin = patch.along(dim)
    extent, usable, snap = size + 2 * margin, length, 1
    for name, column in columns.items():
        if dim not in column.lengths or extent > length:
            continue
        scale = resolution(column.lengths[dim], length)
        usable = min(usable, int(column.lengths[dim] / scale))
        snap = lcm(snap, scale.denominator)
        if (extent * scale).denominator > 1 or (stride * scale).denominator > 1:
            problem = f"patches of {extent} elements along {dim!r}, {stride} apart, are {extent * scale} of {name!r}"
            raise UsageError(problem, f"give sizes and strides that are multiples of {scale.denominator}")
    if extent > usable:
        with_margin = f" with a margin of {margin}" if margin else ""
        problem = f"patches of {size} elements{with_margin} along {dim!r}, which has {usable} in all arrays"
        raise UsageError(problem, "give a smaller patch")
    count = (usable - extent) // stride + 1
    if not patch.random:
        return Axis(dim, length, np.zeros(1, np.int64), np.array([count]), stride, extent, 1)
    positions = (usable - extent) // snap + 1  # of a corner; the anchors divide them evenly
    stride = positions // count * snap
    last = positions * snap - (count - 1) * stride
    return Axis(dim, length, np.zeros(1, np.int64), np.array([count]), stride, extent, 1, stride, last, snap)


def resolution(length: int, reference: int) -> Fraction:
    """Return how many elements a column has for one of the first column, along an axis of these lengths.

    The levels of an image have its length divided by 2, 4, .., rounded up or down.
    """
    coarser, finer = round(reference / max(1, length)), round(length / max(1, reference))
    if coarser and abs(coarser * length - reference) < coarser:
        return Fraction(1, coarser)
    if finer and abs(finer * reference - length) < finer:
        return Fraction(finer)
    return Fraction(length, reference)


def _reference_chunk(column: RegionColumn, dim: str, length: int) -> int:
    """Return the largest chunk of a column along a dimension, in elements of the first column.

    Sparse rows end anywhere in a chunk, so that neighbouring cells read the chunk between them twice. For them it is
    that of up to `ROW_CHUNKS`, as far as the limits of cells allow.
    """
    if column.rows is not None:
        (array,) = (member.array for member in column.members if member.array is not None)
        count = min(ROW_CHUNKS, array.shape[0] // array.chunks[0] // LEAST_CELLS, CELL_BYTES // 2 // array.chunk_bytes)
        return max(1, min(length, int(max(1, count) * array.chunks[0] / max(1.0, column.mean_row))))
    chunks = [m.array.chunks[m.dims.index(dim)] for m in column.members if m.array is not None and dim in m.dims]
    return max(1, min(length, int(max(chunks, default=1) / resolution(column.lengths[dim], length))))


def _element_bytes(column: RegionColumn, references: Mapping[str, int]) -> float:
    """Return the bytes of a column in a box of one element of every anchored axis."""
    size = np.dtype(column.dtype).itemsize * max(1, column.channels) * column.mean_row
    return float(size * prod(n / references.get(dim, 1) for dim, n in column.lengths.items()))


def _with_outputs(column: RegionColumn, axes: Sequence[Axis], outputs: WindowParts) -> RegionColumn:
    """Return a column with what is cut from it for samples along the anchored axes."""
    if column.rows is not None:
        return replace(column, lengths={ROWS: int(column.rows[-1])})
    lengths, sample_axis = column.lengths, column.sample_axis
    own = [axis for axis in axes if axis.name in lengths]
    scales = {axis.name: resolution(lengths[axis.name], axis.length) for axis in own}
    sizes = {axis.name: int(axis.extent * scales[axis.name]) for axis in own if axis.name != sample_axis}

    def output(suffix: str, parts: tuple[Part, ...]) -> Output:
        count = sum(part.length for part in parts)
        shape = [sizes.get(dim, n) if dim != sample_axis else count for dim, n in lengths.items()]
        if column.channels:
            shape.insert(column.channel_axis, column.channels)
        if not count and sample_axis in lengths:
            del shape[column.sample_position]
        if 0 in shape:
            problem = f"samples of {column.name!r} have the shape {tuple(shape)}, without elements"
            raise FieldError(problem, "leave it out of fields= and channels=")
        return Output(column.name + suffix, tuple(shape), parts)

    if sample_axis in lengths:
        made = [output("", outputs.parts), *([output("_target", outputs.target)] if outputs.target else [])]
    else:  # the same for every sample
        made = [output("", (Part(0, 0, 0, 1),))]
    return replace(column, outputs=tuple(made), scales=scales, sizes=sizes)


def _check_chunks(columns: Iterable[RegionColumn], memory: int | None) -> None:
    arrays = [member.array for column in columns for member in column.members if member.array is not None]
    largest = max(arrays, key=lambda array: array.chunk_bytes, default=None)
    if memory is not None and largest is not None and largest.chunk_bytes > memory:
        problem = f"a chunk of the array {largest.path!r} has {largest.chunk_bytes} bytes, and memory={memory}"
        raise MemoryBudgetError(problem, f"give memory={4 * largest.chunk_bytes} or more, or smaller chunks")


def _manifest(store: Store, arrays: ArrayFields) -> tuple[Manifest, OrderPin]:
    """Return the manifest of arrays, and the order of new runs.

    The manifest has the layout of each column, an order, and digests of metadata and samples.
    """
    anchors = arrays.anchors
    samples, block = len(anchors), anchors.block
    layouts, tables = {}, {}
    for name, column in arrays.columns.items():
        sparse = column.rows is not None
        kind = Field("ragged", column.dtype) if sparse else Field("tensor", column.dtype, column.outputs[0].shape)
        size = samples * column.sample_bytes if sparse else samples * kind.item_bytes
        # chunks have the codecs of their own metadata
        layouts[name] = FieldLayout(kind, block, block, "zarr", resident=False, nbytes=size, stored=size)
        tables[name] = _digest(column, anchors)
    readers = [RegionReader(store, name, layouts[name], arrays) for name in layouts]
    return Manifest(samples, block, layouts, _pinned_order(samples, block, readers), tables), _order(block, readers)


def _order(block: int, readers: Sequence[RegionReader]) -> OrderPin:
    """Return the order of new runs, whose window takes at most `WINDOW_BYTES` of regions and `WINDOW_REQUESTS`.

    It has as many lanes as fit with windows of two blocks, so that runs on few and many ranks begin the same order.
    """
    samples = readers[0].num_samples

    def decoded_bytes(block: int) -> int:
        return sum(reader.most_bytes(block) for reader in readers)

    block = wider_block(
        readers, block, lambda wide: -(-samples // wide) >= LEAST_BLOCKS and decoded_bytes(wide) <= BLOCK_BYTES
    )
    order = order_pin(samples, block, -(-samples // block) * decoded_bytes(block))
    requests = sum(reader.pieces(block) for reader in readers)
    most = max(4, min(WINDOW_BYTES // max(1, decoded_bytes(block)), WINDOW_REQUESTS // requests))
    lanes = min(order.lanes, previous_power(most // 4))
    return OrderPin(block, lanes, max(2, min(order.window // block, most // lanes - 2)) * block)


def _pinned_order(samples: int, block: int, readers: Sequence[RegionReader]) -> OrderPin:
    """Return the order that the digest covers, and that `Shuffle(block=)` and `Shuffle(window=)` begin from."""
    block_bytes, requests = sum(r.most_bytes(block) for r in readers), sum(r.pieces(block) for r in readers)
    order = order_pin(samples, block, -(-samples // block) * block_bytes)
    most = max(4, min(PINNED_WINDOW_BYTES // max(1, block_bytes), WINDOW_REQUESTS // requests))
    lanes, window = order.lanes, order.window // block
    while lanes > 1 and lanes * (window + 2) > most:
        lanes //= 2
    return OrderPin(block, lanes, max(2, min(window, most // lanes - 2)) * block)


def _digest(column: RegionColumn, anchors: Anchors) -> str:
    """Return the SHA-256 of what determines the values and the samples of a column, in hexadecimal."""
    digest = hashlib.sha256(
        repr((column.dims, tuple(column.lengths.values()), column.dtype, column.outputs, column.channels)).encode()
    )
    if column.rows is not None:
        digest.update(column.rows.astype("<i8").tobytes())
    for member in column.members:
        document = "" if member.array is None else member.array.digest
        digest.update(repr((member.dims, member.slices, document, member.unpacking)).encode())
        if member.constant is not None:
            digest.update(np.ascontiguousarray(member.constant).tobytes())
    for axis in anchors.axes:
        values = (axis.name, axis.length, axis.stride, axis.extent, axis.cell, axis.jitter, axis.last_jitter, axis.snap)
        digest.update(repr((values, anchors.aligned)).encode())
        digest.update(axis.first.astype("<i8").tobytes() + axis.count.astype("<i8").tobytes())
    return digest.hexdigest()
