"""The coordinate of the sample axis: gaps, durations, labels of times, and which elements `where=` selects."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import SelectionError, UsageError
from streamloader.format.zarr_metadata import ZarrArray

if TYPE_CHECKING:
    from streamloader.engine.sampling import OpenedArrays

Ints = NDArray[np.int64]
TIME_CHANNELS = ("time_of_day", "time_of_year")
# A difference of neighbours above this multiple of the usual one is a gap: calendar months differ by less.
GAP = 1.5
_SECONDS = {
    **dict.fromkeys(("ns", "nanosecond", "nanoseconds"), 1e-9),
    **dict.fromkeys(("us", "microsecond", "microseconds"), 1e-6),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "D", "day", "days"), 86400.0),
    **dict.fromkeys(("w", "W", "week", "weeks"), 604800.0),
}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*\Z")
_UNITS = re.compile(r"\s*([A-Za-z]+)\s+since\s+(.+?)\s*\Z")
_ORIGIN = re.compile(
    r"(\d{1,4})-(\d{1,2})-(\d{1,2})(?:[T ]\s*(\d{1,2})(?::(\d{1,2})(?::(\d{1,2}(?:\.\d*)?))?)?)?"
    r"\s*(?:Z|UTC|GMT|([+-])(\d{1,2})(?::?(\d{2}))?)?\Z"
)
_CALENDARS = ("standard", "gregorian", "proleptic_gregorian")
_DAY, _YEAR = 86400.0, 365.2425 * 86400.0  # seconds; the mean year of the Gregorian calendar


@dataclass(frozen=True, eq=False)
class Coordinate:
    """The values of a sample axis, None if no array has its name; shape (elements,).

    `unit`: seconds for each unit of the values, 0 if they are not times. `origin`: the time of value 0, as a date in
    ISO 8601, "" if it is unknown or of a calendar that numpy does not have.
    """

    name: str
    url: str
    length: int
    values: NDArray[Any] | None
    unit: float = 0.0
    origin: str = ""

    def spacing(self) -> float:
        """Return the usual difference of neighbours, in units of the values."""
        return 1.0 if self.values is None or self.length < 2 else float(np.median(np.diff(self.values)))

    def gaps(self, segments: Ints) -> Ints:
        """Return the elements after a gap in one of the segments, int64 (n, 2).

        Raises `UsageError` if the values in a segment do not ascend, or descend as those of the others do.
        """
        if self.values is None or self.length < 2:
            return np.zeros(0, np.int64)
        inside = np.zeros(self.length + 1, np.int64)  # the pairs of neighbours in one segment
        np.add.at(inside, segments[:, 0], 1)
        np.add.at(inside, segments[:, 1] - 1, -1)
        pairs = np.flatnonzero(np.cumsum(inside)[: self.length - 1] > 0)
        steps = np.diff(self.values.astype(np.float64))[pairs]
        if not steps.size:
            return np.zeros(0, np.int64)
        wrong = np.flatnonzero((steps <= 0) if steps[0] > 0 else (steps >= 0))
        if wrong.size:
            at = int(pairs[wrong[0]])
            pair = f"{self.values[at]} and {self.values[at + 1]}"
            problem = (
                f"the coordinate {self.name!r} of {self.url} is not monotonic: elements {at} and {at + 1} are {pair}"
            )
            raise UsageError(problem, "sort the store, or select a part that ascends with where=slice(start, stop)")
        after: Ints = pairs[np.abs(steps) > GAP * np.median(np.abs(steps))] + 1
        return after

    def elements(self, what: str, duration: str, unit: int) -> int:
        """Return how many times `unit` elements a duration is. Raises `UsageError` unless it is a whole number."""
        match = _DURATION.match(duration)
        if match is None or match[2] not in _SECONDS:
            raise UsageError(what, "write a duration like '6h', '30min' or '1d', or a number of elements")
        spacing = abs(self.spacing()) * self.unit
        if self.values is None or not spacing:
            problem = f"{what}, and {self.name!r} of {self.url} is not a coordinate of times"
            raise UsageError(problem, "give a number of elements")
        count = float(match[1]) * _SECONDS[match[2]] / (spacing * unit)
        if count < 0.5 or abs(count - round(count)) > 1e-6 * count:
            problem = f"{what} is {count:g} times {spacing * unit:g} s, the spacing of {self.name!r}"
            raise UsageError(problem, "give a multiple of it, or a number of elements")
        return round(count)

    def times(self) -> NDArray[np.datetime64]:
        """Return the values as times. Raises `UsageError` if they are not."""
        if self.values is None or not self.origin:
            problem = f"{self.name!r} of {self.url} is not a coordinate of times in the Gregorian calendar"
            raise UsageError(problem, "select elements by their numbers")
        seconds = self.values.astype(np.float64) * self.unit
        return np.datetime64(self.origin, "ms") + np.round(seconds * 1e3).astype("timedelta64[ms]")

    def fractions(self, name: str, channel: str) -> NDArray[np.float32]:
        """Return the fraction of the day or the year of each element. Raises `UsageError` if they are not times."""
        try:
            times = self.times()
        except UsageError as error:
            raise UsageError(f"the channel {channel!r}: {error.problem}", "leave it out") from error
        start = times.astype("datetime64[D]" if name == "time_of_day" else "datetime64[Y]")
        seconds = (times - start).astype("timedelta64[ms]").astype(np.float64) / 1e3
        return np.asarray(seconds / (_DAY if name == "time_of_day" else _YEAR), np.float32)


def read_coordinate(opened: OpenedArrays, axis: str, length: int) -> Coordinate:
    """Return the coordinate of a sample axis: the values of the array of its name, if that has one dimension."""
    array = opened.group.arrays.get(axis)
    if array is None or array.dims != (axis,) or array.shape != (length,):
        return Coordinate(axis, opened.group.url, length, None)
    if not array.holds_numbers:  # names, say, which have no order
        return Coordinate(axis, opened.group.url, length, None)
    values = opened.read_exactly(axis)
    unit, origin = _time_unit(array)
    return Coordinate(axis, opened.group.url, length, values, unit, origin)


def _time_unit(array: ZarrArray) -> tuple[float, str]:
    """Return the seconds of a unit and the time of value 0, from CF's attribute `units` or a dtype of times."""
    raw = array.document.get("data_type", array.document.get("dtype"))
    options = raw.get("configuration", {}) if isinstance(raw, dict) else {}
    unit, count = "", 1
    if isinstance(raw, dict) and raw.get("name") == "numpy.datetime64":
        unit, count = str(options.get("unit")), options.get("scale_factor", 1)
    elif isinstance(raw, str) and raw.lstrip("<>|=").startswith("M8"):
        unit, count = np.datetime_data(np.dtype(raw))
    if unit:  # months and years have no length in seconds
        return (_SECONDS[unit] * count, "1970-01-01") if unit in _SECONDS else (0.0, "")
    match = _UNITS.match(str(array.attributes.get("units", "")))
    if match is None or match[1] not in _SECONDS:
        return 0.0, ""
    known = str(array.attributes.get("calendar", "standard")).lower() in _CALENDARS
    return _SECONDS[match[1]], _parse_origin(match[2]) if known else ""


