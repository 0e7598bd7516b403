"""What a conversion shall make of its source: everything that decides which bytes are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from streamloader.conversion.mapped import Mapper, map_source
from streamloader.conversion.recode import Recode, recode_source
from streamloader.conversion.sources.base import Source
from streamloader.conversion.sources.choose import choose
from streamloader.conversion.sources.wish import Wish
from streamloader.conversion.splits import Splits
from streamloader.errors import UsageError
from streamloader.options import Layout

OnError = Literal["raise", "skip", "quarantine"]
ON_ERROR: tuple[OnError, ...] = ("raise", "skip", "quarantine")


@dataclass(frozen=True)
class Recipe:
    """The wishes. `shuffle` is the seed of a random order, None keeps the source's; see the classes for the others."""

    wish: Wish = field(default_factory=Wish)
    recode: Recode | None = None
    mapper: Mapper | None = None
    splits: Splits = field(default_factory=dict)
    shuffle: int | None = None
    layout: Layout = field(default_factory=Layout)

    def __post_init__(self) -> None:
        if self.shuffle is not None and not 0 <= self.shuffle < 1 << 63:
            raise UsageError(f"shuffle={self.shuffle}", "give a seed from 0 to 2^63 - 1")

    @property
    def opening(self) -> Wish:
        """What the source itself is asked for: with a function behind it, all of its fields."""
        return replace(self.wish, fields={}, mapped=True) if self.mapper else self.wish

    @property
    def shares(self) -> str:
        """All splits with their shares, in the order that decides which rows are whose: `train=9/10,val=1/10`."""
        return ",".join(f"{name}={share}" for name, share in self.splits.items())

    def apply(self, source: Source) -> Source:
        """Return the source with images encoded anew, mapped, and with the fields that are wished. Reads some rows."""
        if self.recode is not None:
            source = recode_source(source, self.recode)
        if self.mapper is not None:
            wish = Wish(self.wish.fields)  # missing values were filled before
            return choose(map_source(source, self.mapper, wish), wish)
        return source

    def options(self) -> Mapping[str, Any]:
        """Return the wishes as JSON values: what an interrupted conversion must agree on to go on."""
        return {
            "fields": {name: str(kind) if kind else None for name, kind in self.wish.fields.items()},
            **self.wish.notes,
            "recode": self.recode.options() if self.recode else None,
            "map": self.mapper.options() if self.mapper else None,
            "split": self.shares,
            "shuffle": self.shuffle,
            **asdict(self.layout),
        }
