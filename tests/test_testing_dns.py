"""A name that no longer resolves: for the processes that are to see it, and what a run makes of it."""

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from folder_server import folder_server, location
from torchrun import environment, run_python

import streamloader as sl
from streamloader.errors import UsageError
from streamloader.options import Layout
from streamloader.testing import FaultProxy, HostName

NAME = "store.test"
COUNT, BATCH = 14_000, 100
MEMORY = 9 << 20  # half of the dataset
LAYOUT = Layout(shard_size=1 << 20, block_size=1 << 16, chunk_size=1 << 14, codec="none")


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    if subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("the system lets no process have mounts of its own")


RESOLVING = """
import socket, sys
for line in sys.stdin:
    try:
        print(socket.getaddrinfo(line.strip(), 80, type=socket.SOCK_STREAM)[0][4][0], flush=True)
    except socket.gaierror as error:
        print(error.errno == getattr(socket, "EAI_AGAIN"), error.errno == getattr(socket, "EAI_NONAME"), flush=True)
"""


@pytest.mark.parametrize(("temporary", "gone"), [(True, "True False"), (False, "False True")])
def test_a_name_resolves_in_processes_that_run_and_in_no_others_until_it_is_gone(temporary, gone):
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(HostName(NAME, "127.0.0.9", temporary=temporary))
        command = name.command(sys.executable, "-S", "-c", RESOLVING)
        process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )

        def resolved(host):
            process.stdin.write(f"{host}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        for _ in range(2):
            assert (name.resolves, resolved(NAME)) == (True, "127.0.0.9")
            name.resolves = False
            begin = time.monotonic()
            assert (name.resolves, resolved(NAME)) == (False, gone)
            assert time.monotonic() - begin < 5
            assert resolved("localhost") == "127.0.0.1"
            name.resolves = True
        with pytest.raises(socket.gaierror):
            socket.getaddrinfo(NAME, 80)
        process.stdin.close()


AS_USER = """
import encodings.latin_1, os, subprocess  # Python's own files may be root's
from streamloader.testing.dns import HostName
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with HostName("store.test", "127.0.0.9") as name:
    print(subprocess.run(name.command("getent", "hosts", "store.test"), capture_output=True, text=True).stdout)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_needs_no_rights():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        assert run_python("-c", AS_USER, TMPDIR=folder).stdout.split() == ["127.0.0.9", "store.test"]


def test_a_system_without_namespaces_is_an_error_that_says_what_is_needed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"unshare.*util-linux"), HostName(NAME):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("dns")
    with sl.Writer(path / "data", {"x": "float32[300]"}, layout=LAYOUT, num_samples=COUNT) as out:
        out.write_batch({"x": np.arange(COUNT, dtype=np.float32)[:, None] + np.arange(300, dtype=np.float32) / 512})
    return path


@pytest.fixture(scope="module")
def expected(folder):
    """The digests of all batches, in order."""
    shuffle = sl.Shuffle(window=1024, lanes=4)
    batches = sl.NumpyDataset(folder / "data", batch_size=BATCH, shuffle=shuffle, with_index=True, num_workers=0)
    return [hashlib.sha256(batch["index"].tobytes() + batch["x"].tobytes()).hexdigest() for batch in batches]


@pytest.fixture(scope="module")
def name():
    with HostName(NAME) as name:
        yield name


@pytest.fixture
def proxy_and_place(request, name, folder):
    """A proxy, and the URL and options by which a client reads the dataset through it by its name."""
    with folder_server(folder) as server, FaultProxy(server.url) as proxy:
        name.resolves = True
        yield proxy, location(proxy.endpoint.replace("127.0.0.1", NAME), request.param)


# the digest of a batch for each line that is read, and how the epoch ended
READING = """
import hashlib, json, sys
import streamloader as sl
from worker_tasks import run_workers
url, options = json.loads(sys.argv[1])
run_workers(options["num_workers"]) if options["num_workers"] else None
try:
    for batch in sl.NumpyDataset(url, shuffle=sl.Shuffle(window=1024, lanes=4), with_index=True, **options):
        print(hashlib.sha256(batch["index"].tobytes() + batch["x"].tobytes()).hexdigest(), flush=True)
        sys.stdin.readline()
    print("end")
except sl.errors.StreamloaderError as error:
    print(error.code, error)
"""


@contextlib.contextmanager
def reading(name, place, workers, retry):
    """Run a process that reads the dataset, and yield it and a function that returns the next n lines of its output."""
    url, options = place
    more = {"batch_size": BATCH, "num_workers": workers, "memory": MEMORY}
    given = json.dumps([url, {**more, "storage_options": {**options, "retry": retry}}])
    command = name.command(sys.executable, "-c", READING, given)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as process:

        def ask(count):
            process.stdin.write("\n" * count)
            process.stdin.flush()
            return [process.stdout.readline().strip() for _ in range(count)]

        try:
            yield process, ask
        finally:
            process.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    ("proxy_and_place", "workers"), [("s3", 0), ("s3", 2), ("http", 0)], indirect=["proxy_and_place"]
)
def test_a_run_goes_on_by_open_connections_waits_for_the_name_and_keeps_the_order(
    proxy_and_place, workers, name, expected
):
    proxy, place = proxy_and_place
    with reading(name, place, workers, {"report_seconds": 0.5, "probe_seconds": 0.2}) as (process, ask):
        seen = [process.stdout.readline().strip()]
        name.resolves = False
        before = proxy.counts["requests"]
        seen += ask(40)
        assert proxy.counts["requests"] > before
        proxy.stop()
        proxy.start()  # all its connections are reset
        process.stdin.write("\n" * COUNT)
        process.stdin.flush()
        waits = process.stderr.readline()
        assert re.search(rf"retries for .*{NAME}.*Temporary failure in name resolution", waits), waits
        requests = proxy.counts["requests"]
        name.resolves = True
        seen += process.stdout.read().split()
        assert "succeed again" in process.stderr.read()
        assert proxy.counts["requests"] > requests
    assert seen == [*expected, "end"]


@pytest.mark.long
@pytest.mark.parametrize("proxy_and_place", ["s3"], indirect=True)
def test_a_name_that_stays_away_ends_the_run_with_its_host_the_attempts_and_the_cause(proxy_and_place, name, expected):
    proxy, place = proxy_and_place
    retry = {"outage_seconds": 1.5, "request_seconds": 1.5, "probe_seconds": 0.2}
    with reading(name, place, 2, retry) as (process, _):
        seen = [process.stdout.readline().strip()]
        name.resolves = False
        proxy.stop()
        proxy.start()
        process.stdin.write("\n" * COUNT)
        process.stdin.flush()
        *more, last = process.stdout.read().splitlines()
        seen += more
    assert seen == expected[: len(seen)]
    assert last.startswith("SL203 ")
    assert NAME in last
    assert "cannot be reached" in last
    assert "Temporary failure in name resolution" in last
    attempts, seconds = re.search(r"\((\d+) attempts in ([\d.]+) s\)", last).groups()
    assert int(attempts) > 1
    assert 1.5 <= float(seconds) < 25  # both limits, and the deadline of the last attempt


READING_ONCE = """
import json, sys
from streamloader.errors import StorageError
from streamloader.storage import open_store
url, path, options = json.loads(sys.argv[1])
store = open_store(url, options)
store.retries.reached = True  # a run that was going on
try:
    print(bytes(store.retries.call(lambda: store.reader().read(path, 0, 5))).decode())
except StorageError as error:
    print(error.code, error)
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("plane", "returns"), [("fsspec", True), ("fsspec", False), ("http", False), ("reference", True)]
)
def test_a_read_waits_for_the_name(name, tmp_path, plane, returns):
    """By aiohttp, whose clients keep names for 10 s; and the host of a reference is none that may not be read."""
    (tmp_path / "x").write_text("right")
    with folder_server(tmp_path) as server:
        url, options = server.url.replace("127.0.0.1", NAME), {"encoded": False} if plane == "fsspec" else {}
        if plane == "reference":
            (tmp_path / "refs.json").write_text(json.dumps({"x": [f"{url}/x", 0, 5]}))
            url, options = f"reference://::{tmp_path}/refs.json", {"remote_options": {}}
        retry = {"report_seconds": 0.2, "probe_seconds": 0.1, "outage_seconds": 60 if returns else 1}
        program = [sys.executable, "-c", READING_ONCE, json.dumps([url, "x", {**options, "retry": retry}])]
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        name.resolves = False
        with subprocess.Popen(name.command(*program), env=environment(), text=True, **pipes) as process:
            if returns:
                assert "retries for" in process.stderr.readline()
                name.resolves = True
            found = process.stdout.read().strip()
    if returns:
        assert found == "right"
    else:
        assert re.search(rf"^SL203 .*{NAME}.*Temporary failure in name resolution.*attempts in", found), found
