"""Fixtures that every test file may use: real S3 servers, and a fresh URL on every kind of store."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from servers import S3Server, external_server, moto_server, seaweedfs_server

# a test that forgets its keys must fail at once, not ask a cloud's metadata service for them
os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")

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


@pytest.fixture(params=["memory", "file", *S3_SERVERS])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(url, storage_options) of an empty place on each kind of store in turn."""
    if request.param == "file":
        yield (tmp_path / "store").as_uri(), {}
    elif request.param == "memory":
        name = f"streamloader-{uuid.uuid4().hex}"
        yield f"memory://{name}/data", {}
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{name}"):
            memory.rm(f"/{name}", recursive=True)
    else:
        server: S3Server = request.getfixturevalue(request.param)
        yield server.url(), server.storage_options
