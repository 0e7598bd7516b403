"""Two hundred uses of each kind leave threads, files, slots and resident memory as they were."""

import faulthandler

import leaks
import pytest
from torchrun import run_python

pytestmark = pytest.mark.long

LARGE = """
import pathlib, sys, leaks
leaks.check_flat(leaks.growth(leaks.cycles(pathlib.Path(sys.argv[1]))["large transform"], 200))
"""


@pytest.mark.filterwarnings("ignore:2 DataLoader workers")
@pytest.mark.parametrize("kind", [*leaks.KINDS, "transform workers", "DataLoader workers"])
def test_two_hundred_cycles_leave_nothing(cycled, kind):
    faulthandler.cancel_dump_traceback_later()  # two hundred processes start one after another
    leaks.check_flat(leaks.growth(leaks.cycles(cycled)[kind], 200, first=30))


def test_two_hundred_cycles_leave_no_large_array_of_a_transform(cycled):
    # by default glibc keeps freed arrays in an arena for each thread, and it varies how many (docs/training.md)
    run_python("-c", LARGE, cycled, MALLOC_ARENA_MAX="1")
