"""All stores behave alike: memory, local files and real S3 servers."""

import errno
import os
import pickle
import shutil
import uuid
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from http.server import SimpleHTTPRequestHandler
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from conversions import wait_for
from faulty import QuietHandler, serving
from fsspec.implementations.memory import MemoryFileSystem
from leaks import uncollected
from stores import AT_ONCE, Double

from streamloader.errors import NotFoundError, ObjectExistsError, StorageError, UnsupportedError, UsageError
from streamloader.options import RetryPolicy
from streamloader.storage import ObjectInfo, open_store
from streamloader.storage.generic import AzureClient
from streamloader.storage.process import run_all
from streamloader.testing.conformance import DIGITS, LAWS, SLICES, LawError, Place

SEPARATE, ORDERED = "an object and objects below it are separate", "a listing is in the order of the bytes of its keys"
# laws that our stores do not keep: folders are no keys, and moto does not compare checksums
MISSING = {
    "memory": {SEPARATE},
    "file": {SEPARATE},
    "moto": {"a PUT with a wrong CRC-32C is refused, a right one confirmed"},
    "seaweedfs": {ORDERED},
    "external": {SEPARATE, ORDERED},  # some have these
}


@pytest.fixture(scope="module")
def root(root_url):
    return open_store(*root_url)


@pytest.fixture
def store(root):
    return root.child(f"{uuid.uuid4().hex}/data")


@pytest.fixture
def reader(store):
    store.put("a/digits", DIGITS)
    return store.reader()


@pytest.mark.quick(32)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_every_store_keeps_the_law(law, root_url, store, request):
    name = request.node.callspec.params["root_url"]
    if not law.applies(store):
        return
    with ExitStack() as stack:
        if name == "moto" and law.name in AT_ONCE:  # it compares and writes in two steps: two writers may win
            url, options = root_url
            one_by_one = stack.enter_context(Double(options["endpoint_url"], set()).running())
            store = open_store(f"{url}/{uuid.uuid4().hex}", {**options, "endpoint_url": one_by_one.endpoint})
        if law.name in MISSING[name]:
            stack.enter_context(pytest.raises((LawError, StorageError)))
        law.check(Place(store, 205 if name == "moto" else 20))  # moto's pages hold 100


@pytest.mark.quick(2)
def test_every_store_tells_when_an_object_was_written(store, tmp_path):
    begin = datetime.now(UTC).replace(microsecond=0)  # S3 and HTTP have whole seconds
    store.put("a/digits", DIGITS)
    (tmp_path / "digits").write_bytes(DIGITS)
    with serving(partial(ListingHandler, directory=str(tmp_path))) as server:
        web = open_store(server.endpoint)
        for each, path in ((store, "a/digits"), (web, "digits")):
            assert begin <= each.modified(path) <= datetime.now(UTC)
            assert each.modified("missing") is None


def test_an_invalid_range_is_an_error(store):
    for start, stop in ((-1, 3), (5, 4)):
        with pytest.raises(UsageError, match="invalid range"):
            store.get_range("digits", start, stop)


def test_a_failed_condition_names_the_object(store):
    store.put("one", DIGITS)
    with pytest.raises(ObjectExistsError, match="/one"):
        store.create("one", b"")
    with pytest.raises(ObjectExistsError, match="/one was changed"):
        store.replace("one", b"", b"other")


def test_the_data_plane_reads_the_same_slices_in_place_where_it_can(store, reader):
    assert reader.kind == {"memory": "fsspec", "s3": "http", "file": "file"}[store.url.split(":")[0]]
    assert reader.reason
    for start, stop in SLICES:
        view = reader.read("a/digits", start, stop)
        assert isinstance(view, memoryview)
        assert bytes(view) == DIGITS[start:stop]
        buffers = []

        def allocate(size, buffers=buffers):
            buffers.append(bytearray(size))
            return memoryview(buffers[-1])

        assert bytes(reader.read("a/digits", start, stop, allocate)) == DIGITS[start:stop]
        if reader.kind in ("http", "file") and DIGITS[start:stop]:
            assert buffers[0][: len(DIGITS[start:stop])] == DIGITS[start:stop]


def test_a_missing_object_is_not_found_by_either_plane(store, reader):
    assert store.head("a/none") is store.head("a") is None, "a folder is no object"
    with pytest.raises(NotFoundError):
        store.get("a")
    for ask in (
        lambda: store.get("a/none"),
        lambda: store.get_range("a/none", 0, 1),
        lambda: store.get_tail("a/none", 1),
        lambda: reader.read("a/none", 0, 1),
    ):
        with pytest.raises(NotFoundError, match=r"/a/none: it does not exist") as raised:
            ask()
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 400


