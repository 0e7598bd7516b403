"""Parquet, Arrow and Hugging Face sources: what their own tools read, and every input that cannot be converted."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import FORMATS, assert_error, bad_rows, files, kinds_of, opened, plain, recorded, rows_of, write_table

from streamloader.conversion.sources import fields
from streamloader.conversion.sources.base import raise_bad
from streamloader.errors import FieldError, SourceChangedError, SourceError

NUMBERS = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.uint16(): st.integers(0, 2**16 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float16(): st.floats(allow_nan=False, width=16),
    pa.float32(): st.floats(allow_nan=False, width=32),
    pa.float64(): st.floats(allow_nan=False),
}
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)  # longer than what a view holds itself


def column_types():
    """A type and a strategy for its values."""
    numbers = st.sampled_from(list(NUMBERS.items()))
    lists_of = lambda kinds: st.builds(  # noqa: E731
        lambda one, k: (pa.list_(one[0], k), st.lists(one[1], min_size=k, max_size=k)), kinds, st.integers(1, 3)
    )
    fixed = lists_of(numbers)
    inner = numbers | fixed
    square = lists_of(fixed)
    makers = st.sampled_from([pa.list_, pa.large_list])
    lists = st.builds(lambda make, one: (make(one[0]), st.lists(one[1], max_size=4)), makers, inner)
    strings = (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()))
    texts = st.sampled_from([(kind, TEXTS) for kind in strings])
    some_bytes = st.sampled_from([(kind, st.binary(max_size=20)) for kind in (pa.binary(), pa.large_binary())])
    words = st.just((pa.binary(3), st.binary(min_size=3, max_size=3)))
    return numbers | fixed | square | lists | texts | some_bytes | words


def with_nulls(kind, values):
    """Values of a type with nulls here and there, also within them."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = with_nulls(kind.value_type, NUMBERS.get(kind.value_type, st.none()))
        low, high = (kind.list_size,) * 2 if pa.types.is_fixed_size_list(kind) else (0, 4)
        values = st.lists(inner, min_size=low, max_size=high)
    return st.integers(0, 7).flatmap(lambda n: values if n else st.none())


def has_null(value):
    return value is None or (isinstance(value, list) and any(map(has_null, value)))


def random_table(data):
    """A table, some of whose columns have nulls or stand in a struct, and its rows by field."""
    count = data.draw(st.integers(1, 20), "rows")
    columns, values_of = {}, {}
    for number in range(data.draw(st.integers(1, 3), "columns")):
        kind, values = data.draw(column_types())
        values = with_nulls(kind, values) if data.draw(st.booleans(), "nulls") else values
        rows = data.draw(st.lists(values, min_size=count, max_size=count))
        dictionary = pa.types.is_dictionary(kind)
        array = pa.array(rows, pa.string()).dictionary_encode() if dictionary else pa.array(rows, kind)
        struct = data.draw(st.booleans(), "struct")
        columns[f"c{number}"] = pa.StructArray.from_arrays([array], ["m"]) if struct else array
        values_of[f"c{number}_m" if struct else f"c{number}"] = rows
    return pa.table(columns), [dict(zip(values_of, row, strict=True)) for row in zip(*values_of.values(), strict=True)]


def test_rows_of_nested_fixed_lists_are_picked_from_the_middle_of_a_block(tmp_path):
    values = [[[i, i + 1], [i, i]] for i in range(8)]
    write_table(tmp_path, pa.table({"x": pa.array(values, pa.list_(pa.list_(pa.int8(), 2), 2))}))
    assert rows_of(opened(tmp_path), [1, 3, 6]) == [{"x": values[i]} for i in (1, 3, 6)]


