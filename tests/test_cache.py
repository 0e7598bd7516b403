"""The cache of ranges: right bytes always, one request for each range and machine, and never more than its limit."""

from pathlib import Path

import streamloader as sl
from streamloader.storage.buffers import Use
from streamloader.storage.cache import RangeCache

DIGEST = "5e" * 32


def test_a_range_is_fetched_once(tmp_path: Path):
    body, cache = bytes(range(100)), RangeCache(sl.Cache(tmp_path, free=0), DIGEST)
    assert cache.read(lambda: body[10:50], "c/0", 10, 50, use=Use(1.5)) == (body[10:50], False)
    again = RangeCache(sl.Cache(tmp_path, free=0), DIGEST)
    assert again.read(lambda: b"", "c/0", 10, 50, use=Use(2.5)) == (body[10:50], True)
    assert not cache.failures and not again.failures
