"""An S3 server for the demo: moto in a process of its own, which ends when its starter does."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamloader.errors import EngineError

STOP_SECONDS = 20.0


@contextmanager
def s3_server(bucket: str, log: Path) -> Iterator[str]:
    """Run a server on a free port of this machine with one empty bucket, and give its URL; it writes to `log`.

    Raises `EngineError` where it does not start.
    """
    with log.open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, "-m", "streamloader.demo.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C must not end the server before the ranks that use it
        )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        endpoint = server.stdout.readline().strip()
        if not endpoint:
            last = (log.read_text().strip().splitlines() or ["it said nothing"])[-1]
            raise EngineError(f"the S3 server did not start: {last}", "pip install 'moto[s3]' flask flask-cors")
        request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        direct.open(request, timeout=STOP_SECONDS).close()
        yield endpoint
    finally:
        server.stdin.close()
        server.wait(STOP_SECONDS)
        server.stdout.close()


def end_with_starter() -> None:
    """Block until standard input is closed, which the end of its other side does however it came; then end at once."""
    while os.read(0, 4096):  # not sys.stdin: its lock, held at exit, would abort the interpreter
        pass
    os._exit(1)


def _serve() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    print(f"http://{host}:{port}", flush=True)  # noqa: T201 - the starter reads it
    end_with_starter()


if __name__ == "__main__":
    _serve()
