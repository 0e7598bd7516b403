"""The page about installation has every extra, with its packages; what is missing when it is used is named."""

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import zarr
from commands import run

import streamloader as sl
from streamloader.errors import UnsupportedError, UsageError
from streamloader.storage import open_store

ROOT = Path(__file__).parent.parent
OF_CONTRIBUTORS = {"docs", "dev", "integrations"}


def test_the_page_has_each_extra_with_its_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name: packages for name, packages in project["optional-dependencies"].items() if name not in OF_CONTRIBUTORS
    }
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    names = {name: {re.split(r"[\[>;]", package)[0] for package in packages} for name, packages in extras.items()}
    assert {name: set(packages.split(", ")) for name, packages in rows} == names


def test_the_page_has_each_package_of_the_default_installation():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    page = (ROOT / "docs" / "install.md").read_text()
    table = page[page.index("| package | MB") :]
    for package in {re.split(r"[\[>;]", each)[0] for each in dependencies} - {"torch"}:
        assert package in table, f"docs/install.md: {package} is not in the table of sizes"


def without(monkeypatch, package):
    """Let a package be one that is not installed."""
    for module in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, module, None)


def test_without_obstore_fsspec_reads_ranges_and_says_why(monkeypatch):
    without(monkeypatch, "obstore")
    reader = open_store("https://localhost/x").reader()
    assert (reader.kind, reader.reason) == ("fsspec", "obstore is not installed: fsspec reads ranges, more slowly")


def test_a_chained_url_names_s3fs_if_it_is_missing(monkeypatch):
    without(monkeypatch, "s3fs")
    with pytest.raises(UnsupportedError, match="s3fs"):
        open_store("simplecache::s3://bucket/x")


def test_the_viewer_names_its_extra_if_it_is_missing(monkeypatch, capsys):
    without(monkeypatch, "aiohttp")
    status, _, errors = run(capsys, "view", "dataset", "--no-browser")
    assert status
    assert "pip install 'streamloader[view]'" in " ".join(errors.split())


def same(sample):
    return sample


def test_zarr_that_a_map_function_gets_names_zarr_if_it_is_missing(monkeypatch, tmp_path):
    zarr.open_group(tmp_path / "x.zarr", mode="w").create_array("a", data=np.zeros(3, np.complex64))
    without(monkeypatch, "zarr")
    with pytest.raises(UsageError, match="install it with pip install zarr"):
        sl.convert(tmp_path / "x.zarr", tmp_path / "out", map=same, workers=0)
