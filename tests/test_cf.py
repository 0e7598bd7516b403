"""Values are unpacked as xarray unpacks them, 16 bits to float32; and the valid range counts, which xarray ignores."""

import warnings

import numpy as np
import pytest
import xarray as xr
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.errors import FormatError
from streamloader.zarr.cf import unpacking_of

DTYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "f4", "f8"]
numbers = st.one_of(st.integers(-100, 100).map(float), st.sampled_from([0.01, -2.5, 1e-3, 280.0]))


@settings(max_examples=examples(100))
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
    assert out.dtype == (dtype if dtype.kind == "f" else "f4" if dtype.itemsize <= 2 else "f8")
    if attributes.keys() == {"_FillValue"}:
        assert out.dtype == wanted.dtype
    # xarray computes floats of 32 bits in 32 bits
    np.testing.assert_allclose(out, wanted.astype(out.dtype), rtol=3e-6, atol=1e-5)
    spread = np.empty((50, 2), unpacking.dtype)[:, 0]
    unpacking.write(stored, spread)
    np.testing.assert_array_equal(spread, out)


def test_a_large_fill_value_is_compared_exactly():
    unpacking = unpacking_of({"_FillValue": 2**60 + 1}, np.dtype("i8"), "x")
    found = unpacking.apply(np.array([2**60, 2**60 + 1], np.int64))
    np.testing.assert_array_equal(found, [2.0**60, np.nan])


def test_both_fill_values_are_missing():
    unpacking = unpacking_of({"_FillValue": -1, "missing_value": [7, 8]}, np.dtype("i2"), "x")
    out = np.empty(4, np.float32)
    unpacking.write(np.array([-1, 7, 8, 9], np.int16), out)
    np.testing.assert_array_equal(out, [np.nan, np.nan, np.nan, 9])


@pytest.mark.parametrize("dtype", ["i4", "i8", "u4"])
def test_whole_numbers_of_32_bits_stay_exact(dtype):
    stored = np.array([20200303, 2**31 - 1, 7], dtype)
    unpacking = unpacking_of({"_FillValue": 7}, stored.dtype, "x")
    out = np.empty(3, unpacking.dtype)
    unpacking.write(stored, out)
    assert out[:2].tolist() == stored[:2].tolist()
    assert np.isnan(out[2])


@pytest.mark.parametrize("dtype", ["i2", "i4", "f4"])
@pytest.mark.parametrize(
    "attributes", [{"valid_range": [-5, 7]}, {"valid_min": -5, "valid_max": 7}, {"valid_min": -5}, {"valid_max": 7}]
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


def unpacked(attributes, stored):
    unpacking = unpacking_of(attributes, stored.dtype, "x")
    return stored.astype("f8") if unpacking is None else unpacking.unpack(stored)


@given(st.sampled_from(["1", "2", "4"]), st.sampled_from(["true", "false"]), st.data())
def test_limits_are_reinterpreted_as_the_data_are(size, unsigned, data):
    """Both are of one type, whichever of the two writers stored them as."""
    kind = np.dtype(f"{'u' if unsigned == 'true' else 'i'}{size}")
    bounds = st.integers(int(np.iinfo(kind).min), int(np.iinfo(kind).max))
    values = np.array(data.draw(st.lists(bounds, min_size=1)), kind)
    limits = np.array(sorted(data.draw(st.tuples(bounds, bounds))), kind)
    wanted = np.where((values >= limits[0]) & (values <= limits[1]), values.astype("f8"), np.nan)
    as_stored, as_given = (data.draw(st.sampled_from([f"i{size}", f"u{size}"])) for _ in range(2))
    attributes = {"_Unsigned": unsigned, "valid_range": limits.view(as_given).tolist()}
    np.testing.assert_array_equal(unpacked(attributes, values.view(as_stored)), wanted)


@given(
    st.sampled_from([0.01, 0.1, -0.25, 3e-3, 1.0]),
    st.sampled_from([None, 280.0, -5.5]),
    st.tuples(st.integers(-3000, 3000), st.integers(-3000, 3000)).map(sorted),
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from(["valid_range", "text", "both"]),
    st.booleans(),
)
def test_limits_that_are_floats_are_of_unpacked_values(scale, offset, ends, width, way, scalars):
    stored = np.arange(-4000, 4000, dtype="i2")
    packing = {name: width(x) for name, x in (("scale_factor", scale), ("add_offset", offset)) if x is not None}
    if not scalars:  # as JSON has them
        packing = {name: float(x) for name, x in packing.items()}
    limits = sorted(float(width(end * scale + (offset or 0))) for end in ends)
    given_limits = {
        "valid_range": {"valid_range": limits},
        "text": {"valid_range": f"[{limits[0]!r}, {limits[1]!r}]"},
        "both": {"valid_min": limits[0], "valid_max": limits[1]},
    }[way]
    inside = (stored >= ends[0]) & (stored <= ends[1])
    np.testing.assert_array_equal(np.isnan(unpacked(packing | given_limits, stored)), ~inside)


@pytest.mark.parametrize("offset", [np.int16(1000), np.uint8(200), 1000, np.float32(0.5)])
def test_limits_may_be_beyond_the_integers_of_an_offset(offset):
    stored = np.arange(-20, 20, dtype="i2")
    limits = {"valid_min": float(offset) + 5, "valid_max": 10**30}
    np.testing.assert_array_equal(
        unpacked({"add_offset": offset, **limits}, stored), np.where(stored >= 5, stored + float(offset), np.nan)
    )


@pytest.mark.parametrize("text", ["-5, 7", "-5 7", "[-5, 7]", "-5s, 7s", "-5 to 7"])
def test_a_range_as_text_is_read(text):
    stored = np.arange(-20, 20, dtype="i2")
    inside = (stored >= -5) & (stored <= 7)
    np.testing.assert_array_equal(
        unpacked({"valid_range": text, "scale_factor": 0.5}, stored), np.where(inside, stored / 2, np.nan)
    )


@pytest.mark.parametrize("value", ["see the manual", "", [7, -5], [1, 2, 3], {}, True, "NaN"])
@pytest.mark.parametrize("name", ["valid_range", "valid_min"])
def test_what_is_no_range_is_ignored(name, value):
    stored = np.arange(-20, 20, dtype="i2")
    np.testing.assert_array_equal(unpacked({name: value}, stored), stored)


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


@pytest.mark.parametrize("as_xarray", [False, True])
@pytest.mark.parametrize(("stored", "unsigned"), [("i1", "true"), ("i4", "true"), ("i8", "true"), ("u2", "false")])
def test_values_of_the_other_sign_alone_stay_integers(stored, unsigned, as_xarray):
    values = np.array([0, 3, -1, -56], f"i{stored[1:]}").view(stored)
    attributes = {"_Unsigned": unsigned}
    wanted = xr.decode_cf(xr.Dataset({"x": ("n", values, attributes)}))["x"].values
    unpacking = unpacking_of(attributes, values.dtype, "x", as_xarray=as_xarray)
    out = np.empty(4, unpacking.dtype)
    unpacking.write(values, out)
    assert out.dtype == wanted.dtype
    np.testing.assert_array_equal(out, wanted)
