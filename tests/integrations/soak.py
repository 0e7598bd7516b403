"""Trains through a proxy that makes requests fail, and kills ranks and workers, for as long as one likes.

`make soak SECONDS=3600 SEED=1`. An attempt is a run of some ranks from the state that the one before left, at another
world size, until it is killed. Over each epoch, each sample must come exactly once, with the right bytes; a rank that
runs for long must not grow; and nothing of a killed rank may stay. The seed gives the same attempts, faults and kills:
what `attempts` yields.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from servers import moto_server, seaweedfs_server
from test_kill import assert_all_end, descendants, entries, kill_all, shared_memory
from torchrun import environment

from streamloader.testing import Fault, FaultProxy

SAMPLES = 1203
EPOCH_STEPS = -(-SAMPLES // 8)
WORLDS = (1, 2, 3, 4)  # 3 does not divide the lanes
LONG_EPOCHS = 9  # of an attempt that is looked at for growth
GROWN_BYTES = 24e6  # that a rank may have more in the last third of its epochs than in the second
# what a client has to bear: the kinds after which a repeat of the request succeeds
FAULTS = ("delay", "slices", "reset", "reset-body", "truncate", "short", "flip", "wrong-range", "200", "400", "429")
FAULTS += ("500", "503", "503-retry-after", "garbled", "long-header", "many-headers", "lost", "stall", "half-open")
# also for first requests: a rank that starts slowly may meet an outage, and the endpoint is right
PATIENCE = {"response_seconds": 4.0, "outage_seconds": 120.0, "request_seconds": 60.0, "first_contact_attempts": 100}
OUTAGE = 1.5  # seconds
WAIT = 300  # seconds in which a rank takes its next steps, whatever the faults

Place = tuple[int, int]


class Attempt(NamedTuple):
    """A run of some ranks: its faults, and what happens at which step of rank 0; it ends with a kill of all ranks.

    `epochs`: how many it runs where it is not killed, else 0.
    """

    number: int
    ranks: int
    workers: int
    torch: bool
    server: str
    faults: tuple[Fault, ...]
    events: tuple[tuple[int, str], ...]
    epochs: int


def attempts(seed: int) -> Iterator[Attempt]:
    """Yield attempts without end: a pure function of the seed."""
    rng = random.Random(seed)
    number = 0
    while True:
        long = number % 5 == 1
        ranks, faults = 1 if long else rng.choice(WORLDS), []
        for kind in rng.sample(FAULTS, 4):
            hangs = kind in ("stall", "half-open")  # each takes as long as the client waits
            seconds = 8.0 if hangs else 0.2 if kind == "503-retry-after" else None
            faults.append(Fault(kind, rate=0.005 if hangs else rng.choice([0.005, 0.01, 0.03]), seconds=seconds))
        if rng.random() < 0.2:
            faults.append(Fault("brown-out", rate=0.2, seconds=1.0))
        steps, workers = rng.randint(5, 1 + 2 * EPOCH_STEPS // ranks), rng.choice([0, 2])
        kinds = ("cache", "outage", "faults", *["worker"] * (workers > 0))
        happen = [(rng.randint(1, steps), kind) for kind in kinds if rng.random() < 0.5]
        end = "" if long else rng.choice(["all", "all", "one", "stop"])
        torch, server = rng.random() < 0.3, rng.choice(["seaweedfs", "moto"])
        plan = (*sorted(happen), (steps, end)) if end else tuple(sorted(happen))
        yield Attempt(number, ranks, workers, torch, server, tuple(faults), plan, LONG_EPOCHS if long else 0)
        number += 1


@dataclass
class Soak:
    """The progress of a soak test in a folder, and what it has counted."""

    folder: Path
    seed: int
    servers: dict[str, Any]
    say: Callable[[str], None] = print
    state: dict[str, Any] | None = None
    kept: dict[Place, list[int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    whole_epochs: int = 0

    @property
    def place(self) -> Place:
        """Where the run stands."""
        return (0, 0) if self.state is None else (self.state["epoch"], self.state["position"])

    def run(self, attempt: Attempt, until: int | None = None) -> None:
        """Run an attempt, and check everything that it leaves. `until`: the epoch at which it ends by itself."""
        server = self.servers[attempt.server]
        until = until or (self.place[0] + attempt.epochs if attempt.epochs else 1 << 40)
        with FaultProxy(server.endpoint, attempt.faults, seed=self.seed + attempt.number, process=True) as proxy:
            ranks = [self._start(attempt, rank, until, proxy.endpoint) for rank in range(attempt.ranks)]
            try:
                pids = self._happen(attempt, ranks, proxy)
            finally:
                kill_all([pid for rank in ranks for pid in (*descendants(rank.pid), rank.pid)])
                for rank in ranks:
                    rank.wait(WAIT)
                    rank.stdout.close()
            self.counts.update(proxy.counts)
        assert_all_end(pids)
        assert shared_memory(pids) == []
        assert list((self.folder / "temporary").iterdir()) == []
        self._collect(attempt)

    def _start(self, attempt: Attempt, rank: int, until: int, endpoint: str) -> "subprocess.Popen[str]":
        server, name = self.servers[attempt.server], f"{attempt.number}-{rank}"
        cache = str(self.folder / "cache")
        job = {
            "url": server.data,
            "options": {**server.storage_options, "endpoint_url": endpoint, "retry": PATIENCE},
            "world": [rank, attempt.ranks],
            "log": str(self.folder / f"{name}.jsonl"),
            **{"workers": attempt.workers, "torch": attempt.torch, "until": until, "state": self.state},
            **{"cache": cache, "limit": "700kB", "seed": self.seed, "memory": "5MB"},
        }
        variables = {"PYTHONWARNINGS": "ignore", "TMPDIR": str(self.folder / "temporary"), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.stderr").open("w") as errors:
            return subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "soak_rank.py"), json.dumps(job)],
                env=environment() | variables,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def _happen(self, attempt: Attempt, ranks: list[Any], proxy: FaultProxy) -> list[int]:
        """Let happen what the attempt says; return the processes that there were."""
        steps, pids = 0, {rank.pid for rank in ranks}
        for rank in ranks[1:]:  # which may start later: a refused connection ends a rank that never had another
            rank.stdout.readline()
        for step, event in attempt.events:
            pids |= self._steps(attempt, ranks, step - steps)
            steps = max(steps, step)
            self._event(event, ranks, proxy)
            self.counts[event] += 1
            if event == "one":
                pids |= self._steps(attempt, ranks, 5)
        if not attempt.events or attempt.events[-1][1] not in ("all", "one", "stop"):
            pids |= self._steps(attempt, ranks, None)
            for number, rank in enumerate(ranks):
                for _ in rank.stdout:
                    pass
                assert rank.wait(WAIT) == 0, self._errors(attempt, number)
        return sorted(pids)

    def _steps(self, attempt: Attempt, ranks: list[Any], count: int | None) -> set[int]:
        """Wait for steps of rank 0, None: for its end. Return the processes of all ranks then."""
        taken = sum(1 for _ in islice(ranks[0].stdout, count))
        if count is not None and taken < count:
            assert ranks[0].wait(WAIT) == 0, self._errors(attempt, 0)
        for number, rank in enumerate(ranks):
            assert rank.poll() in (None, 0, -signal.SIGKILL), self._errors(attempt, number)
        return {pid for rank in ranks for pid in (rank.pid, *descendants(rank.pid))}

    def _errors(self, attempt: Attempt, rank: int) -> str:
        return f"{attempt}\n" + (self.folder / f"{attempt.number}-{rank}.stderr").read_text()[-4000:]

    def _event(self, event: str, ranks: list[Any], proxy: FaultProxy) -> None:
        if event == "worker":
            kill_all([self._worker(ranks)])  # of three within a minute, a call would fail
        elif event == "cache":
            shutil.rmtree(self.folder / "cache", ignore_errors=True)
        elif event == "outage":
            proxy.stop()
            time.sleep(OUTAGE)  # connections are refused for so long
            proxy.start()
        elif event == "faults":
            proxy.faults = proxy.faults[::-1]
        elif event == "one":
            kill_all([ranks[-1].pid] if len(ranks) > 1 else [])
        elif event == "stop":  # a rank that hangs is killed as others are
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGSTOP)

    def _worker(self, ranks: list[Any]) -> int:
        """Wait until a rank has a worker, a child of the process that forks them, and return its process id."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            for rank in ranks:
                for workers in map(descendants, descendants(rank.pid)):
                    if workers:
                        return workers[0]
            time.sleep(0.05)
        raise AssertionError("no rank has a worker")

    def _collect(self, attempt: Attempt) -> None:
        """Take over the steps that all ranks took, and the state after the last one; check each whole epoch."""
        paths = [self.folder / f"{attempt.number}-{rank}.jsonl" for rank in range(attempt.ranks)]
        logs = [list(entries([path] if path.exists() else [])) for path in paths]
        steps = [[entry for entry in log if "after" in entry] for log in logs]
        for log in logs:
            check_flat([entry["held"] for entry in log if "held" in entry], attempt)
        begin, taken = self.place, min(map(len, steps))
        assert all(tuple(entry["after"]) > begin for log in steps for entry in log)
        for together in islice(zip(*steps, strict=False), taken):
            (after,) = {tuple(entry["after"]) for entry in together}  # all ranks stand at the same place
            assert all(entry["state"] == together[0]["state"] for entry in together)
            self.kept[after] = [sample for entry in together for sample in entry["samples"]]
        if taken:
            self.state = steps[0][taken - 1]["state"]
        self.counts["steps"] += taken
        self._check_epochs()
        for path in self.folder.glob(f"{attempt.number}-*"):
            path.unlink()

    def _check_epochs(self) -> None:
        """Assert that each epoch which is over had each sample exactly once."""
        seen: dict[int, list[int]] = {}
        for (epoch, position), samples in self.kept.items():
            seen.setdefault(epoch if position else epoch - 1, []).extend(samples)
        for epoch, samples in seen.items():
            if epoch < self.place[0]:
                missing, twice = set(range(SAMPLES)) - set(samples), [n for n, c in Counter(samples).items() if c > 1]
                assert sorted(samples) == list(range(SAMPLES)), (epoch, sorted(missing)[:9], sorted(twice)[:9])
                self.whole_epochs += 1
        current = self.place[0]
        self.kept = {at: samples for at, samples in self.kept.items() if (at[0] if at[1] else at[0] - 1) >= current}


