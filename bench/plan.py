"""What one run measures, in which order: contestants take turns, round after round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.contestants import CEILINGS, OURS, Contestant
from bench.servers import Front
from bench.workloads import WORKLOADS, Workload

OWN_SECONDS = 6.0  # about what a process of the project or a ceiling takes, for the time left
START_SECONDS = 5.0  # the same for a peer, beside its epochs


@dataclass(frozen=True)
class Settings:
    """One run. `seconds` cuts the epochs of peers. `minutes` are shared by the cells evenly, writing aside; peers whose
    turn comes later than their cell's share are left out.

    `repeats` are rounds of the project and its ceilings, `peer_repeats` those of the peers: all their worker counts
    in the first, the best one afterwards. `samples` overrides every workload's count;
    `touch` is how many GB of memory are touched first, to see how fast the machine hands it out.
    """

    quick: bool
    name: str
    server: str = "seaweedfs"
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    peers: tuple[str, ...] = ()
    workers: tuple[int, ...] = (0, 1, 2)
    repeats: int = 3
    peer_repeats: int = 1
    seconds: float = 20.0
    minutes: float = 0.0
    samples: int = 0
    touch: float = 1.0
    laws: bool = True
    fronts: tuple[Front, ...] = ("tls", "count")

    def count(self, workload: Workload) -> int:
        """Return the samples of the workload in this run."""
        return self.samples or (workload.quick if self.quick else workload.count)


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


def steps(settings: Settings, cell: Cell, peers: list[Contestant]) -> Iterator[Step]:
    """Yield the steps of a cell: rounds, then once through each front."""
    own = [*(one for one in CEILINGS if not one.workloads or cell.workload.name in one.workloads), OURS]
    for repeat in range(settings.repeats):
        for contestant in own:
            yield Step(cell, contestant, 0, repeat)
        # all peers with one worker count before the next one: where time runs out, each has had a turn
        for workers in () if repeat >= settings.peer_repeats else settings.workers if repeat == 0 else (None,):
            for contestant in peers:
                yield Step(cell, contestant, workers, repeat)
    for front in settings.fronts:
        if settings.quick and cell.workload.name != "images":
            continue
        for contestant in own if front == "tls" else (OURS,):
            yield Step(cell, contestant, 0, 0, front)
        # requests of peers are counted in a full run only: a cut epoch says little about them
        for contestant in peers if front == "tls" or not settings.quick else ():
            yield Step(cell, contestant, None, 0, front)


def expected_seconds(settings: Settings, step: Step) -> float:
    """Return about how long a step takes."""
    return START_SECONDS + 2 * settings.seconds if step.contestant.kind == "peer" else OWN_SECONDS
