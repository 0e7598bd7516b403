"""Destinations without room or permission: one error that says so, nothing finished is lost, and it goes on afterwards.

The command is a process of its own and what is in its way is real: a full disk, a limit of the kernel, modes, keys.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.exceptions
import numpy as np
import pytest
from servers import S3Server, seaweedfs_server
from test_convert_job import contents, interrupt_after
from test_convert_sources import tar

from streamloader.conversion.job import convert
from streamloader.format.receipts import check_receipts, read_receipts
from streamloader.options import Layout
from streamloader.storage import open_store

COMMAND = [sys.executable, "-m", "streamloader.cli.main", "convert"]
OPTIONS = ["--shard-size", "16KiB", "--workers", "2", "--quiet"]
LAYOUT = Layout(shard_size=16 << 10)
REFUSED = 2
BEGUN = 3  # shards that are finished before there is an obstacle
# all that an unfinished conversion of one field has at its destination
OURS = re.compile(r"bin/c/\d+(/0)*|_streamloader/(job\.json|files|parts/\d+|receipts/\d+\.json)")

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
HOLD = 'mount -t tmpfs -o size=1m tmpfs "$0" && echo ready && read -r _'


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tar of 256 samples that grow: the later a shard, the larger its file. 2 MiB in all."""
    path = tmp_path_factory.mktemp("source") / "it.tar"
    rng = np.random.default_rng(0)
    tar(path, {f"{i:03}.bin": rng.bytes(64 * (i + 1)) for i in range(256)})
    return path


