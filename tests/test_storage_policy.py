"""Retries: how often, how long, and never for what does not pass. On a clock of the test's own."""

import contextlib
import heapq
import itertools
import logging
import random
from http.client import IncompleteRead

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.errors import (
    AccessError,
    EndpointError,
    NotFoundError,
    StorageError,
    ThrottledError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from streamloader.options import RetryPolicy
from streamloader.storage.retry import OUTAGE_AFTER_SECONDS, Outage, Patience, Progress, Retrier, Timing, check_range
from streamloader.storage.url import parse_location
from streamloader.testing.clock import VirtualClock


class Clock(VirtualClock):
    """The clock of a retrier, which records what it sleeps."""

    def __init__(self, jitter=0.5):
        super().__init__()
        self.slept = []
        self.timing = Timing(clock=self.time, sleep=self.record, jitter=lambda: jitter)

    def record(self, seconds):
        self.slept.append(seconds)
        self.sleep(seconds)

    def retrier(self, policy=None, reached=True):
        retrier = Retrier(policy or RetryPolicy(), "s3://b", self.timing)
        retrier.reached = reached
        return retrier


def failing(*errors):
    """A call that raises the errors one after another, then returns; and the list of its calls."""
    calls = []
    left = iter(errors)

    def call():
        calls.append(len(calls))
        error = next(left, None)
        if error is not None:
            raise error
        return "done"

    return call, calls


@pytest.mark.parametrize(("kind", "seconds"), [(TransientError, 0.05), (ThrottledError, 0.1), (EndpointError, 0.05)])
def test_one_passing_failure_makes_exactly_one_extra_call(kind, seconds):
    call, calls = failing(kind("it broke", "wait"))
    clock = Clock()
    assert clock.retrier().call(call) == "done"
    assert (len(calls), clock.slept) == (2, [seconds])


@pytest.mark.parametrize(
    ("kind", "limit", "reached", "attempts"),
    [
        (NotFoundError, 1, True, 1),
        (AccessError, 1, True, 1),
        (StorageError, 1, True, 1),
        (UnsupportedError, 3, True, 3),
        (EndpointError, 1, True, 1),  # a certificate
        (EndpointError, 3, True, 3),
        (EndpointError, None, False, 1),  # an endpoint that has never responded
        (TransientError, None, False, 3),
    ],
)
def test_attempts_are_limited_by_the_error_and_for_an_endpoint_that_never_responded(kind, limit, reached, attempts):
    error = kind("it failed")
    error.attempts = limit
    call, calls = failing(*[error] * 9)
    clock = Clock()
    with pytest.raises(kind, match="it failed"):
        clock.retrier(reached=reached).call(call)
    assert (len(calls), len(clock.slept)) == (attempts, attempts - 1)


@pytest.mark.parametrize("answer", [[], [NotFoundError("no")]])
def test_an_endpoint_that_answered_once_is_waited_for(answer):
    retrier = Clock().retrier(reached=False)
    first, _ = failing(*answer)
    with pytest.raises(NotFoundError) if answer else contextlib.nullcontext():
        retrier.call(first)
    call, calls = failing(*[EndpointError("refused")] * 3)
    assert retrier.call(call) == "done"
    assert len(calls) == 4


def test_the_last_failure_has_attempts_and_time_and_keeps_its_type():
    call, calls = failing(*[ThrottledError("s3://b/k: slow down", "send less")] * 999)
    with pytest.raises(ThrottledError, match=r"s3://b/k: slow down \(\d+ attempts in 300.\d s\); send less") as raised:
        Clock().retrier().call(call)
    assert raised.value.remedy == "send less"
    assert 200 < len(calls) < 410  # one every 0.75 to 1.5 s


def test_no_retry_raises_the_failure_itself():
    error = TransientError("once")
    with pytest.raises(TransientError) as raised:
        Clock().retrier(RetryPolicy(outage_seconds=0, request_seconds=0)).call(failing(error)[0])
    assert raised.value is error


@pytest.mark.parametrize(("asked", "slept"), [(0.0, 0.1), (7.0, 7.1), (3600.0, 30.1)])
def test_the_wait_that_a_store_asks_for_is_limited_by_the_policy(asked, slept):
    error = ThrottledError("slow down")
    error.retry_after = asked
    clock = Clock()
    clock.retrier().call(failing(error)[0])
    assert clock.slept == [pytest.approx(slept)]


def test_a_wait_that_a_store_asks_for_is_shown_and_logged(caplog):
    error = ThrottledError("slow down")
    error.retry_after = 600.0
    seen = []
    retrier = Retrier(
        RetryPolicy(), "s3://b", Clock().timing._replace(sleep=lambda _: seen.append(retrier.waiting_for))
    )
    with caplog.at_level(logging.WARNING, "streamloader"):
        retrier.call(failing(error)[0])
    assert seen == ["s3://b asks to wait 600 s (Retry-After); the wait is 30 s"]
    assert [record.getMessage() for record in caplog.records] == [f"streamloader: {seen[0]}"]  # no outage
    assert retrier.waiting_for == ""


def test_a_handler_of_the_log_may_ask_what_is_waited_for():
    error = ThrottledError("slow down")
    error.retry_after = 600.0
    retrier, seen = Clock().retrier(), []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(retrier._lock.locked() or retrier.waiting_for)
    logging.getLogger("streamloader").addHandler(handler)
    try:
        retrier.call(failing(error)[0])
    finally:
        logging.getLogger("streamloader").removeHandler(handler)
    assert seen == ["s3://b asks to wait 600 s (Retry-After); the wait is 30 s"]


def test_a_wait_that_a_store_asks_for_is_not_shown_once_another_request_succeeds(caplog):
    error = ThrottledError("slow down")
    error.retry_after = 600.0
    seen = []

    def sleep(_):
        retrier.call(lambda: "another")
        seen.append(retrier.waiting_for)

    retrier = Retrier(RetryPolicy(), "s3://b", Clock().timing._replace(sleep=sleep))
    with caplog.at_level(logging.WARNING, "streamloader"):
        for _ in range(5):
            retrier.call(failing(error)[0])
    assert seen == [""] * 5
    assert len(caplog.records) == 1


def test_a_store_that_pauses_inside_of_bodies_soon_gets_one_request_a_read():
    sent = []

    def read(seconds):
        sent.append(seconds)
        patience.began(0.01)
        if seconds < 1.5:  # a pause of the body
            raise TimeoutError

    patience = Patience(RetryPolicy())
    for _ in range(100):
        patience.call(read)
    assert len(sent) < 140


@settings(max_examples=30)
@given(st.floats(0, 1, exclude_max=True), st.floats(0.1, 5), st.floats(1, 30), st.floats(1, 500))
def test_a_request_that_alone_fails_ends_within_its_time(jitter, base, cap, limit):
    clock = Clock(jitter)
    policy = RetryPolicy(base_seconds=base, cap_seconds=cap, request_seconds=limit)
    retrier = clock.retrier(policy)

    def call():
        clock.sleep(0.1)
        retrier.call(lambda: "another")  # others succeed all the time
        clock.sleep(0.1)
        raise TransientError("this object")

    with pytest.raises(TransientError, match="this object"):
        retrier.call(call)
    assert clock.time() <= limit + cap + 1
    for retry, delay in enumerate(clock.slept):
        assert 0 <= delay <= min(cap, base * 2.0 ** min(retry, 60))


def test_a_request_that_always_fails_ends_although_rare_successes_end_outages():
    clock = Clock()
    retrier = clock.retrier()

    def call():
        clock.sleep(3.0)
        retrier.call(lambda: "another")
        clock.sleep(3.0)
        raise TransientError("this object")

    with pytest.raises(TransientError):
        retrier.call(call)
    assert clock.time() < 450


def test_an_outage_that_nobody_waits_for_is_forgotten():
    clock = Clock()
    retrier = clock.retrier()
    with pytest.raises(TransientError):
        retrier.call(failing(*[TransientError("broke")] * 999)[0])
    assert retrier.waiting_for == ""
    clock.sleep(1000)
    assert retrier.call(failing(TransientError("broke"))[0]) == "done"


def test_an_outage_is_logged_once_and_shown_until_it_ends(caplog):
    clock = Clock()
    retrier = clock.retrier()
    seen = []

    def call():
        seen.append((clock.time(), retrier.waiting_for))
        if clock.time() < 61:
            raise EndpointError("s3://b/x: connection refused")
        return "done"

    with caplog.at_level(logging.WARNING, "streamloader"):
        for _ in range(2):
            assert retrier.call(call) == "done"
    begin, end = [record.getMessage() for record in caplog.records]
    assert begin.startswith(
        "streamloader retries for up to 300 s: no request to s3://b has succeeded for 10 s; last error: s3://b/x: conn"
    )
    assert end.startswith("streamloader resumes: requests to s3://b succeed again after 6")
    assert all(not text for now, text in seen if now < 10)
    assert all("connection refused" in text for now, text in seen[:-1] if now > 12)
    assert retrier.waiting_for == ""


def simulate(requests, outage, hang, seed):
    """Let so many requests at a time go on and on; return when each success came, and how many were sent in the outage.

    Each takes 0.05 s; in the outage it fails after `hang` s.
    """
    policy, draw = RetryPolicy(), random.Random(seed)
    state = Outage(policy)
    order = itertools.count()
    backoffs = dict.fromkeys(range(requests), 0)
    events = [(draw.random(), next(order), request, "send", 0.0) for request in range(requests)]
    heapq.heapify(events)
    came, sent_in_outage = [], 0
    while events:
        now, _, request, what, sent = heapq.heappop(events)
        if now > outage[1] + 10:
            break
        if what == "send":
            wait = state.wait(now, draw.random())
            if wait > 0:
                heapq.heappush(events, (now + min(wait, 0.1), next(order), request, "send", 0.0))
                continue
            down = outage[0] <= now < outage[1]
            sent_in_outage += down
            event = (now + hang, "failed") if down else (now + 0.05, "came")
            heapq.heappush(events, (event[0], next(order), request, event[1], now))
        elif what == "failed":
            state.failed(sent, now, draw.random(), "refused")
            assert state.seconds(now) < policy.outage_seconds
            delay = 0.0 if state.declared else policy.delay(backoffs[request], draw.random())
            backoffs[request] += not state.declared
            heapq.heappush(events, (now + delay, next(order), request, "send", 0.0))
        else:
            state.succeeded(now)
            backoffs[request] = 0
            came.append(now)
            heapq.heappush(events, (now, next(order), request, "send", 0.0))
    return came, sent_in_outage


@pytest.mark.quick(16)
@pytest.mark.parametrize("requests", [1, 16, 64])
@pytest.mark.parametrize("hang", [0.001, 0.3, 5.0, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_requests_are_few_in_an_outage_and_continue_soon_after_it(requests, hang, seed):
    came, sent = simulate(requests, (20.0, 80.0), hang, seed)
    back = [now for now in came if now >= 80]
    assert back[0] < 82
    assert len([now for now in back if now < 83]) >= requests  # hanging ones come later, the others at once
    probes = 60 / (0.5 * RetryPolicy().probe_seconds)
    assert sent <= probes + requests * (2 + 20 * OUTAGE_AFTER_SECONDS)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 1 << 20)), max_size=50), st.integers(1, 1 << 22))
