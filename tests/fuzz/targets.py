"""What is fuzzed, a function of bytes each: the format's objects, and the values that users and other writers give.

A target passes if the package gives the right data, or an error of its own. What is right is known from
`naive_reader.py`, which shares no code with the package, from the golden data, or from Python or cftime. Checksums,
hashes and digests are made to fit where an attacker would do so, as in `formats/streamloader/v1/make_bad.py`.
"""

import ast
import atexit
import json
import re
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import cftime
import naive_reader
import numpy as np
from conversions import module_at
from golden import GOLDEN, V1, assert_same
from numcodecs import blosc, zstd

import streamloader as sl
from fuzz.edits import Draw, edited_bytes, edited_json
from streamloader.errors import EngineError, StreamloaderError
from streamloader.format.conditions import Condition
from streamloader.format.opening import open_root
from streamloader.loader.dataset import NumpyMixture
from streamloader.storage import open_store
from streamloader.storage.references import JsonReferences
from streamloader.zarr.calendar import MISSING, TimeUnits
from streamloader.zarr.cf import unpacking_of

MAKE_BAD = module_at(V1 / "make_bad.py")
BASES = ["free", "lengths", "one", "variable", "mixed", "tensors"]  # of one table page, without skips
FORMATS = V1.parent.parent
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
MOST_READ = 5000  # samples, of an edited manifest


class Target(NamedTuple):
    """What is fuzzed: `run` takes an input and raises for a defect; `seeds` are inputs to begin with."""

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...] = (b"",)


TARGETS: dict[str, Target] = {}


def target(*seeds: bytes) -> Callable[[Callable[[Draw], None]], Callable[[Draw], None]]:
    """Register a function as the target of its name."""

    def register(function: Callable[[Draw], None]) -> Callable[[Draw], None]:
        TARGETS[function.__name__] = Target(lambda data: function(Draw(data)), (b"", bytes(8), *seeds))
        return function

    return register


@contextmanager
def allowed(*kinds: type[BaseException]) -> Iterator[None]:
    """Let errors of the package pass that say what is wrong, on one line, and these kinds."""
    try:
        yield
    except EngineError:
        raise
    except StreamloaderError as error:
        text = str(error)
        assert error.problem and not CONTROL.search(text), repr(error)
        assert len(text) < 5000, f"an error of {len(text)} characters: {text:.500}"
    except kinds:
        pass


class Golden(MAKE_BAD.Files):  # type: ignore[misc, name-defined]
    """The objects of a golden dataset, all of them, to be changed."""

    def __init__(self, name: str) -> None:
        self.root, self.objects = json.loads(_golden(name)["zarr.json"]), dict(_golden(name))
        del self.objects["zarr.json"]

    def restate(self) -> None:
        """State the digest that fits."""
        self.ours["digest"] = naive_reader.digest_of(self.ours)

    def all(self) -> dict[str, bytes]:
        """Return the objects with the root document."""
        return {**self.objects, "zarr.json": json.dumps(self.root).encode()}


@cache
def _golden(name: str) -> Mapping[str, bytes]:
    folder = GOLDEN / name
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Objects:
    """A folder in memory, with what `naive_reader` needs of a path."""

    def __init__(self, objects: Mapping[str, bytes], path: str = "") -> None:
        self.objects, self.path = objects, path

    def __truediv__(self, name: str) -> "Objects":
        return Objects(self.objects, f"{self.path}/{name}".lstrip("/"))

    def is_file(self) -> bool:
        return self.path in self.objects

    def read_bytes(self) -> bytes:
        return self.objects[self.path]


class Place:
    """A place in memory for the objects of one dataset after another; what stays the same is not written again."""

    def __init__(self) -> None:
        self.store = open_store(f"memory://{uuid.uuid4().hex}/fuzz")
        self._stored: dict[str, bytes] = {}

    def put(self, objects: Mapping[str, bytes]) -> str:
        """Write these objects and no others; return their URL."""
        for path in self._stored.keys() - objects.keys():
            self.store.delete([path])
        for path, data in objects.items():
            if self._stored.get(path) != data:
                self.store.put(path, data)
        self._stored = dict(objects)
        return self.store.url


place = cache(Place)  # of this process


