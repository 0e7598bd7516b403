"""Credentials that end in the middle of a run are renewed: from each source, in each process, once and not by each."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from types import SimpleNamespace

import numpy as np
import pytest
import session_tokens as tokens
from amounts import longer
from datasets import SMALL, value, write
from torchrun import run_python

import streamloader as sl
from streamloader.errors import AccessError, UnsupportedError, UsageError
from streamloader.storage import credentials, open_store
from streamloader.storage.credentials import Keys, Renewed, keys_of
from streamloader.storage.url import parse_location

LIVES = 60  # requests with one token: more than are in flight
SAMPLES = 256
LOCATION = parse_location("s3://bucket", {})
pytestmark = pytest.mark.usefixtures("no_keys")


@pytest.fixture
def server(moto, tmp_path):
    with tokens.session_tokens(moto, tmp_path, LIVES) as server:
        yield server


def train(url, options, workers):
    """Read an epoch, whose values are right, and return how many tokens ended meanwhile."""
    dataset = sl.NumpyDataset(url, batch_size=32, num_workers=workers, with_index=True, storage_options=options)
    numbers = []
    for batch in dataset:
        np.testing.assert_array_equal(batch["x"], np.stack([value("x", i) for i in batch["index"].tolist()]))
        numbers += batch["index"].tolist()
    assert sorted(numbers) == list(range(SAMPLES))
    return dataset


def work(server, url, options, folder, workers=0, num_workers=0):
    """Convert, append, verify and train, with so many processes; a token ends in each."""
    half = SAMPLES // 2
    for name, first in (("first", 0), ("second", half)):
        np.savez(folder / f"{name}.npz", x=np.stack([value("x", i) for i in range(first, first + half)]))
    steps = {
        "convert": lambda: sl.convert(
            f"{folder}/first.npz", url, layout=SMALL, workers=workers, storage_options=options
        ),
        "append": lambda: sl.append(url, f"{folder}/second.npz", workers=workers, storage_options=options),
        "verify": lambda: sl.verify(url, storage_options=options),
        "train": lambda: train(url, options, num_workers),
    }
    for name, step in steps.items():
        server.left = min(server.left, 10)  # this token ends soon
        before = server.tokens
        report = step()
        assert server.tokens > before, name
        assert name != "verify" or report.ok, report


@pytest.fixture(scope="module")
def dataset(moto):
    write(url := moto.url(), SAMPLES, ["x"], options=moto.storage_options)
    return url


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", tokens.KINDS)
def test_keys_that_expire_in_the_middle_of_an_epoch_are_renewed(kind, server, dataset, monkeypatch):
    server.left = 10
    train(dataset, server.options(kind, monkeypatch), 0)
    assert 2 <= server.tokens <= server.given <= server.tokens + 2
    assert server.refused <= 64 * server.tokens


@pytest.mark.long
@pytest.mark.parametrize("kind", ["process", *map(longer, ("function", "container", "web identity", "sso"))])
def test_keys_that_expire_in_the_middle_are_renewed_in_every_kind_of_work(kind, server, moto, tmp_path, monkeypatch):
    options = server.options(kind, monkeypatch)
    work(server, moto.url(), options, tmp_path)
    # each client of a store asks once when it begins, and once for each token that ended in its time
    assert server.tokens <= server.given <= 4 * server.tokens + 8


@pytest.mark.long
@pytest.mark.parametrize("kind", ["function", "web identity"])
def test_keys_are_renewed_in_worker_processes(kind, server, moto, tmp_path, monkeypatch):
    options = server.options(kind, monkeypatch)
    # workers of the loader may run already, with another environment
    work(server, moto.url(), options, tmp_path, 2, 2 if kind == "function" else 0)
    assert server.given <= 3 * (4 * server.tokens + 8)


IN_DATA_LOADER = """
import json, sys
from torch.utils.data import DataLoader
import streamloader as sl
if __name__ == "__main__":
    url, options = json.loads(sys.argv[1])
    dataset = sl.StreamingDataset(url, batch_size=32, with_index=True, num_workers=0, storage_options=options)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=sys.argv[2])
    print(json.dumps(sorted((int(i), float(x[0])) for batch in loader for i, x in zip(batch["index"], batch["x"]))))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("sso", "fork"),
        *(longer(*each) for each in (("sso", "forkserver"), ("container", "spawn"), ("process", "fork"))),
    ],
)
def test_keys_that_expire_are_renewed_in_workers_of_a_data_loader(kind, method, server, dataset, monkeypatch, tmp_path):
    options = server.options(kind, monkeypatch)
    (tmp_path / "program.py").write_text(IN_DATA_LOADER)
    server.left = 10
    arguments = (tmp_path / "program.py", json.dumps([dataset, options]), method)
    found = json.loads(run_python(*arguments, HOME=str(tmp_path)).stdout)  # botocore looks for tokens of SSO there
    assert found == [[i, float(value("x", i)[0])] for i in range(SAMPLES)]
    assert server.tokens >= 2
    # the process asks, and each of its workers, which begin with its keys or ask, and for each token that ends
    assert server.given <= 3 * (server.tokens + 2)


