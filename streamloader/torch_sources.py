"""What a mixture is made of: its sources, flattened, and their weights from step to step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from streamloader.errors import FieldError, MixtureError
from streamloader.format.manifest import Manifest
from streamloader.plan.turns import exact_shares, whole_weights
from streamloader.torch_selection import WhereChoice


@dataclass(frozen=True, eq=False)
class Source:
    """A dataset of a mixture: `url` and `storage_options` for fsspec, `split` and `where` as for a dataset alone."""

    url: str | os.PathLike[str]
    split: str | None = None
    where: WhereChoice = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)


Weights = Mapping[Any, float]  # of a URL, a Source, or a Mixture


@dataclass(frozen=True)
class Wishes:
    """Sources, and the shares that are wanted of each from a step on: the first from step 0, together 1."""

    sources: tuple[Source, ...]
    shares: tuple[tuple[int, tuple[Fraction, ...]], ...]

    @property
    def whole(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The same in whole numbers."""
        return tuple((step, whole_weights(shares)) for step, shares in self.shares)

    def at(self, step: int) -> tuple[Fraction, ...]:
        """Return the shares at a step."""
        return [shares for begin, shares in self.shares if begin <= step][-1]


def choose_sources(weights: Weights, schedule: Mapping[int, Weights] | None) -> Wishes:
    """Return the sources of a mixture, nested ones flattened. Raises `MixtureError` for what cannot be mixed."""
    if not isinstance(weights, Mapping) or not weights:
        raise MixtureError(f"a mixture of {weights!r:.60}", "give a weight for each source: Mixture({a: 0.7, b: 0.3})")
    parts = {key: _part(key) for key in weights}
    phases = {0: weights, **dict(schedule or {})}
    for step, changed in phases.items():
        unknown = [key for key in changed if key not in parts] if isinstance(changed, Mapping) else [changed]
        if isinstance(step, bool) or not isinstance(step, int) or step < 0 or unknown:
            raise MixtureError(
                f"schedule={{{step!r}: {changed!r:.60}}}", "give weights of the mixture's own sources, by whole steps"
            )
    shares = {step: exact_shares([changed.get(key, 0) for key in parts]) for step, changed in phases.items()}
    steps = sorted({*shares, *(step for part in parts.values() for step, _ in part.shares)})
    found = []
    for step in steps:
        outer = shares[max(begin for begin in shares if begin <= step)]
        pairs = zip(outer, parts.values(), strict=True)
        found.append((step, tuple(share * inner for share, part in pairs for inner in part.at(step))))
    return Wishes(tuple(one for part in parts.values() for one in part.sources), tuple(found))


def _part(key: Any) -> Wishes:
    nested = getattr(key, "_wishes", None)
    if isinstance(nested, Wishes):
        return nested
    if not isinstance(key, str | os.PathLike | Source):
        raise MixtureError(f"a source {key!r:.60}", "give a URL, a Source, or a Mixture")
    return Wishes((key if isinstance(key, Source) else Source(key),), ((0, (Fraction(1),)),))


def check_alike(
    sources: Sequence[Source], manifests: Sequence[Manifest], names: Sequence[Sequence[str]], with_index: bool
) -> Sequence[str]:
    """Return the fields to fetch, which all sources have alike. Raises `MixtureError`, which names the difference."""
    if with_index and "source" in names[0]:
        raise FieldError("the datasets have a field 'source', and the batch a column of that name", "leave it out")
    for source, manifest, mine in zip(sources, manifests, names, strict=True):
        missing = set(names[0]) ^ set(mine)
        if missing:
            raise MixtureError(
                f"{source.url} and {sources[0].url} do not both have {', '.join(sorted(missing))}",
                "name the fields that all sources have in fields=",
            )
        for name in names[0]:
            one, other = manifests[0].fields[name].field, manifest.fields[name].field
            if one != other:
                raise MixtureError(
                    f"{name} is {one} in {sources[0].url} and {other} in {source.url}",
                    "mix datasets whose fields are alike, or leave the field out with fields=",
                )
    return names[0]
