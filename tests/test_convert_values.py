"""A value is stored exactly, or it is refused with the file, the line and what to do."""

import json

import numpy as np
import pytest
from sources import plain

import streamloader as sl
from streamloader.errors import DestinationError, FieldError, SourceError, StreamloaderError, UsageError
from streamloader.format import codecs

LARGE = 2**53 + 1  # the first whole number that float64 does not hold


def write_lines(path, values):
    """Write one value, as JSON or as the text that it is, under the key x of each line."""
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    path.write_text("".join(f'{{"x": {text}}}\n' for text in texts))
    return path


def converted(src, tmp_path, **options):
    sl.convert(src, tmp_path / "out", workers=0, **options)
    return sl.open(tmp_path / "out")


def values_of(ds, name="x"):
    return [plain(ds[i][name]) for i in range(len(ds))]


# --- lines of JSON and Python objects: types are inferred

REFUSED = {
    "a float out of range": ([1.5, "1e400"], "'x' is a number that float64 does not hold"),
    "a float out of range in a list": ([[1.5], "[-1e400]"], "holds a number that float64 does not hold"),
    "beyond uint64 in a list": ([[2**64], [1]], "whole numbers that no integer type holds"),
    "beyond int64 and negative, in a list": ([[2**63], [-1]], "from -1 to 9223372036854775808, which no integer type"),
    "beyond int64 and negative": ([2**63 + 1, -1], "from -1 to 9223372036854775809, which no integer type holds"),
    "a large integer among fractions": ([LARGE, 0.5], "does not hold 9007199254740993 exactly"),
    "a large integer in a list of fractions": ([[0.5, 1], [LARGE, 0.5]], "9007199254740993 beside fractions"),
    "true among numbers": ([True, 2], "holds bool and numbers"),
    "true in a list of numbers": ([[1, 2], "[true, 2]"], "true or false beside numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_type_holds_exactly_is_refused(case, tmp_path):
    values, message = REFUSED[case]
    with pytest.raises(StreamloaderError, match=message) as error:
        converted(write_lines(tmp_path / "it.jsonl", values), tmp_path)
    assert error.value.remedy
    assert not (tmp_path / "out").exists()


LATE = {
    "true in an integer column": ([0, 1], True, "is bool, expected int64"),
    "1 in a bool column": ([True, False], 1, "is int64, expected bool"),
    "a large integer in a float column": ([0.5], LARGE, "does not hold 9007199254740993 exactly"),
    "negative in an unsigned column": ([2**63], -1, "expected uint64, which does not hold -1"),
    "beyond int64": ([1], 2**63, "expected int64, which does not hold"),
    "a float out of range": ([0.5], "1e400", "a number that float64 does not hold"),
    "a new key": ([1], '2, "late": 3', r"it has 'late', .*fields=.x.* late=TYPE.*fill=.{2}late.: VALUE"),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("case", LATE)
def test_a_value_that_no_sampled_line_has_is_a_bad_sample(case, tmp_path):
    usual, late, message = LATE[case]
    values = [usual[i % len(usual)] for i in range(1000)]
    src = write_lines(tmp_path / "it.jsonl", [*values[:300], late, *values[300:]])
    with pytest.raises(SourceError, match=rf"it\.jsonl:301: .*{message}"):
        converted(src, tmp_path)
    report = sl.convert(src, tmp_path / "out", workers=0, on_error="skip")
    assert report.num_left_out == 1
    assert sorted(values_of(sl.open(tmp_path / "out"))) == sorted(values)


def test_integers_of_both_signs_and_sizes_keep_their_type(tmp_path):
    kinds = {"uint64": [2**63 + 1, 5], "int64": [LARGE, -LARGE], "float64": [2**53, 0.5]}
    for kind, values in {**kinds, "float64[2]": [[2**53, 0.5]], "uint64[1]": [[2**63], [1]]}.items():
        ds = converted(write_lines(tmp_path / "it.jsonl", values), tmp_path / kind)
        assert (str(ds.fields["x"]), values_of(ds)) == (kind, values)


def test_a_key_that_some_lines_lack_is_filled(tmp_path):
    lines = [{"x": i} for i in range(1000)]
    lines[300] |= {"late": 7, "more": "text"}
    lines[301] |= {"late": None}
    (tmp_path / "it.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ds = converted(tmp_path / "it.jsonl", tmp_path, fields="x,late=int8", fill={"late": -1})
    assert values_of(ds, "late") == [-1] * 300 + [7] + [-1] * 699
    assert list(ds.fields) == ["late", "x"]
    with pytest.raises(DestinationError, match=r"fill\.late.* differ"):
        converted(tmp_path / "it.jsonl", tmp_path, fields="x,late=int8", fill={"late": 0}, resume=True)


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        ({"x": 300}, "300 of the field 'x' is not a value of int8"),
        ({"x": 0.5}, "0.5 of the field 'x' is not a value of int8"),
        ({"x": "nan"}, "'nan' of the field 'x' is not a value of int8"),
        ({"x": True}, "True of the field 'x' is not a value of int8"),
        ({"y": 1}, "fill names 'y', which .* lacks; its fields are x"),
    ],
)
def test_a_fill_value_must_fit_its_field(fill, message, tmp_path):
    src = write_lines(tmp_path / "it.jsonl", [1, None])
    with pytest.raises(FieldError, match=message):
        converted(src, tmp_path, fields="x=int8", fill=fill)


def test_fill_is_refused_where_no_value_can_be_missing(tmp_path):
    np.save(tmp_path / "x.npy", np.array([0.5, np.nan]))
    with pytest.raises(UsageError, match="fill, for npy, in which no value is missing; use map; fill works"):
        converted(tmp_path / "x.npy", tmp_path, fill={"x": 0})


def test_flags_become_numbers_by_name(tmp_path):
    ds = converted(write_lines(tmp_path / "it.jsonl", [True, False]), tmp_path, fields="x=uint8")
    assert values_of(ds) == [1, 0]
    ds = converted(write_lines(tmp_path / "it.jsonl", [[], [True]]), tmp_path / "lists", fields="x=ragged:uint8")
    assert values_of(ds) == [[], [1]]
    src = write_lines(tmp_path / "it.jsonl", [True, None])
    ds = converted(src, tmp_path / "nulls", fields="x=int8", fill={"x": -1})
    assert values_of(ds) == [1, -1]


@pytest.mark.parametrize("values", [[True, 2], [2, True], [[True], [2, 3]], [True] * 500 + [2] + [True] * 500])
def test_flags_among_numbers_are_refused_though_a_type_is_named(values, tmp_path):
    kind = "ragged:int64" if isinstance(values[0], list) else "int64"
    with pytest.raises(SourceError, match="give all samples one kind of value"):
        converted(write_lines(tmp_path / "it.jsonl", values), tmp_path, fields=f"x={kind}")


def test_json_that_is_kept_as_text_stays_json(tmp_path):
    src = write_lines(tmp_path / "it.jsonl", ['[1, "a"]', "[1e400]"])
    with pytest.raises(SourceError, match=r"it\.jsonl:2: its 'x' holds a number that float64 does not hold"):
        converted(src, tmp_path, fields="x=text")


OBJECTS = {
    "integers": ([{"x": [2**63, -1]}], "whole numbers that no integer type holds together"),
    "large and fraction": ([{"x": [LARGE, 0.5]}], "9007199254740993 beside fractions"),
    "arrays": ([{"x": [np.array([LARGE]), np.array([0.5])]}], "beside fractions"),
    "flags and numbers": ([{"x": [True, 2]}], "true or false beside numbers"),
    "a new key": ([{"x": i} for i in range(500)] + [{"x": 1, "y": 2}] + [{"x": 1}] * 500, "it has 'y'"),
    "a wider float": (
        [{"x": np.float32(i)} for i in range(500)] + [{"x": 0.1}] + [{"x": np.float32(1)}] * 500,
        r"500.*is float64, expected float32, which does not hold its values; choose with fields=.x=TYPE",
    ),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_values_of_python_objects_are_not_rounded(case, tmp_path):
    samples, message = OBJECTS[case]
    with pytest.raises(StreamloaderError, match=message):
        converted(samples, tmp_path)
    with pytest.raises(StreamloaderError, match=message):
        converted(iter(samples), tmp_path)


# --- types asked by name


@pytest.mark.parametrize(
    ("array", "dtype", "message"),
    [
        (np.array([0, 2**24 + 1]), "float32", "does not hold 16777217 exactly"),
        (np.array([0, LARGE]), "float64", "does not hold 9007199254740993 exactly"),
        (np.array([0, 2**63 - 1]), "float64", "does not hold 9223372036854775807 exactly"),
        (np.array([0, 2**64 - 1], np.uint64), "float32", "does not hold 18446744073709551615 exactly"),
        (np.array([0, 2049], np.uint16), "float16", "does not hold 2049 exactly"),
        (np.array([0, 70000]), "float16", "does not hold 70000 exactly"),
        (np.array([0, 300]), "int8", "does not hold 0 to 300|does not hold 300"),
        (np.array([0, -1]), "uint64", "does not hold"),
        (np.array([0, 0.5]), "int64", "is float64, expected int64"),
        (np.array([0, np.nan], np.float32), "int64", "is float32, expected int64"),
        (np.array([0, 1e300]), "float32", "does not hold its values"),
    ],
)
def test_a_type_that_does_not_hold_a_value_is_refused(array, dtype, message, tmp_path):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(SourceError, match=message):
        converted(tmp_path / "x.npy", tmp_path, fields=f"x={dtype}")


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([2**24, -(2**24), 2**25, 2**62]), "float32"),
        (np.array([2**53, 2**63 - 1024]), "float64"),
        (np.array([2**63, 2**64 - 2048], np.uint64), "float64"),
        (np.array([0.1, np.nan, np.inf]), "float32"),  # rounding a float to fewer bits is what was asked for
        (np.array([True, False]), "float32"),
    ],
)
def test_a_type_that_holds_every_value_is_taken(array, dtype, tmp_path):
    np.save(tmp_path / "x.npy", array)
    ds = converted(tmp_path / "x.npy", tmp_path, fields=f"x={dtype}")
    assert np.array_equal(ds.read("x", 0, len(array)), array.astype(dtype), equal_nan=array.dtype.kind == "f")


def test_samples_that_are_measured_together_may_exceed_a_chunk(tmp_path, monkeypatch):
    """A chunk has up to 2 GiB, and 16 samples are measured whatever their size."""
    monkeypatch.setattr(codecs, "MAX_CHUNK_BYTES", 1 << 20)
    samples = [{"x": bytes([number]) * 200_000} for number in range(16)]
    sl.convert(samples, tmp_path / "out", workers=0)
    assert sl.open(tmp_path / "out")[15] == samples[15]
