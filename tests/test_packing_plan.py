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
import reference_order as golden_orders
from amounts import examples
from extensions import compiled, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.errors import SelectionError
from streamloader.order import packing
from streamloader.order.packing import Packed
from streamloader.samples import AllBut
from streamloader.testing import order as reference

GOLDEN = json.loads(golden_orders.ORDERS.read_text(encoding="utf-8"))["packing"]


@st.composite
def packings(draw: st.DrawFn) -> reference.Packing:
    """Lengths of which some can be packed: a few groups of short documents, or of long ones."""
    length = draw(st.integers(1, 12))
    most = draw(st.sampled_from([1, length, 3 * length, 200 * length]))
    lengths = draw(st.lists(st.integers(0, most), max_size=200))
    lengths += [draw(st.integers(1, length))]
    return reference.Packing(tuple(draw(st.permutations(lengths))), length, draw(st.booleans()))


def packed(case: reference.Packing, **options) -> Packed:
    return Packed([np.array(case.lengths, np.uint32)], case.length, split=case.split, **options)


def rows_of(found: Packed, rows=None) -> list[list[tuple[int, int]]]:
    """The (document, piece) of each row."""
    documents, pieces, edges = found.items(np.arange(len(found)) if rows is None else np.array(rows, np.int64))
    both = list(zip(documents.tolist(), pieces.tolist(), strict=True))
    return [both[start:stop] for start, stop in pairwise(edges.tolist())]


def size_of(case: reference.Packing, document: int, piece: int) -> int:
    return min(case.length, case.lengths[document] - piece * case.length)


FUNCTIONS = ("pack", "find", "locate", "place")


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    """The extension as it is here now."""
    return compiled("streamloader.order._packing", tmp_path_factory.mktemp("extension"))


@pytest.fixture(scope="module")
def native(extension):
    """Its function `pack`."""
    return extension.pack


@pytest.fixture(params=["python", pytest.param("native", marks=needs_compiler)])
def either(request, monkeypatch):
    """Each implementation takes the place of the functions."""
    extension = None if request.param == "python" else request.getfixturevalue("extension")
    for name in FUNCTIONS:
        monkeypatch.setattr(packing, name, getattr(extension or packing, name if extension else f"_{name}"))


@pytest.mark.quick(9)
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["name"])
def test_rows_equal_the_golden_rows(golden, either):
    case = golden_orders.PACKINGS[golden["name"]]
    assert rows_of(packed(case)) == [[tuple(item) for item in row] for row in golden["rows"]]


@settings(max_examples=examples(200), deadline=None)
@given(packings())
def test_rows_equal_the_reference(case):
    assert rows_of(packed(case)) == reference.rows(case)


def plan_of(pack, rests, edges, length):
    """What `pack` writes, and its number of rows."""
    out = np.zeros(rests.size, np.uint16), np.zeros(rests.size, np.uint32), np.zeros(edges.size - 1, np.int64)
    costs = np.zeros(rests.size, np.uint32)
    rows = pack(rests, edges, length, (*out, costs))
    return rows, out[0].tolist(), out[1][:rows].tolist(), out[2].tolist(), costs[:rows].tolist()


@pytest.mark.long
@needs_compiler
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 63, 64, 255, 256, 4095, 4096, 2**18, 2**30]))
def test_both_implementations_pack_the_same_rows(native, seed, length):
    rng = np.random.default_rng(seed)
    edges = np.append(0, np.cumsum(rng.integers(0, 300, 4)))
    most = rng.integers(1, length, endpoint=True)
    rests = rng.integers(0, most, edges[-1], endpoint=True).astype(np.uint32)
    assert plan_of(native, rests, edges, length) == plan_of(packing._pack, rests, edges, length)


def both(extension, name, *given):
    """The result of a function and what it wrote, the same of both implementations; or that it raises."""
    found = []
    for function in (getattr(extension, name), getattr(packing, f"_{name}")):
        arrays = [np.full_like(array, 7) for array in given[-1]] if isinstance(given[-1], tuple) else given[-1].copy()
        try:
            result = function(*given[:-1], arrays)
        except ValueError as error:
            result, arrays = str(error), []
        found.append((result, [array.tolist() for array in arrays]))
    assert found[0] == found[1]
    return found[0]


@needs_compiler
@settings(max_examples=examples(200), deadline=None)
@given(packings(), st.data())
def test_both_implementations_find_the_same_items(extension, case, data):
    found = packed(case)
    tables = found._rows, found._groups, found._full, found._items, found._ends
    last = len(found) - 1
    rows = np.array(data.draw(st.lists(st.integers(0, last), max_size=400)), np.int64)
    edges, none = np.zeros(rows.size + 1, np.int64), np.zeros(0, np.int64)
    count, _ = both(extension, "find", rows, tables, (edges, none, none))
    for more in (0, 3):
        room = np.zeros(count + more, np.int64)
        assert both(extension, "find", rows, tables, (edges, room, room))[0] == count
    for beyond in (-1, last + 1):
        result, _ = both(extension, "find", np.append(rows, beyond), tables, (np.append(edges, 0), none, none))
        assert "do not match" in result


