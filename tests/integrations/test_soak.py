"""Three minutes of training with faults, kills and other world sizes; and the checks, which find what is planted."""

from itertools import islice

import pytest
import soak
from soak import SAMPLES, Soak, attempts, check_flat

SECONDS = 40  # of attempts; then come the one that has begun, and the rest of an epoch
SEED = 20


def test_a_run_with_faults_and_kills_has_each_sample_once_in_each_epoch(tmp_path):
    run = soak.soak(SECONDS, SEED, tmp_path)
    assert run.whole_epochs >= soak.LONG_EPOCHS
    assert run.counts["requests"] > 200
    faults = {fault.kind for attempt in islice(attempts(SEED), 3) for fault in attempt.faults}
    assert sum(run.counts[kind] for kind in faults) > 5
    assert run.counts["all"] + run.counts["one"] + run.counts["stop"] >= 1


def test_a_seed_gives_the_same_attempts_again():
    first, again, other = (list(islice(attempts(seed), 40)) for seed in (5, 5, 6))
    assert first == again != other
    kinds = {event for attempt in first for _, event in attempt.events}
    assert kinds == {"worker", "cache", "outage", "faults", "all", "one", "stop"}
    assert {attempt.ranks for attempt in first} == set(soak.WORLDS)
    assert {attempt.workers for attempt in first} == {0, 2}
    assert {fault.kind for attempt in first for fault in attempt.faults} >= set(soak.FAULTS)


def state(epoch, position):
    return {"epoch": epoch, "position": position}


@pytest.mark.parametrize("change", [lambda samples: samples.pop(), lambda samples: samples.append(7)])
def test_a_sample_that_is_missing_or_comes_twice_is_found(tmp_path, change):
    samples = list(range(SAMPLES))
    run = Soak(tmp_path, 0, {}, state=state(1, 0))
    run.kept = {(0, 800): samples[:800], (1, 0): samples[800:]}
    run._check_epochs()
    assert (run.whole_epochs, run.kept) == (1, {})
    change(samples)
    run.kept = {(0, 800): samples[:800], (1, 0): samples[800:]}
    with pytest.raises(AssertionError):
        run._check_epochs()


@pytest.mark.parametrize(("number", "step"), [(0, 5e6), (1, 3), (2, 2)])
def test_growth_is_found(number, step):
    attempt = next(attempts(0))
    series = [[int(200e6), 40, 20] for _ in range(18)]
    check_flat(series, attempt)
    for epoch, held in enumerate(series):
        held[number] += int(epoch * step)
    with pytest.raises(AssertionError, match="grew over the epochs"):
        check_flat(series, attempt)