def temporary_folder() -> Path:
    """Return a folder that is removed when this process exits, or with that of the fuzzer."""
    path = tempfile.mkdtemp(prefix="fuzz-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def columns_of(url: str, *, split: str | None = None, stream: bool = False) -> dict[str, Any] | None:
    """Return all columns and lengths of a dataset, None if that is an error; by batches if `stream`."""
    with allowed():
        ds = sl.open(url, split=split)
        if len(ds) > MOST_READ:
            return None
        found = ds[:]
        assert all(len(column) == len(ds) for column in found.values())
        for name in ds.manifest.lengths:
            with allowed():
                assert len(ds.lengths(name)) == len(ds)
        if stream and len(ds):
            with allowed():
                batches = list(sl.NumpyDataset(url, split=split, batch_size=len(ds), shuffle=False))
                assert len(batches) == 1
                for name, column in found.items():  # ragged rows of a batch are concatenated
                    ragged = ds.fields[name].kind == "ragged"
                    assert_same(batches[0][name], np.concatenate(column) if ragged else column)
        return found
    return None


def naive_columns(objects: Mapping[str, bytes], split: str | None = None) -> dict[str, Any] | None:
    """Return what the naive reader reads, None if it refuses or fails, which hostile documents let it do."""
    try:
        return naive_reader.read(Objects(objects), split)[1]  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - it is no part of what is tested
        return None


def compare(objects: Mapping[str, bytes], *, same: bool = False, split: str | None = None, stream: bool = False) -> Any:
    """Read a dataset, and compare it with what the naive reader reads. `same`: what that reads has to be read."""
    found = columns_of(place().put(objects), split=split, stream=stream)
    if found is None and not same:
        return None
    wanted = naive_columns(objects, split)
    assert found is not None or wanted is None, "the naive reader reads it"
    if found is not None and wanted is not None:
        assert set(found) == set(wanted)
        for name, column in wanted.items():
            assert_same(found[name], column)
    return found


def drawn_chunk(draw: Draw) -> tuple[Golden, str, int, int]:
    """Draw a dataset, and a field, a shard and a chunk of it."""
    files = Golden(draw.choice(BASES))
    name = draw.choice(sorted(files.ours["fields"]))
    shard = draw.below(len(files.table(name)))
    return files, name, shard, draw.below(len(files.bodies(name, shard)))


@target()
def manifest(draw: Draw) -> None:
    """The root document: the manifest with a digest that fits, its splits, and everything around it."""
    name, split = draw.choice([("free", None), ("appended", None), ("lengths", None), ("splits", "train")])
    files, around = Golden(name), draw.below(4) == 0
    if around:
        files.root = edited_json(files.root, draw)
    else:
        files.root = edited_json(files.root, draw, lambda root: root["attributes"]["streamloader"])
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # no manifest that has a digest
            files.restate()
    found = compare(files.all(), split=split)
    if found is not None:
        opened = open_root(open_store(place().store.url), split).manifest
        assert naive_reader.digest_of(json.loads(json.dumps(opened.to_json()))) == opened.digest


@target(b"\x00\x01[" + b"x" * 20, *(b"\x00\x01" + path.read_bytes() for path in sorted(V1.glob("bad/*/zarr.json"))))
def documents(draw: Draw) -> None:
    """The root document and the job file of an unfinished conversion, as bytes."""
    path, objects = draw.choice(["zarr.json", "_streamloader/job.json"]), dict(_golden("free"))
    job = {"by": "convert", "fields": ["x"], "shards": 3, "splits": ["train"]}
    base = objects.pop("zarr.json") if path == "zarr.json" else json.dumps(job).encode()
    body = draw.rest() if draw.below(2) else edited_bytes(base, draw)
    columns_of(place().put({**objects, path: body, "_streamloader/receipts/0.json": b"{}"}))


@target()
def tables(draw: Draw) -> None:
    """The chunk table, whose hash and digest fit."""
    files, name, _, _ = drawn_chunk(draw)
    table = files.table(name)
    for _ in draw.times():
        table.reshape(-1)[draw.below(table.size)] = draw.integer() % 2**32
    files.ours["fields"][name]["stored"] += draw.choice([0, 0, 1, 2**40])
    files.put_table(name, table)
    compare(files.all(), same=True, stream=not draw.below(8))


@target()
def pages(draw: Draw) -> None:
    """The bytes of a page: of a chunk table or a table of lengths, whose checksum fits."""
    files = Golden(draw.choice(["free", "lengths", "one"]))
    path = draw.choice(sorted(path for path in files.objects if path.startswith("_streamloader") and "/c/" in path))
    page = edited_bytes(files.objects[path][:-4], draw)
    same = MAKE_BAD.sealed(page) == files.objects[path]
    files.objects[path] = MAKE_BAD.sealed(page)
    found = compare(files.all())
    assert found is None or same or "lengths" in path


@target()
def index(draw: Draw) -> None:
    """The index of a shard, whose checksum fits: only damage and `verify` let it be read."""
    files, name, shard, _ = drawn_chunk(draw)
    field, path = files.ours["fields"][name], files.shard(name, shard)
    body, size = files.objects[path], 16 * (field["shard"] // field["chunk"]) + 4
    entries, damaged = np.frombuffer(body[-size:-4], "<u8").copy(), draw.below(3)
    for _ in draw.times():
        entries[draw.below(entries.size)] = draw.integer() % 2**64
    edited = MAKE_BAD.sealed(entries.tobytes())
    files.objects[path] = body[:-size] + edited
    if damaged == 1:
        files.flip(path, draw.below(len(body) - size))
    found = columns_of(place().put(files.all()))
    assert (found is None) == (damaged == 1)
    if damaged == 2:
        with allowed():
            problems = sl.verify(place().store.url).problems
            assert bool(problems) == (edited != body[-size:]), problems


@target(*(bytes([base, 0, 0, 0]) for base in range(6)))
def frames(draw: Draw) -> None:
    """The stored bytes of a chunk, a frame of zstd or blosc or none, whose checksums fit."""
    files, name, shard, chunk = drawn_chunk(draw)
    stream, body = not draw.below(8), edited_bytes(files.bodies(name, shard)[chunk], draw)
    files.replace_chunk(name, shard, chunk, body)
    compare(files.all(), stream=stream)


PACK: dict[str, Callable[[bytes], bytes]] = {
    "none": bytes,
    "lz4": lambda body: bytes(blosc.compress(body, b"lz4", 5, blosc.NOSHUFFLE)) if body else b"",
    "zstd": lambda body: bytes(zstd.compress(body, 3)),
}
UNPACK: dict[str, Callable[[bytes], bytes]] = {"none": bytes, "lz4": blosc.decompress, "zstd": zstd.decompress}


@target()
def items(draw: Draw) -> None:
    """The decoded bytes of a chunk, compressed again: of variable-length fields the count, lengths and values."""
    files, name, shard, chunk = drawn_chunk(draw)
    field, bodies = files.ours["fields"][name], files.bodies(name, shard)
    stream, payload = not draw.below(8), bytes(UNPACK[field["codec"]](bodies[chunk]))
    changed = edited_bytes(payload, draw)
    if field["kind"] != "tensor":  # what another writer would state
        field["nbytes"] = max(0, field["nbytes"] + draw.choice([0, len(changed) - len(payload)]))
    files.replace_chunk(name, shard, chunk, PACK[field["codec"]](changed))
    compare(files.all(), same=True, stream=stream)


@target()
def lengths(draw: Draw) -> None:
    """The table of lengths: numbers whose hash fits, or a frame; what it says never changes the samples."""
    files = Golden("lengths")
    name = draw.choice(sorted(files.ours["lengths"]))
    field, count = files.ours["fields"][name], files.ours["num_samples"]
    starts = range(0, count, field["shard"])
    paths = [f"_streamloader/lengths/{name}/c/{number}" for number in range(len(starts))]
    rows = [np.frombuffer(zstd.decompress(files.objects[path][:-4]), "<u4").copy() for path in paths]
    number, as_frame = draw.below(len(paths)), draw.below(3) == 0
    if as_frame:
        frame = edited_bytes(files.objects[paths[number]][:-4], draw)
        files.objects[paths[number]] = MAKE_BAD.sealed(frame)
    else:
        for _ in draw.times():
            rows[number][draw.below(rows[number].size)] = draw.integer() % 2**32
        files.objects[paths[number]] = MAKE_BAD.sealed(bytes(zstd.compress(rows[number], 3)))
        parts = [row[: min(field["shard"], count - start)] for row, start in zip(rows, starts, strict=True)]
        hashes = b"".join(naive_reader.hashlib.sha256(part.tobytes()).digest() for part in parts)
        files.ours["lengths"][name] = naive_reader.hashlib.sha256(hashes).hexdigest()
    objects = files.all()
    url = place().put(objects)
    ds = sl.open(url)
    with allowed():
        found = ds.lengths(name) * ds.fields[name].item_bytes
        assert as_frame or found.tolist() == np.concatenate(parts).tolist()
    for bucket in (False, True):  # memory is reserved, and buckets are made, by these lengths
        with allowed():
            more: dict[str, Any] = {"bucket_by": name} if bucket else {}
            batches = list(sl.NumpyDataset(url, batch_size=3, shuffle=False, **more))
            assert bucket or sum(len(batch["label"]) for batch in batches) == len(ds)


@cache
def _with_deleted() -> Mapping[str, bytes]:
    url = Place().put(_golden("lengths"))
    sl.delete(url, ids=[1, 4, 5])
    store = open_store(url)
    return {info.path: store.get(info.path) for info in store.list()}


@target()
def deleted(draw: Draw) -> None:
    """The list of deleted samples, whose checksum, hash and count fit."""
    objects = dict(_with_deleted())
    root = json.loads(objects["zarr.json"])
    ours = root["attributes"]["streamloader"]
    path = f"_streamloader/deleted.{ours['deleted']['generation']}"
    numbers = bytes(zstd.decompress(objects[path][:-4]))
    changed = edited_bytes(numbers, draw)
    changed = changed[: len(changed) // 8 * 8]
    frame = bytes(zstd.compress(changed, 3)) if changed else b""
    objects[path] = MAKE_BAD.sealed(edited_bytes(frame, draw) if not changed or draw.below(4) == 0 else frame)
    ours["deleted"] |= {"count": len(changed) // 8, "sha256": naive_reader.hashlib.sha256(changed).hexdigest()}
    ours["digest"] = naive_reader.digest_of(ours)
    compare({**objects, "zarr.json": json.dumps(root).encode()}, same=True)


@target()
def objects(draw: Draw) -> None:
    """Any object with any damage: the same data, or an error, and never other data."""
    name = draw.choice(BASES)
    given = dict(_golden(name))
    for _ in range(1 + draw.below(2)):
        path = draw.choice(sorted(path for path in given if not path.endswith("zarr.json")))
        given[path] = edited_bytes(given[path], draw)
    found, wanted = columns_of(place().put(given), stream=not draw.below(8)), naive_columns(_golden(name))
    assert wanted is not None
    for field, column in wanted.items() if found is not None else ():
        assert_same(found[field], column)


@cache
def _runs() -> list[tuple[Any, list[dict[str, Any]]]]:
    """Loaders of small datasets, of one and of a mixture, each with states that they had."""
    first, second = Place().put(_golden("free")), Place().put(_golden("lengths"))
    made = []
    for loader in (
        sl.NumpyDataset(first, batch_size=3, fields=["label"]),
        sl.NumpyDataset(second, batch_size=2, fields=["label"], where="label >= 0"),
        NumpyMixture({first: 3.0, second: 1.0}, batch_size=4, fields=["label"]),
    ):
        states = [loader.state_dict()]
        for _ in islice(loader, 3):
            states.append(loader.state_dict())
        made.append((loader, states))
    return made


@target()
def state(draw: Draw) -> None:
    """A saved state: it is refused, or the run goes on from it, and its own state is what it says."""
    loader, states = draw.choice(_runs())
    changed = edited_json(draw.choice(states), draw)
    with allowed():
        loader.load_state_dict(changed, force=bool(draw.below(2)))
        again = loader.state_dict()
        loader.load_state_dict(json.loads(json.dumps(again)))
        assert loader.state_dict() == again
        if loader.epoch < 2**40:
            for batch in islice(loader, 2):
                assert 1 <= len(batch["label"]) <= 4
    loader.close()


COLUMNS: dict[str, Any] = {
    "a": np.arange(-4, 12, dtype=np.int64),
    "b": np.array([7, 0, 255, 3] * 4, np.uint8),
    "yes": np.array([True, False] * 8),
    "word": ["cat", "dog", "é", ""] * 4,
    "kind": np.array([0, 1, 2, 1] * 4, np.int64),
    "t": np.arange(16, dtype=np.int64) * 10,
}
CONDITIONS = ["a >= 3 and b == 7", "a in (1, 2, 3) or not yes", "0 < a <= b // 2", "-a % 3 == 1", "word == 'cat'"]
CONDITIONS += ["word not in ('dog', 'é')", "kind == 'ant'", "kind in ['ant', 'bee']", "t >= '1970-01-02T00:00'"]
CONDITIONS += ["'a' > 3", "a / 2 > 1.5 and (yes or b > 254)", "a != b != 3", "(a + b) * 2 - 1 >= 7", "a == 10**3"]


@target(*(bytes([1]) + text.encode() for text in CONDITIONS), *(bytes([0, number]) for number in range(14)))
def where(draw: Draw) -> None:
    """A condition: what Python says of each row, if it is about small numbers."""
    if draw.below(2) == 0:
        text = edited_bytes(draw.choice(CONDITIONS).encode(), draw).decode("utf-8", "replace")
    else:
        text = draw.rest().decode("utf-8", "surrogateescape" if draw.below(9) == 0 else "replace")
    with allowed(), warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        condition = Condition.parse(text)
        if condition.fields <= set(COLUMNS):
            times = {"t": lambda value: TimeUnits.parse("hours since 1970-01-01", "standard").number(value)}
            condition = condition.with_values({"kind": ("ant", "bee", "cat")}, ("word",), times)
            mask = condition.mask({name: COLUMNS[name] for name in condition.fields})
            assert (mask.dtype, mask.shape) == (np.bool_, (16,)), mask
            if _plain(text) and not condition.fields & {"word", "kind", "t"}:
                expected = [_of_python(text, row) for row in range(16)]
                assert all(one in (None, found) for one, found in zip(expected, mask.tolist(), strict=True)), text


def _plain(text: str) -> bool:
    """Return whether Python's numbers are those of numpy here: all are whole and small."""
    values = [node.value for node in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(node, ast.Constant)]
    return all(isinstance(value, int) and abs(value) < 1000 for value in values)


def _of_python(text: str, row: int) -> bool | None:
    """Return what Python says of a condition that was parsed: names, numbers and operators, and nothing else.

    None for a division by zero, which is infinity or NaN in numpy.
    """
    values = {name: COLUMNS[name][row].item() for name in ("a", "b", "yes")}
    try:
        return bool(eval(text.strip(), {"__builtins__": {}}, values))
    except ZeroDivisionError:
        return None


REFERENCES = {
    "version": 1,
    "templates": {"u": "memory://elsewhere/x", "f": "{{c}}/data"},
    "gen": [{"key": "b/{{i}}", "url": "data.{{i + 1}}", "offset": "{{i * 8}}", "dimensions": {"i": [0]}}],
    "refs": {
        ".zgroup": {"zarr_format": 2},
        "a/.zarray": json.dumps({"zarr_format": 2, "shape": [4, 4], "chunks": [1, 4], "dtype": "<i4", "order": "C"}
                                | {"fill_value": -1, "filters": None, "compressor": None}),
        "a/.zattrs": '{"_ARRAY_DIMENSIONS": ["time", "x"]}',
        "a/0.0": ["data.1", 0, 16],
        "a/1.0": "base64:AAAAAAEAAAACAAAAAwAAAA==",
        "a/2.0": ["{{u}}", 3, 16],
        "a/3.0": ["{{f(c='x')}}", 3],
    },
}  # fmt: skip
SECRET = b"what lies outside the folder of the references"


@cache
def _references() -> Path:
    root = temporary_folder()
    (root / "in").mkdir()
    (root / "in" / "data.1").write_bytes(bytes(range(64)))
    (root / "data").write_bytes(SECRET)
    (root / "in" / "data.link").symlink_to(root / "data")
    return root / "in" / "it.json"


@target(b'\x01{"version": 1, "refs": {"a": ["../data", 0, 9]}}', b'\x01{"version": 1, "refs": {"a": ["data.link"]}}')
def references(draw: Draw) -> None:
    """A file of references: nothing outside its folder is read, whatever it names."""
    path = _references()
    body = draw.rest() if draw.below(4) == 1 else json.dumps(edited_json(REFERENCES, draw)).encode()
    found = None
    with allowed():
        found = JsonReferences(body, "x.json")
        for key in list(found.values)[:30]:
            with allowed(FileNotFoundError):
                found.find(key)
    if found is None:
        return
    path.write_bytes(body)
    with allowed():
        store = open_store(f"reference://::{path}")
        for key in list(found.values)[:30]:
            if isinstance(key, str) and "://" not in str(found.values[key]).removeprefix("memory://"):
                with allowed(FileNotFoundError):
                    assert SECRET[:9] not in store.get(key)
    with allowed():
        dataset = sl.NumpyDataset(str(path), batch_size=2, sample_axis="time", shuffle=False)
        for _ in islice(dataset, 5):
            pass
        dataset.close()


ATTRIBUTES = {"scale_factor": 0.5, "add_offset": 3, "_FillValue": -1, "missing_value": [7, 8], "valid_range": [-5, 90]}
ATTRIBUTES |= {"valid_min": 0, "_Unsigned": "true", "valid_max": "10b", "dtype": "bool", "units": "days since 2000-1-1"}


@target()
def attributes(draw: Draw) -> None:
    """CF attributes of an array: values are unpacked one by one as all at once, missing ones are NaN."""
    dtype = np.dtype(draw.choice(["i1", "u1", ">i2", "u2", "i4", ">u4", "i8", "u8", "f2", "f4", ">f8", "b1"]))
    kept = {name: value for name, value in ATTRIBUTES.items() if draw.below(2)}
    given = edited_json(kept, draw)
    if draw.below(3) == 0:  # netCDF's are arrays and numpy's scalars
        given = {name: np.asarray(value) if isinstance(value, int | float) and abs(value) < 2**63 else value
                 for name, value in given.items()}  # fmt: skip
    stored = np.frombuffer((draw.take(64) + bytes(range(64)))[:64], np.uint8).view(dtype.newbyteorder("="))
    with allowed(), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        unpacking = unpacking_of(given, dtype, "x", as_xarray=bool(draw.below(2)))
        if unpacking is not None:
            out, spread = np.empty(stored.shape, unpacking.dtype), np.empty((*stored.shape, 2), unpacking.dtype)[:, 0]
            unpacking.write(stored, out)
            unpacking.write(stored, spread)
            np.testing.assert_array_equal(out, spread)
            np.testing.assert_array_equal(out, unpacking.apply(stored.astype(unpacking.stored)))
            if out.dtype.kind == "f":
                assert np.isnan(out[unpacking.missing(stored.astype(unpacking.stored))]).all()
            assert len(str(unpacking)) > 1


DATES = ["days since 1900-01-01", "hours since 1582-10-15 06:30:00 +1:30", "s since 1-1-1", "minutes since 19700101"]
DATES += ["seconds since 2000-2-29T12:00:00.5Z", "days since 31-DEC-1999", "weeks since 1970-01-01 11:00 PM"]
KINDS = ["standard", "gregorian", "proleptic_gregorian", "julian", "noleap", "365_day", "all_leap", "360_day", "x"]


@target(*(bytes([0, number]) for number in range(7)))
def times(draw: Draw) -> None:
    """CF's units of times: what is understood has a date that is read as the same time, cftime's where it has one."""
    calendar = draw.choice(KINDS)
    text = edited_bytes(draw.choice(DATES).encode(), draw).decode("utf-8", "replace")
    parsed = TimeUnits.parse(text, calendar)
    if parsed is None:
        return
    values = np.array([draw.integer() % 2**63 for _ in range(3)] + [0, 1, -1, 1000], np.int64)
    found = parsed.times(values)
    floats = parsed.times(values.astype(np.float64))
    assert found.dtype == floats.dtype == np.int64
    if parsed.calendar is None:
        return
    for time in found[found != MISSING].tolist():
        assert parsed.calendar.parse(parsed.calendar.format(time))[0] <= time
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = cftime.num2date(1000, text, calendar, only_use_cftime_datetimes=True)
        except Exception:  # noqa: BLE001 - it understands fewer texts, and raises many kinds
            return
    if wanted.year > 1 and parsed.unit >= 10**6:
        shown = parsed.calendar.format(int(found[-1]))
        assert shown.split("T")[0] == wanted.strftime("%Y-%m-%d").rjust(10, "0"), (text, calendar, shown, wanted)