@needs_compiler
@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([10, 60, 2**50]))
def test_both_implementations_find_documents_in_their_slots(extension, seed, block, most):
    rng = np.random.default_rng(seed)
    slots = [np.unique(rng.integers(0, most, rng.integers(1, block, endpoint=True))) for _ in range(4)]
    known = np.full(4 * block, 2**63 - 1)
    for number, documents in enumerate(slots):
        known[number * block :][: documents.size] = documents
    counts, of_row = rng.integers(0, 5, 9), rng.integers(0, 4, 9)
    documents = [rng.choice(slots[slot], count) for slot, count in zip(of_row, counts, strict=True)]
    edges, documents = np.append(0, np.cumsum(counts)), np.concatenate(documents)
    out = np.zeros(documents.size, np.int64)
    for function in (extension.locate, packing._locate):
        assert function(known, block, (of_row * block, edges, documents), out) == -1
        assert known[out].tolist() == documents.tolist()
        assert np.array_equal(out // block, np.repeat(of_row, counts))
        if documents.size:
            missing = documents.copy()
            missing[documents.size // 2] = most
            assert function(known, block, (of_row * block, edges, missing), out) == documents.size // 2


@needs_compiler
@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 9), st.sampled_from(["int32", "int64", None]))
def test_both_implementations_place_the_same_items(extension, seed, length, step_rows, numbers):
    rng = np.random.default_rng(seed)
    counts, item_bytes = rng.integers(0, 6, 7), int(rng.choice([1, 2, 4]))
    edges, total = np.append(0, np.cumsum(counts)), counts.sum()
    table = np.stack([rng.integers(0, 99, 20), item_bytes * rng.integers(0, rng.integers(1, 3 * length), 20)], axis=1)
    table[:, 1] += rng.integers(0, 9) == 0
    documents = rng.integers(0, 2**31 if numbers == "int32" else 2**40, total)
    items = edges, documents, rng.integers(0, 3, total), rng.integers(0, 20, total), table
    column = (7, length) if numbers else (0, 0)
    cu_seqlens = (-(-7 // step_rows), step_rows * (counts.max() + 1) + 1) if numbers else (0, 0)
    made = []
    for place in (extension.place, packing._place):
        out = [np.full(shape, 7) for shape in ((3, total), (2, 7))]
        columns = zip((column, column, cu_seqlens), (numbers or "int32", "int32", "int32"), strict=True)
        out += [np.full(shape, 7, dtype) for shape, dtype in columns]
        made.append((place(items, (length, step_rows, item_bytes), tuple(out)), [array.tolist() for array in out]))
    assert made[0][0] == made[1][0]
    assert made[0][0] >= 0 or made[0] == made[1]


@needs_compiler
def test_other_threads_run_while_many_documents_are_packed(native):
    """No thread is made to give the lock away meanwhile: another one runs if packing does so itself."""
    rests, edges = np.full(1 << 20, 3, np.uint32), np.arange(0, (1 << 20) + 1, 1 << 10)
    none = np.zeros(0, np.uint32)
    out = np.zeros(1 << 20, np.uint16), np.zeros(1 << 20, np.uint32), np.zeros(1 << 10, np.int64), none
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
def test_items_that_do_not_match_are_an_error_of_the_extension(extension):
    def call(sizes=(4, 1, 4), **changed):
        empty, of_row = np.zeros(0, np.int32), {"edges": np.array([0, 1]), "copies": np.zeros((3, 1), np.int64)}
        of_row |= {name: np.zeros(1, np.int64) for name in ("documents", "pieces", "slot_rows")}
        of_row |= {"table": np.array([[0, 8]]), "gaps": np.zeros((2, 1), np.int64)}
        of_row |= dict.fromkeys(("numbers", "positions", "cu_seqlens"), empty) | changed
        items = (of_row[name] for name in ("edges", "documents", "pieces", "slot_rows", "table"))
        out = (of_row[name] for name in ("copies", "gaps", "numbers", "positions", "cu_seqlens"))
        return extension.place(tuple(items), sizes, tuple(out))

    assert call() == -1
    assert call(slot_rows=np.array([1])) == call(slot_rows=np.array([-1])) == 0
    few = np.zeros(2, np.int32)
    changes = [{name: few} for name in ("copies", "gaps", "numbers", "positions", "cu_seqlens", "edges")]
    changes += [{name: few[:0]} for name in ("pieces", "slot_rows", "edges")]
    changes += [{"edges": np.array(edges)} for edges in ([0], [0, 2], [-1, 1], [1, 0])]
    changes += [{"sizes": sizes} for sizes in ((0, 1, 4), (4, 0, 4), (4, 1, 0), (2**20, 2**20, 4), (2**40, 1, 4))]
    for change in changes:
        with pytest.raises(ValueError, match="do not match"):
            call(**change)
    known, edges, one = np.arange(4), np.array([0, 1]), np.zeros(1, np.int64)
    assert extension.locate(known, 2, (one, edges, one), one) == -1
    for block, firsts, ends, out in (
        (0, 0, 1, one),
        (5, 0, 1, one),
        (2, 3, 1, one),
        (2, -1, 1, one),
        (2, 0, 2, one),
        (2, 0, 1, one[:0]),
    ):
        with pytest.raises(ValueError, match="do not match"):
            extension.locate(known, block, (np.array([firsts]), np.array([0, ends]), one), out)


@needs_compiler
@pytest.mark.parametrize(("rests", "edges", "length"), INVALID)
def test_arrays_that_do_not_match_are_an_error(native, rests, edges, length):
    rests, edges = np.array(rests, np.uint32), np.array(edges, np.int64)
    out = np.zeros(rests.size, np.uint16), np.zeros(rests.size, np.uint32), np.zeros(4, np.int64)
    out = *out, np.zeros(rests.size, np.uint32)
    with pytest.raises(ValueError, match="do not match"):
        native(rests, edges, length, out)
    for short in range(3):
        less = tuple(values[: 0 if number == short else None] for number, values in enumerate(out[:3]))
        less = *less, out[3]
        with pytest.raises(ValueError, match="do not match"):
            native(np.ones(2, np.uint32), np.array([0, 2]), 8, less)


@settings(max_examples=examples(200), deadline=None)
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


@settings(max_examples=examples(100), deadline=None)
@given(packings())
def test_documents_are_cut_only_where_they_are_longer_than_a_row(case):
    for document, piece in (item for row in rows_of(packed(case)) for item in row):
        assert piece == 0 or case.lengths[document] > case.length


@settings(max_examples=examples(100), deadline=None)
@given(packings(), st.data())
def test_rows_do_not_depend_on_the_arrays_in_which_lengths_arrive(case, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(case.lengths)), max_size=6)))
    arrays = [np.array(case.lengths[a:b], np.int64) for a, b in pairwise([0, *cuts, len(case.lengths)])]
    found, whole = Packed(iter(arrays), case.length, split=case.split), packed(case)
    assert rows_of(found) == rows_of(whole)
    assert found.digest == whole.digest


