"""Fixtures that every test file may use: real S3 servers, and a fresh URL on every kind of store."""

import os
import signal
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import settings
from servers import S3Server, external_server, moto_server, seaweedfs_server
from worker_tasks import run_workers

# a test that forgets its keys must fail at once, not ask a cloud's metadata service for them
os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
# threads of torch that wait for work keep their cores busy, and there are as many test processes as cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

# machines are shared: how long an example takes says nothing; with CI set, hypothesis draws the same examples each time
settings.register_profile("unhurried", parent=settings(), deadline=None)
settings.register_profile("long", parent=settings.get_profile("unhurried"))  # of make test-examples
settings.load_profile("unhurried")


# files whose tests may differ by Python version, and by the packages that are built for it: make test-python runs them
PYTHON = ["batch_rng", "both_ways", "cli", "codecs", "convert_engine", "convert_sources", "environments", "executor"]
PYTHON += ["golden", "image", "leaks", "numpy", "pack", "packed_rows", "packing_plan", "public", "resume", "rows"]
PYTHON += ["storage_conformance", "storage_fork", "streaming_dataset", "threads", "transform", "video", "views"]
PYTHON += ["workers", "zarr_codecs"]
# what takes long is begun first: with pytest-xdist a file is run by one process, and the others would wait for it
FIRST = [
    "docs",
    "arrays",
    "ddp",
    "pages",
    "tutorials",
    "outages",
    "engine_workers",
    "executor",
    "convert_sources",
    "bench",
]
FIRST += ["sources_text", "storage_faults", "workers", "killed_conversions", "engines", "frameworks", "run_memory"]
FIRST += ["conversion_memory", "bad_destinations", "cli", "arrays_faults", "transform", "references"]
FIRST += ["streaming_dataset", "leaks", "device_schedules", "schedules", "jax_tensorflow", "worlds"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of the files that are run on every Python."""
    if item.path.name in {f"test_{name}.py" for name in PYTHON}:
        item.add_marker("python")


@pytest.hookimpl(tryfirst=True)  # before `-m 'not long'` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `quick` leaves to `make test-long`, and order the files by how long they take."""
    cases: Counter[str] = Counter()
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick is not None and item.get_closest_marker("long") is None:
            test = item.nodeid.partition("[")[0]
            cases[test] += 1
            if cases[test] > quick.args[0]:
                item.add_marker("long")
    rank = {f"test_{name}.py": number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Start without AWS's keys and settings; the files `credentials` and `config` in tmp_path are looked into."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "REGION", "DEFAULT_REGION"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no read for late before its policy does, so that requests can be counted if the process stands still."""
    monkeypatch.setattr("streamloader.storage.retry.LEAST_PATIENCE", 60.0)


@pytest.fixture(scope="session")
def two_workers() -> None:
    """Two workers run: before, threads of this process read."""
    run_workers(2)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let the test's processes get SIGINT, also where pytest ignores it, as what a script starts with `&` does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Returns the path of a dataset of `tests/datasets.py`, for reading only; of these fields, or all."""
    import datasets  # imports torch, which some test files do without

    @cache
    def written(count: int, *fields: str, layout: Any = datasets.SMALL) -> str:
        path = tmp_path_factory.mktemp("data") / "d"
        datasets.write(path, count, fields or datasets.FIELDS, layout)
        return str(path)

    return written


@pytest.fixture(scope="session")
def cycled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the datasets that the cycles of `tests/leaks.py` read."""
    import leaks

    path = tmp_path_factory.mktemp("leaks")
    leaks.write(path)
    return path


StoreUrl = tuple[str, dict[str, Any]]

EXTERNAL = os.environ.get("STREAMLOADER_TEST_S3", "")
S3_SERVERS = ["moto", "seaweedfs", *(["external"] if EXTERNAL else [])]


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """A moto server; it does not check signatures."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[S3Server]:
    """A SeaweedFS server; it checks signatures."""
    with seaweedfs_server() as server:
        yield server


@pytest.fixture(scope="session")
def external() -> Iterator[S3Server]:
    """The server that STREAMLOADER_TEST_S3 names, with the AWS keys of the environment."""
    with external_server(EXTERNAL) as server:
        yield server


@pytest.fixture(params=S3_SERVERS)
def s3(request: pytest.FixtureRequest) -> S3Server:
    """Each S3 server in turn."""
    server: S3Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="session", params=["memory", "file", *S3_SERVERS])
def root_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreUrl]:
    """(url, storage_options) of a place on each kind of store in turn, shared by all tests."""
    if request.param == "file":
        yield tmp_path_factory.mktemp("store").as_uri(), {}
    elif request.param == "memory":
        name = f"streamloader-{uuid.uuid4().hex}"
        yield f"memory://{name}", {}
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{name}"):
            memory.rm(f"/{name}", recursive=True)
    else:
        server: S3Server = request.getfixturevalue(request.param)
        yield server.url(), server.storage_options


@pytest.fixture
def store_url(root_url: StoreUrl) -> StoreUrl:
    """(url, storage_options) of an empty place on each kind of store in turn."""
    url, options = root_url
    return f"{url}/{uuid.uuid4().hex}/data", options
