"""The engine under random schedules of its threads, workers and requests, on a virtual clock.

`python tests/test_engine_schedules.py SEED` repeats a schedule.
"""

import sys
from dataclasses import replace
from typing import Any

import pytest
from amounts import longer
from engine_model import Faults, Plan, Run, one_machine, try_seeds
from scheduler import Scheduler, Violation

from streamloader.engine.engine import Engine, Planner
from streamloader.engine.executor import Calls, Threads
from streamloader.engine.fetcher import Fetcher
from streamloader.engine.kept import NO_SLOT
from streamloader.engine.memory import Memory

SCHEDULES = 10_000
AT_ONCE = 500


# tests/integrations/test_schedules.py runs the others, and plants the other bugs
def test_no_schedule_of_the_first_breaks_a_law_of_the_engine():
    try_seeds(range(AT_ONCE))


@pytest.mark.parametrize("first", [longer(first) for first in range(SCHEDULES, 5 * SCHEDULES, SCHEDULES)])
def test_no_schedule_of_many_breaks_a_law_of_the_engine(first):
    try_seeds(range(first, first + SCHEDULES))


def test_a_size_that_damage_states_is_not_taken_for_a_need_of_memory():
    try_seeds([10273])  # which reads a damaged frame in a worker, with memory for no more than it needs


def test_a_seed_repeats_its_schedule():
    def trace(seed: int) -> list[tuple[str, float]]:
        run, steps = Run(seed), list[tuple[str, float]]()
        check = run.scheduler.check

        def note() -> None:
            steps.append((run.scheduler.running.name, run.scheduler.clock.time()))
            check()

        run.scheduler.check = note
        run.run()
        return steps

    with one_machine():
        for seed in range(10):
            assert trace(seed) == trace(seed)


# ---- bugs, each planted by one method


def take_without_waking(self: Any) -> Any:
    return self._ready.popleft()


def end_piece_without_waking(self: Any, *given: Any) -> None:
    """The assembler finds that its block is complete when it looks the next time."""
    awaited, self._awaited = self._awaited, -1
    ORIGINALS[Fetcher, "_end_piece"](self, *given)
    self._awaited = awaited


def release_twice(self: Any, ticket: int) -> None:
    slot = self._slots[ticket]
    ORIGINALS[Memory, "release"](self, ticket)
    if slot in self._free:
        self._free.append(slot)


def claim_after_release(self: Any, attempt: Any) -> int:
    """A late response gets the slot that an earlier one to the same piece had."""
    slots = self.__dict__.setdefault("claimed", {})
    slot = ORIGINALS[Fetcher, "_claim"](self, attempt)
    if slot == NO_SLOT and attempt.piece.finished and not self._closed.is_set():
        attempt.piece.writer = attempt.number
        self._writers += 1
        return int(slots.get(attempt.piece, NO_SLOT))
    slots[attempt.piece] = slot
    return int(slot)


def lose_jobs_of_the_dead(self: Any, channel: Any, _job: Any) -> None:
    ORIGINALS[Calls, "lost"](self, channel, None)


def run_without_closing(self: Any, function: Any) -> None:
    """A close is lost while a function is queued, and a thread starts for it."""
    self.close = bool
    try:
        ORIGINALS[Threads, "run"](self, function)
    finally:
        del self.close


def close_unnoticed(self: Any) -> None:
    """A start that goes on does not know that the engine was closed."""
    self.core = None
    self._end()


def fail_with_a_hedge(self: Any, attempt: Any, error: Any) -> None:
    """The error of a hedge, which is not retried, is that of its piece."""
    if attempt.number:
        self._end(attempt, error)
    else:
        ORIGINALS[Fetcher, "_retry"](self, attempt, error)


