"""Rows that documents are packed into: every element once, within a row, in few rows, by their lengths alone."""

import json
import pickle
import sys
import threading
import time
from itertools import pairwise

import datasets
import numpy as np
import pytest
import reference_order as reference
from extensions import compiled, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.errors import SelectionError
from streamloader.order import packing
from streamloader.order.packing import Packed
from streamloader.samples import AllBut

GOLDEN = json.loads(reference.ORDERS.read_text(encoding="utf-8"))["packing"]


@st.composite
def packings(draw: st.DrawFn) -> reference.Packing:
    """Lengths of which some can be packed: a few groups of short documents, or of long ones."""
    length = draw(st.integers(1, 12))
    most = draw(st.sampled_from([1, length, 3 * length, 200 * length]))
    lengths = draw(st.lists(st.integers(0, most), max_size=200))
    lengths += [draw(st.integers(1, length))]
    return reference.Packing("drawn", tuple(draw(st.permutations(lengths))), length, draw(st.booleans()))


def packed(case: reference.Packing, **options) -> Packed:
    return Packed([np.array(case.lengths, np.uint32)], case.length, split=case.split, **options)


def rows_of(found: Packed, rows=None) -> list[list[tuple[int, int]]]:
    """The (document, piece) of each row."""
    documents, pieces, edges = found.items(np.arange(len(found)) if rows is None else np.array(rows, np.int64))
    both = list(zip(documents.tolist(), pieces.tolist(), strict=True))
    return [both[start:stop] for start, stop in pairwise(edges.tolist())]


def size_of(case: reference.Packing, document: int, piece: int) -> int:
    return min(case.length, case.lengths[document] - piece * case.length)


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """The function `pack` of the extension as it is here now."""
    return compiled("streamloader.order._packing", tmp_path_factory.mktemp("extension")).pack


@pytest.fixture(params=["python", pytest.param("native", marks=needs_compiler)])
def either(request, monkeypatch):
    """Each implementation takes the place of `pack`."""
    found = packing._pack if request.param == "python" else request.getfixturevalue("native")
    monkeypatch.setattr(packing, "pack", found)


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["name"])
def test_rows_equal_the_golden_rows(golden, either):
    case = next(case for case in reference.PACKINGS if case.name == golden["name"])
    assert rows_of(packed(case)) == [[tuple(item) for item in row] for row in golden["rows"]]


@settings(max_examples=200, deadline=None)
@given(packings())
def test_rows_equal_the_reference(case):
    assert rows_of(packed(case)) == reference.rows(case)


def plan_of(pack, rests, edges, length):
    """What `pack` writes, and its number of rows."""
    out = np.zeros(rests.size, np.uint16), np.zeros(rests.size, np.uint32), np.zeros(edges.size - 1, np.int64)
    rows = pack(rests, edges, length, out)
    return rows, out[0].tolist(), out[1][:rows].tolist(), out[2].tolist()


@needs_compiler
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 63, 64, 255, 256, 4095, 4096, 2**18, 2**30]))
def test_both_implementations_pack_the_same_rows(native, seed, length):
    rng = np.random.default_rng(seed)
    edges = np.append(0, np.cumsum(rng.integers(0, 300, 4)))
    most = rng.integers(1, length, endpoint=True)
    rests = rng.integers(0, most, edges[-1], endpoint=True).astype(np.uint32)
    assert plan_of(native, rests, edges, length) == plan_of(packing._pack, rests, edges, length)


@needs_compiler
def test_other_threads_run_while_many_documents_are_packed(native):
    """No thread is made to give the lock away meanwhile: another one runs if packing does so itself."""
    rests, edges = np.full(1 << 20, 3, np.uint32), np.arange(0, (1 << 20) + 1, 1 << 10)
    out = np.zeros(1 << 20, np.uint16), np.zeros(1 << 20, np.uint32), np.zeros(1 << 10, np.int64)
    counted, ends = [0], threading.Event()

    def count():
        while not ends.is_set():
            counted[0] += 1
            time.sleep(0)  # gives the lock away

    def advanced():
        before = counted[0]
        native(rests, edges, 8, out)
        return counted[0] > before

    interval, thread = sys.getswitchinterval(), threading.Thread(target=count, daemon=True)
    thread.start()
    sys.setswitchinterval(60)
    try:
        assert any(advanced() for _ in range(20))
    finally:
        sys.setswitchinterval(interval)
        ends.set()
        thread.join()


INVALID = [
    *(([5], [0, 1], length) for length in (0, 4, 2**40)),
    *(([5], edges, 8) for edges in ([], [0, 2], [1, 1], [-1, 1])),
    *(([5, 5], edges, 8) for edges in ([0, 1], [0, 2, 1, 2])),
    ([1] * (2**16 + 1), [0, 2**16 + 1], 8),
]


@needs_compiler
@pytest.mark.parametrize(("rests", "edges", "length"), INVALID)
def test_arrays_that_do_not_match_are_an_error(native, rests, edges, length):
    rests, edges = np.array(rests, np.uint32), np.array(edges, np.int64)
    out = np.zeros(rests.size, np.uint16), np.zeros(rests.size, np.uint32), np.zeros(4, np.int64)
    with pytest.raises(ValueError, match="do not match"):
        native(rests, edges, length, out)
    for short in range(3):
        less = tuple(values[: 0 if number == short else None] for number, values in enumerate(out))
        with pytest.raises(ValueError, match="do not match"):
            native(np.ones(2, np.uint32), np.array([0, 2]), 8, less)


