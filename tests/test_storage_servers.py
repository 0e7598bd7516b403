"""The servers that the other tests stand on: they answer, and nothing of them outlives their starter."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from servers import S3Server

STARTER = """
import sys
from servers import {server} as start
with start() as server:
    print(server.pid, server.endpoint, flush=True)
    sys.stdin.read()
"""


def test_each_server_keeps_an_object(s3: S3Server) -> None:
    bucket = s3.new_bucket()
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a/b", Body=b"abc")
    assert client.get_object(Bucket=bucket, Key="a/b", Range="bytes=1-1")["Body"].read() == b"b"


@pytest.mark.parametrize("server", ["moto_server", "seaweedfs_server"])
def test_server_and_its_folder_die_with_a_killed_starter(server: str, tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER.format(server=server)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert starter.stdin and starter.stdout
    with starter.stdin, starter.stdout:
        pid = int(starter.stdout.readline().split()[0])
        server_end = os.pidfd_open(pid)
        keeper_end = os.pidfd_open(_parent(pid))
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    for end in (server_end, keeper_end):
        assert select.select([end], [], [], 20)[0], f"process {pid} or its keeper lives on"
        os.close(end)
    assert not list(tmp_path.iterdir())


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
