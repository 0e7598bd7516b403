"""Two hundred uses of each kind leave threads, files, arenas and resident memory as they were."""

import faulthandler
from pathlib import Path

import leaks
import pytest

pytestmark = pytest.mark.long

KINDS = ["break", "close", "epochs", "load_state_dict", "samples", "transform", "failing transform", "images"]
KINDS += ["mixture", "replay", "transform workers", "DataLoader workers", "large transform"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("leaks")
    leaks.write(path)
    return path


@pytest.mark.filterwarnings("ignore:2 DataLoader workers")
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_cycles_leave_nothing(folder, kind):
    faulthandler.cancel_dump_traceback_later()  # two hundred processes start one after another
    first = 200 if kind == "large transform" else 30  # malloc keeps large arrays in each heap
    leaks.check_flat(leaks.growth(leaks.cycles(folder)[kind], 200, first))