@pytest.fixture(scope="module")
def whole(src: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed conversion."""
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(src, out, layout=LAYOUT, workers=0)
    return contents(out)


@dataclass
class Place:
    """A destination with an obstacle: `prefix` goes before its commands, `seen` is where we find its files."""

    dst: Path
    seen: Path
    told: tuple[str, str]
    prefix: list[str]
    free: Callable[[], Any]


def run(
    src: Path, dst: Path | str, tmp_path: Path, prefix: list[str], env: Mapping[str, str], options: Sequence[str] = ()
) -> Any:
    """Convert by a command of its own, which must leave nothing in its folder of temporary files."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    # a limit on files would cut the interpreter's .pyc
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONDONTWRITEBYTECODE": "1", **env}
    line = [*prefix, *COMMAND, str(src), str(dst), *OPTIONS, *options]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert not list((tmp_path / "tmp").iterdir())
    return done


def refused(done: Any, dst: Path | str, problem: str, code: str) -> None:
    """Make sure that the command told the place, the problem, a remedy and the code in one line."""
    assert (done.returncode, done.stdout) == (REFUSED, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(rf"error: {re.escape(str(dst))}[^ ]*: {problem} \(.+\); .+ \[{code}\]", line), line


def begin(src: Path, dst: Path | str, options: dict[str, Any] | None = None) -> None:
    """Finish some shards in the way of the command, and break off."""
    with pytest.raises(KeyboardInterrupt):
        convert(src, dst, layout=LAYOUT, workers=0, progress=interrupt_after(BEGUN), storage_options=options)


def finished(root: Path) -> dict[Path, int]:
    """Return the files of the finished shards with their times. All must be whole, and nothing else must be there."""
    store = open_store(root)
    receipts = read_receipts(store)
    assert check_receipts(store, receipts) == []
    strange = [path for path in contents(root) if not OURS.fullmatch(path)]
    assert strange == []
    paths = [root / path for receipt in receipts.values() for path in receipt.objects]
    return {path: path.stat().st_mtime_ns for path in paths}


def goes_on(src: Path, place: Place, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Take the obstacle away, and make sure that the same command ends with the right bytes and writes none twice."""
    before = finished(place.seen)
    place.free()
    done = run(src, place.dst, tmp_path, place.prefix, {})
    assert (done.returncode, done.stderr) == (0, "")
    assert contents(place.seen) == whole
    kept = {path: when for path, when in before.items() if path.exists()}  # parts are gathered at the end
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@contextlib.contextmanager
def limited(folder: Path, most: int = 20 << 10) -> Iterator[Place]:
    """A place where no file may have more than `most` bytes."""
    prefix = [sys.executable, "-c", LIMITED, str(most)]
    told = ("the file is larger than it may be there", "SL200")
    yield Place(folder / "out", folder / "out", told, prefix, prefix.clear)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Place]:
    """A disk of 1 MiB, where one may be mounted: for the holder's process and those that join it. Else a limit."""
    line = ["sh", "-c", HELD_DISK, str(folder)]
    environment = {**os.environ, "HOLD": HOLD}
    with subprocess.Popen(
        line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as holder:
        if holder.stdout.readline() == "ready\n":
            prefix = ["nsenter", "--preserve-credentials", "--user", "--mount", f"--target={holder.pid}"]
            larger = [*prefix, "mount", "-o", "remount,size=16m", str(folder)]
            seen = Path(f"/proc/{holder.pid}/root{folder}/out")
            told = ("no space is left", "SL200")
            yield Place(folder / "out", seen, told, prefix, lambda: subprocess.run(larger, check=True))
        else:
            with limited(folder) as place:
                yield place
        holder.stdin.close()


@pytest.mark.parametrize("obstacle", [limited, small_disk])
def test_a_place_that_fills_up_says_so_and_the_conversion_goes_on_where_there_is_room(
    obstacle: Any, src: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    with obstacle(tmp_path / "disk") as place:
        for _ in range(2):  # again, and nothing is lost by that
            done = run(src, place.dst, tmp_path, place.prefix, {})
            refused(done, place.dst, *place.told)
            assert finished(place.seen)
        goes_on(src, place, whole, tmp_path)


def test_a_place_without_any_room_stays_empty(src: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    with limited(tmp_path / "disk", 10) as place:
        refused(run(src, place.dst, tmp_path, place.prefix, {}), place.dst, *place.told)
        assert contents(place.seen) == {}
        goes_on(src, place, whole, tmp_path)


@pytest.mark.parametrize("begun", [False, True])
def test_a_folder_that_may_not_be_written_says_so_and_the_conversion_goes_on_where_it_may(
    begun: bool, src: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    dst = tmp_path / "closed" / "out"
    dst.parent.mkdir()
    if begun:
        begin(src, dst)
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
    refused(done, dst, *place.told)
    assert contents(dst) == before
    assert len(finished(dst)) == BEGUN * begun
    goes_on(src, place, whole, tmp_path)


# --- S3


IDENTITIES = {"reader": ["Read", "List"], "blind": ["Read", "Write"], "giver": ["Write"]}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that knows keys which may do some things only; a key's secret is like its name."""
    may = {"streamloader": ["Admin", "Read", "List", "Tagging", "Write"], **IDENTITIES}
    keys = {name: [{"accessKey": name, "secretKey": f"{name}-secret"}] for name in may}
    document = {"identities": [{"name": name, "credentials": keys[name], "actions": may[name]} for name in may]}
    path = tmp_path_factory.mktemp("identities") / "s3.json"
    path.write_text(json.dumps(document))
    with seaweedfs_server(flags=[f"-s3.config={path}"]) as server:
        yield server


def objects(server: S3Server, url: str) -> dict[str, bytes]:
    """Return all that is below the URL; no upload must be unfinished."""
    with contextlib.closing(server.client()) as client:
        assert "Uploads" not in client.list_multipart_uploads(Bucket=url.split("/")[2])
    store = open_store(url, server.storage_options)
    return {info.path: store.get(info.path) for info in store.list()}


@pytest.mark.parametrize("begun", [False, True])
def test_a_key_that_may_not_says_so_and_the_conversion_goes_on_with_one_that_may(
    begun: bool, src: Path, whole: dict[str, bytes], strict: S3Server, tmp_path: Path
) -> None:
    url = strict.url("out")
    if begun:
        begin(src, url, strict.storage_options)
    before = objects(strict, url)
    assert sum("/receipts/" in path for path in before) == BEGUN * begun
    wrong = {"streamloader": "wrong", **{name: f"{name}-secret" for name in IDENTITIES}}
    for key, secret in wrong.items():
        keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
        refused(run(src, url, tmp_path, [], {**strict.env, **keys}), url, "no permission", "SL202")
        assert objects(strict, url) == before
    done = run(src, url, tmp_path, [], strict.env)
    assert (done.returncode, done.stderr) == (0, "")
    assert objects(strict, url) == whole


@pytest.mark.timeout(300)
def test_a_full_store_ends_the_conversion_in_bounded_time_and_it_goes_on_where_there_is_room(
    src: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with seaweedfs_server(data, ["-master.volumeSizeLimitMB=1", "-volume.max=9"]) as server:
        url = server.url("out")
        begin(src, url, server.storage_options)
        fill(server)
        before = objects(server, url)
        assert sum("/receipts/" in path for path in before) == BEGUN
        soon = ["--storage-option", 'retry={"outage_seconds": 8}']
        done = run(src, url, tmp_path, [], server.env, soon)  # it is killed where the retries do not end
        refused(done, url, "the store failed or the transfer broke off", "SL204")
        after = objects(server, url)
        assert {path: after.get(path) for path in before} == before
    with seaweedfs_server(data, ["-master.volumeSizeLimitMB=1", "-volume.max=60"]) as server:
        done = run(src, url, tmp_path, [], server.env)
        assert (done.returncode, done.stderr) == (0, "")
        assert objects(server, url) == whole


def fill(server: S3Server) -> None:
    """Write beside the destination until the server takes no more."""
    with contextlib.closing(server.client()) as client, pytest.raises(botocore.exceptions.ClientError):
        for i in range(100):
            client.put_object(Bucket=server.shared_bucket, Key=f"other/{i}", Body=bytes(512 << 10))
