"""What the user asks of a source: which fields, and of which type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamloader.errors import FieldError, UsageError
from streamloader.format.manifest import Field, check_name
from streamloader.format.values import to_value

_BETWEEN = re.compile(r",(?![^\[]*\])")  # not the commas of a shape


@dataclass(frozen=True)
class Wish:
    """`fields` are those to keep, in order, each with the type that it shall have or None for that of the source;
    none keeps all as they are. Names are those of fields, not those in the files.

    `fill` gives fields the value that stands for a missing one. `raw` keeps packed values as they are stored. `mapped`:
    a map function gets the fields, so times come as whole numbers without being asked for.
    """

    fields: Mapping[str, Field | None] = field(default_factory=dict)
    fill: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False
    mapped: bool = False

    @property
    def notes(self) -> dict[str, Any]:
        """What the manifest's provenance keeps of it, so that an append or a comparison reads its source alike."""
        fill = {
            name: value.decode(errors="replace") if isinstance(value, bytes) else str(value)
            for name, value in self.fill.items()
        }
        return {**({"fill": fill} if fill else {}), **({"raw": True} if self.raw else {})}

    @classmethod
    def again(cls, fields: Mapping[str, Field | None], provenance: Mapping[str, Any]) -> Wish:
        """Return the wish for these fields, with the `notes` that are in a provenance."""
        fill = provenance.get("fill")
        return cls(fields, dict(fill) if isinstance(fill, Mapping) else {}, provenance.get("raw") is True)

    def wanted(self, name: str) -> bool:
        """Return whether the field is to be kept."""
        return not self.fields or name in self.fields

    def fill_values(self, fields: Mapping[str, Field], where: str) -> dict[str, Any]:
        """Return the fill values as str, bytes, or numpy scalars of the dtype of their fields.

        Raises `FieldError` for a field that is not there, and for a value that its type does not hold.
        """
        unknown = next((name for name in self.fill if name not in fields), None)
        if unknown is not None:
            raise FieldError(f"fill names the field {unknown!r}, which {where} lacks", f"it has {', '.join(fields)}")
        return {name: fill_value(name, fields[name], given) for name, given in self.fill.items()}


def fill_value(name: str, kind: Field, given: Any) -> Any:
    """Return a fill value as a str for text, bytes for bytes, else as a numpy scalar of the field's dtype.

    Numbers may be given as text, as on the command line. Raises `FieldError` for a value that the type does not hold.
    """
    if kind.kind in ("text", "bytes"):
        if isinstance(given, str):
            return given if kind.kind == "text" else given.encode()
        if isinstance(given, bytes) and kind.kind == "bytes":
            return given
        raise FieldError(f"the fill value {given!r} of the field {name!r} is not {kind.kind}", f"give {kind.kind}")
    value = _number(given) if isinstance(given, str) else given
    try:
        if isinstance(value, bool) != (kind.dtype == "bool"):
            raise FieldError("")
        return np.asarray(to_value(name, Field("tensor", kind.dtype), value, ""))[()]
    except FieldError:
        problem = f"the fill value {given!r} of the field {name!r} is not a value of {kind.dtype}"
        raise FieldError(problem, f"give one that {kind.dtype} holds, or another type with fields") from None


def _number(text: str) -> Any:
    """Return the bool, int or float that a text stands for, or the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def parse_wish(
    fields: str | Iterable[str] | Mapping[str, str | Field | None] | None,
    fill: Mapping[str, Any] | None = None,
    raw: bool = False,
) -> Wish:
    """Return the wish of `"image,label"`, `["image", "tokens=ragged:int32"]` or `{"image": None, "x": "float32[3]"}`.

    Raises `FieldError` for a type that there is not, `UsageError` for a name that is none or stands twice.
    """
    for name in fill or {}:
        check_name(name)
    return Wish({} if fields is None else _parse_fields(fields), dict(fill or {}), raw)


def _parse_fields(fields: str | Iterable[str] | Mapping[str, str | Field | None]) -> dict[str, Field | None]:
    if isinstance(fields, Mapping):
        pairs = [(name, kind) for name, kind in fields.items()]
    else:
        texts = [fields] if isinstance(fields, str) else list(fields)
        parts = [part.strip().partition("=") for text in texts for part in _BETWEEN.split(text)]
        pairs = [(name.strip(), kind.strip() or None) for name, _, kind in parts]
    found: dict[str, Field | None] = {}
    for name, kind in pairs:
        check_name(name)
        if name in found:
            raise UsageError(f"the field {name!r} is named twice", "name each field once")
        found[name] = None if kind is None else Field.parse(kind)
    return found
