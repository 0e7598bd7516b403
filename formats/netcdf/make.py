"""Make `input/` and `expected.json` beside this file: python formats/netcdf/make.py (needs xarray, netCDF4, scipy)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

HERE = Path(__file__).parent
ROWS = 6
FIELDS = {"flag": "int8", "rain": "float64[2,3]", "station": "text", "t2m": "float64[2,3]", "time": "int32"}
# the format, who writes it, and whether time is the unlimited dimension, whose records are interleaved
FILES = {
    "netcdf4.nc": ("NETCDF4", "netcdf4", True),
    "classic.nc": ("NETCDF3_CLASSIC", "scipy", True),
    "fixed.nc": ("NETCDF3_64BIT", "scipy", False),
    "data.cdf": ("NETCDF3_64BIT_DATA", "netcdf4", True),
}


def dataset() -> xr.Dataset:
    """Return the variables: some along time, one along the grid only, and coordinates."""
    rng = np.random.default_rng(3)
    grid = ("time", "lat", "lon")
    out = xr.Dataset(
        {
            "t2m": (grid, rng.integers(-50, 50, (ROWS, 2, 3)).astype("i2")),
            "rain": (grid, rng.random((ROWS, 2, 3))),
            "flag": ("time", np.arange(ROWS, dtype="i1")),
            "station": ("time", np.array([f"Nº {n}" for n in range(ROWS)])),
            "height": (("lat", "lon"), np.zeros((2, 3), "f4")),
        },
        {"time": np.arange(ROWS, dtype="i4") * 6, "lat": [10.0, 20.0], "lon": [1.0, 2.0, 3.0]},
    )
    out["t2m"].attrs = {"units": "K", "scale_factor": 0.5, "add_offset": 280.0}
    out["time"].attrs = {"units": "hours since 2020-01-01", "calendar": "standard"}
    return out


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows as xarray reads them: packed values decoded, times as numbers."""
    with xr.open_dataset(path, decode_times=False) as opened:
        columns = {name: opened[name].values for name in FIELDS}
    return [{name: _plain(column[row]) for name, column in columns.items()} for row in range(ROWS)]


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else value.tolist()


def main() -> None:
    """Write the same variables in four formats, one also in two files, and read them back."""
    folder = HERE / "input"
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    for name, (kind, engine, unlimited) in FILES.items():
        dataset().to_netcdf(folder / name, format=kind, engine=engine, unlimited_dims=["time"] if unlimited else [])
    for name, rows in (("a.nc", slice(0, 4)), ("b.nc", slice(4, ROWS))):
        part = dataset().isel(time=rows)
        part.to_netcdf(folder / "parts" / name, format="NETCDF3_CLASSIC", engine="scipy", unlimited_dims=["time"])
    samples = read(folder / "netcdf4.nc")
    assert all(read(folder / name) == samples for name in FILES)
    (HERE / "expected.json").write_text(json.dumps({"fields": FIELDS, "samples": samples}, indent=1) + "\n")


if __name__ == "__main__":
    main()
