"""Times of netCDF's CF conventions, section 4.4: units, calendars and dates, in integer arithmetic.

A time is an int64: the microseconds since January 1 of year 0 of its calendar, about 290,000 years. cftime computes the
same, and is the oracle of the tests.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

MISSING = int(np.iinfo(np.int64).min)  # no time, numpy's NaT
SECOND = 1_000_000
MINUTE, HOUR, DAY = 60 * SECOND, 3600 * SECOND, 86400 * SECOND
_LIMIT = 2.0**62  # of microseconds, for an origin and for what is counted from it: the sum is an int64
_UNITS: dict[str, Fraction] = {
    name: Fraction(unit)
    for names, unit in (
        ("ns nanosec nanosecs nanosecond nanoseconds", Fraction(1, 1000)),
        ("us usec usecs microsec microsecs microsecond microseconds", 1),
        ("ms msec msecs millisec millisecs millisecond milliseconds", 1000),
        ("s sec secs second seconds", SECOND),
        ("m min mins minute minutes", MINUTE),
        ("h hr hrs hour hours", HOUR),
        ("d day days", DAY),
        ("w week weeks", 7 * DAY),
    )
    for name in names.split()
}
_SINCE = re.compile(r"\s*([a-z]+)\s+since\s+(.+)", re.IGNORECASE)
_DATE = re.compile(
    # year, month, day; a year of six digits needs its month, since 197001 is rather a month of 1970
    r"\s*([+-]?(?:\d{1,5}|\d{6}(?=[-/])))(?:[-/](\d{1,2})(?:[-/](\d{1,2}))?)?"
    r"(?:[T\s]\s*(\d[\d:.]*(?:\s*[AP]\.?M\.?)?))?"  # time of the day
    # the zone; after a year and a month it follows a space, since 1582-10-15:30 is no month in the zone -15:30;
    # three digits are none, since -106 is -1:06 to some and -10 hours to others
    r"(?:\s*(?:Z|UTC|GMT)|(?(4)\s*|(?(3)\s*|\s+))([+-])(\d{1,2})(?:(?::|(?<=\d\d))(\d{2}))?)?\s*\Z",
    re.IGNORECASE,
)
_CLOCK = re.compile(r"(\d{1,2})(?::([0-5]?\d)(?::([0-5]?\d)(?:\.(\d*))?)?)?\s*(?:([AP])\.?M\.?)?\Z", re.IGNORECASE)
_NAMED_MONTH = re.compile(r"\A\s*(\d{1,2})[-\s]([A-Z]{3})[A-Z]*[-\s](\d{4})\b", re.IGNORECASE)
_COMPACT = re.compile(r"\A\s*(\d{4})(\d\d)(\d\d)(?!\d)")
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]


def _julian(year: Ints) -> Ints:
    return 365 * year + (year + 3) // 4


def _gregorian(year: Ints) -> Ints:
    return _julian(year) - (year + 99) // 100 + (year + 399) // 400


def _early(year: Ints) -> Ints:
    return _julian(year) - 2


def _mixed(year: Ints) -> Ints:
    """The Julian calendar until 1582-10-04, which 1582-10-15 of the Gregorian one follows."""
    return np.where(year <= 1582, _early(year), _gregorian(year))


_REFORM = 578_101  # the number of 1582-10-15


@dataclass(frozen=True)
class Calendar:
    """A calendar: `starts` returns the number of the day on which each year begins."""

    name: str
    starts: Callable[[Ints], Ints]

    @property
    def _from_1(self) -> bool:
        """Whether the year -1 comes before the year 1."""
        return self.starts in (_julian, _mixed)

    def _months(self, year: int, late: bool) -> list[int]:
        """Return the number of the first day of each month and of the next year; `late`: as after the reform."""
        starts = self.starts if self.starts is not _mixed else _gregorian if late else _early
        first, following = starts(np.array([year, year + 1])).tolist()
        days = following - first
        lengths = [30] * 12 if days == 360 else [31, 28 + (days == 366), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
        return list(accumulate(lengths, initial=first))

    def day(self, year: int, month: int, day: int) -> int:
        """Return the number of a day. Raises `ValueError` for one that the calendar does not have."""
        date = year, month, day
        late = date > (1582, 10, 14)
        months = self._months(year + (self._from_1 and year < 0), late)
        absent = (self._from_1 and year == 0) or (self.starts is _mixed and date > (1582, 10, 4) and not late)
        if absent or not 1 <= month <= 12 or not 1 <= day <= months[month] - months[month - 1]:
            raise ValueError(f"the {self.name} calendar has no {year:04}-{month:02}-{day:02}")
        return months[month - 1] + day - 1

    def years(self, days: Ints) -> Ints:
        """Return the years of days."""
        low, high = int(days.min(initial=0)), int(days.max(initial=0))
        # a year has 360 to 366 days, and the longest ones count fewest
        known = np.arange(min(low // 360, low // 366) - 2, max(high // 360, high // 366) + 3)
        return known[np.searchsorted(self.starts(known), days, side="right") - 1]

    def parse(self, text: str) -> tuple[int, int]:
        """Return the first time that a date names, and the end of its last unit: a year, a day, a second; in UTC.

        Raises `ValueError` for what is no date of the calendar.
        """
        text = _NAMED_MONTH.sub(lambda m: f"{m[3]}-{_MONTHS.index(m[2].lower()) + 1}-{m[1]}", text)
        match = _DATE.match(_COMPACT.sub(r"\1-\2-\3", text))
        if match is None:
            raise ValueError(f"{text!r} is not a date")
        *date, clock, sign, hours, minutes = match.groups()
        year, month, day = (int(part or 1) for part in date)
        start = self.day(year, month, day) * DAY
        if date[2]:
            end = start + DAY
        else:
            following = (year, month + 1, 1) if date[1] and month < 12 else (year + 1 or int(self._from_1), 1, 1)
            end = self.day(*following) * DAY
        if clock:
            passed, unit = _parse_clock(clock)
            start, end = start + passed, start + passed + unit
        zone = (int(hours or 0) * HOUR + int(minutes or 0) * MINUTE) * (-1 if sign == "-" else 1)
        return start - zone, end - zone

    def format(self, time: int) -> str:
        """Return a time in ISO 8601, to the second."""
        day, rest = divmod(time, DAY)
        year = int(self.years(np.array([day]))[0])
        months = self._months(year, day >= _REFORM)
        month = bisect_right(months, day)
        clock = f"{rest // HOUR:02}:{rest % HOUR // MINUTE:02}:{rest % MINUTE // SECOND:02}"
        year -= self._from_1 and year < 1
        return f"{year:0{4 + (year < 0)}}-{month:02}-{day - months[month - 1] + 1:02}T{clock}"

    def fractions(self, times: Ints, of_year: bool) -> NDArray[np.float64]:
        """Return how much of the day, or of the year, has passed at each time; NaN for missing ones."""
        days, rest = np.divmod(np.where(times == MISSING, 0, times), DAY)
        passed = rest / DAY
        if of_year:
            years = self.years(days)
            starts = self.starts(years)
            passed = (days - starts + passed) / (self.starts(years + 1) - starts)
        return np.where(times == MISSING, np.nan, passed)


def _parse_clock(text: str) -> tuple[int, int]:
    """Return a time of the day in microseconds, and its last unit. Raises `ValueError`."""
    match = _CLOCK.match(text)
    hour = 24 if match is None else int(match[1])
    if match is None or not (1 <= hour <= 12 if match[5] else hour < 24):
        raise ValueError(f"{text!r} is not a time of the day")
    if match[5]:
        hour = hour % 12 + 12 * (match[5] in "Pp")
    digits = (match[4] or "")[:6]
    passed = hour * HOUR + int(match[2] or 0) * MINUTE + int(match[3] or 0) * SECOND + int(f"{digits:0<6}")
    return passed, 10 ** (6 - len(digits)) if digits else SECOND if match[3] else MINUTE if match[2] else HOUR


_CALENDARS = {
    name: Calendar(name or "standard", starts)
    for names, starts in (
        (("standard", "gregorian", ""), _mixed),
        (("proleptic_gregorian",), _gregorian),
        (("julian",), _julian),
        (("noleap", "365_day"), lambda year: 365 * year),
        (("all_leap", "366_day"), lambda year: 366 * year),
        (("360_day",), lambda year: 360 * year),
    )
    for name in names
}


def parse_unit(name: str, calendar: Calendar | None = None) -> Fraction | None:
    """Return the microseconds of a unit such as `hours`; None for others, and for months that differ in length."""
    if calendar is not None and calendar.name == "360_day" and name.lower() in ("month", "months"):
        return Fraction(30 * DAY)
    return None if name == "M" else _UNITS.get(name.lower())  # numpy's months


@dataclass(frozen=True)
class TimeUnits:
    """What the values of a coordinate of times are: units of `unit` microseconds from `origin` on.

    `calendar` is None if it or the origin is unknown: then there are durations, but no dates.
    """

    unit: Fraction
    calendar: Calendar | None = None
    origin: int = 0

    @classmethod
    def parse(cls, units: str, calendar: str) -> TimeUnits | None:
        """Return those of CF's attributes `units`, "hours since 1900-01-01", and `calendar`; None if it has no unit."""
        match, known = _SINCE.match(units), _CALENDARS.get(calendar.strip().lower())
        unit = None if match is None else parse_unit(match[1], known)
        if match is None or unit is None:
            return None
        try:
            origin = 0 if known is None else known.parse(match[2])[0]
        except ValueError:
            return cls(unit)
        return cls(unit, known, origin) if abs(origin) < _LIMIT else cls(unit)

    @classmethod
    def of_numpy(cls, dtype: np.dtype[Any]) -> TimeUnits | None:
        """Return those of numpy's datetime64; None for months and years."""
        unit, count = np.datetime_data(dtype)
        found, calendar = parse_unit(unit), _CALENDARS["proleptic_gregorian"]
        if found is None or not count:
            return None
        return cls(found * count, calendar, calendar.day(1970, 1, 1) * DAY)

    def number(self, text: str) -> float:
        """Return the value of the first time that a date means, exact if it is whole. Raises `ValueError` for none."""
        if self.calendar is None:
            raise ValueError("its calendar is unknown")
        value = (self.calendar.parse(text)[0] - self.origin) / self.unit
        return int(value) if value.denominator == 1 else float(value)

    def times(self, values: NDArray[Any]) -> Ints:
        """Return the times of values, exactly; floats of minutes or more to the millisecond. NaN is `MISSING`."""
        known = (np.abs(values.astype(np.float64)) < _LIMIT / float(self.unit)) & (values != MISSING)
        kept = np.where(known, values, 0).astype(np.float64 if values.dtype.kind == "f" else np.int64)
        whole = np.floor(kept).astype(np.int64) if values.dtype.kind == "f" else kept
        # few times of the day are exact in fractions of days
        part = np.round((kept - whole) * float(self.unit), -3 if self.unit >= MINUTE else 0).astype(np.int64)
        return np.where(known, whole * self.unit.numerator // self.unit.denominator + part + self.origin, MISSING)
