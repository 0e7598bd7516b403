"""After a fork no client of the parent is touched: the child reads correctly and does not hang.

Each case runs in a process of its own, since forking one that has threads is the point.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from folder_server import folder_server

from streamloader.storage import open_store

CONTENT = bytes(range(256)) * 100

PRELUDE = """
import json, multiprocessing, os, sys, warnings
from streamloader.errors import ForkError
from streamloader.storage import open_store

url, options, how = json.loads(sys.argv[1])

def look(store, queue=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        readers = [store.reader(), store.child("a").reader(), open_store(url, options).reader()]
    warned = sum("forkserver" in str(warning.message) for warning in caught)
    parts = [bytes(readers[0].read("a/b", 3, 9)), store.get("a/b")[3:9], bytes(readers[1].read("b", 3, 9))]
    if url.startswith("s3"):
        store.put(f"written/{os.getpid()}", b"by the child")
        assert not {"s3fs", "aiobotocore", "obstore", "fsspec"} & sys.modules.keys()
    found = [warned, [part.hex() for part in parts], [r.kind for r in readers], [r.reason for r in readers]]
    if queue is None:
        return found
    queue.put(found)

def main():
    store = open_store(url, options)
    used = store.reader()
    assert bytes(used.read("a/b", 0, 3)) == bytes([0, 1, 2]) == store.get("a/b")[:3]
    if how == "os.fork":
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                used.read("a/b", 0, 3)
                fork_error = False
            except ForkError:
                fork_error = True
            os.write(write_end, json.dumps([*look(store), fork_error]).encode())
            os._exit(0)
        os.close(write_end)
        print(os.read(read_end, 100_000).decode())
        assert os.waitpid(child, 0)[1] == 0
    else:
        context = multiprocessing.get_context(how)
        queue = context.Queue()
        process = context.Process(target=look, args=(store, queue))
        process.start()
        print(json.dumps([*queue.get(timeout=300), True]))
        process.join()
    assert bytes(used.read("a/b", 0, 3)) == bytes([0, 1, 2])

if __name__ == "__main__":
    main()
"""


def run_case(tmp_path, url, options, how):
    """Run the prelude with `how` as the way to start the child; return what the child found."""
    script = tmp_path / "case.py"
    script.write_text(PRELUDE)
    command = [sys.executable, str(script), json.dumps([url, options, how])]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    return json.loads(subprocess.check_output(command, env=environment, timeout=300))


WAYS = ["os.fork", "fork", "spawn", "forkserver"]


@pytest.mark.parametrize("how", WAYS)
def test_a_child_reads_by_a_client_of_its_own(seaweedfs, tmp_path, how):
    url, options = seaweedfs.url(), seaweedfs.storage_options
    store = open_store(url, options)
    store.put("a/b", CONTENT)
    warnings, parts, kinds, _, fork_error = run_case(tmp_path, url, options, how)
    assert (warnings, parts, kinds) == (0, [CONTENT[3:9].hex()] * 3, ["http"] * 3)
    assert fork_error  # for the parent's connections
    assert len(list(store.list("written"))) == 1


@pytest.mark.parametrize("how", WAYS)
def test_obstore_is_not_touched_after_a_fork(tmp_path, how):
    open_store(tmp_path / "store").put("a/b", CONTENT)
    with folder_server(tmp_path / "store") as server:
        warnings, parts, kinds, reasons, fork_error = run_case(tmp_path, server.url, {}, how)
    forked = how in ("os.fork", "fork")
    assert (warnings, parts) == (1 if forked else 0, [CONTENT[3:9].hex()] * 3)
    assert kinds == ["fsspec" if forked else "obstore"] * 3
    assert all(("forkserver or spawn" in reason) == forked for reason in reasons)
    assert fork_error


def test_local_files_are_read_after_a_fork_too(tmp_path):
    open_store(tmp_path / "store").put("a/b", CONTENT)
    warnings, parts, kinds, _, fork_error = run_case(tmp_path, str(tmp_path / "store"), {}, "os.fork")
    assert (warnings, parts, kinds) == (0, [CONTENT[3:9].hex()] * 3, ["file"] * 3)
    assert not fork_error  # nothing is shared with the parent


def test_importing_and_opening_starts_no_thread_and_no_client(tmp_path):
    code = """
import threading, sys
import streamloader.storage
assert "obstore" not in sys.modules and "s3fs" not in sys.modules
store = streamloader.storage.open_store("s3://bucket/x", {"endpoint_url": "http://127.0.0.1:9"}).child("a")
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=Path(__file__).parent.parent)