@pytest.mark.long
def test_a_function_that_other_processes_cannot_load_is_called_in_this_one(server, dataset, monkeypatch, tmp_path):
    options = server.options("function", monkeypatch)
    private = {**options, "credential_provider": lambda: tokens.ask(server.endpoint)}
    trained = train(dataset, private, 2)
    assert "credential_provider" in trained.stats().workers_reason
    np.savez(tmp_path / "more.npz", x=np.zeros((4, 300), np.float32))
    with pytest.raises(UsageError, match=r"cannot load the credential_provider: .*define it in a module"):
        sl.append(dataset, f"{tmp_path}/more.npz", workers=2, storage_options=private)


# ---- the renewal itself


def keys(number=0, expiry=1000.0):
    return Keys(credentials.ReadOnlyCredentials(f"key{number}", "secret", None), expiry)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets, in place of that of the credentials."""
    now = SimpleNamespace(seconds=0.0, time=lambda: now.seconds, monotonic=time.monotonic)
    monkeypatch.setattr(credentials, "time", now)
    return now


def after_renewal(renewed):
    """The key in use when no renewal is under way."""
    while renewal := renewed._renewal:
        renewal.result(10)
    return renewed.get_frozen_credentials().access_key


def test_threads_that_need_keys_at_once_share_one_renewal(clock):
    asked, go = [], threading.Event()

    def ask():
        asked.append(go.wait(10))
        return keys(len(asked), expiry=clock.seconds + 100)

    renewed = Renewed(ask, LOCATION)
    for round_ in (1, 2):
        go.clear()
        with ThreadPoolExecutor(32) as pool:
            found = [pool.submit(renewed.get_frozen_credentials) for _ in range(32)]
            go.set()
            assert {future.result().access_key for future in found} == {f"key{round_}"}
        assert len(asked) == round_
        clock.seconds += 101


def test_requests_go_on_with_the_present_keys_while_others_are_fetched(clock):
    asked, go = [], threading.Event()

    def ask():
        if asked:
            go.wait(10)
        asked.append(clock.seconds)
        return keys(len(asked), expiry=clock.seconds + 3600)

    renewed = Renewed(ask, LOCATION)
    assert renewed.get_frozen_credentials().access_key == "key1"
    clock.seconds = 3600 - credentials.BEFORE_SECONDS - 1
    assert after_renewal(renewed) == "key1"
    clock.seconds += 2
    for _ in range(10):
        assert renewed.get_frozen_credentials().access_key == "key1"
    go.set()
    assert after_renewal(renewed) == "key2"
    assert len(asked) == 2


@pytest.mark.parametrize("life", [10, 60, 600])
def test_keys_that_live_shortly_are_not_fetched_for_each_request(clock, life):
    asked = []

    def ask():
        asked.append(clock.seconds)
        return keys(len(asked), expiry=clock.seconds + life)

    renewed = Renewed(ask, LOCATION)
    for _ in range(1000):
        after_renewal(renewed)
        clock.seconds += life / 100
    assert 10 <= len(asked) <= 21


def test_a_source_that_fails_is_harmless_until_the_keys_expire(clock, caplog):
    asked = []

    def ask():
        asked.append(clock.seconds)
        if len(asked) > 1:
            raise RuntimeError("the source is out of order")
        return keys(expiry=3600)

    renewed = Renewed(ask, LOCATION)
    while clock.seconds < 3600:
        assert after_renewal(renewed) == "key0"
        clock.seconds += 1
    assert 3 <= len(asked) <= 20  # more often towards the end
    assert "renewing credentials failed, they expire in 14.0 minutes: RuntimeError: the source is out" in caplog.text
    with pytest.raises(
        AccessError, match=r"no valid credentials \(RuntimeError: the source is out of order\)"
    ) as raised:
        renewed.get_frozen_credentials()
    assert raised.value.remedy


def test_a_source_that_hangs_is_an_error_within_a_stated_time(monkeypatch):
    monkeypatch.setattr(credentials, "RENEW_SECONDS", 0.2)
    go = threading.Event()
    renewed = Renewed(lambda: go.wait(60) and keys(), LOCATION)
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(AccessError, match=r"no valid credentials \(no response for 0.2 s\)"):
            renewed.get_frozen_credentials()
    assert time.monotonic() - begin < 10
    go.set()


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", tokens.KINDS)
def test_a_renewal_that_fails_ends_the_run_with_its_reason(kind, server, moto, tmp_path, monkeypatch):
    options = server.options(kind, monkeypatch)
    store = open_store(moto.url(), options)
    store.put("a", b"abc")
    server.broken = True
    (tmp_path / "keys.json").unlink()
    server.tokens += 1
    begin = time.monotonic()
    with pytest.raises(AccessError, match=r"no valid credentials \((\w*HTTPError|\w+Error|\w+Exception): "):
        store.read("a", 0, 1)
    assert time.monotonic() - begin < credentials.RENEW_SECONDS + 10


UTC_2999 = datetime(2999, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    "given",
    [
        {"key": "k", "secret": "s", "token": "t", "expires_at": UTC_2999},
        {"access_key_id": "k", "secret_access_key": "s", "token": "t", "expires_at": UTC_2999},  # obstore
        {"AccessKeyId": "k", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": UTC_2999},  # boto3
        {"key": "k", "secret": "s", "token": "t", "expires_at": "2999-01-01T00:00:00Z"},
        {"key": "k", "secret": "s", "token": "t", "expires_at": UTC_2999.timestamp()},
    ],
)
def test_a_function_may_return_what_others_return(given):
    assert keys_of(given) == Keys(credentials.ReadOnlyCredentials("k", "s", "t"), UTC_2999.timestamp())


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (None, "returned a NoneType, not a dict"),
        ({"key": "hush-hush"}, "no text for 'secret', but a NoneType"),
        ({"key": "k", "secret": b"hush-hush"}, "no text for 'secret', but a bytes"),
        ({"key": "k", "secret": "hush-hush", "expires_at": [1]}, "a list as 'expires_at'"),
        ({"key": "k", "secret": "hush-hush", "expires_at": "soon"}, "Invalid isoformat"),
        ({"key": "k", "secret": "hush-hush", "expires_at": 1}, "expired at 1970-01-01 00:00:01 UTC"),
    ],
)
def test_what_a_function_returns_otherwise_is_an_error_without_its_values(given, shown):
    with pytest.raises(AccessError, match=shown) as raised:
        open_store("s3://bucket", {"endpoint_url": "http://127.0.0.1:9", "credential_provider": lambda: given}).get("a")
    assert "hush" not in str(raised.value)


def test_the_option_is_for_s3_and_instead_of_keys():
    with pytest.raises(UsageError, match=r"credential_provider is a dict.*give a function"):
        open_store("s3://bucket", {"credential_provider": {}})
    with pytest.raises(UsageError, match=r"credential_provider and key.*give one of them"):
        open_store("s3://bucket", {"credential_provider": dict, "key": "k", "secret": "s"})
    with pytest.raises(UnsupportedError, match="gs://bucket: credential_provider is an option of S3"):
        open_store("gs://bucket", {"credential_provider": dict})