def _parse_origin(text: str) -> str:
    """Return the date and time of CF's `units`, in UTC and ISO 8601; "" if it is none."""
    match = _ORIGIN.match(text)
    if match is None:
        return ""
    year, month, day, hour, minute, second, sign, hours, minutes = match.groups()
    try:
        date = np.datetime64(f"{int(year):04}-{int(month):02}-{int(day):02}", "ms")
    except ValueError:
        return ""
    seconds = int(hour or 0) * 3600 + int(minute or 0) * 60 + float(second or 0)
    offset = (int(hours or 0) * 3600 + int(minutes or 0) * 60) * (-1 if sign == "-" else 1)
    return str(date + np.timedelta64(round(1000 * (seconds - offset)), "ms"))


def select_elements(opened: OpenedArrays, coordinate: Coordinate, where: Any) -> Ints:
    """Return the elements of the sample axis that `where=` selects, ascending.

    Raises `SelectionError` for an unknown array or label, and an empty selection.
    """
    from streamloader.order.selection import Condition, Selection

    if isinstance(where, slice) and (isinstance(where.start, str) or isinstance(where.stop, str)):
        where = _between(coordinate, where)
    if isinstance(where, Condition):
        columns = {}
        for name in where.fields:
            array = opened.group.arrays.get(name)
            if array is None or array.dims != (coordinate.name,):
                known = [n for n, a in opened.group.arrays.items() if a.dims == (coordinate.name,)]
                problem = f"where={where.text!r} uses {name!r}, which is not an array along {coordinate.name!r}"
                raise SelectionError(problem, f"use {', '.join(known) or 'a slice or a mask'}")
            columns[name] = opened.read_exactly(name)
        where = where.mask(columns)
    return Selection.of(where, coordinate.length).samples


def _between(coordinate: Coordinate, labels: slice) -> NDArray[np.bool_]:
    """Return whether each time lies between two labels, both included, as xarray's `sel` does."""
    times, mask = coordinate.times(), np.ones(coordinate.length, np.bool_)
    try:
        if labels.start is not None:
            mask &= times >= np.datetime64(labels.start)
        if labels.stop is not None:
            stop = np.datetime64(labels.stop)
            mask &= times < stop + 1  # the end of a day, a month or a year
    except (ValueError, TypeError) as error:
        raise SelectionError(f"where={labels} is not a range of times: {error}", "write times as 2001-12-31") from error
    if not mask.any():
        problem = f"where={labels.start}:{labels.stop} selects none of the times {times.min()} to {times.max()}"
        raise SelectionError(problem, f"select some of {coordinate.name!r}")
    return mask
