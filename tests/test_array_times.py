"""Times of the sample axis: windows last as long as they say, and `where=` selects what xarray selects."""

import datetime
import warnings

import cftime
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from amounts import examples
from commands import run
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr_stores import samples_of

import streamloader as sl
from streamloader import errors
from streamloader.zarr.coordinates import Coordinate


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Small worlds and many lanes are the subject of other tests, and so are their warnings."""
    warnings.filterwarnings("ignore", message=".*(lanes|blocks are read)")


def write(path, times, units="hours since 2001-01-01", group="", calendar=None, **more):
    """A store whose array `v` has the number of each element, along `time`."""
    root = zarr.open_group(path, mode="a")
    node = root.require_group(group) if group else root
    arrays = {"time": np.asarray(times), "v": np.arange(len(times)), **more}
    for name, values in arrays.items():
        made = node.create_array(
            name, data=np.asarray(values), chunks=(max(4, len(times) // 8),), dimension_names=["time"]
        )
        if name == "time" and units:
            made.attrs.update({"units": units, **({"calendar": calendar} if calendar else {})})
    return str(path)


def windows_of(url, *, name="v", **options):
    """The numbers of the elements of each window, inputs then targets, by `index`; and the dataset."""
    options = {"sample_axis": "time", "batch_size": None, "with_index": True, "fields": [name], **options}
    dataset = sl.StreamingDataset(url, **options)
    found = {}
    for sample in dataset:
        rows = sample[name].tolist(), sample[f"{name}_target"].tolist() if f"{name}_target" in sample else []
        found[int(sample["index"])] = tuple(rows)
    return found, dataset


@st.composite
def axes(draw):
    """Steps of 6 hours, with stretches of others, and gaps; ascending or descending."""
    steps = draw(
        st.lists(st.one_of(st.just([6] * 4), st.lists(st.sampled_from([3, 6, 8, 30]), max_size=4)), max_size=6)
    )
    times = np.cumsum([0, *[6] * 30, *(step for part in steps for step in part)])
    return times[::-1].copy() if draw(st.booleans()) else times


@settings(max_examples=examples(40), deadline=None)
@given(axes(), st.sampled_from(["length", "forecast", "leads"]), st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_durations_hold_at_every_anchor_and_the_others_are_counted(tmp_path_factory, times, kind, history, lead, daily):
    url = write(tmp_path_factory.mktemp("x") / "x.zarr", times)
    stride = "12h" if daily else 1
    window = {
        "length": sl.Window(f"{6 * history}h", stride=stride),
        "forecast": sl.Window(history=f"{6 * history}h", lead=f"{6 * lead}h", stride=stride),
        "leads": sl.Window(history=f"{6 * history}h", lead=("6h", f"{6 * lead + 6}h"), stride=stride),
    }[kind]
    leads = {"length": [], "forecast": [6 * n for n in range(1, lead + 1)], "leads": [6, 6 * lead + 6]}[kind]
    wanted = [6 * n for n in range(1 - history, 1)], leads
    found, dataset = windows_of(url, windows=window)
    # inputs and targets lie at their hours from the present element, wherever it is
    for inputs, targets in found.values():
        present = times[inputs[-1]]
        assert [times[i] - present for i in inputs] == wanted[0]
        assert [times[i] - present for i in targets] == wanted[1]
    by_time = {int(time): number for number, time in enumerate(times)}
    offsets = [hour + 6 * (history - 1) for hour in (*wanted[0], *wanted[1])]
    if not daily:
        # every window whose elements follow each other, with as many between them as between hours, is there
        complete = {
            by_time[first]
            for first in by_time
            if all(abs(by_time.get(first + hour, -99) - by_time[first]) == hour // 6 for hour in offsets)
        }
        assert found.keys() == complete
    read = {i for inputs, targets in found.values() for i in (*inputs, *targets)}
    assert dataset.unused == {"time": len(times) - len(read)}
    assert dataset.num_samples == len(found)


def test_left_out_counts_the_windows_that_have_other_durations(tmp_path):
    url = write(tmp_path / "x.zarr", [*range(0, 60, 6), *range(60, 75, 3)])
    found, dataset = windows_of(url, windows=sl.Window(history=1, lead="6h"))
    assert sorted(found) == list(range(10))
    assert dataset.left_out == 4
    assert dataset.unused == {"time": 4}
    assert windows_of(url, windows=sl.Window(history=1, lead=1))[1].left_out == 0


def test_the_usual_step_is_that_of_the_selected_part(tmp_path):
    url = write(tmp_path / "x.zarr", [*range(0, 120, 6), *range(120, 150, 3)])
    found, _ = windows_of(url, windows=sl.Window("12h"), where=slice(20, None))
    assert found[20] == ([20, 21, 22, 23], [])
    assert len(found) == 7


def test_a_stride_that_is_a_duration_holds_where_steps_differ(tmp_path):
    times = [*range(0, 60, 6), *range(60, 100, 3), *range(102, 130, 6)]
    url = write(tmp_path / "x.zarr", times)
    for windows in (sl.Window(1, stride="12h"), sl.Window(history=1, lead=1, stride="12h")):
        found, _ = windows_of(url, windows=windows)
        assert [times[i] for i in sorted(found)] == [
            n for n in range(0, 130 - 6 * (windows.lead or 0), 12) if n in times
        ]


def test_no_window_of_a_duration_is_an_error_that_says_so(tmp_path):
    url = write(tmp_path / "x.zarr", np.cumsum([0, *[5, 6, 7] * 10]))
    with pytest.raises(errors.UsageError, match=r"no window along 'time' has the durations of Window\(length='18h'"):
        windows_of(url, windows=sl.Window("18h"))


def test_descending_times_give_targets_after_inputs(tmp_path):
    url = write(tmp_path / "x.zarr", np.arange(0, 60, 6)[::-1].copy())
    found, _ = windows_of(url, windows=sl.Window(history="12h", lead=2))
    assert found[9] == ([9, 8], [7, 6])
    assert sorted(found) == [3, 4, 5, 6, 7, 8, 9]
    levels = write(tmp_path / "y.zarr", np.arange(10)[::-1].copy(), units="")
    assert windows_of(levels, windows=sl.Window(history=2, lead=1))[0][0] == ([0, 1], [2])


@pytest.mark.quick(5)
@pytest.mark.parametrize("patches", [None, sl.Patch({"y": 8, "x": 40}), sl.Patch({"y": 8, "x": 8})])
@pytest.mark.parametrize("windows", [sl.Window(history="3h", lead="2h"), sl.Window(history=2, lead=1), sl.Window(4)])
def test_boxes_of_descending_times_are_in_the_order_of_time(windows, patches, tmp_path):
    url = write(tmp_path / "x.zarr", np.arange(20)[::-1].copy())
    values = np.arange(20 * 40 * 40, dtype="f4").reshape(20, 40, 40)
    zarr.open_group(url).create_array("z", data=values, chunks=(7, 40, 40), dimension_names=["time", "y", "x"])
    options = {"sample_axis": "time", "windows": windows, "patches": patches, "fields": ["z"], "with_index": True}
    for sample in samples_of(list(sl.StreamingDataset(url, batch_size=4, **options))):
        y, x = (int(sample.get(f"index_{dim}", 0)) for dim in "yx")
        height, width = (40, 40) if patches is None else patches.size.values()
        after = int(sample["index"])  # elements before it are later
        for name in ("z", "z_target") if windows.lead else ("z",):
            count = len(sample[name])
            wanted = values[after - count + 1 : after + 1][::-1, y : y + height, x : x + width]
            np.testing.assert_array_equal(sample[name], wanted)
            after -= count


def test_an_axis_without_a_coordinate_takes_no_memory():
    """Such as that of a flat array of tokens."""
    coordinate = Coordinate("token", "", 10**15, None)
    segments = np.array([[0, 10**15]])
    assert coordinate.usual(segments) == 1
    assert coordinate.gaps(segments).size == 0


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "u4", "datetime64[s]"])
def test_every_dtype_of_times_has_durations(dtype, tmp_path):
    hours = np.arange(50)
    units, values = "hours since 1900-01-01", hours
    if dtype == "f8":
        units, values = "days since 0001-01-01", 730_000 + hours / 24
    elif dtype.startswith("d"):
        units, values = "", np.datetime64("2001-01-01") + hours * np.timedelta64(3600, "s")
    url = write(tmp_path / "x.zarr", values.astype(dtype)[::-1] if dtype == "u4" else values.astype(dtype), units)
    found, dataset = windows_of(url, windows=sl.Window(history="3h", lead="2h", stride="5h"))
    assert (len(found), dataset.left_out) == (10, 0)


@pytest.mark.parametrize("missing", [np.nan, np.datetime64("NaT")])
def test_a_missing_time_is_a_gap(missing, tmp_path):
    times = np.arange(20.0) if isinstance(missing, float) else np.datetime64("2001-01-01", "h") + np.arange(20)
    times[7] = missing
    url = write(tmp_path / "x.zarr", times)
    assert sorted(windows_of(url, windows=sl.Window(3))[0]) == [*range(5), *range(8, 18)]
    assert sorted(windows_of(url, windows=sl.Window("3h"))[0]) == [*range(5), *range(8, 18)]
    assert 7 not in windows_of(url, where=slice("1999", None))[0]


def test_times_before_the_first_known_one_may_be_missing(tmp_path):
    times = np.datetime64("2001-01-01", "h") + np.arange(9)
    times[:2] = np.datetime64("NaT")
    url = write(tmp_path / "x.zarr", times)
    assert sorted(windows_of(url, windows=sl.Window("3h"))[0]) == [2, 3, 4, 5, 6]
    write(tmp_path / "none.zarr", np.full(9, np.datetime64("NaT", "h")))
    assert len(windows_of(tmp_path / "none.zarr", windows=sl.Window(1))[0]) == 9
    with pytest.raises(errors.SelectionError, match=r"selects none of the times \(all are missing\)"):
        windows_of(tmp_path / "none.zarr", where=slice("2000", None))


def test_times_with_the_fill_value_are_missing(tmp_path):
    url = write(tmp_path / "x.zarr", np.array([0, 1, -1, 3, 4, 5]))
    zarr.open_array(f"{url}/time").attrs.update({"_FillValue": -1, "units": "hours since 2000-01-01"})
    assert sorted(windows_of(url, windows=sl.Window(2))[0]) == [0, 3, 4]
    assert sorted(windows_of(url, where=slice(None, "2000-01-01T01:30"))[0]) == [0, 1]
    with pytest.raises(errors.SelectionError, match="none of the times 2000-01-01T00:00:00 to 2000-01-01T05:00:00"):
        windows_of(url, where=slice(None, "1999-12-31T23:30"))


def test_groups_below_have_their_coordinates_levels_groups_and_conditions(tmp_path):
    times = [*range(10), *range(20, 30)]
    url = write(tmp_path / "x.zarr", times, group="g/h", run=np.repeat([1, 2], 10))
    write(tmp_path / "x.zarr", np.arange(20), group="other")
    inner = [*range(8), *range(10, 18)]
    assert sorted(windows_of(url, name="g/h/v", windows=sl.Window("3h"))[0]) == inner
    assert sorted(windows_of(url, name="g/h/v", windows=sl.Window(3))[0]) == inner
    assert sorted(windows_of(url, name="g/h/v", windows=sl.Window(3), where="run == 2")[0]) == inner[8:]
    assert sorted(windows_of(url, name="g/h/v", windows=sl.Window(2, group="run"))[0]) == [*range(9), *range(10, 19)]
    assert sorted(windows_of(url, name="g/h/v", where=slice("2001-01-01T20", "2001-01-01T21"))[0]) == [10, 11]
    zarr.consolidate_metadata(tmp_path / "x.zarr")
    assert sorted(windows_of(url, name="g/h/v", windows=sl.Window("3h"))[0]) == inner
    with pytest.raises(errors.FieldError, match=r"'g/h/time' and 'other/time' of .* differ"):
        sl.StreamingDataset(url, batch_size=1, sample_axis="time", fields=["g/h/v", "other/v"])


def test_a_coordinate_above_the_group_counts_for_it_and_levels_are_found_beside_an_array(tmp_path):
    root = zarr.open_group(tmp_path / "x.zarr", mode="w")
    times = [0, 1, 2, 10, 11, 12]
    root.create_array("time", data=np.array(times), dimension_names=["time"])
    root.create_array("g/level", data=np.array([500, 850]), dimension_names=["level"])
    values = np.arange(24).reshape(6, 2, 2)
    root.create_array("g/z", data=values, dimension_names=["time", "level", "x"])
    options = {"sample_axis": "time", "batch_size": 1, "with_index": True, "windows": sl.Window(2)}
    dataset = sl.StreamingDataset(tmp_path / "x.zarr", channels=sl.Channels("g/z@850"), **options)
    found = {int(sample["index"]): sample["channels"] for sample in samples_of(list(dataset))}
    assert sorted(found) == [0, 1, 3, 4]
    np.testing.assert_array_equal(found[3][:, 0], values[3:5, 1])


CALENDARS = ["standard", "proleptic_gregorian", "noleap", "all_leap", "360_day", "julian"]


@pytest.mark.quick(4)
@pytest.mark.parametrize("calendar", CALENDARS)
@pytest.mark.parametrize(
    "where",
    [
        *(slice("1999-02", "2000-02"), slice("2000", None), slice(None, "1999-12-30", 3), slice("1999-06-15", None, 4)),
        slice("2000-02-28T12", "2000-03-01"),
    ],
)
def test_times_of_every_calendar_are_selected_as_by_xarray(calendar, where, tmp_path):
    days = np.arange(0, 500, 0.5)
    url = write(tmp_path / "x.zarr", days, "days since 1998-12-30", calendar=calendar)
    decoded = xr.decode_cf(
        xr.Dataset({"time": ("time", days, {"units": "days since 1998-12-30", "calendar": calendar})}),
        decode_times=xr.coders.CFDatetimeCoder(use_cftime=True),
    )
    wanted = decoded.assign(v=("time", np.arange(days.size)))["v"].sel(time=where).values
    found, _ = windows_of(url, where=where)
    assert sorted(found) == wanted.tolist()


def test_the_standard_calendar_is_mixed_with_and_without_the_attribute(tmp_path):
    days = np.arange(577_700, 577_800)
    date = cftime.num2date(577_750, "days since 1-1-1", "standard").isoformat()[:10]
    for number, calendar in enumerate((None, "standard", "gregorian")):
        url = write(tmp_path / f"{number}.zarr", days, "days since 1-1-1", calendar=calendar)
        assert sorted(windows_of(url, where=slice(date, date))[0]) == [50]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["time_of_year", "time_of_day"])
@pytest.mark.parametrize("calendar", CALENDARS)
def test_fractions_of_times_are_below_one_in_every_calendar(name, calendar, tmp_path):
    hours = np.arange(3 * 366) * 27
    url = write(
        tmp_path / "x.zarr", hours, "Hours since 2003-12-30 12:00 AM", calendar=calendar, w=np.zeros(hours.size)
    )
    channels = sl.Channels("v", name)
    dataset = sl.StreamingDataset(url, batch_size=1024, sample_axis="time", channels=channels, with_index=True)
    dates = cftime.num2date(hours, "hours since 2003-12-30", calendar)
    for sample in samples_of(list(dataset)):
        date = dates[int(sample["index"])]
        start = date.replace(month=1, day=1, hour=0)
        wanted = (date - start) / (start.replace(year=date.year + 1) - start)
        wanted = date.hour / 24 if name == "time_of_day" else wanted
        assert sample["channels"][1] == pytest.approx(wanted, abs=1e-6)
        assert sample["channels"][1] < 1


LABELS = [
    slice(datetime.datetime(2001, 1, 2), datetime.datetime(2001, 1, 3)),
    slice(pd.Timestamp("2001-01-02 06:00"), pd.Timestamp("2001-01-03")),
    slice(np.datetime64("2001-01-02"), np.datetime64("2001-01-03", "ns")),
    slice(pd.Timestamp("2001-01-02"), None, 3),
    slice(None, np.datetime64("2001-01-02T11:59"), 2),
    slice("2001-01-02", pd.Timestamp("2001-01-03 12:00")),
]


AS_TEXT = {
    "2001:2002-03": slice("2001", "2002-03"),
    "2002-12:": slice("2002-12", None),
    ":2001-03-04": slice(None, "2001-03-04"),
    "2001-01-01T06:2001-01-02T18": slice("2001-01-01T06", "2001-01-02T18"),
    "2001-01-01T06:30:2001-01-02T18:30": slice("2001-01-01T06:30", "2001-01-02T18:30"),
    "slice(2001, 2002)": slice(2001, 2002),
    "slice('2001', '2002', 3)": slice("2001", "2002", 3),
    " slice(-5, None) ": slice(-5, None),
    ":": slice(None),
}


@pytest.mark.parametrize("text", AS_TEXT)
def test_a_range_as_text_selects_what_the_slice_does(text, tmp_path):
    url = write(tmp_path / "x.zarr", np.arange(0, 24 * 800, 8))
    assert windows_of(url, where=text)[0] == windows_of(url, where=AS_TEXT[text])[0]


@pytest.mark.parametrize("text", ["2001:2002", "2001:", ":2002", "0:800", "-100:", "20010101:20020101"])
def test_numbers_as_text_are_refused_where_they_may_be_times(text, tmp_path, capsys):
    """2,400 elements of the years 2001 to 2003: both readings select some."""
    url = write(tmp_path / "x.zarr", np.arange(0, 24 * 800, 8))
    with pytest.raises(errors.SelectionError, match=f"where={text} may mean times or numbers of elements of 'time'"):
        windows_of(url, where=text)
    for command in ("stats", "plan"):
        status, _, err = run(capsys, command, url, "--sample-axis", "time", "--fields", "v", "--where", text)
        assert (status, f"where={text} may mean times" in err) == (2, True), err


def test_the_remedy_of_numbers_as_text_can_be_copied(tmp_path):
    url = write(tmp_path / "x.zarr", np.arange(0, 24 * 800, 8))
    with pytest.raises(errors.SelectionError) as caught:
        windows_of(url, where="2001:2002")
    assert caught.value.remedy == "write times as 2001-01:2002-12, elements as 'slice(2001, 2002)'"
    assert len(windows_of(url, where="2001-01:2002-12")[0]) == 3 * 730
    assert list(windows_of(url, where="slice(2001, 2002)")[0]) == [2001]


def test_numbers_as_text_are_refused_where_they_may_be_other_values(tmp_path):
    years = write(tmp_path / "years.zarr", np.arange(1, 2100), units="")
    with pytest.raises(errors.SelectionError, match=r"may mean values .*write values as 'time >= 1', elements as 'sl"):
        windows_of(years, where="2001:2002")
    counted = write(tmp_path / "counted.zarr", np.arange(2100), units="")
    assert list(windows_of(counted, where="2001:2003")[0]) == [2001, 2002]


@pytest.mark.parametrize("where", LABELS)
def test_datetimes_and_timestamps_select_as_in_xarray(where, tmp_path):
    url = write(tmp_path / "x.zarr", np.arange(0, 96, 6))
    index = pd.Timestamp("2001-01-01") + pd.to_timedelta(np.arange(0, 96, 6), "h")
    wanted = xr.DataArray(np.arange(16), {"time": index}, "time").sel(time=where).values
    assert sorted(windows_of(url, where=where)[0]) == wanted.tolist()


def test_dates_zones_and_dates_of_cftime_are_labels(tmp_path):
    url = write(tmp_path / "x.zarr", np.arange(0, 96, 6))
    assert sorted(windows_of(url, where=slice(datetime.date(2001, 1, 2), datetime.date(2001, 1, 2)))[0]) == [4, 5, 6, 7]
    zone = datetime.timezone(datetime.timedelta(hours=6))
    start = datetime.datetime(2001, 1, 2, 12, tzinfo=zone)
    assert sorted(windows_of(url, where=slice(start, start))[0]) == [5]
    url = write(tmp_path / "y.zarr", np.arange(90), "days since 2001-01-01", calendar="360_day")
    date = cftime.Datetime360Day(2001, 2, 30)
    assert sorted(windows_of(url, where=slice(date, date))[0]) == [59]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (slice("2001-02-30", None), "the standard calendar has no 2001-02-30"),
        (slice("yesterday", None), "'yesterday' is not a date"),
        (slice("2001-01-01", 5), "5 is not a time"),
        (slice("2001-01-01", None, 0), "step cannot be zero"),
        (slice(pd.NaT, None), "'NaT' is not a date"),
    ],
)
def test_labels_that_are_no_times_are_errors(where, message, tmp_path):
    url = write(tmp_path / "x.zarr", np.arange(0, 96, 6))
    with pytest.raises(errors.SelectionError, match=message):
        windows_of(url, where=where)


def test_an_unknown_calendar_is_named(tmp_path):
    url = write(tmp_path / "x.zarr", np.arange(9), "days since 2001-01-01", calendar="martian")
    with pytest.raises(errors.UsageError, match=r"known calendar \(it has units='days since .*', calendar='martian'\)"):
        windows_of(url, where=slice("2001", None))
    assert len(windows_of(url, windows=sl.Window("2d"))[0]) == 8


CONDITIONS = {
    "time >= '2024-06-03T06:00'": range(9, 40),
    "time == '2024-06-03T06:00'": [9],
    "time in ('2024-06-03T06:00', '2024-06-03T12:00')": [9, 10],
    "time < '2024-06-01T00:30' or time > '2024-06-10T16:00'": [0, 39],
}


@pytest.mark.parametrize(("where", "kept"), CONDITIONS.items())
def test_conditions_compare_times_that_are_parts_of_their_unit(where, kept, tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("v", data=np.arange(40.0), dimension_names=["time"])
    days = group.create_array("time", data=np.arange(40) / 4, dimension_names=["time"])
    days.attrs["units"] = "days since 2024-06-01"
    options = {"batch_size": 64, "sample_axis": "time", "shuffle": False, "remainder": "uneven", "where": where}
    (batch,) = sl.StreamingDataset(tmp_path / "x.zarr", **options)
    assert batch["v"].tolist() == list(kept)
