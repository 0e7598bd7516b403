"""What a bench is asked, and what it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from streamloader.errors import UsageError
from streamloader.measure.ceiling import Ceiling
from streamloader.stats import Stats


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and for how long: `seconds` for each stage.

    `batch_size`: 256 by default, or all samples of a smaller dataset. `workers`: DataLoader workers of the loader
    stage. `memory`: as `StreamingDataset` takes it. `image_size`: (height, width) that encoded images are decoded
    to; None leaves them encoded. `trace`: a file that gets one JSON line for each batch of the loader, its
    `BatchReport`; without workers only.
    """

    batch_size: int | None = None
    fields: tuple[str, ...] | None = None
    split: str | None = None
    seconds: float = 10.0
    workers: int = 0
    memory: int | None = None
    image_size: tuple[int, int] | None = (224, 224)
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    trace: Path | None = None

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.workers < 0:
            raise UsageError(
                f"seconds={self.seconds}, workers={self.workers}", "give seconds above 0, and workers of at least 0"
            )
        if self.fields == ():
            raise UsageError("fields=() leaves nothing to measure", "name a field, or leave fields out")
        if self.trace is not None and self.workers:
            raise UsageError("trace= with workers=, whose batches are made elsewhere", "leave one of them out")


@dataclass(frozen=True)
class BenchResult:
    """What was measured of `url`: ceilings, the loader, and the `verdict`, whose first word is the limit.

    `loader.bytes` are those fetched; with workers, what the samples take. `stats` are the loader's; None with workers.
    """

    url: str
    num_samples: int
    batch_size: int
    first_batch_seconds: float
    ceilings: tuple[Ceiling, ...]
    loader: Ceiling
    stats: Stats | None
    ratio: float
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-able values, rates included."""
        rows = [
            asdict(row)
            | {"samples_per_second": row.samples_per_second, "megabytes_per_second": row.megabytes_per_second}
            for row in (*self.ceilings, self.loader)
        ]
        return {
            "url": self.url,
            "num_samples": self.num_samples,
            "batch_size": self.batch_size,
            "first_batch_seconds": self.first_batch_seconds,
            "stages": rows,
            "stats": None if self.stats is None else asdict(self.stats),
            "ratio": self.ratio,
            "verdict": self.verdict,
        }