CALM: dict[str, Any] = {"lost": None, "closes_after": None}
LATE: dict[str, Any] = {**CALM, "faults": Faults(stalled=0.4), "names": ("x",), "workers": 0}
# where each bug is, what plants it, the plans in which it shows, and the most schedules until one finds it
PLANTED: dict[str, tuple[type, str, Any, dict[str, Any], int]] = {
    "a lost wake-up of the planner": (Planner, "take", take_without_waking, CALM, 20),
    "a lost wake-up behind a poll": (Fetcher, "_end_piece", end_piece_without_waking, CALM, 20),
    "a double release": (Memory, "release", release_twice, CALM, 20),
    "a late hedge that writes into reused memory": (Fetcher, "_claim", claim_after_release, LATE, 200),
    "the death of a worker that is lost": (
        Calls,
        "lost",
        lose_jobs_of_the_dead,
        {**CALM, "workers": 2, "kills": 2},
        50,
    ),
    "a close while a job is admitted": (Threads, "run", run_without_closing, {"workers": 0, "closes_after": -3}, 200),
    "a close during the start": (Engine, "close", close_unnoticed, {"workers": 1, "kills": 0, "closes_after": -1}, 100),
    "the error of a hedge": (
        Fetcher,
        "_retry",
        fail_with_a_hedge,
        {**LATE, "faults": Faults(stalled=0.4, reset=0.4), "lanes": 1, "lost": ("x", 3, False)},
        200,
    ),
}
ORIGINALS: dict[tuple[type, str], Any] = {(kind, name): getattr(kind, name) for kind, name, *_ in PLANTED.values()}


def seeds_until_found(bug: str) -> int:
    """Return how many schedules pass before one finds a bug."""
    kind, name, method, changes, most = PLANTED[bug]
    with one_machine(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, method)
        for seed in range(most):
            try:
                Run(seed, replace(Plan.of(seed), **changes)).run()
            except Exception:  # noqa: BLE001 - a law that is broken, or what the bug leads to
                return seed
    raise AssertionError(f"{bug} is not found by {most} schedules")


def test_a_lost_wake_up_is_found():
    check_found("a lost wake-up of the planner")


def check_found(bug: str) -> None:
    found = seeds_until_found(bug)
    with one_machine():
        Run(found, replace(Plan.of(found), **PLANTED[bug][3])).run()  # what is not changed passes


# ---- the scheduler


def test_a_wait_that_nothing_ends_is_a_deadlock():
    scheduler = Scheduler(0)
    with pytest.raises(Violation, match="deadlock"):
        scheduler.run(scheduler.runtime.event().wait)


def test_a_thread_that_does_not_end_is_a_deadlock():
    scheduler = Scheduler(0)
    queue = scheduler.runtime.queue()
    with pytest.raises(Violation, match="deadlock: the thread, the consumer wait"):
        scheduler.run(scheduler.runtime.thread(target=queue.get, name="the thread").start)


def test_a_wait_that_only_its_timeout_ends_is_a_lost_wake_up():
    scheduler, found = Scheduler(0), []
    condition = scheduler.runtime.condition()

    def change() -> None:
        with condition:
            found.append(1)

    def wait() -> None:
        scheduler.runtime.thread(target=change, name="").start()
        with condition:
            while not found:
                condition.wait(1.0)

    with pytest.raises(Violation, match="lost wake-up"):
        for _ in range(20):
            found.clear()
            scheduler.run(wait)


def test_an_error_of_a_thread_ends_the_schedule_and_is_raised():
    scheduler = Scheduler(0)
    queue = scheduler.runtime.queue()

    def start() -> None:
        scheduler.runtime.thread(target=lambda: 1 / 0, name="").start()
        queue.get()

    with pytest.raises(ZeroDivisionError):
        scheduler.run(start)


if __name__ == "__main__":
    with one_machine():
        run = Run(int(sys.argv[1]))
        print(run.plan)
        run.run()
        print(f"{run.scheduler.steps} steps in {run.scheduler.clock.time():.2f} virtual seconds break no law")
