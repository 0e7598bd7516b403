"""Destinations without space or permission: one error that says so, finished shards are kept, and it can be resumed.

The command is a process of its own and what is in its way is real: a full disk, a limit of the kernel, modes, keys.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.exceptions
import numpy as np
import pytest
from conversions import contents, interrupted
from servers import seaweedfs_server
from sources import tar

import streamloader as sl
from streamloader.format.publish import check_receipts, read_receipts
from streamloader.storage import open_store

COMMAND = [sys.executable, "-m", "streamloader.cli.main", "convert"]
OPTIONS = ["--shard-size", "16KiB", "--workers", "2", "--quiet"]
LAYOUT = sl.Layout(shard_size=16 << 10)
BEGUN = 3  # shards that are finished before there is an obstacle
# all that an unfinished conversion of one field has at its destination
OURS = re.compile(r"(_streamloader/lengths/)?bin/c/\d+|_streamloader/(job\.json|files|parts/\d+|receipts/\d+\.json)")

# programs that run the rest of their command line as it is, but for one thing
LIMITED = (
    "import os, resource, sys\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)
# modes bind root too, once it has no CAP_DAC_OVERRIDE (1) to get back at an exec (24: PR_CAPBSET_DROP)
BOUND_BY_MODES = (
    "import ctypes, os, sys\n"
    "assert os.geteuid() or ctypes.CDLL(None).prctl(24, 1, 0, 0, 0) == 0\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)
HELD_DISK = 'exec unshare --user --map-root-user --mount sh -c "$HOLD" "$0"'
HOLD = 'mount -t tmpfs -o size=512k tmpfs "$0" && echo ready && read -r _'


@pytest.fixture(scope="module")
def src(tmp_path_factory):
    """A tar of 64 samples that grow: the later a shard, the larger its file. 520 KiB in all."""
    path = tmp_path_factory.mktemp("source") / "it.tar"
    rng = np.random.default_rng(0)
    tar(path, {f"{i:03}.bin": rng.bytes(256 * (i + 1)) for i in range(64)})
    return path


@pytest.fixture(scope="module")
def expected(src, tmp_path_factory):
    """The files of an undisturbed conversion."""
    out = tmp_path_factory.mktemp("expected") / "out"
    sl.convert(src, out, layout=LAYOUT, workers=0)
    return contents(out)


@dataclass
class Place:
    """A destination with an obstacle: `prefix` goes before its commands, `seen` is where we find its files."""

    dst: Path
    seen: Path
    message: tuple[str, str]
    prefix: list[str]
    free: Callable[[], Any]


def run(src, dst, tmp_path, prefix, env, options=()):
    """Convert by a command of its own, which must leave nothing in its folder of temporary files."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    # a limit on files would cut the interpreter's .pyc
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONDONTWRITEBYTECODE": "1", **env}
    line = [*prefix, *COMMAND, str(src), str(dst), *OPTIONS, *options]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert not list((tmp_path / "tmp").iterdir())
    return done


def run_ok(src, dst, tmp_path, prefix, env):
    """Convert without an error."""
    done = run(src, dst, tmp_path, prefix, env)
    assert (done.returncode, done.stderr) == (0, "")