def test_a_response_takes_no_longer_than_its_deadline(parts, size):
    now, policy = 0.0, RetryPolicy(response_seconds=4.0, min_bytes_per_second=1000.0)
    progress, left = Progress(policy, lambda: now), size
    try:
        for seconds, part in parts:
            if seconds >= progress.seconds_left():
                break  # the socket's timeout
            now += seconds
            progress.received(min(part, left))
            left -= min(part, left)
            if not left:
                break
    except TimeoutError:
        pass
    assert now <= policy.deadline(size) + 1e-6


def test_a_trickle_is_late_at_once_wherever_it_begins():
    now = 0.0
    progress = Progress(RetryPolicy(), lambda: now)
    for _ in range(1000):  # a fast beginning does not earn an hour
        now += 0.01
        progress.received(1 << 20)
    begin = now
    with pytest.raises(TimeoutError, match="behind 65536 bytes/s"):
        while progress.seconds_left():
            now += 1.0
            progress.received(1)
    assert now - begin <= RetryPolicy().response_seconds + 1


def test_a_read_that_is_much_later_than_others_is_repeated_once_with_the_whole_time():
    asked = []

    def read(seconds):
        asked.append(seconds)
        if len(asked) == 1:
            raise TimeoutError
        return "done"

    patience = Patience(RetryPolicy())
    with pytest.raises(TimeoutError):  # nothing is known yet
        patience.call(read)
    for _ in range(100):
        patience.began(0.5)
    asked.clear()
    assert patience.call(read) == "done"
    assert asked == [1.0, 10.0]
    for seconds in (2.0, 3.0, 4.0) * 9:  # a store that became slow
        patience.began(seconds)
    asked[:] = []
    patience.call(asked.append)
    assert 4.0 < asked[0] <= 10.0


