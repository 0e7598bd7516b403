"""Real S3 servers, and emulators of Azure's and Google's stores, on free ports of this machine.

Each is a process of its own that dies with its starter.

A server is started by a keeper process (this file run as a script). The keeper holds the reading end of a
pipe from the starter: when the starter closes it, or dies in any way, the keeper kills the server's whole
process group and removes the server's folder. Nothing here needs pytest.

    with moto_server() as server:
        url = server.url("photos")                       # s3://<bucket>/<fresh folder>/photos
        fsspec.filesystem("s3", **server.storage_options)
"""

import base64
import contextlib
import json
import os
import random
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READY_SECONDS = 300.0
START_ATTEMPTS = 3
SEAWEEDFS_PORTS = 10


# every request that a store makes; in this order, each finds what it needs
STORE_CALLS: dict[str, Callable[[Any], Any]] = {
    "put": lambda store: store.put("a", b"abc"),
    "create": lambda store: store.create("b", b"abc"),
    "head": lambda store: store.head("a"),
    "get": lambda store: store.get("a"),
    "get_tail": lambda store: store.get_tail("a", 2),
    "read": lambda store: store.reader().read("a", 0, 1),
    "list": lambda store: list(store.list()),
    "replace": lambda store: store.replace("a", b"xyz", b"abc"),
    "remove_leftovers": lambda store: store.remove_leftovers(),
    "delete": lambda store: store.delete(["a", "b"]),
}


@dataclass
class S3Server:
    """An S3 endpoint and the keys for it; `pid` is the server's process, 0 for one that we did not start."""

    name: str
    endpoint: str
    key: str
    secret: str
    token: str = ""
    pid: int = 0
    buckets: list[str] = field(default_factory=list)
    shared_bucket: str = ""

    @property
    def storage_options(self) -> dict[str, Any]:
        """Return the options of s3fs for this server."""
        keys = {"key": self.key, "secret": self.secret, **({"token": self.token} if self.token else {})}
        return {**keys, "endpoint_url": self.endpoint, "client_kwargs": {"region_name": "us-east-1"}}

    @property
    def env(self) -> dict[str, str]:
        """Return the environment that leads a process without options to this server."""
        keys = {"AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret}
        if self.token:
            keys["AWS_SESSION_TOKEN"] = self.token
        return {**keys, "AWS_ENDPOINT_URL": self.endpoint, "AWS_DEFAULT_REGION": "us-east-1"}

    def client(self) -> Any:
        """Return a botocore client, for what fsspec does not offer."""
        from botocore.config import Config
        from botocore.session import get_session

        return get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            aws_session_token=self.token or None,
            config=Config(s3={"addressing_style": "path"}, connect_timeout=5, read_timeout=15),
        )

    def new_bucket(self) -> str:
        """Create an empty bucket and return its name."""
        name = f"streamloader-{uuid.uuid4().hex[:16]}"
        with contextlib.closing(self.client()) as client:
            client.create_bucket(Bucket=name)
        self.buckets.append(name)
        return name

    def url(self, name: str = "data") -> str:
        """Return the URL of an empty folder `name`; all are in one bucket, since a new one takes a second."""
        self.shared_bucket = self.shared_bucket or self.new_bucket()
        return f"s3://{self.shared_bucket}/{uuid.uuid4().hex}/{name}"

    def remove_buckets(self) -> None:
        """Empty and delete the buckets made here: needed only where the server outlives the tests."""
        with contextlib.closing(self.client()) as client:
            for bucket in self.buckets:
                for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
                    for entry in page.get("Contents", ()):
                        client.delete_object(Bucket=bucket, Key=entry["Key"])
                client.delete_bucket(Bucket=bucket)
        self.buckets.clear()


@contextlib.contextmanager
def moto_server() -> Iterator[S3Server]:
    """Run moto: it keeps objects in memory and does not check signatures."""

    def command(folder: Path, ports: Sequence[int]) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(ports[0])]

    # short pages, so that listings of a hundred objects already have a second one
    with _running("moto", command, num_ports=1, env={"MOTO_S3_DEFAULT_MAX_KEYS": "100"}) as server:
        yield server