@settings(max_examples=examples(100), deadline=None)
@given(packings(), st.data())
def test_rows_can_be_read_anywhere_and_have_costs(case, data):
    found = packed(case, costs=True)
    whole = rows_of(found)
    assert len(found) == len(whole)
    chosen = data.draw(st.lists(st.integers(0, len(found) - 1), max_size=20))
    copy = pickle.loads(pickle.dumps(found))
    assert rows_of(copy, chosen) == [whole[row] for row in chosen]
    squares = [sum(size_of(case, *item) ** 2 for item in row) for row in whole]
    assert found.costs_of(np.arange(len(found))).tolist() == [cost // case.length for cost in squares]


@pytest.mark.parametrize(("length", "bytes_of_a_row"), [(2**16 - 1, 2), (2**16, 4), (10**6, 4)])
def test_costs_take_two_bytes_for_each_row_that_is_not_a_full_piece_unless_it_is_long(either, length, bytes_of_a_row):
    lengths = [3 * length, 5, length - 5, length - 1, 2 * length + 7]
    found, plain = (Packed([np.array(lengths)], length, costs=costs) for costs in (True, False))
    assert plain.costs is None
    assert found.nbytes == plain.nbytes + bytes_of_a_row * 3
    mixed = [((length - 5) ** 2 + 5**2) // length, (length - 1) ** 2 // length, 7**2 // length]
    assert sorted(found.costs_of(np.arange(8)).tolist()) == sorted([length] * 5 + mixed)


@settings(max_examples=100, deadline=None)
@given(packings(), st.integers(1, 90))
def test_a_block_of_rows_has_these_documents(case, block):
    found = packed(case)
    documents = [[d for d, _ in row] for row in rows_of(found)]
    blocks = [sorted(set().union(*documents[s : s + block])) for s in range(0, len(found), block)]
    assert [found.documents(i * block, min(len(found), (i + 1) * block)).tolist() for i in range(len(blocks))] == blocks
    items = [sum(map(len, documents[s : s + block])) for s in range(0, len(found), block)]
    assert found.most_items(block) == max(items)


@settings(max_examples=examples(50), deadline=None)
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


@pytest.mark.long
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
