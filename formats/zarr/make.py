"""Make `input/` and `expected.json` beside this file: python formats/zarr/make.py (needs zarr and xarray)."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr

HERE = Path(__file__).parent
ROWS = 7
FIELDS = {"flag": "bool", "name": "text", "t2m": "int16[2,3]", "time": "int64"}
XARRAY_FIELDS = FIELDS | {"t2m": "float64[2,3]"}


def arrays() -> dict[str, np.ndarray]:
    """Return the arrays along the samples."""
    rng = np.random.default_rng(9)
    return {
        "t2m": rng.integers(-50, 50, (ROWS, 2, 3)).astype("i2"),
        "flag": np.arange(ROWS) % 3 == 0,
        "time": np.arange(ROWS) * 6,
        "name": np.array([f"Nº {n}" * n for n in range(ROWS)], object),
    }


def write_plain(path: Path, version: int, shards: tuple[int, ...] | None) -> None:
    """Write the arrays right in a group, as zarr-python does; those of version 3 in shards."""
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name, values in arrays().items():
        dtype = "str" if name == "name" else values.dtype
        chunks = (4, *values.shape[1:])
        cut = None if shards is None else (*shards, *values.shape[1:])
        made = group.create_array(name, shape=values.shape, dtype=dtype, chunks=chunks, shards=cut)
        made[:] = values
    group.create_group("more")


def write_xarray(path: Path, version: int) -> None:
    """Write the arrays as an xarray dataset, beside what has no sample dimension."""
    values = arrays()
    dims = {"t2m": ("time", "lat", "lon"), "flag": ("time",), "name": ("time",)}
    variables = {name: (dims[name], values[name]) for name in dims}
    variables["height"] = (("lat", "lon"), np.zeros((2, 3), "f4"))
    coordinates = {"time": values["time"], "lat": [10.0, 20.0], "lon": [1.0, 2.0, 3.0]}
    out = xr.Dataset(variables, coordinates)
    out["t2m"].attrs = {"units": "K", "scale_factor": 0.5, "add_offset": 280.0}
    out.to_zarr(path, mode="w", zarr_format=version, consolidated=True, encoding={"t2m": {"chunks": (4, 2, 2)}})


def read_plain(path: Path) -> dict[str, Any]:
    """Return the columns as zarr-python reads them."""
    group = zarr.open_group(path, mode="r")
    return {name: np.asarray(group[name][:]).tolist() for name in FIELDS}


def read_xarray(path: Path) -> dict[str, Any]:
    """Return the columns as xarray reads them: packed values decoded, times as numbers."""
    with xr.open_zarr(path, decode_times=False) as opened:
        return {name: opened[name].values.tolist() for name in FIELDS}


def rows(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of the columns."""
    return [{name: column[row] for name, column in columns.items()} for row in range(ROWS)]


def main() -> None:
    """Write the same arrays by zarr-python and by xarray, in both versions, and read them back."""
    warnings.simplefilter("ignore")  # zarr-python says of strings that their dtype has no specification yet
    shutil.rmtree(HERE / "input", ignore_errors=True)
    folder = HERE / "input"
    write_plain(folder / "v2.zarr", 2, None)
    write_plain(folder / "v3.zarr", 3, (8,))
    write_xarray(folder / "xarray2.zarr", 2)
    write_xarray(folder / "xarray3.zarr", 3)
    decoded, columns = read_xarray(folder / "xarray3.zarr"), read_plain(folder / "v3.zarr")
    assert read_xarray(folder / "xarray2.zarr") == decoded
    assert read_plain(folder / "v2.zarr") == columns
    expected = {"fields": FIELDS, "samples": rows(columns), "xarray_fields": XARRAY_FIELDS, "xarray": rows(decoded)}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