@pytest.mark.quick(1)
def test_an_error_keeps_nothing_of_its_caller(store):
    """As a reference cycle of the error and its traceback would, until the next garbage collection."""

    class Held:
        pass

    def ask(call):
        held = Held()
        with suppress(NotFoundError):
            call("a/none")
        return weakref.ref(held)

    calls = [store.get, lambda path: store.get_range(path, 0, 1), lambda path: store.get_tail(path, 1)]
    calls += [lambda path: store.replace(path, b"1", b"0"), lambda path: store.reader().read(path, 0, 1)]
    calls += [lambda path: run_all(store.get, [path] * 2, 2)]
    with uncollected():
        kept = [ask(call) for call in calls]
        wait_for(lambda: not any(one() for one in kept))  # a thread of run_all may end later than its result is there


def test_no_path_leaves_its_store(store):
    asks = (store.get, store.head, lambda path: store.put(path, b""), lambda path: store.reader().read(path, 0, 1))
    for path in ("../a", "/a", "a//b", "a/../b", "./a", "a/", ""):
        for ask in asks:
            with pytest.raises(UsageError):
                ask(path)


def test_child_is_the_store_of_the_folder(store):
    child = store.child("a").child("b")
    child.put("c", DIGITS)
    assert child.url == f"{store.url}/a/b"
    assert store.get("a/b/c") == bytes(child.reader().read("c", 0, 10)) == DIGITS


def test_a_store_pickles_as_its_url(store):
    store.put("a/b", DIGITS)
    store.reader().read("a/b", 0, 1)
    again = pickle.loads(pickle.dumps(store.child("a")))
    assert again.url == store.child("a").url
    assert again.get("b") == bytes(again.reader().read("b", 0, 10)) == DIGITS
    copy = pickle.loads(pickle.dumps(again))  # as each task of a worker has one
    assert copy.get("b") == DIGITS
    assert copy._client() is again._client()


@pytest.mark.quick(1)
def test_a_bucket_itself_is_a_store(s3):
    store = open_store(f"s3://{s3.new_bucket()}/", s3.storage_options)
    store.put("a", DIGITS)
    assert [info.path for info in store.list()] == ["a"]
    assert bytes(store.reader().read("a", 1, 3)) == b"12"


