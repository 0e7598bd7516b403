"""The JavaScript module in formats/streamloader/v1/js reads every golden dataset: its own tests pass in node."""

import shutil
import subprocess
from pathlib import Path

import pytest
from torchrun import TESTS

FORMAT = TESTS.parent / "formats" / "streamloader" / "v1"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the module beside the datasets, where npm may write."""
    for name in ("golden", "bad"):
        (tmp_path / name).symlink_to(FORMAT / name)
    return Path(shutil.copytree(FORMAT / "js", tmp_path / "js", ignore=shutil.ignore_patterns("node_modules")))


def run(folder: Path, *command: str) -> str:
    """Run a command in a folder; return what it printed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    return output


@pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="node and npm are not installed")
def test_the_module_passes_its_tests_in_node(package):
    install = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "zarrita@0.7"]
    installed = subprocess.run(install, cwd=package, capture_output=True, text=True, check=False, timeout=300)
    if installed.returncode:
        pytest.skip(f"npm cannot install zarrita here: {installed.stderr[-200:]}")
    assert "# fail 0" in run(package, "node", "--test", "--test-reporter=tap")
