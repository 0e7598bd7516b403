"""What the user asks of a source: which fields, and of which type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from streamloader.errors import UsageError
from streamloader.format.manifest import Field, check_name

_BETWEEN = re.compile(r",(?![^\[]*\])")  # not the commas of a shape


@dataclass(frozen=True)
class Wish:
    """`fields` are those to keep, in order, each with the type that it shall have or None for that of the source;
    none keeps all as they are. Names are those of fields, not those in the files.
    """

    fields: Mapping[str, Field | None] = field(default_factory=dict)

    def wanted(self, name: str) -> bool:
        """Return whether the field is to be kept."""
        return not self.fields or name in self.fields


def parse_wish(fields: str | Iterable[str] | Mapping[str, str | Field | None] | None) -> Wish:
    """Return the wish of `"image,label"`, `["image", "tokens=ragged:int32"]` or `{"image": None, "x": "float32[3]"}`.

    Raises `FieldError` for a type that there is not, `UsageError` for a name that is none or stands twice.
    """
    if fields is None:
        return Wish()
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
    return Wish(found)
