"""What a conversion tells while it runs, and when it is done: plain values, no terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from streamloader.format.manifest import Manifest

Phase = Literal["scan", "write", "finish"]


@dataclass(frozen=True)
class Progress:
    """Where a conversion stands, in samples. `kept` of the `done` were written by an earlier run; this one has
    stored `bytes`.

    In the phase "scan" `total` is 0: how much there is, is not known yet. `detail` is one line of text.
    """

    phase: Phase
    done: int = 0
    total: int = 0
    kept: int = 0
    bytes: int = 0
    detail: str = ""


Listener = Callable[[Progress], None]


def ignore(_: Progress) -> None:
    """Listen to nothing."""


@dataclass(frozen=True)
class Report:
    """What a conversion made. `manifests` by split; without splits the one name is "".

    `shards_kept` of the `shards` were finished by an earlier, interrupted run.
    """

    url: str
    format: str
    manifests: Mapping[str, Manifest]
    shards: int
    shards_kept: int

    @property
    def num_samples(self) -> int:
        """The samples of all splits."""
        return sum(manifest.num_samples for manifest in self.manifests.values())
