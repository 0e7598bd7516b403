"""The pages of the documentation that need packages of their own, or take long."""

import pytest
from test_docs import HEAVY, check, photos, reader  # noqa: F401 - two fixtures
from test_worlds import AS_ROOT


# that of frameworks takes 100 s on two free cores, of which other tests want two thirds
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", HEAVY, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs_and_prints_what_it_says(page, reader, monkeypatch):  # noqa: F811 - the fixture
    for name, value in AS_ROOT.items():
        monkeypatch.setenv(name, value)
    check(page, reader, limit=900)
