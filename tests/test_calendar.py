"""Times of every calendar are those of cftime, and dates are read as people write them."""

import warnings
from fractions import Fraction

import cftime
import numpy as np
import pytest
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.zarr.calendar import DAY, HOUR, MISSING, TimeUnits

CALENDARS = [
    *("standard", "gregorian", "proleptic_gregorian", "julian"),
    *("noleap", "365_day", "all_leap", "366_day", "360_day"),
]
UNITS = {"microseconds": 1, "milliseconds": 10**3, "seconds": 10**6, "minutes": 60 * 10**6, "hours": HOUR, "days": DAY}
ORIGINS = [
    "1-1-1",
    "1500-02-28 18:00",
    "1582-10-04",
    "1582-10-15",
    "1583-03-01",
    "1900-02-28",
    "2000-02-29",
    "-5-12-30",
]
units = st.sampled_from(list(UNITS))
calendars = st.sampled_from(CALENDARS)
# days around the years that differ, and far ones
days = st.one_of(st.integers(-400_000, 1_100_000), st.integers(577_700, 578_300), st.integers(-800, 800))


def of_cftime(values, text, calendar):
    with warnings.catch_warnings():  # years before 1 are not in the conventions
        warnings.simplefilter("ignore")
        return [cftime.num2date(value, text, calendar, only_use_cftime_datetimes=True) for value in values]


def texts(calendar, times):
    return [f"{calendar.format(time)}.{time % 10**6:06}" for time in times.tolist()]


@given(calendars, units, st.sampled_from(ORIGINS), days, st.integers(0, DAY - 1))
def test_whole_numbers_are_the_times_of_cftime(calendar, unit, origin, day, rest):
    if calendar in ("noleap", "365_day") and origin == "2000-02-29":
        return
    text, value = f"{unit} since {origin}", (day * DAY + rest) // UNITS[unit]
    found = TimeUnits.parse(text, calendar)
    times = found.times(np.array([value, MISSING]))
    assert times[1] == MISSING
    (wanted,) = of_cftime([value], text, calendar)
    assert texts(found.calendar, times[:1]) == [wanted.isoformat(timespec="microseconds")]
    assert found.calendar.parse(wanted.isoformat()) == (times[0], times[0] + (1 if wanted.microsecond else 10**6))


@given(calendars, st.sampled_from(["seconds", "hours", "days"]), days, st.integers(0, 8639))
def test_fractions_of_days_and_hours_are_the_time_that_was_meant(calendar, unit, day, tens):
    """10 seconds of a day have no exact float, and cftime keeps the noise of microseconds."""
    value = float(Fraction(day * DAY + tens * 10**7, UNITS[unit]))
    found = TimeUnits.parse(f"{unit} since 1-1-1", calendar)
    times = found.times(np.array([value, np.nan, np.inf, 1e36]))
    assert times.tolist() == [found.origin + day * DAY + tens * 10**7, MISSING, MISSING, MISSING]


@settings(max_examples=examples(100))
@given(calendars, st.lists(st.tuples(days, st.integers(0, DAY - 1)), min_size=1, max_size=20))
def test_fractions_of_the_year_and_the_day_are_those_of_cftime(name, moments):
    calendar = TimeUnits.parse("days since 1-1-1", name)
    passed = np.array([day * DAY + rest for day, rest in moments])
    times = np.append(passed + calendar.origin, MISSING)
    dates = of_cftime(passed.tolist(), "microseconds since 1-1-1", name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        starts = [date.replace(month=1, day=1, hour=0, minute=0, second=0, microsecond=0) for date in dates]
        wanted = [
            (date - start) / (start.replace(year=start.year + 1 or int(not start.has_year_zero)) - start)
            for date, start in zip(dates, starts, strict=True)
        ]
    found = calendar.calendar.fractions(times, of_year=True)
    np.testing.assert_allclose(found[:-1], wanted, rtol=0, atol=1e-9)
    assert (found[:-1] < 1).all()
    assert np.isnan(found[-1])
    np.testing.assert_allclose(
        calendar.calendar.fractions(times, of_year=False)[:-1], [rest / DAY for _, rest in moments], rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        *(("Hours since 2000-01-01", HOUR), ("hrs since 2000-1-1", HOUR), ("hr Since 2000/01/01", HOUR)),
        *(("secs since 2000-01-01", 10**6), ("s since 2000-01-01T00:00:00Z", 10**6), ("SEC since 2000-01-01", 10**6)),
        *(("DAYS since 2000-01-01 00:00:0.0", DAY), ("d since 20000101", DAY), ("Day since 01-JAN-2000", DAY)),
        *(("mins since 2000-01-01 12:00 AM", 60 * 10**6), ("minute since 2000-01-01 00:00 UTC", 60 * 10**6)),
        *(("days since 2000-01-01 05:30 +05:30", DAY), ("days since 1999-12-31 6:00 pm -6", DAY)),
        *(("days since 2000-01-01 12:00 p.m. +12:00", DAY), ("days since 2000", DAY), ("days since 2000-01", DAY)),
        *(("days since 2000-01-01-00:00", DAY), ("days since 2000-01 -0", DAY), ("days since 1999-12-31T19-05", DAY)),
        *(("msecs since 1 January 2000", 1000), ("usec since 2000-01-01 00:00:00.000000", 1)),
        *(("weeks since 2000-01-01 00", 7 * DAY), ("nanoseconds since 2000-01-01", Fraction(1, 1000))),
    ],
)
def test_units_are_read_as_people_write_them(text, unit):
    found = TimeUnits.parse(text, "")
    assert found.unit == unit
    assert found.calendar.format(found.origin) == "2000-01-01T00:00:00"
    assert found.origin % DAY == 0


