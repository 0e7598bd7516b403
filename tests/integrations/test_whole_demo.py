"""`streamloader demo` from end to end: too long for the main suite, and the first thing that a new user tries."""

import json
import os
import subprocess
import sys

import pytest
from cli_page import PAGE, keys, sections
from commands import COMMAND


def run_demo(*options, env):
    settings = {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run([*COMMAND, "demo", *options], env={**os.environ, **env}, check=False, **settings)


def test_the_demo_passes_and_leaves_nothing(tmp_path):
    done = run_demo(env={"TMPDIR": str(tmp_path)})
    logs = [path.read_text(errors="replace")[-6000:] for path in tmp_path.glob("*/*.log")]  # kept by a demo that failed
    assert done.returncode == 0, "\n".join([done.stdout[-1000:], done.stderr[-1000:], *logs])
    for line in ("wrote 1797 handwritten digits", "wrote 182 crops", "bytes:png", "bytes:jpeg", "exactly once"):
        assert line in done.stdout
    assert "val accuracy 9" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_with_json_the_demo_prints_one_document_of_what_it_measured(tmp_path):
    done = run_demo("--json", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found.keys() == keys(sections(PAGE.read_text())["demo"])
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    assert "wrote 182 crops" in done.stderr and "bytes:jpeg" in done.stderr


@pytest.mark.long
def test_a_failed_demo_keeps_the_log_that_it_names(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'LOCAL_RANK' in os.environ: sys.exit('SomeError: no memory')\n"  # torchrun's children alone
    )
    (tmp_path / "temporary").mkdir()
    path = os.pathsep.join([str(tmp_path), *sys.path])  # workers and ranks import what this process does
    done = run_demo(env={"TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": path})
    assert done.returncode == 2
    (log,) = (tmp_path / "temporary").glob("*/first.log")
    assert f"see {log}" in done.stderr
    assert "SomeError: no memory" in log.read_text()