@pytest.mark.parametrize("form", ["parquet", "file", "stream", "legacy"])
@given(data=st.data())
@settings(max_examples=examples(30))
def test_every_supported_column_has_its_values_and_rows_with_nulls_are_refused(form, data, tmp_path_factory):
    table, rows = random_table(data)
    size = data.draw(st.integers(-(-len(rows) // 8), 8), "rows of a block")  # of 8 blocks every list's length is seen
    path = write_table(tmp_path_factory.getbasetemp(), table, form, size)
    chosen = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
    found, bad = bad_rows(opened(path), chosen)
    whole = [row for row in chosen if not any(map(has_null, rows[row].values()))]
    assert found == [{name: plain(value) for name, value in rows[row].items()} for row in whole]
    assert [(one.position, one.name) for one in bad] == [
        (place, f"{path}: row {row}") for place, row in enumerate(chosen) if row not in whole
    ]


VIEWS = pa.schema({"s": pa.string_view(), "b": pa.binary_view(), "l": pa.list_view(pa.int16()), "j": pa.json_()})


def test_views_and_json_are_read(tmp_path):
    rows = [{"s": "s" * n, "b": b"b" * n, "l": list(range(n)), "j": f'{{"n": {n}}}'} for n in (0, 5, 20)]
    arrays = [pa.array([row[name] for row in rows], VIEWS.field(name).type) for name in "sbl"]
    arrays.append(pa.ExtensionArray.from_storage(pa.json_(), pa.array([row["j"] for row in rows])))
    write_table(tmp_path, pa.table(arrays, VIEWS), "file")
    source = opened(tmp_path)
    assert kinds_of(source) == {"s": "text", "b": "bytes", "l": "ragged:int16", "j": "text"}
    assert rows_of(source) == [{name: plain(value) for name, value in row.items()} for row in rows]


def test_encodings_are_those_that_all_sampled_values_have(tmp_path):
    png, jpeg = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
    table = pa.table({"a": [png] * 4, "b": [png, png, png, jpeg], "c": [png] * 4, "d": [png, b"", png, png]})
    pq.write_table(table, tmp_path / "it.parquet", row_group_size=1)
    found = opened(tmp_path, "a,b,c=bytes:webp,d").fields
    expected = {"a": "bytes:png", "b": "bytes:mixed", "c": "bytes:webp", "d": "bytes"}
    assert {name: str(field) for name, field in found.items()} == expected


# --- selected types


def lists(path, values, kind):
    pq.write_table(pa.table({"x": pa.array(values, kind), "y": list(range(len(values)))}), path / "it.parquet")
    return path


def test_lists_of_a_selected_shape_are_read_as_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(fields, "to_value", None)
    source = opened(lists(tmp_path, [[i, 2, 3] for i in range(100)], pa.list_(pa.float64())), "x=float32[3]")
    column = source.fragment(np.array([0, 99]))(raise_bad)["x"]
    assert isinstance(column, np.ndarray)
    assert (column.dtype, column.tolist()) == (np.float32, [[0, 2, 3], [99, 2, 3]])


def test_lists_of_lists_need_a_selected_shape(tmp_path):
    lists(tmp_path, [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9], [0, 1]], [[1, 2]]], pa.list_(pa.list_(pa.int32())))
    assert_error(FieldError, r"holds 'x' \(list<.*, or read lists .* with fields=\"x=float32\[2,3\]", tmp_path)
    good, bad = bad_rows(opened(tmp_path, "x=int32[2,2]"))
    expected = [{"x": [[1, 2], [3, 4]]}, {"x": [[5, 6], [7, 8]]}]
    assert good == expected
    assert [one.position for one in bad] == [2, 3]
    assert rows_of(opened(tmp_path, "x=ragged:int32[2]"), [0, 1, 3]) == [*expected, {"x": [[1, 2]]}]


UNSUPPORTED = {
    "timestamp": pa.array([1], pa.timestamp("us")),
    "date32": pa.array([1], pa.date32()),
    "duration": pa.array([1], pa.duration("s")),
    "decimal128": pa.array([1], pa.decimal128(5, 2)),
    "map<": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32())),
    "list<item: string>": pa.array([["a"]]),
    "list<item: struct<a": pa.array([[{"a": 1}]]),
    "list<item: list": pa.array([[[1]]]),
    "null": pa.nulls(1),
    "struct<>": pa.array([{}], pa.struct([])),
    "extension arrow.uuid": pa.array([b"0" * 16], pa.uuid()),
    "fixed_size_list.*empty axis": pa.array([[]], pa.list_(pa.int8(), 0)),
    "sparse_union": pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]),
    "run_end_encoded": pa.RunEndEncodedArray.from_arrays([1], [2]),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_what_no_field_holds_is_refused_by_name_and_can_be_left_out(message, tmp_path):
    table = pa.table({"strange": UNSUPPORTED[message], "y": [7]})
    write_table(tmp_path, table, "file")
    assert_error(FieldError, rf"holds 'strange' \(.*{message}.*fields=.y", tmp_path)
    assert rows_of(opened(tmp_path, "y")) == [{"y": 7}]