@pytest.mark.parametrize("calendar", ["standard", "julian"])
def test_julian_days_begin_in_the_year_before_the_common_era_that_has_no_year_0(calendar):
    text, number = "days since -4713-01-01 12:00", 2451545 + (13 if calendar == "julian" else 0)
    found = TimeUnits.parse(text, calendar)
    assert found.calendar.format(int(found.times(np.array([number]))[0])) == "2000-01-01T12:00:00"
    assert of_cftime([number], text, calendar)[0].isoformat() == "2000-01-01T12:00:00"


def test_months_have_a_length_in_years_of_360_days_only():
    found = TimeUnits.parse("months since 2000-01-01", "360_day")
    assert texts(found.calendar, found.times(np.array([13])))[0].startswith("2001-02-01")
    assert TimeUnits.parse("months since 2000-01-01", "standard") is None


@pytest.mark.parametrize(
    ("units", "calendar"),
    [
        *(("days since 1582-10-10", "standard"), ("days since 0-1-1", "standard"), ("days since 0000-01-01", "julian")),
        *(
            ("days since 2001-02-29", "standard"),
            ("days since 2000-02-29", "noleap"),
            ("days since 2000-02-31", "360_day"),
        ),
        *(
            ("days since 2000-13-01", ""),
            ("days since 2000-01-00", ""),
            ("days since long ago", ""),
            ("days since 2000-1-1", "none"),
        ),
        *(("hours since 2000-1-1 24:00", ""), ("hours since 2000-1-1 13:00 PM", ""), ("hours since 2000-1-1 0:60", "")),
        *(("days since 1-Foo-2000", ""), ("days since 200001011", ""), ("days since 200001", "")),
        *(("hours since 2000-1-1 -600", ""), ("hours since 2000-1-1 12:00+130", "")),
        *(("hours since 1582-10-15:30", "all_leap"), ("hours since 2000-1:30", ""), ("days since 2000-5:00", "")),
    ],
)
def test_what_is_no_date_leaves_durations(units, calendar):
    found = TimeUnits.parse(units, calendar)
    assert found.unit in (DAY, HOUR)
    assert found.calendar is None


@pytest.mark.parametrize(
    "units", ["days", "hours after lunch", "M since 2000-01-01", "years since 2000-01-01", "m s-1", ""]
)
def test_other_units_are_no_times(units):
    assert TimeUnits.parse(units, "standard") is None


@pytest.mark.parametrize("name", CALENDARS)
def test_the_year_before_1_is_one_that_the_calendar_has(name):
    found = TimeUnits.parse("days since 1-1-1", name)
    last = found.origin - DAY
    assert found.calendar.parse(found.calendar.format(last)[:-9]) == (last, found.origin)
    start, end = found.calendar.parse(found.calendar.format(last)[:-15])
    assert start <= last < end == found.origin


@given(calendars, st.one_of(st.integers(-(2**63) + 1, 2**63 - 1), st.integers(-(2**58), 2**58)))
def test_a_time_is_read_as_it_is_written(name, time):
    calendar = TimeUnits.parse("days since 2000-01-01", name).calendar
    second = time - time % 10**6
    assert calendar.parse(calendar.format(time)) == (second, second + 10**6)


@given(calendars, st.integers(-999_999, 999_999).filter(bool), st.integers(-(2**63), 2**63 - 1))
def test_far_origins_give_times_or_durations(name, year, value):
    found = TimeUnits.parse(f"microseconds since {year}-03-01", name)
    if abs(year) > 147_000:
        assert found.calendar is None
    (time,) = found.times(np.array([value])).tolist()
    assert time == (found.origin + value if abs(float(value)) < 2.0**62 else MISSING)


@pytest.mark.parametrize("name", CALENDARS)
def test_a_date_means_all_of_its_last_unit(name):
    calendar = TimeUnits.parse("days since 2000-01-01", name.upper()).calendar
    for year in (1, 1499, 1582, 1583, 1900, 2000, 2001):
        start, end = calendar.parse(f"{year:04}")
        months = [calendar.parse(f"{year:04}-{month:02}") for month in range(1, 13)]
        assert [start, *(stop for _, stop in months)] == [*(first for first, _ in months), end]
        assert end == calendar.parse(f"{year + 1:04}-01-01")[0]
        assert calendar.parse(f"{year:04}-03-01T06")[0] == months[2][0] + 6 * HOUR
        assert calendar.parse(f"{year:04}-03-01T06:30:15")[1] == months[2][0] + 6 * HOUR + 1816 * 10**6
        assert calendar.parse(f"{year:04}-03-01T06:30")[1] == months[2][0] + 6 * HOUR + 31 * 60 * 10**6
        assert calendar.parse(f"{year:04}-03-01") == (months[2][0], months[2][0] + DAY)
