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
import json, multiprocessing, os, sys, threading, warnings
from streamloader.errors import ForkError
from streamloader.storage import open_store

places, how = json.loads(sys.argv[1])

def look(stores, queue):
    found = []
    for store, (url, options) in zip(stores, places):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            readers = [store.reader(), store.child("a").reader(), open_store(url, options).reader()]
        warned = sum("forkserver" in str(warning.message) for warning in caught)
        parts = [bytes(readers[0].read("a/b", 3, 9)), store.get("a/b")[3:9], bytes(readers[1].read("b", 3, 9))]
        assert parts == [bytes(range(3, 9))] * 3
        if url.startswith("s3"):
            store.put(f"written/{os.getpid()}", b"by the child")
        found.append([warned, [reader.kind for reader in readers], [reader.reason for reader in readers]])
    queue.put(found)

def refused(reader):
    try:
        reader.read("a/b", 0, 3)
    except ForkError:
        return True
    return False

def main():
    stores = []
    for url, options in places:
        store = open_store(url, options)
        assert bytes(store.reader().read("a/b", 0, 3)) == bytes([0, 1, 2]) == store.get("a/b")[:3]
        stores.append(store)
        if url.startswith("s3"):  # the first
            assert not {"s3fs", "aiobotocore", "obstore", "fsspec"} & sys.modules.keys()
            assert threading.active_count() == 1
    queue = multiprocessing.get_context("fork" if how == "os.fork" else how).SimpleQueue()
    if how == "os.fork":
        readers = [store.reader() for store in stores]
        child = os.fork()
        if child == 0:
            queue.put([refused(reader) for reader in readers])
            look(stores, queue)
            os._exit(0)
        print(json.dumps(queue.get()))
        print(json.dumps(queue.get()))
        assert os.waitpid(child, 0)[1] == 0
    else:
        process = multiprocessing.get_context(how).Process(target=look, args=(stores, queue))
        process.start()
        print("[]")
        print(json.dumps(queue.get()))
        process.join()
    assert not any(refused(store.reader()) for store in stores)

if __name__ == "__main__":
    main()
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", ["os.fork", "fork", "spawn", "forkserver"])
def test_a_child_reads_by_clients_of_its_own(seaweedfs, tmp_path, how):
    folder, script, forked = tmp_path / "store", tmp_path / "case.py", how in ("os.fork", "fork")
    s3 = open_store(seaweedfs.url(), seaweedfs.storage_options)
    for store in (s3, open_store(folder)):
        store.put("a/b", CONTENT)
    script.write_text(PRELUDE)
    with folder_server(folder) as server:
        places = [(s3.url, seaweedfs.storage_options), (str(folder), {}), (server.url, {})]
        command = [sys.executable, str(script), json.dumps([places, how])]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        printed = subprocess.check_output(command, env=environment, timeout=300).splitlines()
    refused, (of_s3, of_files, of_http) = map(json.loads, printed)
    assert refused == ([True, False, True] if how == "os.fork" else [])  # files have no connections
    assert len(list(s3.list("written"))) == 1
    assert of_s3[:2] == [0, ["http"] * 3]
    assert of_files[:2] == [0, ["file"] * 3]
    assert of_http[:2] == [1 if forked else 0, ["fsspec" if forked else "obstore"] * 3]
    assert all(("forkserver or spawn" in reason) == forked for reason in of_http[2])
