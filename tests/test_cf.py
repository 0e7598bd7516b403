"""Values are unpacked as xarray unpacks them, but to float32; and the valid range counts, which xarray ignores."""

import warnings

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from streamloader.errors import FormatError
from streamloader.format.cf import unpacking_of

DTYPES = ["i1", "u1", "i2", "u2", "i4", "f4", "f8"]
numbers = st.one_of(st.integers(-100, 100).map(float), st.sampled_from([0.01, -2.5, 1e-3, 280.0]))


@given(
    st.sampled_from(DTYPES),
    st.fixed_dictionaries(
        {}, optional={"scale_factor": numbers.filter(bool), "add_offset": numbers, "_FillValue": st.integers(-120, 120)}
    ),
    st.integers(0, 2**32),
)
def test_values_are_those_of_xarray(dtype, attributes, seed):
    dtype = np.dtype(dtype)
    if dtype.kind == "u" and "_FillValue" in attributes:
        attributes["_FillValue"] = abs(attributes["_FillValue"])
    stored = np.random.default_rng(seed).integers(0 if dtype.kind == "u" else -120, 120, 50).astype(dtype)
    given_attributes = {name: dtype.type(v) if "value" in name.lower() else v for name, v in attributes.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = xr.decode_cf(xr.Dataset({"x": ("n", stored, given_attributes)}), decode_times=False)["x"].values
    unpacking = unpacking_of(attributes, dtype, "x")
    if unpacking is None:
        np.testing.assert_array_equal(stored, wanted)
        return
    out = np.empty(50, unpacking.dtype)
    unpacking.write(stored, out)
    assert out.dtype == (dtype if dtype.kind == "f" else np.float32)
    # xarray computes floats of 32 bits in 32 bits
    np.testing.assert_allclose(out, wanted.astype(out.dtype), rtol=3e-6, atol=1e-5)
    spread = np.empty((50, 2), unpacking.dtype)[:, 0]
    unpacking.write(stored, spread)
    np.testing.assert_array_equal(spread, out)


def test_both_fill_values_are_missing():
    unpacking = unpacking_of({"_FillValue": -1, "missing_value": [7, 8]}, np.dtype("i2"), "x")
    out = np.empty(4, np.float32)
    unpacking.write(np.array([-1, 7, 8, 9], np.int16), out)
    np.testing.assert_array_equal(out, [np.nan, np.nan, np.nan, 9])


@pytest.mark.parametrize("dtype", ["i2", "i4", "f4"])
@pytest.mark.parametrize(
    "attributes", [{"valid_range": [-5, 7]}, {"valid_min": -5, "valid_max": 7}, {"valid_min": -5.0}, {"valid_max": 7}]
)
def test_values_outside_the_valid_range_are_nan(dtype, attributes):
    stored = np.arange(-20, 20).astype(dtype)
    unpacking = unpacking_of({**attributes, "scale_factor": 2.0}, stored.dtype, "x")
    out = np.empty(40, unpacking.dtype)
    unpacking.write(stored, out)
    low = -5 if "valid_max" not in attributes or "valid_min" in attributes else -99
    high = 7 if "valid_min" not in attributes or "valid_max" in attributes else 99
    inside = (stored >= low) & (stored <= high)
    np.testing.assert_array_equal(out, np.where(inside, stored * 2.0, np.nan).astype("f4"))


def test_unsigned_values_in_a_signed_array():
    stored = np.array([0, 1, -1, -128], np.int8)
    unpacking = unpacking_of({"_Unsigned": "true", "scale_factor": 0.5, "_FillValue": -1}, stored.dtype, "x")
    out = np.empty(4, np.float32)
    unpacking.write(stored, out)
    np.testing.assert_array_equal(out, [0, 0.5, np.nan, 64])


def test_values_of_the_other_byte_order_are_unpacked():
    unpacking = unpacking_of({"scale_factor": 0.5}, np.dtype(">i2"), "x")
    out = np.empty(3, np.float32)
    unpacking.write(np.array([1, 256, -2], ">i2"), out)
    np.testing.assert_array_equal(out, [0.5, 128, -1])


@pytest.mark.parametrize("attributes", [{"scale_factor": "x"}, {"add_offset": [1, 2]}, {"_FillValue": {}}])
def test_attributes_that_are_no_numbers_are_an_error(attributes):
    with pytest.raises(FormatError, match="decode_cf=False"):
        unpacking_of(attributes, np.dtype("i2"), "x")
