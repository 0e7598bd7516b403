"""The coordinate of the sample axis: gaps, durations, labels of times, and which elements `where=` selects."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FieldError, SelectionError, UsageError
from streamloader.format.manifest import Manifest
from streamloader.order.anchors import expand_anchors
from streamloader.samples import Numbers
from streamloader.zarr.calendar import MISSING, SECOND, Calendar, TimeUnits, parse_unit
from streamloader.zarr.metadata import ZarrArray, ZarrGroup

Ints = NDArray[np.int64]
TIME_CHANNELS = ("time_of_day", "time_of_year")
# A difference of neighbours above this multiple of the usual one is a gap: calendar months differ by less.
GAP = 1.5
EXACT = 1e-6  # of a duration, which times that are floats may miss
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*\Z")


class Span(NamedTuple):
    """`steps` of `step` elements, from `offset` after the first one of a window on, that have a duration each."""

    offset: int
    steps: int
    step: int
    duration: float


@dataclass(frozen=True, eq=False)
class Coordinate:
    """The values of a sample axis, None if no array has its name; shape (elements,). `units`: what they are, if times.

    `attributes`: those that say so, for messages.
    """

    name: str
    url: str
    length: int
    values: NDArray[Any] | None
    units: TimeUnits | None = None
    attributes: str = ""

    @cached_property
    def _floats(self) -> NDArray[np.float64]:
        """The values, less the first known one if they are integers, so that differences are exact. NaN is missing."""
        assert self.values is not None
        if self.values.dtype.kind == "f":
            return self.values.astype(np.float64)
        wide = self.values.astype(np.int64)
        known = wide != MISSING
        return np.where(known, (wide - wide[known][:1].sum()).astype(np.float64), np.nan)

    def usual(self, segments: Ints) -> float:
        """Return the usual difference of neighbours in the segments, in units of the values; it has their sign."""
        if self.values is None:
            return 1.0
        steps = self._steps(segments)[1]
        steps = steps if steps.size else np.diff(self._floats)
        steps = steps[np.isfinite(steps)]
        return float(np.quantile(steps, 0.5, method="nearest")) if steps.size else 1.0

    def _steps(self, segments: Ints) -> tuple[Ints, NDArray[np.float64]]:
        """Return the elements whose next one is in the same segment, and the differences of the two."""
        pairs, _ = expand_anchors(segments[:, 0], np.maximum(0, segments[:, 1] - segments[:, 0] - 1), 1)
        return pairs, self._floats[pairs + 1] - self._floats[pairs]

    def gaps(self, segments: Ints) -> Ints:
        """Return the elements after a gap in one of the segments, int64 (n,); missing values are between two gaps.

        Raises `UsageError` if the values in a segment do not ascend, or descend as those of the others do.
        """
        if self.values is None:
            return np.zeros(0, np.int64)
        (pairs, steps), usual = self._steps(segments), self.usual(segments)
        wrong = np.flatnonzero((steps <= 0) if usual > 0 else (steps >= 0))
        if wrong.size:
            at = int(pairs[wrong[0]])
            pair = f"elements {at} and {at + 1} are {self.values[at]} and {self.values[at + 1]}"
            problem = f"the coordinate {self.name!r} of {self.url} is not monotonic: {pair}"
            raise UsageError(problem, "sort the store, or select a part that ascends with where=slice(start, stop)")
        after: Ints = pairs[~(np.abs(steps) <= GAP * abs(usual))] + 1
        return after

    def elements(self, what: str, text: str, usual: float, unit: int) -> tuple[int, float]:
        """Return how many times `unit` elements a duration such as `6h` is, and `usual`, their difference, exactly.

        Raises `UsageError` unless it is a whole number.
        """
        match = _DURATION.match(text)
        length = None if match is None else parse_unit(match[2])
        if match is None or length is None:
            raise UsageError(what, "write a duration like '6h', '30min' or '1d', or a number of elements")
        if self.units is None or not usual > 0:
            problem = f"{what}, and {self.name!r} of {self.url} is not a coordinate of times{self.attributes}"
            raise UsageError(problem, "give a number of elements")
        duration = float(match[1]) * float(length / self.units.unit)
        count = duration / (usual * unit)
        if count < 0.5 or abs(count - round(count)) > EXACT * count:
            seconds = usual * unit * float(self.units.unit) / SECOND
            problem = f"{what} is {count:g} times {seconds:g} s, the spacing of {self.name!r}"
            raise UsageError(problem, "give a multiple of it, or a number of elements")
        return round(count), duration / (round(count) * unit)

    def _lasts(self, passed: NDArray[np.float64], duration: float) -> NDArray[np.bool_]:
        """Return which differences of values are a duration, but for the rounding of floats."""
        numbers = self.values if self.values is not None and self.values.dtype.kind == "f" else self._floats
        rounding = 2 * float(np.spacing(np.max(np.abs(numbers), initial=0, where=np.isfinite(numbers))))
        return np.asarray(np.abs(np.abs(passed) - duration) <= max(EXACT * duration, rounding))

    def keep_spans(self, spans: Iterable[Span], anchors: Ints) -> NDArray[np.bool_]:
        """Return whether the steps of a window have their durations, for windows at `anchors`."""
        kept = np.ones(anchors.size, np.bool_)
        for offset, count, step, duration in spans:
            wrong = ~self._lasts(self._floats[step:] - self._floats[:-step], duration)
            rows = np.append(wrong, np.zeros(-wrong.size % step, np.bool_)).reshape(-1, step)
            before = np.append(np.zeros(step, np.int64), np.cumsum(rows, axis=0))  # wrong ones `step` apart before each
            kept &= before[anchors + offset] == before[anchors + offset + count * step]
        return kept

    def keep_stride(self, first: Ints, anchors: Ints, stride: float) -> NDArray[np.bool_]:
        """Return whether each anchor is a multiple of a duration before or after the first one of its segment."""
        passed = np.abs(self._floats[anchors] - self._floats[first])
        return self._lasts(passed - np.round(passed / stride) * stride + stride, stride)

    def times(self, what: str = "", remedy: str = "select elements by their numbers") -> tuple[Ints, Calendar]:
        """Return the values as times of a calendar. Raises `UsageError` if they are not; `what` begins its text."""
        if self.values is None or self.units is None or self.units.calendar is None:
            problem = f"{self.name!r} of {self.url} is not a coordinate of times in a known calendar{self.attributes}"
            raise UsageError(what + problem, remedy)
        return self.units.times(self.values), self.units.calendar

    def fractions(self, name: str, channel: str) -> NDArray[np.float32]:
        """Return the fraction of the day or the year of each element. Raises `UsageError` if they are not times."""
        times, calendar = self.times(f"the channel {channel!r}: ", "leave it out")
        return calendar.fractions(times, of_year=name == "time_of_year").astype(np.float32)


def read_coordinate(
    group: ZarrGroup, fields: Iterable[str], axis: str, length: int, read: Callable[[str], NDArray[Any]]
) -> Coordinate:
    """Return the coordinate of a sample axis: the values of the array of its name, if that has one dimension.

    It is in the group of the `fields`, or in the nearest one above. `read`: returns the values of an array. Raises
    `FieldError` if there are several, with other values.
    """
    arrays, found = group.arrays, dict[str, NDArray[Any]]()
    for field in fields:
        name = group.beside(field, axis) if field not in arrays or axis in arrays[field].dims else None
        if name is None or name in found or arrays[name].dims != (axis,) or arrays[name].shape != (length,):
            continue
        if arrays[name].holds_numbers:  # names, say, have no order
            found[name] = read(name)
    if not found:
        return Coordinate(axis, group.url, length, None)
    (name, values), *others = found.items()
    for other, differing in others:
        if not np.array_equal(differing, values):
            problem = f"the arrays {name!r} and {other!r} of {group.url} differ, and samples lie along both"
            raise FieldError(problem, "read the groups apart, or in a Mixture")
    array = arrays[name]
    said = ", ".join(f"{key}={array.attributes[key]!r}" for key in ("units", "calendar") if key in array.attributes)
    return Coordinate(axis, group.url, length, values, time_units(array), f" (it has {said})" if said else "")


def time_units(array: ZarrArray) -> TimeUnits | None:
    """Return what the values of an array are, from a dtype of times or CF's attributes; None if they are not times."""
    if array.numpy_dtype.kind == "M":
        return TimeUnits.of_numpy(array.numpy_dtype)
    return TimeUnits.parse(str(array.attributes.get("units", "")), str(array.attributes.get("calendar") or ""))