def check_error(done, dst, problem, code):
    """Make sure that the command names the place, the problem, a remedy and the code in one line."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(rf"error: {re.escape(str(dst))}[^ ]*: {problem} \(.+\); .+ \[{code}\]", line), line


def finished(root):
    """Return the files of the finished shards with their times. All must be complete, and there must be no others."""
    store = open_store(root)
    receipts = read_receipts(store)
    assert check_receipts(store, receipts) == []
    assert [path for path in contents(root) if not OURS.fullmatch(path)] == []
    paths = [root / path for receipt in receipts.values() for path in receipt.objects]
    return {path: path.stat().st_mtime_ns for path in paths}


def resumes(src, place, expected, tmp_path):
    """Take the obstacle away, and make sure that the same command ends with the right bytes and writes none twice."""
    before = finished(place.seen)
    place.free()
    run_ok(src, place.dst, tmp_path, place.prefix, {})
    assert contents(place.seen) == expected
    kept = {path: when for path, when in before.items() if path.exists()}  # parts are gathered at the end
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@contextlib.contextmanager
def limited(folder, most=20 << 10):
    """A place where no file may have more than `most` bytes."""
    prefix = [sys.executable, "-c", LIMITED, str(most)]
    message = ("the file is larger than the limit", "SL200")
    yield Place(folder / "out", folder / "out", message, prefix, prefix.clear)


@contextlib.contextmanager
def small_disk(folder):
    """A disk of 512 KiB, where one may be mounted: for the holder's process and those that join it. Else a limit."""
    line = ["sh", "-c", HELD_DISK, str(folder)]
    environment = {**os.environ, "HOLD": HOLD}
    with subprocess.Popen(
        line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as holder:
        if holder.stdout.readline() == "ready\n":
            prefix = ["nsenter", "--preserve-credentials", "--user", "--mount", f"--target={holder.pid}"]
            larger = [*prefix, "mount", "-o", "remount,size=16m", str(folder)]
            seen = Path(f"/proc/{holder.pid}/root{folder}/out")
            message = ("no space is left", "SL200")
            yield Place(folder / "out", seen, message, prefix, lambda: subprocess.run(larger, check=True))
        else:
            with limited(folder) as place:
                yield place
        holder.stdin.close()


@pytest.mark.quick(1)
@pytest.mark.parametrize("obstacle", [limited, small_disk])
def test_a_full_disk_is_an_error_and_the_conversion_is_resumed_when_there_is_space(obstacle, src, expected, tmp_path):
    (tmp_path / "disk").mkdir()
    with obstacle(tmp_path / "disk") as place:
        for _ in range(2):  # again, and nothing is lost by that
            check_error(run(src, place.dst, tmp_path, place.prefix, {}), place.dst, *place.message)
            assert finished(place.seen)
        resumes(src, place, expected, tmp_path)


def test_a_destination_without_space_stays_empty(src, expected, tmp_path):
    with limited(tmp_path / "disk", 10) as place:
        check_error(run(src, place.dst, tmp_path, place.prefix, {}), place.dst, *place.message)
        assert contents(place.seen) == {}
        resumes(src, place, expected, tmp_path)


@pytest.mark.parametrize("begun", [False, True])
def test_a_read_only_folder_is_an_error_and_the_conversion_resumes_when_it_is_writable(begun, src, expected, tmp_path):
    dst = tmp_path / "closed" / "out"
    dst.parent.mkdir()
    if begun:
        interrupted(src, dst, BEGUN, layout=LAYOUT)
    before = contents(dst)
    folders = [dst.parent, *(path for path in dst.parent.rglob("*") if path.is_dir())]
    prefix = [sys.executable, "-c", BOUND_BY_MODES]
    place = Place(dst, dst, ("no permission", "SL202"), prefix, lambda: [one.chmod(0o755) for one in folders])
    for folder in folders:
        folder.chmod(0o555)
    try:
        done = run(src, dst, tmp_path, prefix, {})
    finally:
        place.free()
    check_error(done, dst, *place.message)
    assert contents(dst) == before
    assert len(finished(dst)) == 2 * BEGUN * begun  # each with its page of lengths
    resumes(src, place, expected, tmp_path)


# --- S3


IDENTITIES = {"reader": ["Read", "List"], "blind": ["Read", "Write"], "giver": ["Write"]}


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """A server that knows keys which may do some things only; a key's secret is like its name."""
    may = {"streamloader": ["Admin", "Read", "List", "Tagging", "Write"], **IDENTITIES}
    keys = {name: [{"accessKey": name, "secretKey": f"{name}-secret"}] for name in may}
    document = {"identities": [{"name": name, "credentials": keys[name], "actions": may[name]} for name in may]}
    path = tmp_path_factory.mktemp("identities") / "s3.json"
    path.write_text(json.dumps(document))
    with seaweedfs_server(flags=[f"-s3.config={path}"]) as server:
        yield server


def objects(server, url):
    """Return all that is below the URL; no upload must be unfinished."""
    with contextlib.closing(server.client()) as client:
        assert "Uploads" not in client.list_multipart_uploads(Bucket=url.split("/")[2])
    store = open_store(url, server.storage_options)
    return {info.path: store.get(info.path) for info in store.list()}


@pytest.mark.quick(1)
@pytest.mark.parametrize("begun", [False, True])
def test_a_key_without_permission_is_an_error_and_another_key_resumes(begun, src, expected, strict, tmp_path):
    url = strict.url("out")
    if begun:
        interrupted(src, url, BEGUN, layout=LAYOUT, storage_options=strict.storage_options)
    before = objects(strict, url)
    assert sum("/receipts/" in path for path in before) == BEGUN * begun
    wrong = {"streamloader": "wrong", **{name: f"{name}-secret" for name in IDENTITIES}}
    for key, secret in wrong.items():
        keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
        check_error(run(src, url, tmp_path, [], {**strict.env, **keys}), url, "no permission", "SL202")
        assert objects(strict, url) == before
    run_ok(src, url, tmp_path, [], strict.env)
    assert objects(strict, url) == expected


@pytest.mark.long
def test_a_full_store_ends_the_conversion_in_bounded_time_and_resumes_when_there_is_space(src, expected, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    with seaweedfs_server(data, ["-master.volumeSizeLimitMB=1", "-volume.max=9"]) as server:
        url = server.url("out")
        interrupted(src, url, BEGUN, layout=LAYOUT, storage_options=server.storage_options)
        with contextlib.closing(server.client()) as client, pytest.raises(botocore.exceptions.ClientError):
            for i in range(100):  # beside the destination, until the server takes no more
                client.put_object(Bucket=server.shared_bucket, Key=f"other/{i}", Body=bytes(512 << 10))
        before = objects(server, url)
        assert sum("/receipts/" in path for path in before) == BEGUN
        soon = ["--storage-option", 'retry={"outage_seconds": 8}']
        done = run(src, url, tmp_path, [], server.env, soon)  # it is killed where the retries do not end
        check_error(done, url, "the store failed or the transfer broke off", "SL204")
        after = objects(server, url)
        assert {path: after.get(path) for path in before} == before
    with seaweedfs_server(data, ["-master.volumeSizeLimitMB=1", "-volume.max=60"]) as server:
        run_ok(src, url, tmp_path, [], server.env)
        assert objects(server, url) == expected
