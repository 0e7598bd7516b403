"""Real servers of stores other than those of every test: which laws they keep, and datasets on them."""

import uuid

import numpy as np
import pytest
from faulty import NO_RETRY
from servers import juicefs_server

import streamloader as sl
from streamloader.errors import DestinationError
from streamloader.storage import open_store
from streamloader.testing.conformance import LAWS, LawError, Place

SEPARATE = "an object and objects below it are separate"
AT_ONCE = {"of many creates at once exactly one wins", "of many replaces at once exactly one wins"}
JUICEFS = AT_ONCE | {
    SEPARATE,
    "a PUT with a wrong CRC-32C is refused, a right one confirmed",
    "readers of an object that is overwritten get one of its contents",
}


def lost_laws(url, options):
    """The names of the laws that the store does not keep."""
    root, lost = open_store(f"{url}/{uuid.uuid4().hex}", {**options, "retry": NO_RETRY}), set()
    for number, law in enumerate(law for law in LAWS if law.applies(root)):
        try:
            law.check(Place(root.child(f"{number}"), 20))
        except (LawError, sl.errors.StreamloaderError):
            lost.add(law.name)
    return lost


def write_and_read(url, options):
    """Write a dataset, read it, verify it, and fail to overwrite it."""
    url, rows = f"{url}/{uuid.uuid4().hex}", [{"x": np.full(100, i, np.float32)} for i in range(60)]
    sl.convert(rows, url, workers=0, storage_options=options)
    batches = list(sl.NumpyDataset(url, batch_size=10, storage_options=options))
    assert sorted(int(x) for batch in batches for x in batch["x"][:, 0]) == [*range(60)]
    assert sl.verify(url, storage_options=options).ok
    with pytest.raises(DestinationError):
        sl.convert(rows[:3], url, workers=0, storage_options=options)


def test_the_gateway_of_juicefs():
    with juicefs_server() as server:
        assert lost_laws(server.url(), server.storage_options) <= JUICEFS  # a race may end well
        write_and_read(server.url(), server.storage_options)