def time_labels(manifest: Manifest) -> dict[str, Callable[[str], float]]:
    """Return, for each field of times, the function from a date and time to the field's number."""
    known = {} if "map" in manifest.provenance else manifest.provenance  # a map may have changed them
    noted, attributes = (known.get(key) for key in ("units", "attributes"))
    noted = {name: {"units": units} for name, units in noted.items()} if isinstance(noted, Mapping) else {}
    found: dict[str, Callable[[str], float]] = {}
    for name, said in {**noted, **(attributes if isinstance(attributes, Mapping) else {})}.items():
        texts = {key: str(said.get(key, "")) for key in ("units", "calendar")} if isinstance(said, Mapping) else {}
        units = TimeUnits.parse(texts["units"].partition(",")[0], texts["calendar"]) if texts else None
        if units is not None and units.calendar is not None:
            found[name] = units.number
    return found


def select_elements(coordinate: Coordinate, where: Any) -> Ints:
    """Return the elements of the sample axis that a slice, a mask or numbers select, ascending.

    Raises `SelectionError` for an unknown label, an empty selection, and `Numbers` that may mean values of the axis.
    """
    from streamloader.order.selection import select

    if isinstance(where, Numbers):
        _check_counts(coordinate, where)
        where = where.chosen
    ends = (where.start, where.stop) if isinstance(where, slice) else ()
    if any(end is not None and not hasattr(end, "__index__") for end in ends):
        return _between(coordinate, where)
    return select(where, coordinate.length)


