"""Make `anndata2.zarr`, `anndata3.zarr` and `tables.npz` beside this file: tables with sparse matrices, by AnnData.

    python formats/zarr/stores/make_tables.py

Needs anndata>=0.12 and scipy. `tables.npz` has the matrices as dense arrays, from anndata's own reader.
"""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr

HERE = Path(__file__).parent
ROWS, COLUMNS = 37, 29


def matrix(seed: int, dtype: str) -> sp.csr_matrix:
    """Return a matrix whose rows have 0 to 12 values; the first, the last and three neighbours have none."""
    rng = np.random.default_rng(seed)
    dense = np.zeros((ROWS, COLUMNS), dtype)
    for row in range(ROWS):
        columns = rng.choice(COLUMNS, rng.integers(0, 13), replace=False)
        dense[row, columns] = rng.integers(1, 200, columns.size)
    dense[[0, 11, 12, 13, ROWS - 1]] = 0
    return sp.csr_matrix(dense / 4 if dtype == "f4" else dense)


def main() -> None:
    """Write both stores and read them back."""
    rng = np.random.default_rng(5)
    kinds = pd.Categorical.from_codes(rng.integers(0, 3, ROWS), ["B", "NK", "T"])
    obs = pd.DataFrame({"kind": kinds, "depth": rng.random(ROWS).astype("f4")}, index=[f"cell{i}" for i in range(ROWS)])
    x, counts = matrix(1, "f4"), matrix(2, "i4")
    for form in (2, 3):
        path = HERE / f"anndata{form}.zarr"
        shutil.rmtree(path, ignore_errors=True)
        table = anndata.AnnData(X=x, obs=obs, layers={"counts": counts, "by_column": sp.csc_matrix(counts)})
        anndata.settings.zarr_write_format = form
        group = zarr.open_group(path, mode="w", zarr_format=form)
        anndata.io.write_elem(group, "/", table, dataset_kwargs={"chunks": (20,)})
        read = anndata.read_zarr(path)
        assert (x != read.X).nnz == 0
        assert (read.layers["counts"] != counts).nnz == 0
    codes, depth = kinds.codes.astype("i1"), obs["depth"].to_numpy()
    np.savez_compressed(HERE / "tables.npz", X=x.toarray(), counts=counts.toarray(), kind=codes, depth=depth)
    print(", ".join(f"{name} {version(name)}" for name in ("anndata", "zarr", "scipy", "numpy", "pandas")))


if __name__ == "__main__":
    main()
