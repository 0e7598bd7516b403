"""Every statement of the documentation that is code runs as it stands, and what it prints is what the page says."""

import json
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image
from run_page import run_page
from servers import S3Server
from viewing import Client

import streamloader
from streamloader import errors
from streamloader.demo.run import write_photographs
from streamloader.pytorch import dataset  # noqa: F401 - so that no page has to

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
# each needs the package that it leaves: tests/integrations/test_migrating.py runs them
MIGRATING = sorted((ROOT / "docs" / "migrating").glob("*.md"))
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), *MIGRATING]
# need what only tests/integrations has, or take long: test_pages.py there runs them
LONG = "append buckets collation distributed frameworks joins maintenance observability training video zarr"
HEAVY = [ROOT / "docs" / f"{name}.md" for name in LONG.split()]
LINKING = [
    *PAGES,
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    ROOT / "ARCHITECTURE.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "changes" / "README.md",
    *sorted(ROOT.glob("formats/**/*.md")),
]

FENCE = re.compile(r"^```(\w*)( output)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
# not run: the package under test is installed, and a test must not replace it
INSTALL = re.compile(r"^pip install (?:'([^']+)'|(\S+)).*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its first line in the page, its code, and what the page says that it prints."""

    language: str
    line: int
    code: str
    output: str | None = None


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page; a `text output` block belongs to the one before it."""
    found: list[Block] = []
    text = page.read_text()
    for fence in FENCE.finditer(text):
        language, is_output, code = fence[1], bool(fence[2]), fence[3]
        if is_output:
            last = found.pop()
            found.append(Block(last.language, last.line, last.code, code))
        elif language in ("python", "bash"):
            found.append(Block(language, text[: fence.start()].count("\n") + 2, code))
    return found


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `photos/<class>/<image>` of scikit-learn's photographs and some of its digits, JPEG and PNG."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("source") / "photos"
    write_photographs(folder)
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images[:150], digits.target, strict=False)):
        path = folder / f"digit{label}" / f"{number:03d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((pixels * 15).astype("uint8")).resize((160, 160)).save(path)
    return folder


class Reader:
    """Someone who reads pages and tries what they say, each page in a fresh folder with `photos/`."""

    def __init__(self, photos: Path, folder: Path, environment: Mapping[str, str]) -> None:
        self._photos, self.folder, self.environment = photos, folder, environment
        self.printed: dict[Path, list[str]] = {}

    def run(self, page: Path, limit: float = 300, prelude: str = "") -> list[str]:
        """Run a page after a prelude, for as many seconds at most, and return what each of its blocks printed."""
        work = self.folder / page.stem
        shutil.copytree(self._photos, work / "photos")
        (work / "examples").symlink_to(ROOT / "examples")
        parts = [
            ("python", 1, prelude),
            *((part.language, part.line, INSTALL.sub("true", part.code)) for part in blocks(page)),
        ]
        out = self.folder / f"{page.stem}.json"
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        arguments = (parts, out, work, {**self.environment, "PATH": path})
        # forked, since torch is imported here already
        process = multiprocessing.get_context("fork").Process(target=run_page, args=arguments)
        process.start()
        process.join(limit)
        process.kill()
        process.join()
        assert process.exitcode == 0, out.with_suffix(".log").read_text()[-4000:]
        printed: list[str] = json.loads(out.read_text())
        return printed[1:]


@pytest.fixture(scope="module")
def reader(moto: S3Server, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A reader with a bucket, who has done what the README says: the other pages take the dataset that it converts."""
    client = moto.client()
    client.create_bucket(Bucket="my-bucket")
    rule = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::my-bucket/*"}
    client.put_bucket_policy(Bucket="my-bucket", Policy=json.dumps({"Version": "2012-10-17", "Statement": [rule]}))
    client.close()
    reader = Reader(photos, tmp_path_factory.mktemp("reader"), moto.env)
    reader.printed[README] = reader.run(README)
    return reader


LIGHT = [pytest.param(README, marks=pytest.mark.python), *(page for page in PAGES[1:] if blocks(page))]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "page", [page for page in LIGHT if page not in (*HEAVY, *MIGRATING)], ids=lambda page: page.stem
)
def test_every_block_of_a_page_runs_and_prints_what_it_says(page, reader):
    check(page, reader)


def check(page: Path, reader: Reader, limit: float = 300, prelude: str = "") -> None:
    """Run a page, for as many seconds at most, unless it was run, and compare what it printed."""
    if page not in reader.printed:
        reader.printed[page] = reader.run(page, limit, prelude)
    for part, printed in zip(blocks(page), reader.printed[page], strict=True):
        if part.output is not None:
            pattern = re.escape(part.output.strip()).replace(r"\.\.\.", ".*")
            assert re.fullmatch(pattern, printed.strip(), re.DOTALL), f"{page.name}:{part.line} printed\n{printed}"


VIEWS = re.findall(r"^\$ (streamloader view .*)$", (ROOT / "docs/view.md").read_text(), re.MULTILINE)


@pytest.mark.long
def test_every_command_of_the_viewers_page_opens(reader):
    check(ROOT / "docs/view.md", reader)
    assert len(VIEWS) >= 5
    for command in VIEWS:
        with subprocess.Popen(
            [sys.executable, "-m", "streamloader.cli.main", *shlex.split(command)[1:], "--no-browser", "--json"],
            cwd=reader.folder / "view",
            env={**os.environ, **reader.environment},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                client = Client(json.loads(process.stdout.readline())["link"])
                assert client.first.startswith("/losses" if "--losses" in command else "/step"), command
                assert "/sample?number=" in client.get(client.first).text, command
            finally:
                process.kill()


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page):
    for target in LINK.findall(page.read_text()):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = page.parent / file if file else page
        assert linked.exists(), f"{page.name} links {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links {target}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_install_lines_name_extras_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [found for page in PAGES for found in INSTALL.findall(page.read_text())]
    assert lines
    for quoted, bare in lines:
        requirement = re.fullmatch(r"(?:\.|streamloader|[a-z0-9-]+)(?:\[([a-z,]+)\])?", quoted or bare)
        assert requirement, f"pip install {quoted or bare}"
        assert set((requirement[1] or "").split(",")) - {""} <= set(project["optional-dependencies"])


def test_pages_share_no_dataset_but_those_that_they_only_read():
    pages = [path.read_text() for path in LINKING if path.parent.name == "docs"]
    named = Counter(name for page in pages for name in {*re.findall(r"s3://my-bucket/([\w.-]+)", page)})
    assert {name for name, count in named.items() if count > 1} == {"photos", "era5.zarr"}


def test_pages_name_only_what_the_package_has():
    named = {(page.name, name) for page in PAGES for name in re.findall(r"\bsl\.(\w+)", page.read_text())}
    assert {(page, name) for page, name in named if not hasattr(streamloader, name)} == set()


def test_messages_and_pages_advise_packages_by_names_that_an_index_has():
    sources = [*sorted((ROOT / "streamloader").rglob("*.py")), *LINKING]
    advice = re.compile(r"(?:pip install|needs?) [`'\"]*streamloader\b")  # which no index has; in a checkout it is `.`
    assert [str(path.relative_to(ROOT)) for path in sources if advice.search(path.read_text())] == []


def test_the_first_screen_of_the_readme_is_short():
    text = README.read_text()
    install_and_convert, train = blocks(README)[:2]
    assert (install_and_convert.language, train.language) == ("bash", "python")
    assert len([line for line in (install_and_convert.code + train.code).splitlines() if line.strip()]) <= 15
    end = train.line + train.code.count("\n")
    assert end <= 40, "what it is, install, convert and train stand on the first screen"
    picture = re.search(r"^!\[.{20,}\]\((\S+)\)$", text, re.M)
    assert picture
    assert picture.start() < text.index("```"), "a picture shows what it is"
    assert (ROOT / picture[1]).exists()
    assert text.count("![") == 1
    assert text.count("\n") <= 110
    for word in ("pip install", "streamloader convert", "StreamingDataset("):
        assert word in text[: text.index(train.code) + len(train.code)]


def test_the_page_of_errors_is_complete_and_right():
    rows = re.findall(r"^\| `(SL\d+)` \| `(\w+)` \| (.+?) \| (.+?) \|$", (ROOT / "docs/errors.md").read_text(), re.M)
    known = [(getattr(errors, name).code, name) for name in errors.__all__]
    assert [(code, name) for code, name, _, _ in rows] == sorted(known)
    for code, name, what, remedy in rows:
        doc = (getattr(errors, name).__doc__ or "").split("\n")[0].rstrip(".")
        assert what.startswith(doc), f"{code}: the page says {what!r}, the class {doc!r}"
        assert len(remedy) >= 20, f"{code} does not say what to do"


def test_the_glossary_names_what_exists():
    page = (ROOT / "docs/glossary.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (?:`(\w+)` in )?`(.+?)` \|$", page, re.M)
    assert len(rows) > 40
    for term, _, name, file in rows:
        found = not name or re.search(rf"^(class|def) {name}\b", (ROOT / file).read_text(), re.M)
        assert found, f"{term}: {file} has no {name}"
