"""Copying rows and parsing lengths: the C extension and the Python that stands in for it do the same."""

import mmap
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from amounts import examples
from extensions import compiled, module_with, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrun import run_python

from streamloader.errors import CorruptError
from streamloader.format.codecs import pack_items

ROOT = Path(__file__).parent.parent
EXTENSION = "streamloader.format._rows"
EXTREMES = [-(2**63), -1, 0, 1, 2**31, 2**32, 2**62, 2**63 - 1]


def rows_with(extension: ModuleType | None) -> ModuleType:
    """The module `rows` as it is where this is the extension; None: where there is none."""
    return module_with("streamloader.format.rows", EXTENSION, extension)


PYTHON = rows_with(None)


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """The module `rows` with the extension as it is here now, not as it was when the package was installed."""
    extension = compiled(EXTENSION, tmp_path_factory.mktemp("extension"))
    module = rows_with(extension)
    assert module.copy is extension.copy and PYTHON.copy is PYTHON._copy
    return module


@pytest.fixture(params=["python", pytest.param("native", marks=needs_compiler)])
def rows(request):
    """Each implementation."""
    return PYTHON if request.param == "python" else request.getfixturevalue("native")


def ints(values):
    return np.array(values, np.int64)


def outcome(function, *arguments):
    """What a call returns, or the type and the text of its error."""
    try:
        return function(*arguments)
    except (ValueError, CorruptError) as error:
        return type(error).__name__, str(error)


def copied(rows, source, starts, sizes, length, at=None):
    """The target after a copy, and what the call gave."""
    target = bytearray(b"\xee" * length)
    return outcome(rows.copy_rows, source, starts, sizes, target, at), bytes(target)


@st.composite
def drawn_rows(draw):
    """Rows that overlap, some of them empty; one in a while is out of bounds by a little or by very much."""
    source, length = draw(st.binary(max_size=60)), draw(st.integers(0, 80))
    anywhere = st.one_of(st.integers(-1, 90), st.sampled_from(EXTREMES))
    within = draw(st.booleans())

    def drawn(most):
        inside = st.integers(0, min(max(0, most), 2**63 - 1))
        return draw(inside if within else st.one_of(inside, anywhere))

    count = draw(st.integers(0, 12))
    size = draw(st.one_of(st.none(), st.integers(0, 8)))
    sizes = [drawn(min(len(source), length, 12)) if size is None else size for _ in range(count)]
    starts = [drawn(len(source) - n) for n in sizes]
    at = [drawn(length - n) for n in sizes] if draw(st.booleans()) else None
    return source, ints(starts), ints(sizes) if size is None else size, length, at if at is None else ints(at)


def model(source, starts, sizes, length, at):
    """The target, or None for rows out of bounds: unbounded integers, one row after the other."""
    target, rows, end = bytearray(b"\xee" * length), [], 0
    for i, start in enumerate(starts.tolist()):
        size = sizes if isinstance(sizes, int) else int(sizes[i])
        to = end if at is None else int(at[i])
        if min(start, size, to) < 0 or start + size > len(source) or to + size > length:
            return None
        rows.append((start, size, to))
        end = to + size
    for start, size, to in rows:
        target[to : to + size] = source[start : start + size]
    return bytes(target)


@needs_compiler
@given(drawn_rows())
@settings(max_examples=examples(500), deadline=None)
def test_both_copy_what_the_model_copies_or_nothing(native, drawn):
    source, starts, sizes, length, at = drawn
    given_, target = copied(native, source, starts, sizes, length, at)
    assert (given_, target) == copied(PYTHON, source, starts, sizes, length, at)
    expected = model(source, starts, sizes, length, at)
    assert target == (b"\xee" * length if expected is None else expected)
    assert given_ is None if expected is not None else given_[0] == "ValueError"


@needs_compiler
@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_both_fill_what_ascending_rows_leave_or_nothing(native, data):
    sizes = ints(data.draw(st.lists(st.integers(0, 5), max_size=8)))
    gaps = [data.draw(st.integers(0, 4)) for _ in range(len(sizes) + 1)]
    first, anywhere = data.draw(st.integers(0, 3)), st.one_of(st.integers(-1, 40), st.sampled_from(EXTREMES))
    at = first + np.cumsum(gaps[:-1], dtype=np.int64) + np.cumsum(sizes) - sizes
    stop = first + sum(gaps) + int(sizes.sum())
    length = stop + 2
    filler, source = bytes(range(100, 100 + data.draw(st.integers(1, 5)))), bytes(range(10))
    valid = max(gaps) <= len(filler)
    if data.draw(st.booleans()):  # one of the numbers is another one
        numbers = [first, *at.tolist(), stop]
        changed = data.draw(st.integers(0, len(numbers) - 1))
        numbers[changed] = data.draw(anywhere)
        first, *moved, stop = numbers
        at = ints(moved)
        ends = [first, *(at.astype(object) + sizes.astype(object)).tolist()]
        between = [begin - end for begin, end in zip([*moved, stop], ends, strict=True)]
        valid = first >= 0 and max([stop, *ends]) <= length and min(between) >= 0 and max(between) <= len(filler)
    found = []
    for rows in (native, PYTHON):
        target = bytearray(b"\xee" * length)
        arguments = source, np.arange(len(sizes)) % 5, sizes, target, at
        found.append((outcome(partial(rows.copy_rows, *arguments, padding=(filler, first, stop))), bytes(target)))
    assert found[0] == found[1]
    expected = bytearray(b"\xee" * length)
    if valid:
        for row, (size, to) in enumerate(zip(sizes.tolist(), at.tolist(), strict=True)):
            expected[to : to + size] = source[row % 5 : row % 5 + size]
        for end, begin in zip([first, *(at + sizes).tolist()], [*at.tolist(), stop], strict=True):
            expected[end:begin] = filler[: begin - end]
    assert found[0][1] == expected
    assert found[0][0] is None if valid else found[0][0][0] == "ValueError"


