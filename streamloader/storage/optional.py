"""Imports packages that only some features need, when they are used."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from streamloader.errors import UsageError

__all__ = ["Lazy", "arrow_csv", "ipc", "need", "pa", "pc", "pq"]


def need(module: str, install: str = "") -> ModuleType:
    """Return the module. Raises `UsageError` with what to `install` if it is missing, by default its package."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the package is installed, but one that it needs is missing
        name = module.partition(".")[0]
        install = install or ("protobuf" if name == "google" else name)
        raise UsageError(
            f"the package {name} is not installed here", f"install it with pip install {install}"
        ) from None


class Lazy:
    """A module that is imported when an attribute is first used, which raises as `need`."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(need(self._module), name)


if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as arrow_csv
    import pyarrow.parquet as pq
    from pyarrow import ipc
else:
    pa, pc = Lazy("pyarrow"), Lazy("pyarrow.compute")
    arrow_csv, ipc, pq = Lazy("pyarrow.csv"), Lazy("pyarrow.ipc"), Lazy("pyarrow.parquet")
