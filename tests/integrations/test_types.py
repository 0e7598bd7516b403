"""A user's script with all public names passes `mypy --strict` and pyright's strict mode, which know all its types."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import streamloader as sl

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tests" / "user_script.py"
BROKEN = """import streamloader as sl

sl.StreamingDataset("s3://bucket/x")
sl.Decode(sise=(3, 3))
sl.Shuffle(window="large")
print(sl.StreamingDatasett)
sl.open("dataset").fields["label"].shapes
"""


@pytest.fixture
def project(tmp_path):
    """A folder with the script, and `env`, in which the package is installed."""
    shutil.copy(SCRIPT, tmp_path)
    venv.create(tmp_path / "env", symlinks=True)
    (packages,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    shutil.copytree(ROOT / "streamloader", packages / "streamloader", ignore=shutil.ignore_patterns("*.so"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return tmp_path


def check(project, module, *arguments):
    command = [sys.executable, "-m", module, *arguments]
    path = os.pathsep.join([str(project / "env" / "bin"), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(project / "env")}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, check=False, cwd=project, env=env, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout, done.stderr


def test_the_script_uses_every_public_name():
    used = set(re.findall(r"\bsl\.(\w+)", SCRIPT.read_text()))
    assert set(sl.__all__) <= used


def test_pyright_knows_every_type_of_the_script_and_finds_what_is_wrong(project):
    (project / "broken.py").write_text(BROKEN)
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "include": ["*.py"]}
    (project / "pyrightconfig.json").write_text(json.dumps(settings))
    status, printed, _ = check(project, "basedpyright", "--outputjson")
    found = json.loads(printed)["generalDiagnostics"]
    lines = {Path(each["file"]).name: set() for each in found}
    for each in found:
        lines[Path(each["file"]).name].add(each["range"]["start"]["line"])
    assert status == 1
    assert lines == {"broken.py": {2, 3, 4, 5, 6}}, found


@pytest.mark.long
def test_mypy_accepts_the_script_in_strict_mode_and_finds_what_is_wrong(project):
    (project / "broken.py").write_text(BROKEN)
    python = str(project / "env" / "bin" / "python")
    command = ["--strict", "--cache-dir", str(project / "cache"), "--python-executable", python]
    status, printed, errors = check(project, "mypy", *command, "user_script.py", "broken.py")
    lines = re.findall(r"^(\w+\.py):(\d+): error", printed, re.MULTILINE)
    assert status == 1, errors
    assert {int(line) for _, line in lines} == {3, 4, 5, 6, 7}, printed
    assert {file for file, _ in lines} == {"broken.py"}, printed


@pytest.mark.long
def test_pyright_knows_the_type_of_each_public_name(project):
    _, printed, _ = check(project, "basedpyright", "--verifytypes", "streamloader", "--outputjson", "--ignoreexternal")
    symbols = json.loads(printed)["typeCompleteness"]["symbols"]
    public = {each["name"].rpartition(".")[2]: each for each in symbols if each["name"].count(".") == 1}
    assert set(public) >= set(sl.__all__) - {"__version__"}
    assert [name for name in sl.__all__ if name != "__version__" and not public[name]["isTypeKnown"]] == []