@needs_compiler
@given(st.integers(0, 2**32), st.sampled_from([0, 1, 8, 300, None]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_many_rows_are_copied_alike(native, seed, size, shuffled):
    rng = np.random.default_rng(seed)
    source, count = rng.integers(0, 256, 100_000, np.uint8), int(rng.integers(200, 3000))
    sizes = rng.integers(0, 200, count) if size is None else size
    ends = np.cumsum(np.broadcast_to(sizes, count))
    starts = rng.integers(0, source.size - 300, count)
    at = rng.permutation(ends - np.broadcast_to(sizes, count)) if shuffled else None
    length = int(ends[-1]) + 300
    assert copied(native, source, starts, sizes, length, at) == copied(PYTHON, source, starts, sizes, length, at)
    starts[-1] = source.size
    bad = copied(native, source, starts, 1, length + count, at)
    assert bad == copied(PYTHON, source, starts, 1, length + count, at) and f"row {count - 1} of 1 bytes" in bad[0][1]
    assert bad[1] == b"\xee" * (length + count)


@needs_compiler
@given(st.binary(min_size=1, max_size=40), st.data())
@settings(deadline=None)
def test_rows_within_one_buffer_are_copied_in_their_order(native, memory, data):
    def positions(count):
        return ints(data.draw(st.lists(st.integers(0, len(memory) // 2), min_size=count, max_size=count)))

    starts, at, size = positions(6), positions(6), len(memory) // 2
    results = []
    for rows in (native, PYTHON):
        both = bytearray(memory)
        rows.copy_rows(both, starts, size, both, at)
        results.append(both)
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, ">u2").reshape(2, 4)])
def test_source_and_target_are_any_contiguous_buffers_and_arrays_may_be_unaligned(rows, kind):
    target = np.zeros((2, 3), ">i2")
    starts = np.frombuffer(b"_" + ints([0, 8]).tobytes(), np.int64, offset=1)
    rows.copy_rows(kind(bytes(range(16))), starts, starts, target, None)
    assert target.tobytes() == bytes(range(8, 16)) + bytes(4)


@pytest.mark.parametrize(
    ("starts", "sizes", "at"),
    [([0, 1], [1], None), ([0], [1, 2], None), ([0, 1], 1, [0]), ([[0]], 1, None), ([], [0], None)],
)
def test_arrays_of_different_lengths_are_an_error(rows, starts, sizes, at):
    arrays = [ints(values) if isinstance(values, list) else values for values in (starts, sizes)]
    with pytest.raises(ValueError, match=r"expected int64\[\d\]"):
        rows.copy_rows(bytes(9), *arrays, bytearray(9), None if at is None else ints(at))


def test_other_numbers_read_only_targets_and_buffers_with_gaps_are_errors(rows):
    zero = ints([0])
    with pytest.raises(ValueError, match=r"starts is int32\[1\], expected int64\[1\]"):
        rows.copy_rows(bytes(9), np.array([0], np.int32), 1, bytearray(9))
    with pytest.raises(TypeError, match="read-"):
        rows.copy_rows(bytes(9), zero, 1, bytes(9))
    gaps = np.zeros(9, np.uint8)[::2]
    for source, target in ((gaps, bytearray(9)), (bytes(9), gaps)):
        with pytest.raises((TypeError, ValueError), match=r"contiguous|bytes-like"):
            rows.copy_rows(source, zero, 1, target)


def test_rows_of_a_mapping_of_more_than_100_gb(rows, tmp_path):
    at = 123 << 30
    with (tmp_path / "sparse").open("w+b") as file:
        file.truncate(at + 9)
        file.seek(at)
        file.write(b"far away.")
        file.flush()
        with mmap.mmap(file.fileno(), 0) as mapping:
            target = bytearray(6)
            rows.copy_rows(mapping, ints([at + 4, 0, at]), ints([4, 1, 1]), target)
            assert target == b"away\0f"
            rows.copy_rows(b"near", ints([0]), 4, mapping, ints([at]))
            assert mapping[at:] == b"nearaway."
            with pytest.raises(ValueError, match=f"row 0 of 6 bytes, from byte {at + 4} "):
                rows.copy_rows(mapping, ints([at + 4]), 6, target)


@needs_compiler
def test_other_threads_run_during_a_large_copy_and_not_during_a_small_one(native):
    """No thread is made to give the lock away meanwhile: another one runs if the copy does so itself."""
    counted, ends = [0], threading.Event()

    def count():
        while not ends.is_set():
            counted[0] += 1
            time.sleep(0)  # gives the lock away

    def advanced(size):
        source, target = bytes(4 * size), bytearray(4 * size)
        starts = np.arange(4) * size
        before = counted[0]
        native.copy_rows(source, starts, size, target)
        return counted[0] > before

    interval, thread = sys.getswitchinterval(), threading.Thread(target=count, daemon=True)
    thread.start()
    sys.setswitchinterval(60)
    try:
        assert any(advanced(16 << 20) for _ in range(50))
        assert not any(advanced(1000) for _ in range(50))
    finally:
        sys.setswitchinterval(interval)
        ends.set()
        thread.join()


@st.composite
def chunks(draw):
    """`vlen-bytes` of some items, most of them damaged, and a count of items."""
    items = draw(st.lists(st.binary(max_size=9), max_size=12))
    data, count = bytearray(b"".join(pack_items(items))), draw(st.sampled_from([len(items), len(items) + 1, 0]))
    for _ in range(draw(st.integers(0, 2))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.sampled_from([0, 1, 4, 255]))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data), count


def lengths(rows, data, count):
    found = outcome(rows.parse_lengths, memoryview(data), count)
    return found.tolist() if isinstance(found, np.ndarray) else found


@needs_compiler
@given(st.one_of(chunks(), st.tuples(st.binary(max_size=99), st.integers(0, 9))))
@settings(max_examples=examples(500), deadline=None)
def test_both_parse_the_same_lengths_and_find_the_same_damage(native, chunk):
    found = lengths(native, *chunk)
    assert found == lengths(PYTHON, *chunk)
    if isinstance(found, list):
        data, count = chunk
        assert found[0] == 4 and found[-1] == len(data)
        assert b"".join(pack_items([data[a + 4 : b] for a, b in pairwise(found)])) == data
        assert len(found) == count + 1


def test_lengths_of_many_items_and_the_largest_length(rows):
    sizes = np.random.default_rng(0).integers(0, 50, 3000)
    data = b"".join(pack_items([bytes(size) for size in sizes.tolist()]))
    assert rows.parse_lengths(memoryview(data), 3000).tolist() == [4, *(4 + np.cumsum(4 + sizes)).tolist()]
    longest = data[: -4 - int(sizes[-1])] + b"\xff" * 4
    with pytest.raises(CorruptError, match=rf"end at byte {len(longest) + 2**32 - 1} of {len(longest)}"):
        rows.parse_lengths(memoryview(longest), 3000)


WITHOUT = """
import sys
sys.modules["streamloader.format._rows"] = None
import numpy as np
import streamloader as sl
from streamloader.format import rows
with sl.Writer(sys.argv[1], {"x": "ragged:int32", "t": "text"}) as out:
    for i in range(100):
        out.write({"x": np.arange(i, dtype=np.int32), "t": "t" * i})
found = next(iter(sl.StreamingDataset(sys.argv[1], batch_size=100, shuffle=False)))
print(rows.copy is rows._copy, int(found["x"].sum()), sum(map(len, found["t"])))
"""


@pytest.mark.long
def test_without_the_extension_datasets_are_written_and_read(tmp_path):
    assert run_python("-c", WITHOUT, tmp_path / "data").stdout.split() == ["True", "161700", "4950"]


@pytest.mark.long
@needs_compiler
def test_the_package_builds_with_a_compiler_and_without_one_and_contains_the_source(tmp_path):
    pytest.importorskip("setuptools")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        ROOT / "streamloader", tmp_path / "streamloader", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )

    def build(*command, **variables):
        environment = {**os.environ, **variables}
        subprocess.run([sys.executable, "setup.py", "-q", *command], cwd=tmp_path, env=environment, check=True)

    build("build", "--build-base", "without", CC="no-such-compiler")
    assert not list(tmp_path.rglob("*.so")) and list((tmp_path / "without").rglob("rows.py"))
    build("build", "--build-base", "with")
    assert sorted(path.name for path in tmp_path.rglob("*.so")) == ["_packing.abi3.so", "_rows.abi3.so"]
    build("sdist")
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as files:
        names = {Path(name).name for name in files.getnames()}
        assert {"_rows.c", "_rows.pyi", "rows.py", "_packing.c", "_packing.pyi", "packing.py", "setup.py"} <= names