def test_the_storage_of_an_extension_is_read_where_its_type_is_selected(tmp_path):
    write_table(tmp_path, pa.table({"u": UNSUPPORTED["extension arrow.uuid"]}))
    assert rows_of(opened(tmp_path, "u=bytes")) == [{"u": plain(b"0" * 16)}]


SHAPED = {
    "ray": ("ray.data.arrow_tensor_v2", "[2, 2]", pa.large_list(pa.float32()), [[1, 2, 3, 4]] * 2, "float32[2,2]"),
    "array": ("Array2D", '[[2, 2], "int8"]', pa.list_(pa.list_(pa.int8())), [[[1, 2], [3, 4]]] * 2, "int8[2,2]"),
    "growing": ("Array2D", '[[null, 2], "int8"]', pa.list_(pa.list_(pa.int8())), [[[1, 2]], []], "ragged:int8[2]"),
    "unknown": ("ray.data.arrow_tensor", "pickled", pa.list_(pa.float32()), [[1.0]], ""),
    "no shape": ("Array2D", '[[2, "a"]]', pa.list_(pa.list_(pa.int8())), [[[1, 2]]], ""),
    "no list": ("Array3D", "7", pa.list_(pa.list_(pa.int8())), [[[1, 2]]], ""),
}


@pytest.mark.parametrize("case", SHAPED)
def test_arrays_of_other_libraries_are_tensors_of_the_shape_that_they_state(case, tmp_path):
    name, message, kind, values, expected = SHAPED[case]
    name = f"datasets.features.features.{name}ExtensionType" if name.startswith("Array") else name
    metadata = {"ARROW:extension:name": name, "ARROW:extension:metadata": message}
    schema = pa.schema([pa.field("x", kind, metadata=metadata)])
    write_table(tmp_path, pa.table([pa.array(values, kind)], schema))
    if not expected:
        assert_error(FieldError, f"'x' .extension {name}", tmp_path)
        return
    source = opened(tmp_path)
    assert str(source.fields["x"]) == expected
    assert np.array(rows_of(source)[0]["x"]).ravel().tolist() == np.array(values[0]).ravel().tolist()


def test_strings_are_bytes_and_bytes_are_text_where_that_is_selected(tmp_path):
    values = [b"abc", b"\xff", b"def"]
    table = pa.table({"s": pa.array(values).view(pa.string()), "b": values, "f": pa.array(values, pa.binary())})
    write_table(tmp_path, table.set_column(2, "f", pa.array([b"aa", b"bb", b"cc"], pa.binary(2))))
    source = opened(tmp_path, "s=bytes:x,f=text")
    assert kinds_of(source) == {"s": "bytes:x", "f": "text"}
    assert [row["s"] for row in rows_of(source)] == [plain(value) for value in values]
    assert [row["f"] for row in rows_of(source)] == ["aa", "bb", "cc"]
    good, bad = bad_rows(opened(tmp_path, "b=text"))
    assert good == [{"b": "abc"}, {"b": "def"}]
    assert [(one.position, one.problem) for one in bad] == [(1, "the column 'b' is not UTF-8 text")]


