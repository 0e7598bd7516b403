"""Two hundred uses of each kind leave threads, files, arenas and resident memory as they were."""

import faulthandler
from pathlib import Path

import leaks
import pytest
from torchrun import run_python

pytestmark = pytest.mark.long

KINDS = ["break", "close", "epochs", "load_state_dict", "samples", "transform", "failing transform", "images"]
KINDS += ["mixture", "replay", "transform workers", "DataLoader workers"]
LARGE = """
import pathlib, sys, leaks
leaks.check_flat(leaks.growth(leaks.cycles(pathlib.Path(sys.argv[1]))["large transform"], 200))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("leaks")
    leaks.write(path)
    return path


@pytest.mark.filterwarnings("ignore:2 DataLoader workers")
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_cycles_leave_nothing(folder, kind):
    faulthandler.cancel_dump_traceback_later()  # two hundred processes start one after another
    leaks.check_flat(leaks.growth(leaks.cycles(folder)[kind], 200, first=30))


def test_two_hundred_cycles_leave_no_large_array_of_a_transform(folder):
    # by default glibc keeps freed arrays in an arena for each thread, and it varies how many (docs/training.md)
    run_python("-c", LARGE, folder, MALLOC_ARENA_MAX="1")
