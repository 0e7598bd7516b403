"""Ten thousand schedules of the engine, of which `make test` runs the first ones, and all planted bugs."""

import pytest
from engine_model import try_seeds
from test_engine_schedules import AT_ONCE, PLANTED, SCHEDULES, check_found


@pytest.mark.parametrize("first", range(AT_ONCE, SCHEDULES, AT_ONCE))
def test_no_schedule_of_the_engine_breaks_a_law(first):
    try_seeds(range(first, first + AT_ONCE))


@pytest.mark.parametrize("bug", PLANTED)
def test_each_planted_bug_of_the_engine_is_found(bug):
    check_found(bug)