def test_columns_of_one_name_are_refused_unless_they_are_left_out(tmp_path):
    table = pa.table([pa.array([1]), pa.array([2]), pa.array([3])], ["a", "A", "b"])
    write_table(tmp_path, table)
    assert_error(SourceError, r"'a' and 'A' .* both make the field 'a'", tmp_path)
    assert rows_of(opened(tmp_path, "b")) == [{"b": 3}]
    write_table(tmp_path, table.rename_columns(["a", "a", "b"]))
    assert_error(SourceError, r"'a' and 'a' .* both make the field 'a'", tmp_path)


def test_a_selected_field_that_does_not_exist_is_reported_with_those_that_do(tmp_path):
    lists(tmp_path, [[1]], pa.list_(pa.int32()))
    assert_error(FieldError, "has no field 'z'; it has x, y", tmp_path, "x,z")


def test_names_with_dots_are_not_taken_for_members_of_structs(tmp_path):
    table = pa.table({"a": pa.array([{"b": 1, "c": 2}]), "a.d": [3]})
    write_table(tmp_path, table)
    assert rows_of(opened(tmp_path)) == [{"a_b": 1, "a_c": 2, "a_d": 3}]
    assert rows_of(opened(tmp_path, "a_d,a_c")) == [{"a_d": 3, "a_c": 2}]
    assert opened(tmp_path).notes["columns"] == {"a_b": "a.b", "a_c": "a.c", "a_d": "a.d"}


# --- samples that are refused

PICTURES = pa.array([{"bytes": b"1", "path": ""}, {"bytes": None, "path": "2"}])
BAD_TEXT = pa.array([b"a", b"\xff"]).view(pa.string())
NULLS = {
    "in ragged rows": (pa.array([[[1, 2]], [[1, 2], [3, None]]], pa.list_(pa.list_(pa.int8(), 2))), "holds a null"),
    "in the dictionary": (pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", None])), "is null"),
    "struct": (pa.array([{"m": 1}, None]), "is null"),
    "picture": (PICTURES, "bytes: the file itself is not in"),
    "no utf-8": (BAD_TEXT, "is not UTF-8 text"),
    "no utf-8 in the dictionary": (pa.DictionaryArray.from_arrays([0, 1], BAD_TEXT), "is not UTF-8 text"),
}


@pytest.mark.parametrize("case", NULLS)
def test_a_row_with_a_null_is_refused_with_its_file_row_and_column(case, tmp_path):
    array, message = NULLS[case]
    table = pa.table({"y": [0, 1, 2, 3], "x": pa.concat_arrays([array.slice(0, 1), array, array.slice(0, 1)])})
    write_table(tmp_path, table, "file")
    source = opened(tmp_path, "y,x=ragged:int8[2]" if case == "in ragged rows" else None)
    good, bad = bad_rows(source, [1, 2, 3])
    assert [row["y"] for row in good] == [1, 3]
    assert [(one.position, one.name.rpartition("/")[2]) for one in bad] == [(1, "it.arrow: row 2")]
    assert bad[0].problem.startswith(("the column 'x", "the column 'x.m'"))
    assert message in bad[0].problem
    assert_error(SourceError, r"it\.arrow: row 2: the column 'x", source)


def test_positions_count_the_rows_of_the_part_over_all_files(tmp_path):
    for number in range(3):
        values = [None if i == number else 10 * number + i for i in range(4)]
        pq.write_table(pa.table({"x": values}), tmp_path / f"{number}.parquet", row_group_size=3)
    found, bad = bad_rows(opened(tmp_path), [0, 1, 5, 6, 10, 11])
    assert [row["x"] for row in found] == [1, 12, 23]
    names = [f"{tmp_path}/{number}.parquet: row {number}" for number in range(3)]
    assert [(one.position, one.name) for one in bad] == list(zip((0, 2, 4), names, strict=True))


# --- several files


def test_files_of_other_columns_are_named_with_both_types(tmp_path):
    pq.write_table(pa.table({"x": [1], "y": ["a"]}), tmp_path / "a.parquet")
    cases = [
        (pa.table({"x": [1.5], "y": ["a"]}), r"column 'x' is double in .*b\.parquet, int64 in .*a\.parquet"),
        (pa.table({"y": ["a"]}), r"b\.parquet lacks the column 'x', which is int64 in .*a\.parquet"),
        (pa.table({"x": [1], "y": ["a"], "z": [1]}), r"b\.parquet has a column 'z' \(int64\), which .*parquet lacks"),
    ]
    for table, message in cases:
        pq.write_table(table, tmp_path / "b.parquet")
        assert_error(SourceError, message, tmp_path)
        assert rows_of(opened(tmp_path, "y")) == [{"y": "a"}, {"y": "a"}]


def test_columns_may_be_in_another_order_and_layout_and_empty_files_have_no_types(tmp_path):
    pq.write_table(pa.table({"x": pa.nulls(0), "q": pa.nulls(0)}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": [1, 2], "y": ["a", "b"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"y": pa.array([], pa.float32())}), tmp_path / "2.parquet")
    other = pa.array(["c"], pa.large_string()).dictionary_encode()
    pq.write_table(pa.table({"y": other, "x": [3]}), tmp_path / "3.parquet")
    assert rows_of(opened(tmp_path)) == [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}, {"x": 3, "y": "c"}]


def test_keys_of_folders_are_fields_of_text(tmp_path):
    for label, value in {"cat": 1, "sea%20lion": 2}.items():
        folder = tmp_path / f"label={label}" / "year=2024"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"x": [value, 10 * value]}), folder / "part.parquet")
    expected = [("cat", 1), ("cat", 10), ("sea lion", 2), ("sea lion", 20)]
    source = opened(tmp_path)
    assert source.notes["keys"] == ["label", "year"]
    assert rows_of(source) == [{"x": x, "label": label, "year": "2024"} for label, x in expected]
    assert rows_of(opened(tmp_path, "label")) == [{"label": label} for label, _ in expected]
    (tmp_path / "year=1").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "year=1" / "part.parquet")
    assert_error(SourceError, r"year=1/part.parquet is in no folder label=\.\.\., but label=cat", tmp_path)