def test_impossible_policies_are_errors():
    wrong = {"outage_seconds": -1, "first_contact_attempts": 0, "base_seconds": "1", "response_seconds": 0}
    for name, value in wrong.items():
        with pytest.raises(UsageError):
            RetryPolicy(**{name: value})


def test_a_policy_comes_with_the_storage_options():
    policy = RetryPolicy(outage_seconds=7)
    for given_, options in [(policy, {}), ({"outage_seconds": 7}, {"key": "k"})]:
        location = parse_location("s3://b/x", {"retry": given_, **options})
        assert (location.retry, location.options, location.child("y").retry) == (policy, options, policy)
    assert parse_location("s3://b/x", None).retry == RetryPolicy()
    for wrong in (3, "fast", {"outage": 7}):
        with pytest.raises(UsageError, match="outage_seconds"):
            parse_location("s3://b/x", {"retry": wrong})


@pytest.mark.parametrize(
    ("content_range", "length"),
    [
        *(("bytes 100-199/300", 100), ("bytes 100-149/150", 50), ("bytes 100-199/150", 50)),
        *(("bytes 100-199/*", 100), ("bytes 100-199/300", None), (None, 7)),
    ],
)
def test_a_response_with_the_bytes_of_its_range_is_whole(content_range, length):
    check_range("bytes=100-199", content_range, length)


@pytest.mark.parametrize(("total", "length"), [("300", 99), ("300", 101), ("*", 0), ("150", 49)])
def test_a_response_with_other_bytes_than_its_range_is_incomplete(total, length):
    with pytest.raises(IncompleteRead):
        check_range("bytes=100-199", f"bytes 100-199/{total}", length)
