"""A killed writer: what it was writing is complete or absent, and the rest is found and removed."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from servers import end_keeper, start_keeper

from streamloader.errors import StorageError
from streamloader.storage import open_store
from streamloader.storage import s3 as s3_module
from streamloader.testing import Fault, FaultProxy

MIB = 1 << 20

WRITER = """
import itertools, sys
from streamloader.storage import open_store
store = open_store(sys.argv[1])
for number in itertools.count():
    store.put("same", bytes([number % 256]) * (1 << 22))
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_complete_objects_and_nothing_outside_its_folder(tmp_path):
    folder, temporary = tmp_path / "store", tmp_path / "tmp"
    temporary.mkdir()
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
    )
    with writer.stdout:
        for _ in range(5):
            assert writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    store = open_store(folder)
    assert [info.path for info in store.list()] == ["same"]
    assert len(store.get("same")) == 1 << 22
    assert len(set(store.get("same"))) == 1
    assert not list(temporary.iterdir())
    left = [path for path in folder.iterdir() if path.name != "same"]
    assert all(path.name.endswith(".streamloader-tmp") for path in left)
    assert store.remove_leftovers() == len(left)
    assert [path.name for path in folder.iterdir()] == ["same"]


def uploads(server, bucket):
    with contextlib.closing(server.client()) as client:
        return [upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]


@pytest.mark.quick(1)
def test_unfinished_uploads_below_the_store_are_removed_and_no_others(s3):
    bucket = s3.new_bucket()
    with contextlib.closing(s3.client()) as client:
        for key in ("ours/a", "ours/b/c", "others/d"):
            client.create_multipart_upload(Bucket=bucket, Key=key)
    store = open_store(f"s3://{bucket}/ours", s3.storage_options)
    assert store.remove_leftovers() == 2
    assert store.remove_leftovers() == 0
    assert uploads(s3, bucket) == ["others/d"]


@pytest.mark.long
def test_large_objects_go_up_in_parts_and_a_failed_one_is_aborted(seaweedfs, monkeypatch):
    monkeypatch.setattr(s3_module, "PART_BYTES", 5 * MIB)
    bucket = seaweedfs.new_bucket()
    store = open_store(f"s3://{bucket}/x", seaweedfs.storage_options)
    content = os.urandom(MIB) * 11
    assert store.put("large", content).size == 11 * MIB
    assert store.get("large") == content
    monkeypatch.setattr(s3_module, "PART_BYTES", MIB)  # S3 refuses parts that small when the upload is completed
    with pytest.raises(StorageError):
        store.put("failed", content)
    assert uploads(seaweedfs, bucket) == []
    assert store.head("failed") is None


@pytest.mark.long
def test_an_upload_in_parts_whose_last_response_is_lost_is_sent_again(moto, monkeypatch):
    monkeypatch.setattr(s3_module, "PART_BYTES", 5 * MIB)
    content = os.urandom(MIB) * 11
    bucket = moto.new_bucket()
    with FaultProxy(moto.endpoint, [Fault("lost", method="POST", path="uploadId", times=1)]) as proxy:
        store = open_store(f"s3://{bucket}/x", {**moto.storage_options, "endpoint_url": proxy.endpoint})
        store.put("large", content)
        assert proxy.counts["lost"] == 1
        assert store.get("large") == content
    assert uploads(moto, bucket) == []


def test_a_server_of_the_tests_and_its_folder_end_with_their_starter(tmp_path):
    folder = tmp_path / "server"
    folder.mkdir()
    keeper = start_keeper(folder, [], ["sleep", "600"], {})
    pid = int(keeper.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    end_keeper(keeper)  # closes its standard input, as a kill of this process would
    assert not Path(f"/proc/{pid}").exists()
    assert not folder.exists()