def test_hidden_files_are_passed_over(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    (tmp_path / "_temporary").mkdir()
    for hidden in ("_temporary/b.parquet", "._a.parquet", "_metadata.parquet", "_SUCCESS"):
        (tmp_path / hidden).write_bytes(b"")
    source = opened(tmp_path)
    assert (rows_of(source), source.notes) == ([{"x": 1}], {"passed_over": 4})


@pytest.mark.parametrize("log", ["_delta_log/0.json", ".hoodie/x", "metadata/v1.metadata.json"])
def test_tables_of_lakes_are_refused(log, tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    (tmp_path / log).parent.mkdir()
    (tmp_path / log).write_text("{}")
    assert_error(SourceError, "not all of whose files count", tmp_path)
    assert rows_of(opened(tmp_path / "a.parquet")) == [{"x": 1}]


def test_a_file_needs_no_extension_where_the_format_is_named(tmp_path):
    for form, name in (("parquet", "parquet"), ("stream", "arrow")):
        write_table(tmp_path, pa.table({"x": [1]}), form).rename(tmp_path / f"{form}.x")
        assert rows_of(opened(tmp_path / f"{form}.x", name=name)) == [{"x": 1}]
    for name, message in {"parquet": "no .parquet", "arrow": "no .arrow", "huggingface": "no state.json"}.items():
        assert_error(SourceError, message, tmp_path, name=name)


# --- what is read


BIG, PIECE = 1000, 100
POOLS = []  # a pool must outlive what was allocated from it


def big_table():
    rng = np.random.default_rng(0)
    return pa.table({"id": range(BIG), "blob": [rng.bytes(20_000) for _ in range(BIG)], "t": ["text"] * BIG})


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_only_headers_are_read_at_first_and_then_only_what_is_asked_for(form, tmp_path, monkeypatch):
    path = write_table(tmp_path, big_table(), form, PIECE)  # 20 MB in ten blocks
    seen = recorded(monkeypatch)
    source = opened(path, "id,t,blob=bytes:bin")
    assert seen.drain() < 1_500_000
    assert len(rows_of(source, range(250, 270))) == 20
    assert seen.drain() < 4_500_000  # one block of 2 MB, and a buffer or two
    assert len(rows_of(opened(path, "id"))) == BIG
    assert seen.drain() < 3_500_000 or form == "stream"  # of a stream every batch is read whole


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_memory_is_one_block_beside_the_columns(form, tmp_path):
    part = opened(write_table(tmp_path, big_table(), form, PIECE), "blob=bytes:bin").fragment(np.arange(0, BIG, 7))
    before = pa.default_memory_pool()  # asked again later, it would return the pool that was set
    pool = pa.proxy_memory_pool(before)
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        assert len(part(raise_bad)["blob"]) == -(-BIG // 7)
    finally:
        pa.set_memory_pool(before)
    assert 0 < pool.max_memory() < 9_000_000  # of 20 MB: a block of 2 MB, encoded and decoded


# --- damage


def encrypted(path, plain_footer):
    import pyarrow.parquet.encryption as pe

    class Keys(pe.KmsClient):  # keys that are only encoded: nothing here is secret
        def __init__(self, _):
            super().__init__()

        def wrap_key(self, key, _):
            return key.hex().encode()

        def unwrap_key(self, key, _):
            return bytes.fromhex(key.decode())

    factory = pe.CryptoFactory(Keys)
    config = pe.EncryptionConfiguration("a", column_keys={"b": ["x"]}, plaintext_footer=plain_footer)
    table = pa.table({"x": [1, 2]})
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), config)
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)


