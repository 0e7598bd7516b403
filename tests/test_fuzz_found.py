"""What the fuzzer found, each as a test of its own: `make fuzz`, docs/testing.md."""

import json

import numpy as np
import pytest
from golden import GOLDEN

import streamloader as sl
from streamloader.errors import FormatError, SelectionError, StateError, StreamloaderError
from streamloader.format.conditions import Condition
from streamloader.loader.dataset import NumpyDataset, NumpyMixture
from streamloader.zarr.cf import unpacking_of


def test_a_root_document_without_any_split_is_damaged(tmp_path):
    root = json.loads((GOLDEN / "splits" / "zarr.json").read_text())
    root["attributes"]["streamloader"]["splits"] = {}
    (tmp_path / "zarr.json").write_text(json.dumps(root))
    with pytest.raises(FormatError, match=r"the splits of .* are damaged"):
        sl.open(tmp_path, split="train")


@pytest.mark.parametrize("value", [[[1, 2], 3], {"a": 1}, [None, [1]]])
@pytest.mark.parametrize("name", ["scale_factor", "add_offset", "_FillValue"])
def test_an_attribute_of_nested_lists_is_no_number(name, value):
    with pytest.raises(FormatError, match=rf"the {name} .* is not one number"):
        unpacking_of({name: value}, np.dtype("i2"), "x")


@pytest.mark.parametrize("name", ["scale_factor", "add_offset", "_FillValue", "missing_value"])
@pytest.mark.parametrize("dtype", ["i2", "f4"])
def test_a_whole_number_beyond_all_floats_is_no_number(name, dtype):
    with pytest.raises(FormatError, match=rf"the {name} .* is not one number"):
        unpacking_of({name: 10**400}, np.dtype(dtype), "x")
    unpacking_of({name: 10**300}, np.dtype(dtype), "x")


def test_a_limit_of_thousands_of_digits_limits_nothing():
    assert unpacking_of({"valid_max": "9" * 5000}, np.dtype("i2"), "x") is None
    found = unpacking_of({"valid_max": "9" * 5000, "valid_min": 3}, np.dtype("i2"), "x")
    np.testing.assert_array_equal(found.apply(np.array([2, 3], "i2")), [np.nan, 3])


def test_an_error_shows_at_most_so_much_of_what_it_quotes():
    with pytest.raises(SelectionError) as caught:
        Condition.parse("a == " + "|" * 9000)
    assert "where='a == |||" in str(caught.value)
    assert "characters) ... " in str(caught.value)
    assert str(caught.value).endswith("+ - * / // % [SL106]")
    assert len(str(caught.value)) < 2500
    assert len(caught.value.problem) > 9000


def test_an_error_shows_no_control_characters():
    assert str(StreamloaderError("a\x1b[2J\x00 \x7f\n b", "c\td")) == "a\\x1b[2J\\x00 \\x7f b; c d [SL000]"


def test_weights_of_a_state_whose_turns_would_take_petabytes_are_invalid():
    mixture = NumpyMixture({str(GOLDEN / "free"): 3.0, str(GOLDEN / "lengths"): 1.0}, batch_size=4, fields=["label"])
    state = mixture.state_dict()
    state["phases"][0][2] = [2**60, 1]
    with pytest.raises(StateError, match=r"phases .* are invalid"):
        mixture.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1, "workers": 10**300}, "the state .* is invalid"),
        ({"epoch": 2**63}, "the state .* is invalid"),
        ({"skipped": [[0, 2**63, 1]]}, "the state's skipped .* is invalid"),
        ({"order": {"block": 6, "lanes": 2**31 + 1, "window": 12}}, "lanes=2147483649 is above the limit of 65536"),
    ],
)
def test_a_state_with_larger_numbers_than_a_run_can_have_is_invalid(change, message):
    loader = NumpyDataset(str(GOLDEN / "free"), batch_size=4, fields=["label"])
    with pytest.raises(StateError, match=message):
        loader.load_state_dict(loader.state_dict() | change)


def test_a_state_of_a_mixture_without_sources_is_invalid():
    mixture = NumpyMixture({str(GOLDEN / "free"): 3.0, str(GOLDEN / "lengths"): 1.0}, batch_size=4, fields=["label"])
    with pytest.raises(StateError, match="the state has no sources"):
        mixture.load_state_dict(mixture.state_dict() | {"sources": [], "batches": "homogeneous"})
