"""What streamloader needs of a store, as laws that any store is checked by.

    python -m streamloader.testing.conformance s3://bucket/folder --storage-option endpoint_url=http://127.0.0.1:9000

    report = check_store("gs://bucket/folder")
    print(report)

The checks write below a new folder of the URL and remove it. Each law says what the loader does on stores without it.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import sys
import threading
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple

from streamloader.errors import NotFoundError, ObjectExistsError, StorageError, StreamloaderError, UsageError
from streamloader.storage import Store, open_store
from streamloader.storage.objects import join_path
from streamloader.storage.process import run_all
from streamloader.storage.retry import client_errors
from streamloader.storage.store import READ_ONLY

DIGITS = b"0123456789"
# all, parts, beyond the end, at the end, past the end, nothing
SLICES = ((0, 10), (0, 1), (3, 7), (9, 10), (5, 50), (10, 20), (50, 60), (4, 4))
NAMES = [
    *("x y", "a+b", "ü", "u\u0308", "日本", "😀", "100%25", "a#b", "a=b,c;d", "a&b", ".dot", "_streamloader", "~"),
    "x" * 200,
]
PART_BYTES = 5 << 20  # S3's smallest part of a multipart upload
THREADS = 8
RETRY = {"outage_seconds": 5.0, "request_seconds": 5.0}  # what always fails is a finding
CLOCK_SECONDS = 300  # what the clocks of a store and of this machine may differ by


class LawError(AssertionError):
    """A store does not keep a law; the message says what it did."""


class Place(NamedTuple):
    """An empty folder of a store, for one law, and how many objects make more than a page of a listing."""

    store: Store
    objects: int = 1100


@dataclass(frozen=True)
class Law:
    """One thing that streamloader needs of a store.

    `name` is a sentence. `check(place)` raises `LawError` or a `StorageError` if the store does not keep it, and
    `otherwise` is what the loader does then. Training and conversions need the `required` ones. `protocol`: that of the
    stores which it is about, "" for all.
    """

    name: str
    check: Callable[[Place], None]
    otherwise: str
    required: bool = True
    protocol: str = ""

    def applies(self, store: Store) -> bool:
        """Return whether the law is about this store."""
        return self.protocol in ("", store.location.protocol)


class Result(NamedTuple):
    """Whether a store keeps a law, None if it is not about such stores; `detail` is what it did otherwise."""

    law: Law
    holds: bool | None
    detail: str = ""


class Report(NamedTuple):
    """The results of all laws. `str()` is a table; `client` is what reads ranges there."""

    url: str
    client: str
    results: Sequence[Result]

    @property
    def missing(self) -> list[Result]:
        """The results of the laws that the store does not keep."""
        return [each for each in self.results if each.holds is False]

    @property
    def ok(self) -> bool:
        """Whether the store keeps all laws that training and conversions need."""
        return not any(each.law.required for each in self.missing)

    def __str__(self) -> str:
        words = {True: "holds", False: "missing", None: "-"}
        lines = [f"{self.url}, read by {self.client}"]
        for law, holds, detail in self.results:
            lines.append(f"{words[holds]:8}{law.name}{'' if law.required else ' (not required)'}")
            if holds is False:
                lines += [f"{'':8}  found: {detail}", f"{'':8}  then:  {law.otherwise}"]
        return "\n".join(lines)

    def as_json(self) -> str:
        """Return the report as JSON."""
        laws = [
            {"law": law.name, "required": law.required, "holds": holds, "detail": detail, "otherwise": law.otherwise}
            for law, holds, detail in self.results
        ]
        return json.dumps({"url": self.url, "client": self.client, "ok": self.ok, "laws": laws}, indent=1)


def check_store(url: str, storage_options: Mapping[str, Any] | None = None, *, objects: int = 1100) -> Report:
    """Check the store at `url`, an fsspec URL, by all laws, below a new folder, which is removed at the end.

    `objects`: how many a listing must have to need a second page; 0 leaves that law out. Raises `UsageError` for stores
    that are read only, and a `StorageError` if not even an object can be written and read.
    """
    root = open_store(url, {"retry": RETRY, **(storage_options or {})})
    if root.location.protocol in READ_ONLY:
        raise UsageError(f"{root.url}: the store is read only", "give a URL where objects can be written")
    folder = root.child(f"streamloader-conformance-{uuid.uuid4().hex}")
    try:
        folder.put("first", DIGITS)
        folder.get("first")
        results = [_result(law, Place(folder.child(f"{number}"), objects)) for number, law in enumerate(LAWS)]
        return Report(root.url, folder.reader().kind, results)
    finally:
        _clean(folder)


def _result(law: Law, place: Place) -> Result:
    if not law.applies(place.store) or (law is PAGES and not place.objects):
        return Result(law, None)
    try:
        law.check(place)
    except Exception as error:  # noqa: BLE001 - whatever a client raises is a finding
        kind = "" if isinstance(error, LawError | StreamloaderError) else f"{type(error).__name__}: "
        return Result(law, False, kind + " ".join(str(error).split())[:300])
    return Result(law, True)


def _clean(folder: Store) -> None:
    """Delete what the checks have left. A store that cannot list or delete has said so in the report."""
    with suppress(StorageError):
        folder.remove_leftovers()
    with suppress(StorageError):
        folder.delete([info.path for info in folder.list()])
    if folder.location.protocol == "file":
        shutil.rmtree(join_path(folder._client().root, folder.folder), ignore_errors=True)


def _same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise LawError(f"{what}: {_text(found)} instead of {_text(expected)}")


def _text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


@contextmanager
def _raises(kind: type[StreamloaderError], what: str) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise LawError(f"{what}: no {kind.__name__}")


def _reads(store: Store, path: str, start: int, stop: int) -> dict[str, bytes]:
    """Return a range by both planes."""
    return {"get_range": store.get_range(path, start, stop), "reader": bytes(store.reader().read(path, start, stop))}


# the laws


def _content(place: Place) -> None:
    store = place.store
    store.put("a/digits", b"a longer content before")
    info = store.put("a/digits", DIGITS)
    _same((info.path, info.size), ("a/digits", 10), "the result of a PUT")
    _same(store.get("a/digits"), DIGITS, "GET after two PUTs")
    head = store.head("a/digits")
    _same(head and (head.path, head.size), ("a/digits", 10), "HEAD")
    _same(head and '"' in head.etag, False, "quotes in the etag of HEAD")
    if info.etag:
        _same(head and head.etag, info.etag, "the etag of HEAD after that of PUT")


def _buffers(place: Place) -> None:
    store = place.store
    kinds: tuple[Callable[[bytes], Any], ...] = (bytes, bytearray, memoryview)
    for kind in kinds:
        store.put("digits", kind(DIGITS))
        _same(store.create(f"made-{kind.__name__}", kind(DIGITS)).size, 10, "the size of a created object")
        _same(store.get("digits"), DIGITS, f"a {kind.__name__}")
        _same(store.get(f"made-{kind.__name__}"), DIGITS, f"a created {kind.__name__}")
    large = bytes(range(256)) * 5000  # more than goes out at once
    parts: list[Any] = [b"head", memoryview(large), b"", bytearray(b"tail"), memoryview(array("I", range(4)))]
    _same(store.put("parts", parts).size, len(large) + 24, "the size of several buffers")
    _same(store.get("parts"), b"".join(parts), "several buffers")


def _empty(place: Place) -> None:
    store = place.store
    bodies: tuple[Any, ...] = (b"", [])
    for data in bodies:
        _same(store.put("empty", data).size, 0, "the size of an empty object")
        _same(store.get("empty"), b"", "GET")
        _same(_reads(store, "empty", 0, 5), {"get_range": b"", "reader": b""}, "a range of an empty object")
        _same(store.get_tail("empty", 5), b"", "the last 5 bytes of an empty object")
        _same([(info.path, info.size) for info in store.list()], [("empty", 0)], "the listing")
        head = store.head("empty")
        _same(head and head.size, 0, "HEAD")


def _slices(place: Place) -> None:
    store = place.store
    store.put("digits", DIGITS)
    for start, stop in SLICES:
        right = DIGITS[start:stop]
        _same(_reads(store, "digits", start, stop), {"get_range": right, "reader": right}, f"bytes {start} to {stop}")


def _tails(place: Place) -> None:
    place.store.put("digits", DIGITS)
    for size in (1, 4, 10, 50):
        _same(place.store.get_tail("digits", size), DIGITS[-size:], f"the last {size} bytes")
    _same(place.store.get_tail("digits", 0), b"", "the last 0 bytes")


def _large(place: Place) -> None:
    content = array("I", range(1 << 20)).tobytes()
    place.store.put("large", content)
    reader, step = place.store.reader(), 1 << 16
    parts = run_all(lambda at: bytes(reader.read("large", at, at + step)), range(0, len(content), step), 16)
    _same(b"".join(parts) == content, True, "64 ranges of 4 MiB, 16 at once, are the object")


def _missing(place: Place) -> None:
    store = place.store
    store.put("a/digits", DIGITS)
    _same((store.head("a/none"), store.head("a")), (None, None), "HEAD of a missing object, and of a folder")
    with _raises(NotFoundError, "GET of a folder"):
        store.get("a")
    requests: dict[str, Callable[[str], object]] = {
        "GET": store.get,
        "a range": lambda path: store.get_range(path, 0, 1),
        "the end": lambda path: store.get_tail(path, 1),
        "a range by the data plane": lambda path: store.reader().read(path, 0, 1),
        "replace": lambda path: store.replace(path, b"1", b"0"),
    }
    for what, request in requests.items():
        with _raises(NotFoundError, f"{what} of a missing object"):
            request("a/none")


def _create(place: Place) -> None:
    store = place.store
    store.create("one", b"first")
    with _raises(ObjectExistsError, "create over an object"):
        store.create("one", b"second")
    _same(store.get("one"), b"first", "the object after a create that must fail")


def _replace(place: Place) -> None:
    store = place.store
    store.put("root", b"first")
    info = store.replace("root", b"second", b"first")
    _same((info.path, info.size), ("root", 6), "the result of replace")
    with _raises(ObjectExistsError, "replace of an object that was changed"):
        store.replace("root", b"third", b"first")
    _same(store.get("root"), b"second", "the object after a replace that must fail")
    store.replace("root", b"second", b"first")  # again, after a lost answer
    _same(store.get("root"), b"second", "the object after the same replace again")
    store.replace("root", memoryview(b""), bytearray(b"second"))
    _same(store.get("root"), b"", "the object that was replaced by an empty one")


def _one_winner(place: Place, write: Callable[[str, bytes], object]) -> None:
    start = threading.Barrier(THREADS)

    def attempt(path: str, number: int) -> bytes | None:
        data = b"%d" % number
        start.wait(60)
        try:
            write(path, data)
        except ObjectExistsError:
            return None
        return data

    with ThreadPoolExecutor(THREADS) as pool:
        for turn in range(2):
            winners = [data for data in pool.map(partial(attempt, f"one-{turn}"), range(THREADS)) if data is not None]
            _same(winners, [place.store.get(f"one-{turn}")], f"the winners of {THREADS} writes at once")


def _create_at_once(place: Place) -> None:
    _one_winner(place, place.store.create)


def _replace_at_once(place: Place) -> None:
    for turn in range(2):
        place.store.put(f"one-{turn}", b"before")
    _one_winner(place, lambda path, data: place.store.replace(path, data, b"before"))


def _list(place: Place) -> None:
    store = place.store
    sizes = {"a/b/c": 5, "a/b/d": 5, "a/e": 3, "ab": 2, "f": 1}
    for path in sizes:
        store.put(path, path.encode())
    _same({info.path: info.size for info in store.list()}, sizes, "all objects")
    for folder in ("a", "a/"):
        heads = {path: store.head(path) for path in ("a/b/c", "a/b/d", "a/e")}
        _same({info.path: info for info in store.list(folder)}, heads, f"those below {folder}")
    _same({info.path for info in store.child("a").list("b")}, {"b/c", "b/d"}, "those below a/b, seen from a")
    _same([*store.list("none"), *store.list("f")], [], "those below no folder, and below an object")
    _same(list(store.children()), ["a"], "the folders")


def _pages(place: Place) -> None:
    names = [f"n/{number:05}" for number in range(place.objects)]
    run_all(lambda name: place.store.put(name, b""), names, 2 * THREADS)
    found = sorted(info.path for info in place.store.list())
    _same(found == names, True, f"a listing of {len(names)} objects has each once, it has {len(found)}")
    place.store.delete([f"none/{number}" for number in range(900)] + names)
    _same(list(place.store.list()), [], "the listing after all were deleted")


def _list_order(place: Place) -> None:
    for name in ("a0", "b/é", "b/z", "A", "a b", "a-b", "a.b", "a/b"):
        place.store.put(name, b"")
    found = [info.path for info in place.store.list()]
    _same(found, sorted(found, key=str.encode), "the listing")


def _prefix(place: Place) -> None:
    place.store.put("a", b"1")
    place.store.put("a/b", b"2")
    _same(sorted(info.path for info in place.store.list()), ["a", "a/b"], "the listing of an object and one below it")


def _folder_again(place: Place) -> None:
    store = place.store
    store.put("x/c/0/1", DIGITS)
    store.put("x/c/0/2/3", DIGITS)
    store.delete(["x/c/0/1", "x/c/0/2/3"])
    store.put("x/c/0", DIGITS)
    _same([info.path for info in store.list("x")], ["x/c/0"], "the listing")


def _delete(place: Place) -> None:
    store = place.store
    for path in ("a/b", "a/c"):
        store.put(path, b"1")
    store.delete(["a/b", "none"])
    store.delete([])
    _same([info.path for info in store.list()], ["a/c"], "the listing")


def _names(place: Place) -> None:
    store = place.store
    paths = [f"d/{name}" for name in NAMES] + ["/".join(["folder-of-a-path"] * 40)]  # of 679 bytes; S3 takes 1024
    for number, path in enumerate(paths):
        store.put(path, DIGITS + b"%d" % number)
    for number, path in enumerate(paths):
        _same(_reads(store, path, 2, 14), dict.fromkeys(("get_range", "reader"), b"23456789%d" % number), path)
    _same(sorted(info.path for info in store.list()), sorted(paths), "the listing")
    store.delete(paths)
    _same(list(store.list()), [], "the listing after all were deleted")


def _consistent(place: Place) -> None:
    store = place.store
    for number in range(5):
        data = DIGITS * (number + 1)
        store.put("a", data)
        head, listed = store.head("a"), [info.size for info in store.list()]
        reads = _reads(store, "a", number, len(data))
        _same(reads, {"get_range": data[number:], "reader": data[number:]}, "a range after a PUT")
        _same((head and head.size, listed), (len(data), [len(data)]), "HEAD and listing after a PUT")
        store.delete(["a"])
        _same((store.head("a"), list(store.list())), (None, []), "HEAD and listing after a deletion")


def _whole(place: Place) -> None:
    store, contents = place.store, [bytes([number]) * (1 << (12 + number)) for number in range(1, 7)]
    store.put("a", contents[0])
    done = threading.Event()

    def read(_: int) -> set[bytes]:
        seen = set()
        while not done.is_set():
            seen.add(store.get("a"))
        return seen

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, number) for number in range(4)]
        try:
            for number in range(12):
                store.put("a", contents[number % len(contents)])
        finally:
            done.set()
        seen = set().union(*(each.result() for each in readers))
    _same(len(seen - set(contents)), 0, "contents that were read while the object was overwritten, but never written")


def _modified(place: Place) -> None:
    begin = datetime.now(UTC) - timedelta(seconds=CLOCK_SECONDS)
    place.store.put("digits", DIGITS)
    time, end = place.store.modified("digits"), datetime.now(UTC) + timedelta(seconds=CLOCK_SECONDS)
    if time is None or not begin <= time <= end:
        raise LawError(f"an object that was just written says {time}, here it is {datetime.now(UTC)}")
    _same(place.store.modified("none"), None, "the time of a missing object")


def _s3(place: Place) -> tuple[Any, Callable[[str], str]]:
    """Return the S3 client of the store, and a function that returns the key of a path."""
    client = place.store._client()
    return client, lambda path: f"{client.root}/{place.store.folder}/{path}".lstrip("/")


def _checksums(place: Place) -> None:
    client, key = _s3(place)
    with suppress(StorageError, *client_errors()):
        client.call("PutObject", Key=key("a"), Body=BytesIO(DIGITS), ChecksumCRC32C=base64.b64encode(b"0000").decode())
        raise LawError("a PUT with a wrong CRC-32C has succeeded")
    _same(place.store.head("a"), None, "HEAD after a PUT with a wrong CRC-32C")
    place.store.put("a", DIGITS)
    _same(client._checks_crc, True, "the server confirms the CRC-32C of a PUT")


def _multipart(place: Place) -> None:
    client, key = _s3(place)
    content = [bytes(range(256)) * (PART_BYTES >> 8), DIGITS]
    client.put_in_parts(key("large"), content, PART_BYTES)
    head = place.store.head("large")
    _same(head and head.size, PART_BYTES + 10, "the size of an object of two parts")
    _same(bytes(place.store.read("large", PART_BYTES - 1, PART_BYTES + 50)), b"\xff" + DIGITS, "its end")


def _unfinished(place: Place) -> None:
    client, key = _s3(place)
    for name in ("a/b", "a/b", "c"):
        client.call("CreateMultipartUpload", Key=key(name))
    _same(list(place.store.list()), [], "the listing while uploads are unfinished")
    _same(place.store.child("a").remove_leftovers(), 2, "the unfinished uploads that were removed below a folder")
    _same(place.store.remove_leftovers(), 1, "those that were removed below the store")


_UNUSABLE = "the store cannot be used"
_ALONE = "two writers that begin in the same moment may both go on: let one job write a dataset at a time"
PAGES = Law("a listing has each object once, however many there are, and 1,000 are deleted at once", _pages, _UNUSABLE)
LAWS = (
    Law("an object has the content, size and etag that were put last", _content, _UNUSABLE),
    Law("every buffer can be written, and several are one object", _buffers, _UNUSABLE),
    Law("an empty object is an object", _empty, "datasets with empty rows may not be readable"),
    Law("a range is a slice, and ends with the object", _slices, "such an object is downloaded whole, or an error"),
    Law("a suffix range is the end of the object", _tails, "shards and Parquet files cannot be read"),
    Law("ranges are read by many threads at once", _large, _UNUSABLE),
    Law("a missing object is not found, and a folder is no object", _missing, "what is missing looks like an outage"),
    Law("create does not overwrite", _create, "a conversion may overwrite a dataset that exists"),
    Law("of many creates at once exactly one wins", _create_at_once, _ALONE, required=False),
    Law("replace writes only over what was read", _replace, "an append may lose another append that has ended"),
    Law("of many replaces at once exactly one wins", _replace_at_once, _ALONE, required=False),
    Law("a listing is recursive, and of folders", _list, "sources cannot be listed; datasets can be read"),
    PAGES,
    Law(
        "a listing is in the order of the bytes of its keys", _list_order, "nothing: no order is needed", required=False
    ),
    Law("an object and objects below it are separate", _prefix, "nothing: no dataset has such keys", required=False),
    Law("an object can replace a folder whose objects were deleted", _folder_again, "convert to a new folder"),
    Law("deleting ignores missing objects", _delete, "a conversion that was killed cannot be removed"),
    Law("names are kept, whatever their characters", _names, "files with such names cannot be converted"),
    Law("reads and listings show the last write and deletion at once", _consistent, "written data may look damaged"),
    Law("readers of an object that is overwritten get one of its contents", _whole, "an append may look damaged"),
    Law("the time of the last write is known", _modified, "changed sources are not noticed", required=False),
    Law(
        "a PUT with a wrong CRC-32C is refused, a right one confirmed",
        _checksums,
        "the signature covers the body by SHA-256, which takes eight times as long",
        required=False,
        protocol="s3",
    ),
    Law("objects are written in parts", _multipart, "objects of 1 GiB and more cannot be written", protocol="s3"),
    Law(
        "unfinished uploads are listed and removed",
        _unfinished,
        "those of killed writers stay, and are billed, until a lifecycle rule of the bucket ends them",
        required=False,
        protocol="s3",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 0 if the store keeps all required laws."""
    parser = argparse.ArgumentParser(
        prog="python -m streamloader.testing.conformance", description="Check a store by what streamloader needs of it."
    )
    parser.add_argument("url", help="a folder of the store; the checks write below a new folder there")
    parser.add_argument("--storage-option", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    parser.add_argument("--objects", type=int, default=1100, help="more than a page of a listing; 0 leaves that out")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    given = parser.parse_args(arguments)
    options = {}
    for each in given.storage_option:
        name, _, value = each.partition("=")
        with suppress(ValueError):
            value = json.loads(value)
        options[name] = value
    try:
        report = check_store(given.url, options, objects=given.objects)
    except StreamloaderError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{report.as_json() if given.json else report}\n")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
