"""Files of references by kerchunk and VirtualiZarr: what they may name, what is evaluated, and every damage."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import icechunk
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from datasets import assert_threads_end
from faulty import QuietHandler, QuietServer
from folder_server import folder_server
from hypothesis import example, given
from hypothesis import strategies as st
from torchrun import run_python
from zarr.abc.store import RangeByteRequest
from zarr_stores import STORES, url_of, values_of

import streamloader as sl
from streamloader import errors
from streamloader.storage import open_store
from streamloader.storage.icechunk import _virtual_access
from streamloader.storage.references import ParquetReferences, ReferenceClient, expand
from streamloader.storage.url import parse_location

OPTIONS = {"batch_size": 4, "sample_axis": "time"}
VALUES = np.arange(16, dtype="<i4").reshape(4, 4)
ARRAY = {"zarr_format": 2, "shape": [4, 4], "chunks": [1, 4], "dtype": "<i4", "order": "C", "fill_value": -1}
DOCUMENTS = {
    ".zgroup": {"zarr_format": 2},
    "a/.zarray": {**ARRAY, "filters": None, "compressor": None},
    "a/.zattrs": {"_ARRAY_DIMENSIONS": ["time", "x"]},
}
SECRET = "Bearer s3cr3t-of-the-file"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


def references(*chunks: Any, **more: Any) -> dict[str, Any]:
    """A document of references to the rows of `VALUES`, which have the keys a/0.0, a/1.0 and so on."""
    return {"version": 1, "refs": {**DOCUMENTS, **{f"a/{row}.0": chunk for row, chunk in enumerate(chunks)}}, **more}


def read(path: Path | str, **options: Any) -> list[list[int]]:
    """The values of `a`."""
    dataset = sl.StreamingDataset(path, **OPTIONS, decode_cf=False, shuffle=False, **options)
    return np.concatenate([batch["a"].numpy() for batch in dataset]).tolist()


class Recorder(QuietServer):
    """A web server of some bodies, which keeps the path and the headers of every request."""

    def __init__(self, bodies: dict[str, bytes]) -> None:
        super().__init__(RecordingHandler)
        self.bodies = bodies
        self.requests: list[tuple[str, str]] = []
        self.absent, self.most = 404, 10**9
        self.redirects: dict[str, str] = {}

    @property
    def seen(self) -> str:
        """Everything that this server was sent."""
        return " ".join(map("".join, self.requests))


class RecordingHandler(QuietHandler):
    """Serves the bodies of a `Recorder`; what is not there is `absent`, as everything is after `most` requests."""

    server: Recorder

    def do_GET(self) -> None:
        self.server.requests.append((self.path, str(self.headers)))
        body = self.server.bodies.get(self.path.partition("?")[0].lstrip("/"))
        if self.path in self.server.redirects:
            self.respond(302, headers={"Location": self.server.redirects[self.path]})
            return
        if body is None or len(self.server.requests) > self.server.most:
            self.respond(self.server.absent, DENIED if self.server.absent == 403 else b"")
        else:
            self.respond_range(body)

    do_HEAD = do_GET


@contextmanager
def recorders(bodies: dict[str, bytes]) -> Iterator[tuple[Recorder, Recorder]]:
    """Two servers, both of which have the bodies."""
    with Recorder(dict(bodies)).running() as first, Recorder(dict(bodies)).running() as second:
        yield first, second


def written(path: Path, document: Any) -> Path:
    """A JSON file in a folder with `data`, the bytes of `VALUES`."""
    path.parent.mkdir(exist_ok=True, parents=True)
    (path.parent / "data").write_bytes(VALUES.tobytes())
    path.write_text(json.dumps(document))
    return path


ATTACKS = [
    *("u.__globals__[os].environ[SECRET_OF_A_TEST]", "u.__class__", "u[0]", "u!r", "u:>99", "0.real", "", " ", "u u"),
    *(
        "f.__globals__",
        "f",
        "f()",
        "f('x')",
        "f(c=1)[0]",
        "f(**u)",
        "open('x')",
        "9**9",
        "u*9",
        "i/2",
        "[1]",
        "lambda: 1",
    ),
    *("u|upper", "nothing", "f(c=nothing)", "(" * 300, "-" * 3000, "'" + "x" * 5000 + "'", "1//0", "u if 1 else 2"),
]


@pytest.mark.quick(8)
@pytest.mark.parametrize("expression", ATTACKS)
def test_an_expression_that_is_no_name_or_arithmetic_is_an_error_and_nothing_is_sent(expression, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_A_TEST", "the-value-of-the-secret")
    with recorders({"x": VALUES.tobytes()}) as (host, _):
        url = f"{host.endpoint}/{{{{{expression}}}}}"
        document = references([url, 0, 16], templates={"u": "x", "f": "{{c}}.nc"})
        path = written(tmp_path / "refs.json", document)
        with pytest.raises(errors.FormatError, match=r"'a/0.0' in .*refs.json.*is not supported|characters"):
            read(path, fields=["a"], storage_options={"allow": [host.endpoint]})
        assert host.requests == []


@given(st.text("{}()[].,*+-/% 'uifc=1_\n", max_size=60), st.sampled_from(["x", 3, "{{c}}", "{{c}}{{c}}"]))
@example("{{f(c=f(c=f(c=f(c=f(c=f(c=f(c=f(c=f(c=f(c=f(c=f(c=f(c='xxxx')))))))))))))}}", "{{c}}{{c}}")
def test_any_expression_is_expanded_or_a_value_error(text, value):
    with suppress(ValueError):
        assert len(expand(text, {"u": value, "f": value, "i": 1})) <= 4096


def test_templates_are_names_and_have_arguments(tmp_path):
    chunks = [["{{u}}", 0, 16], ["{{ f(c='a') }}", 16, 16], ["{{is}}", 32, 16], ["data", 48, 16]]
    document = references(*chunks, templates={"u": "data", "f": "d{{c}}t{{c}}", "is": "data"})
    assert read(written(tmp_path / "refs.json", document)) == VALUES.tolist()


def test_references_are_generated_from_dimensions(tmp_path):
    rows = {
        "key": "a/{{i}}.0",
        "url": "{{f(c=e)}}",
        "offset": "{{i * 16}}",
        "length": 16,
        "dimensions": {"i": {"stop": 2}},
    }
    more = {"i": {"start": 6, "stop": 10, "step": 2}, "j": [2]}
    halves = {
        **rows,
        "key": "a/{{i // j - 1}}.0",
        "offset": "{{(i - 2) * 8}}",
        "length": "{{8 + 8}}",
        "dimensions": more,
    }
    document = references(gen=[rows, halves], templates={"f": "dat{{c}}", "e": "a"})
    assert read(written(tmp_path / "refs.json", document)) == VALUES.tolist()
    wrong = {"dimensions": [3, {"i": 3}, {"i": {"stop": 10**12}}, {"i": {"stop": 10**99}}], "offset": ["{{i", "", [1]]}
    for name, values in {**wrong, "key": [None, "{{k}}"], "url": [5]}.items():
        for value in values:
            document["gen"] = [rows | {name: value}]
            with pytest.raises(errors.FormatError, match=r"the file of references .*/refs.json cannot be used"):
                read(written(tmp_path / "refs.json", document))


def test_headers_go_to_the_host_of_the_file_and_to_no_other(tmp_path):
    rows = [[0, 16], [16, 16], [32, 16], [48, 16]]
    with recorders({"data": VALUES.tobytes()}) as (own, other):
        urls = ["data", f"{own.endpoint}/data", f"{other.endpoint}/data", "data"]
        chunks = [[url, *row] for url, row in zip(urls, rows, strict=True)]
        own.bodies["refs.json"] = json.dumps(references(*chunks)).encode()
        url, options = f"{own.endpoint}/refs.json", {"headers": {"Authorization": SECRET, "X-Key": SECRET}}
        with pytest.raises(errors.AccessError, match=r"'a/2.0' in .*refs.json leads elsewhere, to http://127.*'allow'"):
            read(url, storage_options=options)
        assert other.requests == []
        assert {headers.count(SECRET) for _, headers in own.requests} == {2}
        for more in ({"allow": other.endpoint}, {"allow": [f"{other.endpoint}/"]}):
            assert read(url, storage_options={**options, **more}) == VALUES.tolist()
        assert other.requests
        assert SECRET not in other.seen
        with pytest.raises(errors.AccessError, match="leads elsewhere"):
            read(url, storage_options={**options, "allow": [f"{other.endpoint}/folder", "s3://127.0.0.1"]})
        remote = {"target_options": options, "remote_options": {"headers": {"X-Key": "of the objects"}}}
        assert read(url, storage_options=remote) == VALUES.tolist()
        assert SECRET not in other.seen
        assert "of the objects" in other.seen


@pytest.mark.parametrize("protocol", ["http", "s3"])
def test_folders_of_a_host_share_a_client(protocol, tmp_path):
    opened = []

    def counted(url: str, options: Any) -> Any:
        opened.append(url)
        return open_store(url, options)

    with recorders({"bucket/data": VALUES.tobytes()}) as (host, _):
        host.bodies |= {f"bucket/{n}/x.y/data": VALUES[n].tobytes() for n in range(4)}
        url, options = location(host.endpoint, protocol)
        url = url if protocol == "s3" else f"{url}/bucket"
        urls = [f"{url}/{n}/x.y/data" for n in range(4)]
        path = written(tmp_path / "refs.json", references(*([one, 0, 16] for one in urls), [f"{url}/data", 0, 16]))
        options = {"allow": [f"{url}/{n}" for n in range(4)], "remote_options": options}
        client = ReferenceClient(parse_location(f"reference://::{path}", options), counted)
        assert [client.get(f"a/{n}.0") for n in range(4)] == [VALUES[n].tobytes() for n in range(4)]
        assert len(opened) == 2  # of the file, and of the host
        with pytest.raises(errors.AccessError, match="leads elsewhere"):
            client.get("a/4.0")


@pytest.mark.long
def test_a_redirect_takes_no_options_to_another_host(tmp_path):
    with recorders({"data": VALUES.tobytes()}) as (own, other):
        own.bodies["refs.json"] = json.dumps(references(*(["moved", n, 16] for n in (0, 16, 32, 48)))).encode()
        url = f"{own.endpoint}/refs.json"
        key = {"headers": {"X-Api-Key": SECRET}}
        choices = [key, {"target_options": {}, "remote_options": key}, {"remote_options": {}}, {"allow": own.endpoint}]
        for options in choices:
            own.redirects["/moved"] = f"{other.endpoint}/data"
            with pytest.raises(errors.AccessError, match=f"{own.endpoint}/moved redirects .*{other.endpoint}/data"):
                read(url, storage_options=options)
            assert other.requests == []
            own.redirects["/moved"] = "/data"
            assert read(url, storage_options=options) == VALUES.tolist()
        own.redirects["/moved"] = f"{other.endpoint}/data"
        assert read(url) == VALUES.tolist()  # as for any other dataset


ELSEWHERE = [
    *("file:///etc/passwd", "/etc/passwd", "local://etc/passwd", "/proc/self/environ", "/dev/zero", "../outside/data"),
    *("x/../../outside/data", "simplecache::data", "simplecache::file:///etc/passwd", "reference://::/x.json"),
    *("http://169.254.169.254/latest", "http://2852039166/latest", "http://0xA9FEA9FE/x", "http://[fe80::1]/x"),
    *("http://[::ffff:169.254.169.254]/x", "http://user@169.254.169.254/x", "http://name.invalid/x", "http://\u2100/y"),
    *("link", "x/../link", "folder/data", "FILE://OWN/link"),
    # metadata services whose addresses are not link-local
    *(
        "http://[fd00:ec2::254]/latest",
        "http://100.100.100.200/latest",
        "http://168.63.129.16/x",
        "http://192.0.0.192/x",
    ),
]


@pytest.mark.quick(11)
@pytest.mark.parametrize("url", ELSEWHERE)
@pytest.mark.parametrize("options", [{}, {"remote_options": {}}, {"allow": ["/etc/pass", "http://169.254.169"]}])
def test_local_files_and_link_local_addresses_are_not_read_unless_they_are_allowed(url, options, tmp_path, monkeypatch):
    if "name.invalid" in url:  # as where a resolver answers, which not every machine has
        error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=error))
    written(tmp_path / "outside" / "refs.json", {})
    url = url.replace("OWN", str(tmp_path / "own"))
    path = written(tmp_path / "own" / "refs.json", references([url, 0, 16]))
    (path.parent / "link").symlink_to("/etc/passwd")
    (path.parent / "folder").symlink_to(tmp_path / "outside")
    with pytest.raises(errors.AccessError, match=r"the reference 'a/0.0' in .*own/refs.json leads elsewhere"):
        read(path, storage_options=options)


IMPOSSIBLE = ["x\0y", "x\ud800", "http://127.0.0.1:99999999/y", "dir:///x/y", "data://x/y"]


@pytest.mark.parametrize("url", IMPOSSIBLE)
def test_a_reference_that_no_client_can_read_is_named(url, tmp_path):
    path = written(tmp_path / "refs.json", references([url, 0, 16]))
    with pytest.raises(errors.StreamloaderError, match=r"the reference 'a/0.0' in .*refs.json"):
        read(path, fields=["a"], storage_options={"remote_options": {}})


HOSTS = [
    *(
        "http://evil.org/x",
        "https://HOST/x",
        "http://HOST.evil.org/x",
        "http://HOST@evil.org/x",
        "http://evil.org:80@HOST:1/x",
    ),
    *("http://HOST#@evil.org/x", "http://HOST\\@evil.org/x", "http://HOST\\.evil.org/x", "//evil.org/x", "s3://HOST/x"),
    *("http://HOST:1/x", "http://evil.org#HOST/x", "ftp://HOST/x", " http://HOST/x"),
]


@pytest.mark.quick(7)
@pytest.mark.parametrize("url", HOSTS)
def test_a_url_that_looks_like_the_own_host_is_another(url):
    with recorders({}) as (own, _):
        host = own.endpoint.removeprefix("http://")
        own.bodies["refs.json"] = json.dumps(references([url.replace("HOST", host), 0, 16])).encode()
        with pytest.raises(errors.StreamloaderError, match=r"the reference 'a/0.0' in .*refs.json"):
            read(f"{own.endpoint}/refs.json", storage_options={"headers": {"X-Key": SECRET}})
        assert {path for path, _ in own.requests} == {"/refs.json"}


def test_an_allowed_folder_is_read_and_its_pipes_do_not_hang(tmp_path):
    data = written(tmp_path / "data" / "refs.json", {}).parent
    path = written(tmp_path / "own" / "refs.json", references(*([f"{data}/data", n, 16] for n in (0, 16, 32, 48))))
    for entry in (str(data), f"file://{data}/", str(tmp_path)):
        assert read(path, storage_options={"allow": [entry]}) == VALUES.tolist()
    os.mkfifo(data / "pipe")
    for name in (str(data / "pipe"), "/dev/zero"):
        written(path, references([name, 0, 16]))
        with pytest.raises(errors.CorruptError, match=r"chunk \[0:1, 0:4\] in .*own/refs.json"):
            read(path, storage_options={"allow": "/"})


def store(tmp_path: Path, name: str = "refs.parquet", source: str = "kerchunk.parquet") -> Path:
    """A copy of a folder of Parquet pages, or of a file, beside the files that it refers to."""
    for file in STORES.glob("*.nc"):
        shutil.copy(file, tmp_path)
    (shutil.copytree if (STORES / source).is_dir() else shutil.copy)(STORES / source, tmp_path / name)
    return tmp_path / name


def page(**columns: Any) -> bytes:
    """A page of Parquet."""
    out = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), out, write_statistics=False)
    return out.getvalue().to_pybytes()


PAGES = {
    "truncated": lambda body: body[: len(body) // 2],
    "empty": lambda body: b"",
    "html": lambda body: b"<!DOCTYPE html><html>not found</html>",
    "footer": lambda body: body[:-12] + bytes(8) + b"PAR1",
    "too many rows": lambda body: page(path=["packed.nc"] * 99, offset=[0] * 99, size=[9] * 99),
    "a number as URL": lambda body: page(path=[[1]] * 16, offset=[0] * 16, size=[9] * 16),
    "too few rows": lambda body: page(path=["packed.nc"], offset=[0], size=[9]),
    "a negative offset": lambda body: page(path=["packed.nc"] * 16, offset=[-5] * 16, size=[9] * 16),
    "missing columns": lambda body: page(path=["packed.nc"] * 16, offset=["x"] * 16, raw=["y"] * 16),
    "too many bytes": lambda body: page(raw=[bytes(1 << 28)]),
    "missing": lambda body: None,
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("damage", PAGES)
def test_a_page_that_cannot_be_read_is_an_error_that_names_it(damage, tmp_path):
    path = store(tmp_path) / "z" / "refs.1.parq"
    body = PAGES[damage](path.read_bytes())
    path.unlink() if body is None else path.write_bytes(body)
    with pytest.raises(errors.FormatError, match=r"refs\.parquet/z/refs\.1\.parq"):
        list(sl.StreamingDataset(path.parent.parent, **OPTIONS, fields=["z"]))


def test_a_page_is_asked_for_again_by_the_pass_that_needs_it(tmp_path):
    path = store(tmp_path)
    with folder_server(tmp_path) as server:
        retry = {"base_seconds": 0.01}
        url = f"{server.url}/{path.name}"
        server.faults["/z/refs.0.parq"] = ["503"] * 3
        options = {"strict": False, "storage_options": {"retry": retry}}  # strict: a probe may meet a fault instead
        dataset = sl.StreamingDataset(url, **OPTIONS, fields=["z"], **options)
        assert len(list(dataset)) == len(dataset)
        assert dataset.stats().retries == 3
        assert sum("/z/refs.0.parq" in asked for asked in server.paths) == 4


@pytest.mark.long
def test_a_pass_that_ends_while_a_page_cannot_be_read_leaves_no_thread(tmp_path):
    path = store(tmp_path)
    with folder_server(tmp_path) as server:
        retry = {"base_seconds": 9e9, "cap_seconds": 9e9}
        url = f"{server.url}/{path.name}"
        dataset = sl.StreamingDataset(url, **OPTIONS, fields=["z"], storage_options={"retry": retry})
        server.faults["/z/refs."] = ["503"] * 999
        batches = iter(dataset)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(next, batches)
            while not any("/z/refs." in asked for asked in server.paths):
                time.sleep(0.01)
            dataset.close()
            with pytest.raises(errors.StreamloaderError):
                waiting.result(60)
        assert_threads_end()


def test_a_page_that_repeats_a_large_value_takes_the_memory_of_one(tmp_path):
    path = store(tmp_path) / "z" / "refs.0.parq"
    value = bytes(1 << 22)
    repeated = {"raw": pa.DictionaryArray.from_arrays([0] * 16, [value]), "path": [None] * 16}
    path.write_bytes(page(**repeated, offset=[0] * 16, size=[0] * 16))
    found = ParquetReferences(open_store(path.parent.parent))
    tracemalloc.start()
    try:
        assert found.find("z/" + ".".join("0" * len(found.values["z/.zarray"]["shape"]))) == value
        assert tracemalloc.get_traced_memory()[1] < 4 * len(value)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["refs.zarr", "combined", "refs.json"])
def test_a_folder_of_pages_is_known_by_its_content(name, tmp_path):
    dataset = sl.StreamingDataset(store(tmp_path, name), batch_size=23, sample_axis="time", fields=["z"], shuffle=False)
    (batch,) = dataset
    np.testing.assert_array_equal(batch["z"], values_of("kerchunk.parquet", "z"))


def test_a_store_of_references_is_read_only(tmp_path):
    found = open_store(f"reference://::{written(tmp_path / 'refs.json', references(['data', 0, 16]))}")
    writes = [lambda: found.put("a/0.0", b""), lambda: found.create("a/1.0", b""), lambda: found.delete(["a/0.0"])]
    for write in [*writes, lambda: found.replace("a/0.0", b"", found.get("a/0.0"))]:
        with pytest.raises(errors.UnsupportedError, match=r"refs.json::/a/\d.0: .* are read only"):
            write()


def test_references_that_are_missing_are_named(tmp_path):
    for name in ("x.json", "x.parquet"):
        with pytest.raises(errors.NotADatasetError, match=f"there are no references at .*{name}"):
            read(tmp_path / name)


def group(path: Path, version: int, **arrays: Any) -> dict[str, bytes]:
    """The objects of a group, with arrays of the dimensions `time` and `x` in chunks of two elements."""
    root = zarr.open_group(path, mode="w", zarr_format=version)
    for name, values in arrays.items():
        names = ["time", "x"][: values.ndim]
        given = {"dimension_names": names} if version == 3 else {"attributes": {"_ARRAY_DIMENSIONS": names}}
        root.create_array(name, data=values, chunks=(2, *values.shape[1:]), fill_value=-1, **given)
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.quick(1)
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("absent", "protocol"), [(403, "http"), (404, "http"), (403, "s3")])
def test_named_fields_of_a_store_that_cannot_be_listed_are_read_with_their_coordinate(
    version, absent, protocol, tmp_path
):
    hours = np.array([0, 1, 2, 5, 6, 7, 8, 9])
    holes = np.where(np.arange(8) // 2 == 1, -1, np.arange(8))  # a chunk of fill values is not stored
    bodies = group(tmp_path, version, time=hours, a=holes, **{"g/b": np.arange(8)})
    options = {"sample_axis": "time", "windows": sl.Window(2), "batch_size": 1, "shuffle": False, "decode_cf": False}
    if protocol == "s3":
        bodies = {f"bucket/{name}": body for name, body in bodies.items()}
    with Recorder(bodies).running() as server:
        server.absent = absent
        url, options["storage_options"] = location(server.endpoint, protocol)
        for choice in (None, version):
            dataset = sl.StreamingDataset(url, fields=["a", "g/b"], zarr_format=choice, **options)
            found = [(batch["a"][0].tolist(), batch["g/b"][0].tolist()) for batch in dataset]
            firsts = [0, 1, 3, 4, 5, 6]  # no window has the gap between 2 and 5
            assert found == [([holes[n], holes[n + 1]], [n, n + 1]) for n in firsts]
            assert dataset.stats().missing_chunks > 0
        assert not any("list-type" in path or path.endswith("/") for path, _ in server.requests)
        server.requests.clear()
        sl.StreamingDataset(url, fields=["a"], zarr_format=version, **options)
        assert all(path.endswith("zarr.json") == (version == 3) for path, _ in server.requests if "/time/" not in path)


def location(endpoint: str, protocol: str) -> tuple[str, dict[str, Any]]:
    """The URL and storage options by which a protocol reads a server."""
    if protocol == "http":
        return endpoint, {}
    keys = {"key": "k", "secret": "s", "endpoint_url": endpoint, "client_kwargs": {"region_name": "us-east-1"}}
    return "s3://bucket", keys


@pytest.mark.quick(1)
@pytest.mark.parametrize("protocol", ["http", "s3"])
def test_credentials_that_expire_are_no_missing_chunks(protocol, tmp_path):
    bodies = {f"bucket/{name}": body for name, body in group(tmp_path, 3, a=np.arange(64)).items()}
    with Recorder(bodies).running() as server:
        server.absent = 403
        url, options = location(server.endpoint, protocol)
        url = url if protocol == "s3" else f"{url}/bucket"
        dataset = sl.StreamingDataset(
            url, batch_size=2, sample_axis="time", fields=["a"], storage_options=options, with_index=True
        )
        server.most = len(server.requests) + 9
        with pytest.raises(errors.AccessError, match=r"/a/c/\d"):
            for batch in dataset:
                assert batch["a"].tolist() == batch["index"].tolist()


def test_a_field_that_is_not_there_is_an_error_that_names_the_others(tmp_path):
    bodies = group(tmp_path, 3, a=np.arange(8), b=np.arange(8))
    options = {"sample_axis": "time", "batch_size": 1, "fields": ["c"]}
    with pytest.raises(errors.FieldError, match=r"no array 'c'; its arrays are a, b"):
        sl.StreamingDataset(tmp_path, **options)
    with Recorder(bodies).running() as server, pytest.raises(errors.FieldError, match="no array 'c'"):
        sl.StreamingDataset(server.endpoint, **options)


def test_a_store_that_forbids_everything_is_an_access_error(tmp_path):
    options = {"sample_axis": "time", "batch_size": 1, "fields": ["a"]}
    bodies = group(tmp_path, 3, a=np.arange(8))
    with Recorder({}).running() as server:
        server.absent = 403
        with pytest.raises(errors.AccessError):
            sl.StreamingDataset(server.endpoint, **options)
        server.bodies = {name: body for name, body in bodies.items() if name.endswith("zarr.json")}
        with pytest.raises(errors.AccessError, match=r"/a/c/\d"):
            list(sl.StreamingDataset(server.endpoint, **options))
        with pytest.raises(errors.UsageError, match="zarr_format=4"):
            sl.StreamingDataset(server.endpoint, **options, zarr_format=4)


@pytest.mark.quick(1)
@pytest.mark.parametrize("chunks", [{}, {"a/0.0": None}])
def test_a_field_without_any_chunk_is_an_error_unless_that_is_allowed(chunks, tmp_path):
    document = references()
    document["refs"].update(chunks)
    with pytest.raises(errors.FormatError, match=r"no chunk of the array .*refs.json::/a |'a/0.0' in .*refs.json"):
        read(written(tmp_path / "refs.json", document))
    assert read(written(tmp_path / "refs.json", references()), strict=False) == [[-1] * 4] * 4
    assert read(written(tmp_path / "refs.json", references(["data", 0, 16]))) == [[0, 1, 2, 3], *[[-1] * 4] * 3]
    with pytest.raises(errors.MissingObjectError, match=r"the chunk \[1:2, 0:4\] in .* is missing"):
        read(tmp_path / "refs.json", strict=True)


@pytest.mark.long
@pytest.mark.parametrize("shards", [None, (4, 4)])
def test_one_chunk_anywhere_is_enough(shards, tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(64, 4), chunks=(2, 4), shards=shards, dtype="i4", fill_value=7)
    array[62:] = 5
    options = {"batch_size": 64, "sample_axis": 0, "shuffle": False}
    (batch,) = sl.StreamingDataset(tmp_path / "a", **options)
    assert batch["a"].flatten().tolist() == [7] * 248 + [5] * 8
    zarr.create_array(tmp_path / "b", shape=(64, 4), chunks=(2, 4), shards=shards, dtype="i4")
    with pytest.raises(errors.MissingObjectError, match=r"no chunk of the array .*/b exists; .*strict=False"):
        list(sl.StreamingDataset(tmp_path / "b", **options))
    (batch,) = sl.StreamingDataset(tmp_path / "b", **options, strict=False)
    assert not batch["b"].any()


@pytest.mark.parametrize("chain", ["simplecache::reference://::{}", "reference://::filecache::reference://::{}"])
def test_fsspecs_own_parser_of_references_is_not_reached_by_a_chain(chain, tmp_path):
    path = written(tmp_path / "refs.json", references(["data", 0, 16]))
    with pytest.raises(errors.UnsupportedError, match=r"inside a chain.*begin the URL with reference://::"):
        read(chain.format(path))


def test_a_chain_reads_the_references_beside_its_file_and_no_others(tmp_path):
    path = written(tmp_path / "own" / "refs.json", references(*(["data", n, 16] for n in (0, 16, 32, 48))))
    url = f"reference://::simplecache::file://{path}"
    cache = {"simplecache": {"cache_storage": str(tmp_path / "cache")}}
    assert read(url, storage_options=cache) == VALUES.tolist()
    for number, other in enumerate(("../own/data", f"{path.parent}/data", "simplecache::data")):
        path = written(tmp_path / "own" / f"{number}.json", references([other, 0, 16]))
        with pytest.raises(errors.AccessError, match="leads elsewhere"):
            read(f"reference://::simplecache::file://{path}", storage_options=cache)


MUTATIONS = [b"[", b"{", b"9", b'"', b"null", b"-", b"\xff", b"base64:", b"{{", b"1e9"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["kerchunk.json", "kerchunk.parquet"])
def test_a_mutated_file_of_references_is_read_or_is_an_error_of_ours(name, tmp_path):
    path = store(tmp_path, name, name)
    parts = sorted(file for file in [path, *path.rglob("*")] if file.is_file())
    originals = {file: file.read_bytes() for file in parts}
    for seed in range(60):
        rng = random.Random(seed)
        file = rng.choice(parts)
        body = bytearray(originals[file])
        for _ in range(rng.choice([1, 1, 4])):
            at = rng.randrange(len(body) + 1)
            cut = at + rng.choice([0, 0, 1, 40, len(body)])
            body[at:cut] = rng.choice([b"", bytes([rng.randrange(256)]), rng.choice(MUTATIONS)])
        file.write_bytes(body)
        try:
            list(sl.StreamingDataset(path, batch_size=23, sample_axis="time", fields=["z"], shuffle=False))
        except errors.StreamloaderError as error:
            assert not isinstance(error, errors.EngineError), (seed, error)
            assert name in str(error), (seed, error)
        file.write_bytes(originals[file])


def repository(tmp_path: Path, prefix: str, place: Any) -> str:
    """The URL of an Icechunk repository whose chunks are ranges of `data` below a URL."""
    config = icechunk.RepositoryConfig.default()
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(prefix, place))
    made = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "repository")), config)
    made.save_config()
    session = made.writable_session("main")
    shape = {"shape": (4, 4), "chunks": (1, 4), "dtype": "<i4", "dimension_names": ["time", "x"]}
    zarr.group(store=session.store).create_array("a", **shape, compressors=None, filters=None)
    for row in range(4):
        session.store.set_virtual_ref(f"a/c/{row}/0", f"{prefix}data", offset=16 * row, length=16)
    session.commit("rows")
    return f"icechunk://::{tmp_path / 'repository'}"


def test_virtual_chunks_of_a_repository_are_read_where_that_is_authorized_with_its_own_credentials(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-environment")
    with Recorder({"bucket/data": VALUES.tobytes()}).running() as server:
        place = {"endpoint_url": server.endpoint, "allow_http": True, "s3_compatible": True, "force_path_style": True}
        url = repository(tmp_path, "s3://bucket/", icechunk.s3_store("us-east-1", **place))
        for options in ({}, {"authorize_virtual_chunk_access": ["s3://other/"]}):
            with pytest.raises(errors.AccessError, match=r"'authorize_virtual_chunk_access': \['s3://bucket/'\]"):
                read(url, storage_options=options)
        assert server.requests == []
        for authorized in ("s3://bucket/", ["s3://bucket/"], {"s3://bucket/": icechunk.s3_anonymous_credentials()}):
            assert read(url, storage_options={"authorize_virtual_chunk_access": authorized}) == VALUES.tolist()
        assert "authorization" not in server.seen.lower()
        keys = {"s3://bucket/": {"key": "of-the-chunks", "secret": "s"}}
        assert read(url, storage_options={"credentials": keys}) == VALUES.tolist()
        assert "Credential=of-the-chunks" in server.seen
        assert "of-the-environment" not in server.seen


def test_the_beginning_of_a_chunk_of_a_repository_is_read_without_the_rest(tmp_path, monkeypatch):
    written(tmp_path / "refs.json", {})
    prefix = f"file://{tmp_path}/"
    url = repository(tmp_path, prefix, icechunk.local_filesystem_store(str(tmp_path)))
    store = open_store(url, {"authorize_virtual_chunk_access": prefix})
    asked = []
    get = icechunk.IcechunkStore.get
    monkeypatch.setattr(
        icechunk.IcechunkStore, "get", lambda self, key, *more: asked.append((key, more[1])) or get(self, key, *more)
    )
    assert store.get_range("a/c/1/0", 0, 8) == VALUES[1].tobytes()[:8]
    assert store.get("a/c/1/0") == VALUES[1].tobytes() == store.get_range("a/c/1/0", 0, 2**40)
    assert asked[0] == ("a/c/1/0", RangeByteRequest(0, 8))
    document = store.get("a/zarr.json")
    assert store.get_range("a/zarr.json", 5, 2**40) == document[5:]


def test_virtual_chunks_are_authorized_by_any_scheme_of_a_store(tmp_path):
    prefix = f"file://{tmp_path}/"
    url = repository(tmp_path, prefix, icechunk.local_filesystem_store(str(tmp_path)))
    for name in ("az://b/", "abfs://b/", "abfss://b/"):
        with pytest.raises(errors.UnsupportedError, match=f"below {name} anonymously; give its credentials"):
            read(url, storage_options={"authorize_virtual_chunk_access": [name]})
    (access,) = _virtual_access(icechunk, {"authorize_virtual_chunk_access": "s3a://b/"}).values()
    assert isinstance(access, icechunk.Credentials.S3)
    written(tmp_path / "refs.json", {})
    assert read(url, storage_options={"credentials": {"abfs://b/": {"sas_token": "s"}, prefix: {}}}) == VALUES.tolist()


def test_virtual_chunks_in_local_files_need_to_be_authorized(tmp_path):
    written(tmp_path / "refs.json", {})
    prefix = f"file://{tmp_path}/"
    url = repository(tmp_path, prefix, icechunk.local_filesystem_store(str(tmp_path)))
    with pytest.raises(errors.AccessError, match="'authorize_virtual_chunk_access'"):
        read(url)
    assert read(url, storage_options={"authorize_virtual_chunk_access": prefix}) == VALUES.tolist()


EXIT = """
import sys, warnings
warnings.simplefilter("ignore")
import streamloader as sl
batches = iter(sl.StreamingDataset(sys.argv[1], batch_size=1, sample_axis="time", fields=["z", "t2m"], memory="64MiB"))
next(batches)
"""


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", ["kerchunk.parquet", "icechunk"])
def test_a_process_ends_in_the_middle_of_a_pass(name, count):
    command = [sys.executable, "-c", EXIT, url_of(name)]
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(count)]
    said = [process.communicate(timeout=120)[1] for process in started]
    assert [(process.returncode, text) for process, text in zip(started, said, strict=True)] == [(0, b"")] * count


LATE = """
import asyncio, sys, threading, time
def send(loop, send=asyncio.SelectorEventLoop._write_to_self):
    send(loop)  # from now on, the loop may use the result
    if threading.get_ident() not in threading._active:
        time.sleep(0.3)
asyncio.SelectorEventLoop._write_to_self = send
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1)
sys.slow = Slow()
"""


@pytest.mark.long
def test_the_end_of_a_process_waits_for_a_thread_of_icechunk_whose_result_was_used():
    """It would need the interpreter while that ends, which takes long here, and abort."""
    run_python("-c", LATE + EXIT, url_of("icechunk"))


def test_the_end_of_a_process_waits_for_native_calls_and_starts_no_more():
    script = """
import threading, time
from streamloader.storage.process import _CALLS, _Calls, finished_before_exit
entered = threading.Event()
def call():
    with finished_before_exit():
        entered.set()
        while not _CALLS.get(_Calls).ending:
            time.sleep(0.01)
        time.sleep(0.5)
        print("finished", flush=True)
    with finished_before_exit():
        print("started", flush=True)
threading.Thread(target=call, daemon=True).start()
entered.wait()
"""
    assert run_python("-c", script).stdout == "finished\n"
