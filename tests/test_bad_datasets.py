"""Broken and hostile datasets: each gives its one clear error, and never wrong data, a crash or much memory."""

import json
import resource
import sys
import uuid
from pathlib import Path

import pytest
from amounts import examples
from commands import run
from conversions import contents, module_at
from golden import EXPECTED as GOLD
from golden import GOLDEN, V1, assert_same, expected_column
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrun import run_python

import streamloader as sl
from streamloader import errors
from streamloader.errors import StreamloaderError
from streamloader.storage import open_store

BAD = V1 / "bad"
EXPECTED = json.loads((BAD / "expected.json").read_text())
WRONG = sorted(name for name, expected in EXPECTED.items() if expected["error"])
SAME = sorted(set(EXPECTED) - set(WRONG))
MOST_GROWTH = 32 << 20  # bytes that reading a bad dataset may add to the peak of reading a good one
CLAIMED = 1 << 30  # bytes that it may allocate, used or not, beside those of a good one: mostly stacks of threads


def read_all(url, split=None):
    """Read every sample one by one, then all at once."""
    ds = sl.open(url, split=split)
    for i in range(min(len(ds), 100)):
        ds[i]
    return ds[:]


def stream(url, expected, shuffle):
    """Iterate one epoch, and check what comes before an error: it must be the samples of the good dataset."""
    decode = "pillow" if expected["when"] == "decode" else None
    loader = sl.StreamingDataset(
        url, batch_size=1, split=expected.get("split"), shuffle=shuffle, decode=decode, with_index=True
    )
    got = []
    for batch in loader:
        number, base = int(batch["index"][0]), expected.get("base", "free")
        assert batch["label"].tolist() == [GOLD[base]["fields"]["label"]["values"][number]]
        assert_same(batch["wave"].numpy(), expected_column(base, "wave")[number : number + 1])
        blob = "blob" if base == "free" else "caption"
        assert batch[blob] == [expected_column(base, blob)[number]]
        got.append(batch)
    return got


def assert_error_is(error, expected):
    """Fail unless it is the expected error: class, code, the words, and on one line."""
    assert (type(error).__name__, error.code) == (expected["error"], expected["code"])
    text = str(error)
    assert [word for word in expected["says"] if word not in text] == [], text
    assert "\n" not in text
    assert len(text) < 1000


@pytest.mark.quick(56)
@pytest.mark.parametrize("name", WRONG)
def test_a_bad_dataset_gives_its_error_when_it_is_opened_or_read(name):
    expected = EXPECTED[name]
    url = (BAD / name).as_uri()
    if expected["when"] == "decode":  # the bytes are what the dataset holds: only decoding them fails
        assert len(read_all(url)["icon"]) == 1
        return
    with pytest.raises(StreamloaderError) as caught:
        (sl.open if expected["when"] == "open" else read_all)(url, split=expected.get("split"))
    assert_error_is(caught.value, expected)


@pytest.mark.quick(34)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_a_bad_dataset_gives_its_error_when_it_is_streamed(name, shuffle):
    expected = EXPECTED[name]
    with pytest.raises(StreamloaderError) as caught:
        stream((BAD / name).as_uri(), expected, shuffle)
    assert_error_is(caught.value, expected)


@pytest.mark.parametrize("name", SAME)
def test_a_wrong_shard_index_or_table_of_lengths_alone_changes_nothing(name):
    """The chunk table has the same as the index, and reading takes lengths from the chunks."""
    url, base = (BAD / name).as_uri(), EXPECTED[name].get("base", "free")
    found = read_all(url)
    for field in GOLD[base]["fields"]:
        assert_same(found[field], expected_column(base, field))
    assert len(stream(url, EXPECTED[name], shuffle=False)) == GOLD[base]["num_samples"]


def test_every_error_class_of_the_format_has_a_bad_dataset():
    classes = {name for name in errors.__all__ if issubclass(getattr(errors, name), errors.FormatError)}
    assert classes <= {expected["error"] for expected in EXPECTED.values()}


