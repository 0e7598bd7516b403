"""A seeded simulation of the engine of one rank: the rate to expect on a machine, what limits it, and the requests.

Requests are made in the order of need. One is in flight until its bytes are unpacked; at most `Load.in_flight` are, and
at most `Load.ahead` are ahead of the batches. Its first byte takes a log-normal latency; then its connection, and the
link that the ranks of a machine share, limit the transfer. All CPU work runs on the cores of the rank; besides, one
thread gathers the samples of one request after the other. Ranks share link and cores in equal parts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from streamloader.engine.memory import in_slots
from streamloader.engine.regions import ARRAYS
from streamloader.errors import UsageError
from streamloader.format.manifest import FieldLayout

Z99 = 2.326  # of the normal distribution: p99 / median = exp(Z99 * sigma) of a log-normal one
REQUESTS = 1024  # that are simulated: the error of the mean latency is a few percent
ENOUGH = 0.95  # of the rate at the limit of requests in flight


@dataclass(frozen=True)
class Costs:
    """CPU seconds, as measured on 2 cores of AMD EPYC: bench/NOTES.md, "A model of the engine".

    `fetch`: per GB received. `request`: per request, to make, check and unpack it. `decode`: per decoded GB, by codec;
    that of arrays which others wrote is a mean of the usual ones.
    `copy`: per decoded GB, to check and gather it. `row`: per row in a slot, `item`: per item in a chunk (`in_slots`),
    to plan and gather it. `batch`: per batch.

    `gather`, `gather_row` and `gather_item`: the wall seconds of the thread that gathers, per decoded GB, row and item.
    They include waiting for the interpreter's lock. `busy`: the share of the cores that threads can use.
    """

    fetch: float = 0.4
    request: float = 0.9e-3
    decode: Mapping[str, float] = field(default_factory=lambda: {"none": 0.0, "lz4": 0.4, "zstd": 1.25, ARRAYS: 0.8})
    copy: float = 0.15
    row: float = 0.2e-6
    item: float = 1.5e-6
    batch: float = 31e-6
    gather: float = 0.23
    gather_row: float = 0.22e-6
    gather_item: float = 4.0e-6
    busy: float = 0.78


@dataclass(frozen=True)
class Machine:
    """A machine: `network` in Gbit/s, `cores`, and `ranks` that share both.

    `latency`: the median seconds to the first byte, and `tail` times that its 99th percentile; `connection`: bytes per
    second of one connection. The defaults are those of an object store in the same region. Raises `UsageError`.
    """

    network: float = 25.0
    cores: float = 8
    ranks: int = 1
    latency: float = 0.03
    tail: float = 3.0
    connection: float = 85e6

    def __post_init__(self) -> None:
        numbers = (self.network, self.cores, self.ranks, self.connection)
        if not all(0 < number < math.inf for number in numbers) or not 0 <= self.latency < math.inf or self.tail < 1:
            problem = f"network={self.network}, cores={self.cores}, ranks={self.ranks}, latency={self.latency}"
            raise UsageError(problem, "give numbers above 0, and a latency of at least 0")


@dataclass(frozen=True)
class Load:
    """The work of a mean request: `size` stored bytes, and its part of the `samples`.

    `cpu`: all CPU seconds. `gather`: wall seconds of the thread that gathers. `in_flight`: the limit of requests;
    `ahead`: the requests that may be made before the batches that need them.
    """

    size: float
    samples: float
    cpu: float
    gather: float
    in_flight: int = 64
    ahead: int = 128


def load_of(
    layouts: Sequence[FieldLayout], samples: tuple[int, int], reads: tuple[float, float], costs: Costs | None = None
) -> Load:
    """Return the work of a mean request for the fields with these layouts.

    `samples`: those of the dataset, and of a batch. `reads`: the requests and bytes of an epoch.
    """
    (num_samples, batch), (requests, size) = samples, reads
    costs = costs or Costs()
    cpu, gather = costs.fetch * size / 1e9 + costs.request * requests + costs.batch * num_samples / batch, 0.0
    for layout in layouts:
        decoded, rows = layout.nbytes / 1e9, in_slots(layout)
        cpu += (costs.copy + costs.decode[layout.codec]) * decoded + num_samples * (costs.row if rows else costs.item)
        gather += costs.gather * decoded + num_samples * (costs.gather_row if rows else costs.gather_item)
    return Load(size / requests, num_samples / requests, cpu / costs.busy / requests, gather / requests)


@dataclass(frozen=True)
class Rate:
    """The rates of a rank in a steady state. `limit`: network, connections, cores or gather.

    `in_flight`: the requests in flight that give 95 % of the rate.
    """

    samples_per_second: float
    megabytes_per_second: float
    limit: str
    in_flight: int


def bounds(load: Load, machine: Machine) -> dict[str, float]:
    """Return the requests per second that each resource allows on its own, for one rank.

    That of requests in flight follows Little's law: their number, divided by the mean time of one.
    """
    mean = machine.latency * math.exp(_sigma(machine) ** 2 / 2) + load.size / machine.connection
    return {
        "network": _per(load.size / (machine.network * 125e6 / machine.ranks)),
        "connections": min(load.in_flight, load.ahead) * _per(mean + load.cpu),
        "cores": _per(load.cpu * machine.ranks / machine.cores),
        "gather": _per(load.gather),
    }


def predict(load: Load, machine: Machine, seed: int = 0) -> Rate:
    """Return the rate of a rank, what limits it, and the requests in flight that it takes."""
    limits = bounds(load, machine)
    rate = min(simulate(load, machine, seed), *(limits[name] for name in limits if name != "connections"))
    low, high = 1, load.in_flight
    while low < high:  # the least limit that gives `ENOUGH` of the rate
        middle = (low + high) // 2
        if simulate(replace(load, in_flight=middle), machine, seed) >= ENOUGH * rate:
            high = middle
        else:
            low = middle + 1
    return Rate(rate * load.samples, rate * load.size / 1e6, min(limits, key=lambda name: limits[name]), high)


def simulate(load: Load, machine: Machine, seed: int = 0) -> float:
    """Return the requests per second of one rank, over the later three quarters of `REQUESTS`.

    Discrete events: a response is received, its bytes are unpacked, or its samples are gathered.
    """
    share = machine.cores / machine.ranks
    cores = max(1, int(share))
    unpacking = load.cpu * cores / share  # cores of a rank are whole: the rest of its share is in the time
    receiving = load.size / (machine.network * 125e6 / machine.ranks)
    transfer = load.size / machine.connection
    latencies = machine.latency * np.random.default_rng(seed).lognormal(0.0, _sigma(machine), REQUESTS)
    events: list[tuple[float, str, int]] = []
    waiting: list[int] = []  # received, to be unpacked in the order of need
    unpacked, gathered = [False] * (REQUESTS + 1), [0.0]
    now = link_free = 0.0
    sent = in_flight = busy = 0
    gathering = False
    while len(gathered) <= REQUESTS:
        while in_flight < load.in_flight and sent < min(REQUESTS, len(gathered) - 1 + load.ahead):
            link_free = max(link_free, now) + receiving
            heapq.heappush(events, (max(now + float(latencies[sent]) + transfer, link_free), "receive", sent))
            sent, in_flight = sent + 1, in_flight + 1
        while waiting and busy < cores:
            heapq.heappush(events, (now + unpacking, "unpack", heapq.heappop(waiting)))
            busy += 1
        if not gathering and unpacked[len(gathered) - 1]:
            gathering = True
            heapq.heappush(events, (now + load.gather, "gather", len(gathered) - 1))
        now, stage, request = heapq.heappop(events)
        if stage == "receive":
            heapq.heappush(waiting, request)
        elif stage == "unpack":
            unpacked[request] = True
            busy, in_flight = busy - 1, in_flight - 1
        else:
            gathered.append(now)
            gathering = False
    first = REQUESTS // 4
    return (REQUESTS - first) * _per(now - gathered[first])


def _sigma(machine: Machine) -> float:
    return math.log(machine.tail) / Z99


def _per(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else math.inf
