"""Where the data lies: SeaweedFS, moto, nginx over a folder, or any S3 endpoint; and nginx in front of one.

Everything that is started here is a process that dies with this one; nothing of the machine's own nginx is used but
its program. The servers and their keeper are those of the tests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bench.workloads import ROOT

sys.path.insert(0, str(ROOT / "tests"))
from servers import end_keeper, free_ports, moto_server, seaweedfs_server, start_keeper

READY_SECONDS = 20.0
NGINX_HELP = "nginx is not installed: run bench/install-servers.sh, or take another --server"
LUA_MODULES = Path("/usr/lib/nginx/modules")
# what a cloud store does: the first byte takes 30 ms, and one connection moves 85 MB/s
DELAY_SECONDS = 0.03
BYTES_PER_SECOND = 85_000_000


@dataclass(frozen=True)
class Endpoint:
    """An S3 address. `ca`: a PEM file that signs its certificate; `log`: where each request is logged, if it is."""

    name: str
    url: str
    key: str = "streamloader"
    secret: str = "streamloader-secret"
    ca: str = ""
    log: Path | None = None

    def client(self) -> Any:
        """Return a botocore client."""
        from botocore.config import Config
        from botocore.session import get_session

        return get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.url,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            verify=self.ca or None,
            config=Config(s3={"addressing_style": "path"}, connect_timeout=5, read_timeout=30),
        )


# What nginx does between a client and the store. "delay" is exact over a folder; a proxied store is up to a quarter
# faster, since nginx paces what it sends, not what it reads.
Front = Literal["plain", "tls", "delay", "count", "store"]


@contextlib.contextmanager
def endpoint(server: str, data: Path | None = None) -> Iterator[Endpoint]:
    """Run a server by name, or use the URL of one with the keys of the environment.

    `data`: a folder where SeaweedFS keeps its objects for the next time.
    """
    if server.startswith(("http://", "https://")):
        key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        if not key or not secret:
            sys.exit("an endpoint by URL needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment")
        yield Endpoint(server, server, key, secret, os.environ.get("AWS_CA_BUNDLE", ""))
        return
    if data is not None:
        data.mkdir(parents=True, exist_ok=True)
    run = {"seaweedfs": lambda: seaweedfs_server(data), "moto": moto_server}[server]
    with run() as started:
        yield Endpoint(server, started.endpoint, started.key, started.secret)


@contextlib.contextmanager
def nginx(behind: Endpoint | Path, front: Front, lists: Endpoint | None = None) -> Iterator[Endpoint]:
    """Run nginx in front of an endpoint, or over a folder of buckets: GET, HEAD and ranges only.

    `lists`: where requests for a listing go instead.
    """
    if not shutil.which("nginx"):
        sys.exit(NGINX_HELP)
    folder, port = Path(tempfile.mkdtemp(prefix="streamloader-nginx-")), free_ports(1)[0]
    if front == "tls":
        make_certificates(folder)
    (folder / "nginx.conf").write_text(configuration(port, behind, front, lists))
    command = ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
    keeper = start_keeper(folder, [], command, {})
    try:
        _wait_until_it_listens(port, folder, keeper)
        address = f"{'https' if front == 'tls' else 'http'}://127.0.0.1:{port}"
        found = behind if isinstance(behind, Endpoint) else Endpoint("nginx", "")
        yield replace(
            found,
            name=f"{found.name}+{front}",
            url=address,
            ca=str(folder / "ca.pem") if front == "tls" else "",
            log=folder / "access.log" if front == "count" else None,
        )
    finally:
        end_keeper(keeper)


def configuration(port: int, behind: Endpoint | Path, front: Front, lists: Endpoint | None = None) -> str:
    """Return nginx's configuration, as text."""
    store = lists if isinstance(behind, Path) else behind
    upstream = passing = ""
    if store is not None:
        scheme, address = store.url.split("//")
        upstream = f"upstream store {{ server {address}; keepalive 64; }}"
        passing = f"proxy_pass {scheme}//store;"
    source = passing
    if isinstance(behind, Path):
        source = f"root {behind}; {f'if ($args ~ list-type) {{ {passing} }}' if lists else ''}"
    modules = [LUA_MODULES / "ndk_http_module.so", LUA_MODULES / "ngx_http_lua_module.so"] if front == "delay" else []
    if front == "delay" and not modules[1].exists():
        sys.exit(f"the delay needs {modules[1]}: run bench/install-servers.sh")
    slow = f"access_by_lua_block {{ ngx.sleep({DELAY_SECONDS}) }} limit_rate {BYTES_PER_SECOND // 1024}k;"
    tls = "ssl_certificate server.pem; ssl_certificate_key server.key; ssl_protocols TLSv1.2 TLSv1.3;"
    # nginx looks at limit_rate after each piece it sent: small pieces make the rate even from the first byte on
    return f"""
{"user root;" if os.geteuid() == 0 else ""}
{" ".join(f"load_module {module};" for module in modules)}
daemon off;
worker_processes {max(2, (os.cpu_count() or 1) // 2)};
pid nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    log_format requests '$request_method\\t$status\\t$body_bytes_sent\\t$uri\\t$is_args';
    access_log {"access.log requests" if front == "count" else "off"};
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
    client_max_body_size 0; proxy_request_buffering off; proxy_max_temp_file_size 0; proxy_buffers 16 64k;
    proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $http_host;
    sendfile on; tcp_nopush on; sendfile_max_chunk {"256k" if front == "delay" else "2m"};
    keepalive_requests 1000000; keepalive_timeout 300;
    {upstream}
    server {{
        listen 127.0.0.1:{port}{" ssl" if front == "tls" else ""};
        {tls if front == "tls" else ""}
        location / {{ {slow if front == "delay" else ""} {source} }}
    }}
}}
"""


def make_certificates(folder: Path) -> None:
    """Make an authority of our own and a certificate for 127.0.0.1: ca.pem, server.pem, server.key."""
    name, alternative = "/CN=streamloader bench", "subjectAltName=IP:127.0.0.1,DNS:localhost"
    new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", name]
    (folder / "names").write_text(alternative)
    steps = [
        [*new, "-x509", "-days", "30", "-keyout", "ca.key", "-out", "ca.pem"],
        [*new, "-keyout", "server.key", "-out", "server.csr"],
        [
            *("openssl", "x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "30", "-extfile", "names", "-out", "server.pem"),
        ],
    ]
    for step in steps:
        subprocess.run(step, cwd=folder, check=True, capture_output=True)


def _wait_until_it_listens(port: int, folder: Path, keeper: subprocess.Popen[bytes]) -> None:
    assert keeper.stdout is not None  # it is a pipe
    keeper.stdout.readline()  # the process id: it has started
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.02)
    sys.exit(f"nginx did not start: {(folder / 'server.log').read_text()[-2000:]}")