@contextlib.contextmanager
def seaweedfs_server(
    data: Path | None = None, flags: Sequence[str] = (), ports: Sequence[int] = ()
) -> Iterator[S3Server]:
    """Run SeaweedFS with its data in a temporary folder, or in `data`, which stays: it checks signatures.

    `flags` are more of its own: other identities, less room. `ports`: `SEAWEEDFS_PORTS` of them, of S3 first, so that
    it can be restarted at the same ones; default free ones.
    """

    def command(folder: Path, ports: Sequence[int]) -> list[str]:
        names = [
            f"{one}.{port}" for one in ("s3", "master", "volume", "filer", "admin") for port in ("port", "port.grpc")
        ]
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "weed"
        return [
            *(weed, f"-logdir={folder}", "mini", f"-dir={data or folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
            *("-master.telemetry=false", "-webdav=false", "-admin.ui=false"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", *flags),
            # these two would stand in /tmp; relative, since a path of a socket has 107 characters at most. The keeper
            # removes those that cannot be moved
            *("-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock"),
        ]

    keys = {"AWS_ACCESS_KEY_ID": "streamloader", "AWS_SECRET_ACCESS_KEY": "streamloader-secret"}
    # a Go program gives idle memory back; on a virtual machine it then pays dearly for getting it anew
    keys["GODEBUG"] = "madvdontneed=0"
    with _running("seaweedfs", command, num_ports=SEAWEEDFS_PORTS, env=keys, ports=ports) as server:
        yield server


@contextlib.contextmanager
def juicefs_server() -> Iterator[S3Server]:
    """Run the gateway of JuiceFS, whose front end is MinIO's, on a folder: it checks signatures."""

    def command(folder: Path, ports: Sequence[int]) -> list[str]:
        path = shutil.which("juicefs", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "juicefs"
        juicefs, meta = shlex.quote(path), "sqlite3://meta.db"
        make = f"{juicefs} format --trash-days 0 --storage file --bucket $PWD/data/ {meta} stores"
        gateway = f"{juicefs} gateway --log log --cache-dir cache --keep-etag --multi-buckets --no-usage-report"
        serve = f"{gateway} --no-banner --metrics 127.0.0.1:{ports[1]} {meta} 127.0.0.1:{ports[0]}"
        return ["sh", "-c", f"HOME=$PWD; export HOME; {make} && exec {serve}"]

    keys = {"AWS_ACCESS_KEY_ID": "streamloader", "AWS_SECRET_ACCESS_KEY": "streamloader-secret"}
    roots = {"MINIO_ROOT_USER": "streamloader", "MINIO_ROOT_PASSWORD": "streamloader-secret"}
    with _running("juicefs", command, num_ports=2, env={**keys, **roots}) as server:
        yield server


@contextlib.contextmanager
def azurite_server(script: Path) -> Iterator[S3Server]:
    """Run Azurite, Microsoft's emulator of Azure's blobs, in node: its `script` is blob/main.js. It is no S3 server."""

    def command(folder: Path, ports: Sequence[int]) -> list[str]:
        flags = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        return ["node", str(script), "--blobHost", "127.0.0.1", "--blobPort", str(ports[0]), *flags]

    secret = base64.b64encode(b"streamloader-secret").decode()
    keys = {"AWS_SECRET_ACCESS_KEY": secret, "AZURITE_ACCOUNTS": f"streamloader:{secret}"}
    with _running("azurite", command, num_ports=1, env=keys, ready=_wait_listening) as server:
        yield server


@contextlib.contextmanager
def gcs_server(binary: Path) -> Iterator[S3Server]:
    """Run fake-gcs-server, an emulator of Google's storage, which holds objects in memory. It is no S3 server."""

    def command(folder: Path, ports: Sequence[int]) -> list[str]:
        flags = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(ports[0]), "-backend", "memory"]
        return [str(binary), *flags, "-public-host", f"127.0.0.1:{ports[0]}"]

    with _running("gcs", command, num_ports=1, env={}, ready=_wait_listening) as server:
        yield server


@contextlib.contextmanager
def external_server(endpoint: str) -> Iterator[S3Server]:
    """Use the server at `endpoint` with the keys of the environment; its buckets are removed at the end."""
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    server = S3Server("external", endpoint, key, secret, os.environ.get("AWS_SESSION_TOKEN", ""))
    try:
        yield server
    finally:
        server.remove_buckets()


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, below the range that the kernel gives to clients."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            candidate = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                candidate.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
                ports.append(candidate.getsockname()[1])
    return ports


@contextlib.contextmanager
def _running(
    name: str,
    command: Callable[[Path, Sequence[int]], list[str]],
    num_ports: int,
    env: dict[str, str],
    ports: Sequence[int] = (),
    ready: Callable[[S3Server, subprocess.Popen[bytes]], str] | None = None,
) -> Iterator[S3Server]:
    """Start the command until it answers: as an S3 server, or as `ready` says.

    Another process may take a free port first, hence the attempts.
    """
    chosen = ports
    for attempt in range(START_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=f"streamloader-{name}-"))
        ports = chosen or free_ports(num_ports)
        sockets = [f"seaweedfs-*-grpc-{port}.sock" for port in ports]
        keeper = start_keeper(folder, sockets, command(folder, ports), env)
        try:
            server = S3Server(
                name,
                f"http://127.0.0.1:{ports[0]}",
                key=env.get("AWS_ACCESS_KEY_ID", "streamloader"),
                secret=env.get("AWS_SECRET_ACCESS_KEY", "streamloader-secret"),
                pid=int(keeper.stdout.readline() or 0),
            )
            problem = (ready or _wait_ready)(server, keeper)
            if not problem:
                yield server
                return
            if attempt == START_ATTEMPTS - 1:
                log = folder / "server.log"  # gone with its folder where the server ended by itself
                shown = log.read_text(errors="replace")[-4000:] if log.exists() else ""
                raise RuntimeError(f"{name} did not start: {problem}\n{shown}")
        finally:
            end_keeper(keeper)


def start_keeper(folder: Path, leftovers: list[str], command: list[str], env: dict[str, str]) -> subprocess.Popen:
    """Start the command in `folder`; the keeper's first line of output is its process id.

    `leftovers` are glob patterns of the files in /tmp that the command would leave.
    """
    # a session of its own: Ctrl-C in the terminal must not end the server before the tests are done with it
    return subprocess.Popen(
        [sys.executable, "-I", __file__, json.dumps([str(folder), leftovers, command])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **env},
        start_new_session=True,
    )


def end_keeper(keeper: subprocess.Popen[bytes]) -> None:
    """Kill the keeper's process and remove its folder."""
    keeper.stdin.close()
    keeper.wait(timeout=300)
    keeper.stdout.close()


def _wait_ready(server: S3Server, keeper: subprocess.Popen[bytes]) -> str:
    """Wait until an object can be written; return what is wrong, or nothing."""
    from botocore.exceptions import BotoCoreError, ClientError

    deadline = time.monotonic() + READY_SECONDS
    port = int(server.endpoint.rpartition(":")[2])
    problem = "it does not listen"
    while time.monotonic() < deadline:
        if select.select([keeper.stdout], [], [], 0)[0]:
            return f"it ended by itself: {problem}"
        try:
            if _listens(server.pid, port):  # else another server, which took its port, may answer
                bucket = server.new_bucket()
                with contextlib.closing(server.client()) as client:
                    client.put_object(Bucket=bucket, Key="ready", Body=b"yes")
                return ""
        except (OSError, BotoCoreError, ClientError) as error:
            problem = str(error)
        time.sleep(0.05)
    return problem


def _wait_listening(server: S3Server, keeper: subprocess.Popen[bytes]) -> str:
    """Wait until the server listens; return what is wrong, or nothing."""
    deadline, port = time.monotonic() + READY_SECONDS, int(server.endpoint.rpartition(":")[2])
    while time.monotonic() < deadline:
        if select.select([keeper.stdout], [], [], 0)[0]:
            return "it ended by itself"
        with contextlib.suppress(FileNotFoundError):  # of a file that it has just closed
            if _listens(server.pid, port):
                return ""
        time.sleep(0.05)
    return "it does not listen"


def _listens(pid: int, port: int) -> bool:
    """Return whether the process has a socket that listens at this port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    found = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    return any(str(file.readlink()) in found for file in Path(f"/proc/{pid}/fd").iterdir())


def _keep(folder: str, leftovers: list[str], command: list[str]) -> int:
    """Run the command until it ends or standard input is closed, then leave nothing of it.

    `leftovers` are glob patterns of the files in /tmp that the command would leave.
    """
    with Path(folder, "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder
        )
    print(server.pid, flush=True)
    server_end = os.pidfd_open(server.pid)
    ended, _, _ = select.select([server_end, 0], [], [])
    if server_end in ended:  # it ended by itself: tell the starter, and keep its log until the starter has read it
        os.close(1)
        select.select([0], [], [], READY_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    status = server.wait()
    for pattern in leftovers:
        for path in Path("/tmp").glob(pattern):
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(_keep(*json.loads(sys.argv[1])))
