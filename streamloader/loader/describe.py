"""A loader's arguments as JSON values, from which `streamloader view` opens the same samples again.

Only what decides which samples a step has, and what is made of them, is described: not workers, memory or devices.
Nothing is pickled: functions and long arrays are left out, and named in `left_out`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields as fields_of
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from streamloader import options
from streamloader.errors import StateError, UsageError
from streamloader.loader.arguments import Arguments, Source
from streamloader.storage.url import redact

# arguments that say which samples a step has, and how they are made
DESCRIBED = (
    *("batch_size", "fields", "shuffle", "seed", "remainder", "decode", "pack", "transform", "skip_steps"),
    *("steps_per_epoch", "with_index", "on_error", "max_bad", "collate", "bucket_by", "bucket_steps", "max_tokens"),
    "clips",
)
PATHS = "url", "left", "right", "exclude"  # arguments that may be paths, which are described as absolute ones
MOST_NUMBERS = 100_000  # of where= and exclude=: more are left out
_TYPES = (
    *(options.CenterCrop, options.Channels, options.Clips, options.Decode, options.Join, options.Pack, options.Pad),
    *(options.Patch, options.RandomResizedCrop, options.Shuffle, options.View, options.Window, Source),
)
TYPES: Mapping[str, Any] = {kind.__name__: kind for kind in _TYPES}
_URL = re.compile(r"[A-Za-z][\w+.-]+:/?/?[^/\\]*|.*::")
_INVALID = "give a file that sl.LossLog or describe() wrote"


def to_json(value: Any) -> Any:
    """Return an argument as JSON values. Raises `UsageError` for a function, a long array, or another object."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        text = redact(value)
        if text != value and not _URL.match(value):  # a condition, which would select other samples
            raise UsageError(text)
        return text
    if isinstance(value, os.PathLike):
        return _absolute(os.fspath(value))
    if isinstance(value, list | tuple | range) and len(value) <= MOST_NUMBERS:
        return [to_json(each) for each in value]
    return _object_to_json(value)


def _object_to_json(value: Any) -> dict[str, Any]:
    """Return a value that JSON has not as a dict with its "type"."""
    if isinstance(value, _TYPES):
        given = {of.name: getattr(value, of.name) for of in fields_of(value) if of.name != "storage_options"}
        changed = {name: each for name, each in given.items() if not _is_default(value, name, each)}
        return {"type": type(value).__name__, **{name: _named(name, each) for name, each in changed.items()}}
    if isinstance(value, Mapping):
        return {"type": "dict", "value": [[to_json(key), to_json(each)] for key, each in value.items()]}
    if isinstance(value, Fraction):
        return {"type": "Fraction", "value": str(value)}
    if isinstance(value, slice):
        return {"type": "slice", "value": to_json([value.start, value.stop, value.step])}
    if not callable(value) and getattr(value, "ndim", 2) == 1 and len(array := np.asarray(value)) <= MOST_NUMBERS:
        return {"type": "array", "value": to_json(array.tolist())}
    name = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    raise UsageError(name if callable(value) else f"a {type(value).__name__}")


def _is_default(value: Any, name: str, given: Any) -> bool:
    default = next(of.default for of in fields_of(value) if of.name == name)
    return given is default or (isinstance(given, bool | int | float | str) and given == default)


def from_json(value: Any) -> Any:
    """Return the argument that `to_json` describes. Raises `StateError` for anything else."""
    if isinstance(value, list):
        return tuple(from_json(each) for each in value)
    if not isinstance(value, dict):
        return value
    values = {name: from_json(each) for name, each in value.items() if name != "type"}
    kind = str(value.get("type"))
    try:
        if kind in TYPES:
            return TYPES[kind](*values.pop("names", ()), **values)
        return _MAKERS[kind](values["value"])
    except (TypeError, ValueError, KeyError) as error:
        raise StateError(f"a description of a run has {str(value)!r:.100}: {error}", _INVALID) from error


_MAKERS: Mapping[str, Callable[[Any], Any]] = {
    "dict": dict,
    "Fraction": Fraction,
    "slice": lambda values: slice(*values),
    "array": np.array,
}


def describe(sources: Iterable[Source], given: Arguments, **others: Any) -> dict[str, Any]:
    """Return the description of a run over `sources`; `others` are further arguments.

    It has "sources", a list, and "arguments" by name, as `to_json` makes them, and "left_out": what could not be
    described, by name, as text.
    """
    left_out: dict[str, str] = {}
    arguments = {name: getattr(given, name) for name in DESCRIBED} | others
    described = _each(arguments, left_out)
    chosen = [_each({of.name: getattr(source, of.name) for of in fields_of(source)}, left_out) for source in sources]
    return {"sources": chosen, "arguments": described, "left_out": left_out}


def _each(values: Mapping[str, Any], left_out: dict[str, str]) -> dict[str, Any]:
    """Return the descriptions of arguments, but of None only for batch_size; add what has none to `left_out`."""
    described = {}
    for name, value in values.items():
        if name == "storage_options" or (value is None and name != "batch_size"):
            continue
        try:
            described[name] = _named(name, value)
        except UsageError as error:
            left_out[name] = error.problem
    return described


def _named(name: str, value: Any) -> Any:
    """Return the argument `name` as JSON values."""
    return to_json(_absolute(value) if name in PATHS and isinstance(value, str) else value)


def _absolute(path: str) -> str:
    """Return a path as an absolute one, since the description may be read elsewhere; a URL unchanged."""
    return path if _URL.match(path) else f"{Path(path).expanduser().absolute()}{'/' * path.endswith('/')}"


def read_description(description: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the arguments of each source, and those of the run. Raises `StateError` for another document."""
    try:
        sources, arguments = description["sources"], description["arguments"]
        read = [{name: from_json(value) for name, value in source.items()} for source in sources]
        return read, {name: from_json(value) for name, value in arguments.items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise StateError(f"a description of a run, {str(description)!r:.60}, has no {error}", _INVALID) from error