def cut(form, keep):
    def make(root):
        path = write_table(root, pa.table({"x": range(100)}), form, 50)
        path.write_bytes(path.read_bytes()[:keep])

    return make


def flipped(root):
    table = pa.table({"x": list(range(1000))})
    pq.write_table(table, root / "it.parquet", write_page_checksum=True, compression="none", use_dictionary=False)
    data = bytearray((root / "it.parquet").read_bytes())
    data[4000] ^= 1
    (root / "it.parquet").write_bytes(data)


def many_rows(root):
    path, rows = write_table(root, pa.table({"x": [0] * 77}), "stream"), (77).to_bytes(8, "little")
    assert path.read_bytes().count(rows) == 2  # of the batch, and of its column
    path.write_bytes(path.read_bytes().replace(rows, (1 << 50).to_bytes(8, "little")))


def saved(change):
    def make(root):
        shutil.copytree(FORMATS / "huggingface" / "input" / "train", root, dirs_exist_ok=True)
        change(root)

    return make


def state(**changes):
    def change(root):
        (root / "state.json").write_text(json.dumps(json.loads((root / "state.json").read_text()) | changes))

    return saved(change)


NO_PARQUET = r"it\.parquet cannot be read as Parquet: "
BAD = {
    "no parquet": (files({"it.parquet": b"PAR1, or so it says"}), NO_PARQUET + ".*magic bytes"),
    "empty parquet": (files({"it.parquet": b""}), NO_PARQUET),
    "truncated parquet": (cut("parquet", -20), NO_PARQUET + ".*magic bytes"),
    "encrypted": (lambda root: encrypted(root / "it.parquet", False), NO_PARQUET + ".*decrypt it first"),
    "encrypted column": (lambda root: encrypted(root / "it.parquet", True), NO_PARQUET + ".*decrypt it first"),
    "flipped bit": (flipped, NO_PARQUET + ".*CRC checksum"),
    "no arrow": (files({"it.arrow": b"no arrow, certainly"}), r"it\.arrow is (no Arrow file|truncated)"),
    "empty arrow": (files({"it.arrow": b""}), r"it\.arrow is truncated"),
    "file cut in its head": (cut("file", 100), r"it\.arrow is truncated: it ends at byte 100"),
    "file cut in a body": (cut("file", -600), r"it\.arrow is truncated"),
    "file without footer": (cut("file", -10), r"it\.arrow cannot be read as Arrow: Not an Arrow file"),
    "stream cut in a body": (cut("stream", -100), r"it\.arrow is truncated: it has .* extends to"),
    "stream without end": (cut("stream", -8), r"it\.arrow is truncated: .*its writer must be closed"),
    "length beyond the file": (files({"it.arrow": b"\xff" * 7 + b"\x7f" + bytes(50)}), r"it\.arrow is truncated"),
    "negative length": (files({"it.arrow": b"\xff" * 8 + bytes(50)}), r"it\.arrow is not an Arrow file"),
    "too many rows": (many_rows, "claims more rows than any file has"),
    "feather 1": (files({"it.feather": b"FEA1" + bytes(50)}), r"it\.feather is a Feather file of version 1"),
    "no column": (lambda root: write_table(root, pa.table({}), "file"), "has no column"),
    "missing file": (saved(lambda root: (root / "data-00001-of-00002.arrow").unlink()), "lacks the file 'data-00001"),
    "climbing file": (state(_data_files=[{"filename": "../up.arrow"}]), r"lacks the file '\.\./up\.arrow'"),
    "no files": (state(_data_files=[]), r"state\.json names no files"),
    "invalid names of files": (state(_data_files=[{"filename": ["x"]}, 3]), "lacks the file"),
    "selection": (state(_indices_data_files=[{"filename": "indices.arrow"}]), "is a selection .*flatten_indices"),
    "state that is not JSON": (saved(lambda root: (root / "state.json").write_text("{")), "not a JSON object"),
    "state that is deep": (saved(lambda root: (root / "state.json").write_text("[" * 100_000)), "not a JSON object"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_damaged_is_named(case, tmp_path):
    make, message = BAD[case]
    make(tmp_path)
    with pytest.raises(SourceError, match=message):
        rows_of(opened(tmp_path))


def test_a_folder_of_splits_is_refused_with_their_names():
    with pytest.raises(SourceError, match=r"holds the splits test, train; choose .*/huggingface/input/test"):
        opened(FORMATS / "huggingface" / "input")


def test_a_buffer_that_ends_within_a_number_is_read_up_to_there(tmp_path):
    path = write_table(tmp_path, pa.table({"x": pa.array(range(77), pa.int32())}), "legacy")
    sizes = [size.to_bytes(8, "little") for size in (4 * 77, 4 * 77 + 1)]
    assert path.read_bytes().count(sizes[0]) == 1
    path.write_bytes(path.read_bytes().replace(*sizes))
    assert rows_of(opened(path)) == [{"x": i} for i in range(77)]


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_a_file_that_changes_after_it_was_opened_is_named(form, tmp_path):
    table = pa.table({"x": range(100), "y": [0.5] * 100})
    longer, of_text = pa.concat_tables([table.slice(0, 7), table, table]), table.set_column(0, "x", [["a"] * 100])
    for other in (table.slice(0, 60), longer, table.drop(["x"]), of_text):
        path = write_table(tmp_path, table, form, 50)
        part = opened(path).fragment(np.arange(100))
        write_table(tmp_path, other, form, 50)
        with pytest.raises(SourceChangedError, match=path.name):
            part(raise_bad)


def test_class_names_are_noted_from_parquet_too(tmp_path):
    classes = [{"_type": "ClassLabel", "names": names} for names in (["cat", "dog"], ["a"], ["b"], [1.5])]
    features = {"y": classes[0], "z": {"feature": classes[1]}, "s": {"m": classes[2]}, "w": classes[3]}
    table = pa.table({"y": [0, 1], "z": [[0], [0]], "s": [{"m": 0}, {"m": 0}], "w": [0, 0]})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    write_table(tmp_path, table.replace_schema_metadata(metadata))
    assert opened(tmp_path).notes["classes"] == {"y": ["cat", "dog"], "z": ["a"], "s_m": ["b"]}
    for damaged in (b"[", b"[1]", b'{"info": 3}', b'{"info": {"features": [1]}}', b'{"info": {"features": {"y": 1}}}'):
        write_table(tmp_path, table.replace_schema_metadata({"huggingface": damaged}))
        assert "classes" not in opened(tmp_path).notes