@settings(max_examples=200, deadline=None)
@given(packings())
def test_each_element_is_in_one_row_and_no_row_is_longer_than_its_length(case):
    found = packed(case)
    left = [n for n in case.lengths if case.split or n <= case.length]
    items = [item for row in rows_of(found) for item in row]
    whole = [(d, k) for d, n in enumerate(case.lengths) if n in left for k in range(-(-n // case.length))]
    assert sorted(items) == whole
    sizes = [sum(size_of(case, *item) for item in row) for row in rows_of(found)]
    assert 0 < min(sizes) <= max(sizes) <= case.length
    assert found.real == sum(sizes) == sum(left)
    assert found.dropped == len(case.lengths) - len(left)


@settings(max_examples=100, deadline=None)
@given(packings())
def test_documents_are_cut_only_where_they_are_longer_than_a_row(case):
    for document, piece in (item for row in rows_of(packed(case)) for item in row):
        assert piece == 0 or case.lengths[document] > case.length


@settings(max_examples=100, deadline=None)
@given(packings(), st.data())
def test_rows_do_not_depend_on_the_arrays_in_which_lengths_arrive(case, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(case.lengths)), max_size=6)))
    arrays = [np.array(case.lengths[a:b], np.int64) for a, b in pairwise([0, *cuts, len(case.lengths)])]
    found, whole = Packed(iter(arrays), case.length, split=case.split), packed(case)
    assert rows_of(found) == rows_of(whole)
    assert found.digest == whole.digest


@settings(max_examples=100, deadline=None)
@given(packings(), st.data())
def test_rows_can_be_read_anywhere_and_have_costs(case, data):
    found = packed(case, costs=True)
    whole = rows_of(found)
    assert len(found) == len(whole)
    chosen = data.draw(st.lists(st.integers(0, len(found) - 1), max_size=20))
    copy = pickle.loads(pickle.dumps(found))
    assert rows_of(copy, chosen) == [whole[row] for row in chosen]
    squares = [sum(size_of(case, *item) ** 2 for item in row) for row in whole]
    assert found.costs.tolist() == [cost // case.length for cost in squares]


@settings(max_examples=100, deadline=None)
@given(packings(), st.integers(1, 90))
def test_a_block_of_rows_has_these_documents(case, block):
    found = packed(case)
    documents = [[d for d, _ in row] for row in rows_of(found)]
    blocks = [sorted(set().union(*documents[s : s + block])) for s in range(0, len(found), block)]
    assert [found.documents(i * block, min(len(found), (i + 1) * block)).tolist() for i in range(len(blocks))] == blocks
    items = [sum(map(len, documents[s : s + block])) for s in range(0, len(found), block)]
    assert found.most_items(block) == max(items)


@settings(max_examples=50, deadline=None)
@given(packings(), st.integers(0, 40))
def test_the_documents_of_a_selection_are_its_samples(case, gap):
    chosen = np.arange(len(case.lengths)) * 3 + gap
    end = int(chosen[-1]) + 1
    for base in (chosen, AllBut(end, np.setdiff1d(np.arange(end), chosen))):
        found, plain = packed(case, packed_from=base), packed(case)
        assert rows_of(found) == [[(int(chosen[d]), k) for d, k in row] for row in rows_of(plain)]
        assert found.documents(0, len(found)).tolist() == chosen[plain.documents(0, len(plain))].tolist()
        assert found.nbytes == plain.nbytes + base.nbytes


def test_other_lengths_and_options_have_another_digest():
    lengths = np.array([1, 2, 3])
    options = [(lengths, 4, True), (lengths, 4, False), (lengths, 5, True), (lengths[::-1], 4, True)]
    assert len({Packed([one], length, split=split).digest for one, length, split in options}) == 4


@pytest.mark.parametrize(
    ("mean", "deviation", "length"), [(3625, 0.7, 2049), (1720, 1.4, 2049), (568, 1, 2049), (90, 0.7, 513)]
)
def test_padding_is_below_two_percent(mean, deviation, length):
    """Lengths like those of WikiText-103, code and dialogues (see bench/packing.py), and of short texts."""
    middle = np.log(mean) - deviation**2 / 2
    lengths = np.random.default_rng(1).lognormal(middle, deviation, 30_000).astype(np.uint32)
    found = Packed([lengths], length)
    assert found.real == lengths.sum()
    assert found.real > 0.98 * len(found) * length


def test_many_short_documents_are_packed_in_little_memory():
    count = 3 << 16
    with datasets.within(12 << 20):
        found = Packed((np.full(4096, 5, np.uint8) for _ in range(count // 4096)), 1 << 20)
    assert found.nbytes < 2.1 * count
    assert found._groups[0].tolist() == list(range(0, count + 1, packing.GROUP_DOCUMENTS))
    documents, pieces, edges = found.items(np.arange(len(found)))
    assert documents.tolist() == list(range(count)) and not pieces.any()
    assert np.diff(edges).tolist() == [packing.GROUP_DOCUMENTS] * len(found)


@pytest.mark.parametrize("lengths", [[], [0, 0], [9, 0, 10]])
def test_nothing_to_pack_is_an_error(lengths):
    with pytest.raises(SelectionError, match=r"pack= has no document to pack: \d have more than 8 elements"):
        Packed([np.array(lengths, np.int64)], 8, split=False)