def check_flat(series: list[list[int]], attempt: Attempt) -> None:
    """Assert that the memory, descriptors and threads of a rank do not grow over its epochs."""
    if len(series) < 9:
        return
    third = len(series) // 3
    for number, (name, most) in enumerate([("bytes", GROWN_BYTES), ("descriptors", 12), ("threads", 6)]):
        values = [held[number] for held in series]
        middle, last = sorted(values[third : 2 * third])[third // 2], sorted(values[-third:])[third // 2]
        assert last - middle <= most, f"{name} grew over the epochs of {attempt}: {values}"


def soak(seconds: float, seed: int, folder: Path, say: Callable[[str], None] = print) -> Soak:
    """Run attempts for so many seconds, then the rest of the epoch, and return what was counted."""
    end = time.monotonic() + seconds
    (folder / "temporary").mkdir(parents=True)
    with ExitStack() as stack:
        servers = {"moto": stack.enter_context(moto_server()), "seaweedfs": stack.enter_context(seaweedfs_server())}
        for server in servers.values():
            server.data = server.url("soak")
            datasets.write(server.data, SAMPLES, ["x", "name"], options=server.storage_options)
        run = Soak(folder, seed, servers, say)
        for attempt in attempts(seed):
            if time.monotonic() > end and attempt.number > 1:  # not before one that is looked at for growth
                last = attempt._replace(events=(), epochs=0, ranks=2, faults=attempt.faults[:1])
                run.run(last, until=run.place[0] + 1)
                break
            began = time.monotonic()
            run.run(attempt)
            shown = f"{attempt.ranks} ranks, {attempt.workers} workers, torch {attempt.torch}, {attempt.server}"
            kinds = ", ".join(f"{fault.kind} {fault.rate}" for fault in attempt.faults)
            happened = ", ".join(f"{event} at {step}" for step, event in attempt.events)
            took = f"{time.monotonic() - began:.1f} s"
            say(
                f"{attempt.number}: {shown}; {kinds}; {happened}; {took}; now at {run.place}, {run.whole_epochs} epochs"
            )
        assert run.whole_epochs == run.place[0] > 0
        for server in servers.values():
            server.remove_buckets()
    return run


def main() -> None:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    given = parser.parse_args()
    print(f"make soak SECONDS={given.seconds:g} SEED={given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        run = soak(given.seconds, given.seed, Path(folder), lambda line: print(line, flush=True))
    print(f"{run.whole_epochs} epochs, each sample once in each; {dict(run.counts)}")


if __name__ == "__main__":
    main()