def test_local_paths_are_stores(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for url, folder in (("here", "here"), ("~/there", "home/there"), (tmp_path / "p", "p"), ("./x/../y", "y")):
        open_store(url).put("a/b", DIGITS)
        assert (tmp_path / folder / "a" / "b").read_bytes() == DIGITS
        assert open_store(url).url == str(tmp_path / folder)


def test_create_needs_no_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = open_store(tmp_path)
    store.create("a", DIGITS)
    with pytest.raises(ObjectExistsError):
        store.create("a", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert store.get("a") == DIGITS


def test_a_local_write_that_was_killed_is_not_listed(tmp_path):
    store = open_store(tmp_path)
    store.put("a", DIGITS)
    (tmp_path / ".0123.streamloader-tmp").write_bytes(b"half")
    assert list(store.list()) == [ObjectInfo("a", 10)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".0123.streamloader-tmp", "a"]


def test_a_chained_url_is_a_store(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("folder/a/b", DIGITS)
    store = open_store(f"zip://folder::file://{tmp_path}/all.zip")
    assert store.get("a/b") == store.child("a").get("b") == DIGITS
    assert bytes(store.child("a").reader().read("b", 2, 4)) == b"23"
    assert [info.path for info in store.list()] == ["a/b"]
    with pytest.raises(NotFoundError, match=r"zip://folder/c::"):
        store.get("c")


CHAINS = ["simplecache::file://{}", "simplecache::{}", "zip://::file://{}.zip", "zip://::{}.zip"]


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_over_local_files_is_read_as_any_store(chain, tmp_path):
    folder = tmp_path / "data"
    open_store(folder).put("a/b", b"hello")
    shutil.make_archive(str(folder), "zip", folder)
    store = open_store(chain.format(folder))
    assert ([info.path for info in store.list()], store.children()) == (["a/b"], ["a"])
    assert (store.head("a/b").size, store.head("a/c")) == (5, None)
    assert (store.get("a/b"), bytes(store.read("a/b", 1, 4)), store.get_tail("a/b", 2)) == (b"hello", b"ell", b"lo")
    with pytest.raises(NotFoundError, match=r"data/a/c: it does not exist|zip://a/c::|data.zip/a/c"):
        store.get("a/c")


def test_objects_at_the_root_of_a_protocol_are_listed_by_paths_that_can_be_read():
    store, name = open_store("memory://"), uuid.uuid4().hex
    store.put(f"{name}/x", b"1")
    assert f"{name}/x" in [info.path for info in store.list()]


def test_threads_read_a_file_that_a_chained_cache_is_downloading():
    content = np.arange(1 << 18, dtype=np.uint32).tobytes()
    part = len(content) // 8

    class Slow(QuietHandler):
        def do_GET(self):
            self.respond(200, headers={"Content-Length": str(len(content))})
            self.wfile.write(content[:part])
            self.server.released.wait(0.5)
            self.wfile.write(content[part:])

    with serving(Slow) as server, ThreadPoolExecutor(8) as threads:
        reader = open_store(f"simplecache::{server.endpoint}/folder").reader()
        parts = threads.map(lambda i: bytes(reader.read("x", i * part, (i + 1) * part)), range(8))
        assert b"".join(parts) == content


def test_the_end_of_a_file_is_read_through_a_chained_cache(tmp_path):
    open_store(tmp_path).put("x", DIGITS)
    store = open_store(f"simplecache::file://{tmp_path}")
    assert store.get("x") == DIGITS
    assert (store.get_tail("x", 3), store.get_tail("x", 99)) == (b"789", DIGITS)


def test_a_folder_that_a_web_server_lists_is_a_store(tmp_path):
    open_store(tmp_path).put("a/b/c", DIGITS)
    open_store(tmp_path).put("a/d", b"1")
    with serving(partial(ListingHandler, directory=str(tmp_path))) as server:
        store = open_store(f"{server.endpoint}/a")
        assert {info.path: info.size for info in store.list()} == {"b/c": 10, "d": 1}
        assert store.get("b/c") == DIGITS
        with pytest.raises(UnsupportedError, match="ranges"):
            store.get_range("b/c", 2, 4)


class ListingHandler(QuietHandler, SimpleHTTPRequestHandler):
    """Python's own: it lists folders and ignores ranges."""


class OtherNames(MemoryFileSystem):
    """A filesystem of fsspec as gcsfs and adlfs are: it names a body otherwise, takes bytes only, and ignores tails."""

    protocol = "othernames"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]

    def pipe_file(self, path, data, mode="overwrite"):
        assert type(data) is bytes
        super().pipe_file(path, data, mode)

    def cat_file(self, path, start=None, end=None):
        return super().cat_file(path, max(0, start or 0), end)


def test_filesystems_get_bodies_as_bytes_whatever_their_name_and_must_not_ignore_the_range_of_a_tail():
    fsspec.register_implementation("othernames", OtherNames, clobber=True)
    store = open_store("othernames://folder", {"retry": {"outage_seconds": 0, "request_seconds": 0}})
    store.put("a", bytearray(b"01"))
    store.create("b", memoryview(b"01"))
    store.replace("a", bytearray(DIGITS), b"01")
    assert (store.get("a"), store.get_range("a", 2, 4), store.get("b")) == (DIGITS, b"23", b"01")
    with pytest.raises(UnsupportedError, match="received 10 bytes for the last 3"):
        store.get_tail("a", 3)


def test_azures_filesystem_gets_no_tails_and_may_have_no_ranges_of_an_empty_object():
    class Adlfs(MemoryFileSystem):
        """As adlfs is: a tail, or a range of an empty object, is an error of its client; nothing found is a list."""

        cachable = False

        def cat_file(self, path, start=None, end=None):
            if start < 0 or end is None or not self.info(path)["size"]:
                raise ValueError("Required Content-Range response header is missing or malformed.")
            return super().cat_file(path, start, end)

        def find(self, path, **options):
            return [path] if self.isfile(path) else super().find(path, **options) or []

    client = AzureClient(Adlfs(), RetryPolicy(), "")
    folder = f"/{uuid.uuid4().hex}"
    client.put(f"{folder}/digits", DIGITS)
    client.put(f"{folder}/empty", b"")
    assert [client.get_tail(f"{folder}/digits", size) for size in (3, 99)] == [b"789", DIGITS]
    assert client.get_range(f"{folder}/digits", 2, 4) == b"23"
    assert client.get_tail(f"{folder}/empty", 3) == client.get_range(f"{folder}/empty", 0, 5) == b""
    assert client.list_page(f"{folder}/none", None) == client.list_page(f"{folder}/digits", None) == ([], None)
    with pytest.raises(FileNotFoundError):
        client.get_tail(f"{folder}/none", 1)
