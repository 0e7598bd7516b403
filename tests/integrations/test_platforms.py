"""macOS and Windows, as far as Linux can tell: the package asks for nothing that they lack."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamloader.engine.executor import NO_SHARED_MEMORY
from streamloader.storage import generic

TESTS = Path(__file__).parent.parent
# What is only called where `sys.platform` allows it. A name that macOS or Windows lacks may be used nowhere else.
OF_LINUX = {"darwin": {"engine/workers.py"}}
OF_LINUX["win32"] = {*OF_LINUX["darwin"], "storage/cache.py", "conversion/executors.py"}
OF_LINUX["win32"] |= {"testing/proxy.py", "testing/dns.py"}


def run(platform, url, folder, env):
    """What tests/other_system_run.py does on a platform: what it printed."""
    folder.mkdir()
    command = [sys.executable, str(TESTS / "other_system_run.py"), platform, url, str(folder)]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        command, check=False, env={**os.environ, **env, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def linux(moto, tmp_path_factory):
    client = moto.client()
    client.create_bucket(Bucket="platforms")
    client.close()
    return run("linux", "s3://platforms/linux", tmp_path_factory.mktemp("linux") / "run", moto.env)[0]


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_files_and_batches_are_the_same_where_the_system_lacks_what_linux_has(platform, linux, moto, tmp_path):
    found, errors = run(platform, f"s3://platforms/{platform}", tmp_path / "run", moto.env)
    assert linux["workers-local"] == linux["workers-s3"] == [2, "num_workers= says so"]
    assert found["workers-local"] == found["workers-s3"] == [0, NO_SHARED_MEMORY]
    same = ("files", "local", "s3", "sample")
    assert {name: found[name] for name in same} == {name: linux[name] for name in same}
    assert ("Windows does not open folders" in errors) == (platform == "win32"), "the cache says why it is not used"


@pytest.mark.long
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_nothing_that_a_system_lacks_is_used_but_where_it_is_asked_for(platform, tmp_path):
    command = [sys.executable, "-m", "mypy", "--platform", platform, "--cache-dir", str(tmp_path), "--no-error-summary"]
    done = subprocess.run(command, check=False, cwd=TESTS.parent, capture_output=True, text=True, timeout=500)
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    files = {line.partition(":")[0].removeprefix("streamloader/") for line in lines}
    assert files == OF_LINUX[platform], done.stdout + done.stderr


def test_a_file_that_a_reader_has_open_on_windows_is_replaced_a_moment_later(tmp_path, monkeypatch):
    temporary, target, refused = tmp_path / "new", tmp_path / "old", [1, 2]
    temporary.write_text("new")
    target.write_text("old")
    replace = Path.replace

    def replace_later(path, other):
        if refused:
            refused.pop()
            raise PermissionError(13, "The process cannot access the file")
        return replace(path, other)

    monkeypatch.setattr(generic, "_REPLACED_AGAIN", (0.001, 0.001, 0.001))
    monkeypatch.setattr(Path, "replace", replace_later)
    generic._move(temporary, str(target))
    assert target.read_text() == "new"
    refused.extend(range(9))
    temporary.write_text("newer")
    with pytest.raises(PermissionError):
        generic._move(temporary, str(target))
