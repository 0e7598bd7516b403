"""Stores that differ from S3, by doubles: datasets are written, checked, read and deleted there (docs/stores.md)."""

import re
import uuid
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from faulty import NO_RETRY
from stores import AT_ONCE, DIFFERENCES, Double

import streamloader as sl
from streamloader.errors import DestinationError, ObjectExistsError, StorageError
from streamloader.storage import open_store
from streamloader.testing.conformance import LAWS, LawError, Place

PAGE = (Path(__file__).parent.parent / "docs" / "stores.md").read_text()
UNCHECKED = {"a PUT with a wrong CRC-32C is refused, a right one confirmed"}
MISSING = {
    "Cloudflare R2": UNCHECKED,
    "Google XML": UNCHECKED | AT_ONCE,
    "Ceph RGW": UNCHECKED | AT_ONCE,
    "MinIO": UNCHECKED | {"an object and objects below it are separate"},  # moto's checksums, here as everywhere
    "conditions unsupported": UNCHECKED | AT_ONCE,
    "no multipart listing": UNCHECKED
    | {"unfinished uploads are listed and removed", "a listing is in the order of the bytes of its keys"},
}
# those that the differences are about
NAMES = "create does|creates at once|replaces at once|replace writes|deleting|parts|unfinished|below|order of|CRC"
TRIED = [law for law in LAWS if re.search(NAMES, law.name)]


@pytest.fixture(params=DIFFERENCES)
def double(request, moto):
    with Double(moto.endpoint, DIFFERENCES[request.param]).running() as server:
        server.name = request.param
        yield server


def at(double, moto):
    options = {**moto.storage_options, "endpoint_url": double.endpoint, "retry": NO_RETRY}
    return f"s3://{moto.shared_bucket or moto.new_bucket()}/{uuid.uuid4().hex}", options


@pytest.mark.quick(1)
def test_the_store_keeps_the_laws_but_those_of_its_differences(double, moto):
    moto.url()
    root = open_store(*at(double, moto))
    found = set()
    for number, law in enumerate(TRIED):
        try:
            law.check(Place(root.child(f"{number}"), 20))
        except (LawError, StorageError):
            found.add(law.name)
    assert found == MISSING[double.name]


@pytest.mark.quick(1)
def test_datasets_are_written_checked_read_deleted_and_never_overwritten(double, moto):
    moto.url()
    url, options = at(double, moto)
    rows = np.arange(40, dtype=np.int64)
    for first in (True, False):
        expected = nullcontext() if first else pytest.raises(DestinationError)
        with expected, sl.Writer(f"{url}/d", {"y": "int64"}, storage_options=options) as out:
            out.write_batch({"y": rows})
    batches = list(sl.NumpyDataset(f"{url}/d", batch_size=8, storage_options=options))
    assert sorted(y for batch in batches for y in batch["y"].tolist()) == rows.tolist()
    assert sl.verify(f"{url}/d", storage_options=options).ok
    store = open_store(url, options)
    store.create("new", b"1")
    with pytest.raises(ObjectExistsError):
        store.create("new", b"2")
    paths = [info.path for info in store.list()]
    store.delete(paths)
    assert not list(store.list())


def test_parts_are_of_equal_size_but_the_last(moto):
    moto.url()
    with Double(moto.endpoint, {"needs equal parts"}).running() as server:
        url, options = at(server, moto)
        store = open_store(url, options)
        client, content = store._client(), np.arange(11 << 18, dtype=np.uint32).tobytes()  # 11 MiB
        client.put_in_parts(f"{client.root}/large", [content[:100], content[100:]], 5 << 20)
        assert [sorted(sizes.values()) for sizes in server.parts.values()] == [[1 << 20, 5 << 20, 5 << 20]]
        assert store.get("large") == content


def test_each_double_is_in_the_table_of_stores():
    for name in DIFFERENCES:
        if name[0].isupper():
            assert f"| {name}" in PAGE
