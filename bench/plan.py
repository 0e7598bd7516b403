"""What one run measures, in which order: contestants take turns, round after round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.contestants import CEILINGS, OURS, THREADED, Contestant
from bench.servers import Front
from bench.workloads import WORKLOADS, Workload

START_SECONDS = 10.0  # about what a process takes beside its later epochs, for the time left
# Peers that would need minutes for an epoch get the first of so many parts of the data; the page marks them.
PARTS = {
    ("mosaic", "vectors"): 64,
    ("litdata", "vectors"): 32,
    ("grain", "vectors"): 64,
    ("lancedb", "vectors"): 8,
    ("mosaic", "tokens"): 8,
    ("litdata", "tokens"): 4,
    ("mosaic", "tokens packed"): 4,
}


# the cells that a quick run measures through each front
QUICK_FRONTS = {"count": ("images",), "delay": ("images", "vectors"), "store": ("images",), "tls": ()}


@dataclass(frozen=True)
class Settings:
    """One run. Epochs are whole; those after the first take `seconds` together at least.

    `repeats` are rounds of the project and its ceilings, `peer_repeats` those of the peers: all their worker counts
    in the first, the best one afterwards; no `workers`: that of the workload. `samples` overrides every workload's
    count; `touch` is how many GB of memory are touched first, to see how fast the machine hands it out.
    """

    quick: bool
    name: str
    server: str = "nginx"
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    peers: tuple[str, ...] = ()
    workers: tuple[int, ...] = (0, 1, 2)
    repeats: int = 3
    peer_repeats: int = 1
    seconds: float = 10.0
    samples: int = 0
    touch: float = 1.0
    laws: bool = True
    fronts: tuple[Front, ...] = ()

    def count(self, workload: Workload) -> int:
        """Return the samples of the workload in this run."""
        return self.samples or workload.count


@dataclass(frozen=True)
class Cell:
    """A workload, and the way it is delivered."""

    workload: Workload
    variant: str

    @property
    def name(self) -> str:
        """Like "tokens packed"."""
        return f"{self.workload.name} {self.variant}".strip()


@dataclass(frozen=True)
class Step:
    """One process. `workers` None: the best count so far. `front`: what stands before the server."""

    cell: Cell
    contestant: Contestant
    workers: int | None
    repeat: int
    front: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """The cell and the contestant."""
        return self.cell.name, self.contestant.name


def cells(settings: Settings) -> list[Cell]:
    """Return the cells of the run."""
    return [Cell(WORKLOADS[name], variant) for name in settings.workloads for variant in WORKLOADS[name].variants]


def part_of(settings: Settings, cell: Cell, contestant: Contestant) -> int:
    """Return of how many parts of the data the contestant gets one: 1 unless it is too slow for all of it."""
    return 1 if settings.samples else PARTS.get((contestant.name, cell.name), 1)


def steps(settings: Settings, cell: Cell, peers: list[Contestant]) -> Iterator[Step]:
    """Yield the steps of a cell: rounds, then once through each front."""
    ceilings = [one for one in CEILINGS if not one.workloads or cell.workload.name in one.workloads]
    own = [*(ceilings[1:] if settings.quick else ceilings), OURS]
    counts = settings.workers or (cell.workload.workers,)
    for repeat in range(settings.repeats):
        for contestant in own:
            yield Step(cell, contestant, 0, repeat)
        # all peers with one worker count before the next one: where time runs out, each has had a turn
        for workers in () if repeat >= settings.peer_repeats else counts if repeat == 0 else (None,):
            for contestant in peers:
                threads = settings.quick and contestant.name in THREADED
                yield Step(cell, contestant, 0 if threads else workers, repeat)
    for front in settings.fronts:
        if settings.quick and cell.name not in QUICK_FRONTS[front]:
            continue
        for contestant in (OURS,) if front == "count" or settings.quick else own:
            yield Step(cell, contestant, 0, 0, front)
        for contestant in () if settings.quick else peers:
            yield Step(cell, contestant, None, 0, front)


def expected_seconds(settings: Settings, step: Step) -> float:
    """Return about how long a step takes."""
    return START_SECONDS if step.front == "count" else START_SECONDS + settings.seconds
