"""Packages that only some sources and engines need: imported when one is used, and named where they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from streamloader.errors import UsageError

# what each extra of this package installs
_PACKAGES = {
    "arrow": "pyarrow",
    "dask": "distributed",
    "hdf5": "h5py",
    "ray": "ray",
    "spark": "pyspark",
    "zstd": "zstandard",
}


def need(module: str, extra: str) -> ModuleType:
    """Return the module. Raises `UsageError`, which says what to install, where its package is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the package is there, and lacks something itself
        problem = f"the package {module.partition('.')[0]} is not installed here"
        raise UsageError(problem, f"install it with pip install {_PACKAGES[extra]}") from None