# the arrays of other Zarr are shown
OPENED = [name for name in WRONG if EXPECTED[name]["when"] == "open" and "split" not in EXPECTED[name]]
INSPECTED = [name for name in OPENED if name != "plain_zarr"]


@pytest.mark.parametrize("name", [*INSPECTED, "rewritten_shard", "blosc_bomb", "text_that_is_no_utf8"])
def test_inspect_prints_the_error_on_one_line_and_exits_with_2(name, capsys):
    status, out, err = run(capsys, "inspect", BAD / name)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    assert [word for word in [*EXPECTED[name]["says"], EXPECTED[name]["code"]] if word not in err] == []


def peaks(names):
    """Return by how many bytes reading each dataset raised this process' peak memory, after a good one was read."""
    read_all((GOLDEN / "free").as_uri())
    stream((GOLDEN / "free").as_uri(), {"when": "read"}, shuffle=True)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = 1024 * int(status["VmData"].split()[0]) + CLAIMED
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    grown = {}
    for name in names:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for read in (read_all, lambda url: stream(url, EXPECTED[name], shuffle=True)):  # noqa: B023 - called here
            try:
                read((BAD / name).as_uri())
            except StreamloaderError:
                continue
        grown[name] = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return grown


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on data is Linux's")
def test_no_bad_dataset_takes_much_memory():
    """Bombs claim from 64 MiB to exabytes."""
    code = "import json, test_bad_datasets as t; print(json.dumps(t.peaks(sorted(t.EXPECTED))))"
    grown_by = json.loads(run_python("-c", code).stdout)
    assert [(name, grown) for name, grown in grown_by.items() if grown > MOST_GROWTH] == []


MEMORY = open_store(f"memory://{uuid.uuid4().hex}/fuzz")
OBJECTS = contents(GOLDEN / "free")
FREE = {field: expected_column("free", field) for field in GOLD["free"]["fields"]}


@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_any_damaged_object_gives_the_same_data_or_a_clear_error(data):
    path = data.draw(st.sampled_from(sorted(OBJECTS)))
    damaged = bytearray(OBJECTS[path])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    for name, content in OBJECTS.items():
        MEMORY.put(name, content)
    MEMORY.put(path, bytes(damaged[:cut]))
    try:
        ds = sl.open(MEMORY.url)
        found = ds[:]
        sample = ds[data.draw(st.integers(0, 19))]
    except StreamloaderError as error:
        assert "\n" not in str(error)
        return
    assert set(found) == set(FREE) == set(sample)
    for field, column in FREE.items():
        assert_same(found[field], column)


MAKE_BAD = module_at(V1 / "make_bad.py")


@given(st.sampled_from(["free", "one"]), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_any_chunk_whose_checksums_fit_reads_as_something_or_is_a_clear_error(base, data):
    """An attacker's frames and lengths: the decoders may not crash, and what is read has the right shape."""
    files = MAKE_BAD.Files(base)
    name = data.draw(st.sampled_from(sorted(files.ours["fields"])))
    bodies = files.bodies(name, 0)
    chunk = data.draw(st.integers(0, len(bodies) - 1))
    body = bytearray(bodies[chunk])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, min(24, len(body)) - 1), st.integers(0, len(body) - 1)))
        body[at] = data.draw(st.integers(0, 255))
    files.replace_chunk(name, 0, chunk, bytes(body[: data.draw(st.integers(0, 2 * len(body)))]))
    for path, content in {**files.objects, "zarr.json": json.dumps(files.root).encode()}.items():
        MEMORY.child(base).put(path, content)
    try:
        found = sl.open(MEMORY.child(base).url)[:]
    except StreamloaderError as error:
        assert "\n" not in str(error)
        return
    for field, one in GOLD[base]["fields"].items():
        wanted = expected_column(base, field)
        assert len(found[field]) == len(wanted), one
        if field != name:
            assert_same(found[field], wanted)
