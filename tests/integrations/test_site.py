"""The documentation site: it builds without a network and without warnings, and no link in it is broken."""

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import streamloader as sl
from streamloader import errors, metrics, testing

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
SILENT = ("code", "pre", "script", "style")


class Page(HTMLParser):
    """What a page links, what it loads, the anchors that it has, and its text outside of code blocks."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors = {"", "top"}  # of every page
        self.text = ""
        self._silent = 0  # in elements of code
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self._silent += tag in SILENT
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        if values.get(LOADED.get(tag, "")):
            self.loaded.add(values[LOADED[tag]])

    def handle_endtag(self, tag):
        self._silent -= tag in SILENT

    def handle_data(self, data):
        self.text += "" if self._silent else data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built where no network is."""
    folder = tmp_path_factory.mktemp("site")
    # not every system lets a user have a network of its own; there, the proxy is a port that is closed
    alone = ["unshare", "--net", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        alone = []
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "--conf-dir", "docs"]
    command = [*alone, *command, "--doctree-dir", folder / "cache", ".", folder / "html"]
    environment = {**os.environ, **proxies}
    built = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr[-4000:]
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """The parsed pages of the site by path."""
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_relative_link_and_anchor_resolves(site, pages):
    broken = defaultdict(list)
    for path, page in pages.items():
        for link in sorted(page.links | page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or (target in pages and unquote(parts.fragment) not in pages[target].anchors):
                broken[str(path.relative_to(site))].append(link)
    assert not broken, dict(broken)
    assert len(pages) > 80


def test_each_code_of_an_error_is_an_anchor_of_its_row(pages, site):
    text = (ROOT / "docs/errors.md").read_text()
    codes = {getattr(errors, name).code for name in errors.__all__}
    assert codes == set(re.findall(r"^\| `(SL\d+)`", text, re.MULTILINE))
    assert {code.lower() for code in codes} <= pages[site / "docs/errors.html"].anchors


def test_pages_load_nothing_from_elsewhere(site, pages):
    loaded = {link for page in pages.values() for link in page.loaded if urlsplit(link).netloc}
    assert loaded == set()
    styles = "".join(path.read_text() for path in (site / "_static").rglob("*.css"))
    assert "url(http" not in styles
    assert "@import" not in styles


def test_every_page_of_the_documentation_can_be_reached_from_the_first_one(site, pages):
    first = site / "docs/index.html"
    reached, new = {first}, [first]
    while new:
        path = new.pop()
        links = {(path.parent / unquote(urlsplit(link).path)).resolve() for link in pages[path].links}
        new += (found := (links & pages.keys()) - reached)
        reached |= found
    sources = (ROOT / "docs").rglob("*.md")
    unreached = [path for path in sources if site / path.relative_to(ROOT).with_suffix(".html") not in reached]
    assert unreached == []


def test_every_public_name_is_in_the_reference(site, pages):
    anchors = {anchor for path, page in pages.items() if path.parent.name == "reference" for anchor in page.anchors}
    names = [f"streamloader.{name}" for name in sl.__all__ if name not in ("errors", "metrics")]
    names += [f"streamloader.errors.{name}" for name in errors.__all__]
    names += [f"{module.__name__}.{name}" for module in (metrics, testing) for name in module.__all__]
    assert [name for name in names if name not in anchors] == []


def test_docstrings_are_rendered_with_their_code_marked(site, pages):
    reference = {path: page for path, page in pages.items() if path.parent.name == "reference"}
    marks = ("`", "**", ":py:", "|--")
    assert [(path.name, mark) for path, page in reference.items() for mark in marks if mark in page.text] == []
    loading = reference[site / "docs/reference/loading.html"]
    assert re.search(r"class StreamingDataset\(\s*url: str", loading.text), "arguments are those of __init__"
    assert re.search(r"^\s*: how many samples may be bad, a number or a share\.$", loading.text, re.M), "an item each"


def test_the_list_for_language_models_names_every_page_of_the_site(site):
    lines = (site / "llms.txt").read_text().splitlines()
    assert lines[0] == "# streamloader"
    linked = [found[1] for line in lines if (found := re.match(r"- \[.+?\]\((\S+)\): \w", line))]
    assert len(linked) == len([line for line in lines if line.startswith("- ")])
    assert [link for link in linked if not (site / link).is_file()] == []
    whole = (site / "llms-full.txt").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        if path.stem != "index":
            assert f"_sources/docs/{path.name}" in linked
            assert path.read_text() in whole
