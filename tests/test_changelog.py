"""Changelog fragments: every file of changes/ becomes one list item, and its links work from CHANGELOG.md."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import LINK, anchors

ROOT = Path(__file__).parent.parent
FRAGMENTS = sorted(path for path in (ROOT / "changes").glob("*.md") if path.name != "README.md")


@pytest.fixture
def tree(tmp_path):
    """What towncrier reads, with the fragments of the repository and two more."""
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "changes", tmp_path / "changes")
    (tmp_path / "changes" / "0-first.md").write_text("Listings send\none request.\n")
    (tmp_path / "changes" / "42.md").write_text("Errors name the [page](docs/errors.md).\n")
    return tmp_path


def test_a_release_has_each_fragment_as_one_list_item_above_earlier_releases(tree):
    before = (tree / "CHANGELOG.md").read_text()
    command = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", "9.9"]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=60)
    head, marker, earlier = before.partition("<!-- releases -->\n")
    after = (tree / "CHANGELOG.md").read_text()
    assert after.startswith(f"{head}{marker}\n## 9.9\n\n- ")
    assert after.endswith(f"\n{earlier}")
    section = after[len(head + marker) : -len(earlier)]
    assert section.count("\n- ") == len(FRAGMENTS) + 2
    assert "\n- Listings send\n  one request.\n" in section
    assert "\n- Errors name the [page](docs/errors.md).\n" in section
    assert [path.name for path in (tree / "changes").glob("*.md")] == ["README.md"]


def test_a_fragment_is_the_text_of_one_list_item():
    for path in FRAGMENTS:
        text = path.read_text()
        assert re.fullmatch(r"[a-z0-9-]+", path.stem), f"{path.name}: letters, digits and hyphens"
        assert text.strip(), f"{path.name} is empty"
        assert "\n\n" not in text.strip(), f"{path.name} has more than one paragraph"
        assert not re.match(r"[-*#]", text), f"{path.name} starts with a bullet or a heading"
        for target in LINK.findall(text):
            file, _, anchor = target.partition("#")
            if "://" not in target:
                assert (ROOT / file).exists(), f"{path.name} links {target}: links are relative to the root"
                assert not anchor or anchor in anchors(ROOT / file), f"{path.name} links {target}"


def test_nothing_but_fragments_is_in_the_folder():
    others = {path.name for path in (ROOT / "changes").iterdir()} - {path.name for path in FRAGMENTS}
    assert others == {"README.md", "template.jinja"}
