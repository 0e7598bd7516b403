"""Packages that only some sources and engines need: imported when one is used, and named where they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from streamloader.errors import UsageError


def need(module: str) -> ModuleType:
    """Return the module. Raises `UsageError`, which says what to install, where its package is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the package is there, and lacks something itself
        name = module.partition(".")[0]
        remedy = f"install it with pip install {'protobuf' if name == 'google' else name}"
        raise UsageError(f"the package {name} is not installed here", remedy) from None


class Lazy:
    """A module that is imported when it is first used. Its attributes raise what `need` raises."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(need(self._module), name)
