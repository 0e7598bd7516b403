"""The pages for those who come from other packages: their blocks run with the real package."""

from importlib.metadata import version

import pytest
from test_docs import MIGRATING, ROOT, Reader, blocks, check, photos  # noqa: F401 - a fixture

# before `import datasets`, which would find a module of the tests, or one that another test of the process has imported
WITHOUT_TESTS = f"""
import sys
sys.modules.pop("datasets", None)
sys.path[:] = [each for each in sys.path if each != {str(ROOT / "tests")!r}]
"""
# MosaicML Streaming imports torchvision, and leaves locks in the folder for temporary files
BESIDE_TORCH = """
import pathlib, tempfile
import torchvision_of_any_build
tempfile.tempdir = str(pathlib.Path.cwd())
"""
PRELUDES = {"huggingface": WITHOUT_TESTS, "lancedb": WITHOUT_TESTS, "mosaic": BESIDE_TORCH}

# modules and classes that the calls in the table of a page belong to, besides torch's DataLoader
PACKAGES = {
    "huggingface": "datasets datasets:IterableDataset datasets.distributed",
    "lancedb": "lancedb lancedb.db:DBConnection lancedb.permutation lancedb.permutation:PermutationBuilder "
    "lancedb.streaming lancedb.streaming:StreamingDataset lancedb.table:Table",
    "litdata": "litdata",
    "mosaic": "streaming streaming:StreamingDataLoader streaming.base.util streaming.vision",
    "tfdata": "tensorflow.data tensorflow.data:Dataset tensorflow.io tensorflow.random tensorflow.train",
    "webdataset": "webdataset webdataset:WebDataset webdataset.shardlists",
}
VERSIONS = {
    "huggingface": "datasets",
    "lancedb": "lancedb",
    "litdata": "litdata",
    "mosaic": "mosaicml-streaming",
    "tfdata": "tensorflow-cpu",
    "webdataset": "webdataset",
}
PAGES = [pytest.param(page, id=page.stem) for page in MIGRATING if blocks(page)]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_the_version_that_it_was_run_with(page):
    assert f" {version(VERSIONS[page.stem])}: " in page.read_text().replace("\n", " ")


@pytest.fixture(scope="module")
def reader(photos, tmp_path_factory):  # noqa: F811 - the fixture
    """A reader with local folders only."""
    folder = tmp_path_factory.mktemp("reader")
    names = "DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER", "HF_HOME"
    caches = {name: str(folder / name.lower()) for name in names}
    return Reader(photos, folder, {**caches, "HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs_with_the_package_that_it_leaves_and_prints_what_it_says(page, reader):
    theirs = [*PACKAGES[page.stem].split(), "torch.utils.data"]
    calls = f"import pathlib, tables_of_calls\ntables_of_calls.check(pathlib.Path({str(page)!r}), {theirs})"
    check(page, reader, prelude=f"{PRELUDES.get(page.stem, '')}\n{calls}\ndel pathlib, tables_of_calls")