def _check_counts(coordinate: Coordinate, where: Numbers) -> None:
    """Raise `SelectionError` if the numbers in a text may mean times or values of the axis rather than its elements."""
    start, stop = where.chosen.start, where.chosen.stop
    times, values = coordinate.units is not None, coordinate.values
    if start is stop is None or values is None or (not times and np.array_equal(values, np.arange(len(values)))):
        return
    remedy = f"write values as '{coordinate.name} >= {values[0]}'"
    if times:
        years = ["" if year is None else f"{year:04}" for year in (start, stop)]
        first, last = (year and f"{year}-{month}" for year, month in zip(years, ("01", "12"), strict=True))
        known = all(re.fullmatch(r"(\d{4})?", year) for year in years)
        remedy = f"write times as {f'{first}:{last}' if known else '2001-01:2017-12'}"
    problem = f"where={where.text} may mean {'times' if times else 'values'} or numbers of elements"
    remedy = f"{remedy}, elements as 'slice({start}, {stop})'"
    raise SelectionError(f"{problem} of {coordinate.name!r} of {coordinate.url}", remedy)


def _between(coordinate: Coordinate, labels: slice) -> Ints:
    """Return the elements whose times lie between two labels, both included, as xarray's `sel` does."""
    times, calendar = coordinate.times()
    mask = times != MISSING
    try:
        if labels.start is not None:
            mask &= times >= _label(calendar, labels.start)[0]
        if labels.stop is not None:
            mask &= times < _label(calendar, labels.stop)[1]
        selected: Ints = np.sort(np.flatnonzero(mask)[:: labels.step])
    except (ValueError, TypeError) as error:
        raise SelectionError(f"where={labels} is not a range of times: {error}", "write times as 2001-12-31") from error
    if not selected.size:
        known = times[times != MISSING]
        ends = (known.min(), known.max()) if known.size else ()
        span = " to ".join(calendar.format(int(end)) for end in ends) or "(all are missing)"
        problem = f"where={labels.start}:{labels.stop} selects none of the times {span}"
        raise SelectionError(problem, f"select some of {coordinate.name!r}")
    return selected


def _label(calendar: Calendar, label: Any) -> tuple[int, int]:
    """Return the first time that a label means and the end: text and dates mean all of a day, a month or a year.

    Datetimes, Timestamps and datetime64 are single times, as in xarray. Raises `ValueError` for other labels.
    """
    if not isinstance(label, str | np.datetime64) and not hasattr(label, "isoformat"):
        raise ValueError(f"{label!r} is not a time")
    text = label.isoformat() if hasattr(label, "isoformat") else str(label)
    start, end = calendar.parse(text)
    single = isinstance(label, np.datetime64) or hasattr(label, "hour")
    return start, start + 1 if single else end
