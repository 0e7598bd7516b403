"""What a conversion tells before, while it runs, and when it is done: plain values, no terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from streamloader.conversion.refused import RefusedSample
from streamloader.format.manifest import Field, Manifest

Phase = Literal["scan", "write", "finish"]


@dataclass(frozen=True)
class Preview:
    """What a conversion is going to write, from a sample of its rows.

    `sizes` are the stored bytes of a sample, `codecs` how they are compressed, by field; `splits` the samples of each
    split ("" where there is none) and `shards` the number of shards of all of them. `details` are how the values of a
    field were decoded, or their unit, where there is something to say; `classes` the names of the classes, by field.
    """

    url: str
    format: str
    files: int
    fields: Mapping[str, Field]
    codecs: Mapping[str, str]
    sizes: Mapping[str, float]
    splits: Mapping[str, int]
    shards: int
    details: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """The samples of all splits."""
        return sum(self.splits.values())

    @property
    def stored(self) -> float:
        """The bytes of all samples, as they will be stored."""
        return self.num_samples * sum(self.sizes.values())


@dataclass(frozen=True)
class Progress:
    """Where a conversion stands, in samples. `kept` of the `done` were written by an earlier run; this one has
    stored `bytes`.

    In the phase "scan" `total` is 0: how much there is, is not known yet; its last report has the `preview`. `detail`
    is one line of text.
    """

    phase: Phase
    done: int = 0
    total: int = 0
    kept: int = 0
    bytes: int = 0
    detail: str = ""
    preview: Preview | None = None


Listener = Callable[[Progress], None]


def ignore(_: Progress) -> None:
    """Listen to nothing."""


@dataclass(frozen=True)
class Report:
    """What a conversion made. `manifests` by split; without splits the one name is "".

    `shards_kept` of the `shards` were finished by an earlier, interrupted run. `left_out` are the bad samples that this
    run found or met again, `num_left_out` all. `preview` is what was planned: after a dry run there is nothing else.
    """

    url: str
    format: str
    preview: Preview
    manifests: Mapping[str, Manifest]
    shards: int
    shards_kept: int
    left_out: Mapping[str, tuple[RefusedSample, ...]] = field(default_factory=dict)
    num_left_out: int = 0

    @property
    def num_samples(self) -> int:
        """The samples of all splits."""
        return sum(manifest.num_samples for manifest in self.manifests.values())
