"""Tables and lines of text, and compressed files: what their own tools wrote, cut anywhere, damaged, and huge."""

import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import random
from contextlib import nullcontext
from itertools import chain, pairwise

import numpy as np
import pytest
import zstandard
from amounts import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sources import assert_error, bad_rows, files, npy_bytes, opened, png, read, recorded, rows_of, tar_bytes
from torchrun import run_python

from streamloader.conversion.sources import ranged_io, text
from streamloader.conversion.sources.base import raise_bad
from streamloader.conversion.sources.fields import FieldSelection
from streamloader.conversion.sources.files import inner_extension, list_source
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.ranged_io import Content, compression_of, decompressed, read_spans
from streamloader.conversion.sources.text import Style, Table, find_all_records, infer_cells
from streamloader.errors import FieldError, SourceChangedError, SourceError, UsageError
from streamloader.storage import open_store
from streamloader.storage.process import run_all

PACK = {
    "": bytes,
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}
PACKINGS = [base for base in PACK if base]


# records and lines


def naive_records(data, blank, delimiter):
    """The records of CSV, one byte after another; None where a quote stays open."""
    found, start, first_line, line, inside, closed = [], 0, 1, 1, False, -2
    for at, sign in enumerate(data):
        if sign == ord('"') and delimiter:
            if inside:
                inside, closed = False, at
            elif at == 0 or data[at - 1 : at] in (delimiter, b"\n") or closed == at - 1:
                inside = True
        if sign == ord("\n"):
            line += 1
            if not inside:
                found.append((start, at + 1, first_line))
                start, first_line = at + 1, line
    found.append((start, len(data), first_line))
    return None if inside else [one for one in found if data[one[0] : one[1]].strip(blank)]


@given(st.text('ab,"\n\r ', max_size=60), st.booleans(), st.data())
@settings(max_examples=examples(500))
def test_records_are_the_same_however_the_text_is_cut_into_blocks(text, quoted, data):
    style = Style(b"\r\n", b",") if quoted else Style(b" \t\r\n")
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    blocks = [raw[start:stop] for start, stop in pairwise([0, *cuts, len(raw)])]
    expected = naive_records(raw, style.blank, style.delimiters)
    found = []
    with nullcontext() if expected is not None else pytest.raises(SourceError, match="opens a quote in the record of"):
        for bounds, _, _ in find_all_records(blocks, style, "it", 0, 1):
            found += map(tuple, bounds.tolist())
    assert expected is None or found == expected


CELLS = st.text(st.sampled_from('ab,;"\t|\n\r é\ufeff'), max_size=6)


@given(
    st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=30),
    st.sampled_from(",;\t|"),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from(list(PACK)),
    st.data(),
)
@settings(max_examples=examples(150))
def test_output_of_the_csv_module_is_read_back(tmp_path_factory, rows, delimiter, end, quoting, packed, data):
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter, lineterminator=end, quoting=quoting)
    writer.writerows([("a", "b"), *rows])
    read = csv.reader(io.StringIO(out.getvalue(), newline=""), delimiter=delimiter)
    assume([tuple(row) for row in read][1:] == rows)  # older versions quote no carriage return
    path = tmp_path_factory.mktemp("csv") / "it.csv"
    path.write_bytes(PACK[packed](out.getvalue().encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "MARK_BYTES", data.draw(st.integers(1, 200)))
        patch.setattr(ranged_io, "BLOCK", data.draw(st.integers(64, 200)))
        patch.setattr(text, "_HEADER_BYTES", 64)
        source = opened(path, "a=text,b=text")
        assert rows_of(source) == [{"a": a, "b": b} for a, b in rows]
        chosen = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1))))
        assert rows_of(source, chosen) == [{"a": rows[i][0], "b": rows[i][1]} for i in chosen]


@given(
    st.lists(
        st.from_regex(rb" ?[-+]?[0-9]{0,3}(\.[0-9]{0,2})?([eE][-+]?[0-9])?", fullmatch=True)
        | st.sampled_from([b"nan", b"-INF", b"+Infinity", b"true", b"False", b"0x1F", b"1_0", b"-0", b"0", b"007"])
        | st.sampled_from([b"9223372036854775807", b"18446744073709551615", b"1" * 25, b"1" * 5000])
        | st.binary(max_size=3).filter(lambda cell: not set(cell) & set(b',"\r\n')),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=examples(200))
def test_the_type_that_is_inferred_holds_every_cell_it_was_inferred_from(cells):
    field = infer_cells(cells)
    filled = [cell for cell in cells if cell.strip()]
    if field.kind == "text":
        return
    table = Table(("x", "y"), {"x": "x"}, {"x": field})
    found = table.columns([cell + b",\n" for cell in filled], b",", len(filled))["x"]
    read = {"bool": lambda cell: cell.lower() == b"true", "float64": float}.get(field.dtype, int)
    np.testing.assert_array_equal(found, np.array([read(cell) for cell in filled], field.dtype))


def test_dates_codes_and_numbers_that_no_type_holds_stay_text(tmp_path):
    (tmp_path / "it.csv").write_text(
        "day,zip,hash,big,mixed,flag,empty,x,large\n"
        "2024-01-31,00501,18446744073709551615,-99999999999999999999,1,true,,1,9007199254740993\n"
        "2024-02-01,10001,0,1,1.5,FALSE,,nan,0.5\n"
    )
    source = opened(tmp_path)
    assert {name: str(field) for name, field in source.fields.items()} == {
        **{"day": "text", "zip": "text", "hash": "uint64", "big": "text", "mixed": "float64"},
        **{"flag": "bool", "empty": "text", "x": "float64", "large": "text"},
    }
    assert source.notes == {"columns": {name: name for name in source.fields}}
    assert rows_of(source)[1]["hash"] == 0


def test_empty_cells_are_filled(tmp_path):
    (tmp_path / "it.csv").write_text("a,b,c,d\n1,0.5,x,true\n,,,\n3,inf,,false\n")
    fill = {"a": "-1", "b": "nan", "c": "none", "d": "false"}
    found = [list(row.values()) for row in rows_of(opened(tmp_path, "a=int8,b,c,d=bool", fill=fill))]
    nan, inf = float("nan"), float("inf")
    assert str(found) == str([[1, 0.5, "x", True], [-1, nan, "none", False], [3, inf, "none", False]])
    some = opened(tmp_path, "c,a", fill={"a": 0})
    assert rows_of(some) == [{"c": "x", "a": 1}, {"c": "", "a": 0}, {"c": "", "a": 3}]
    with pytest.raises(SourceError, match=r"it\.csv:3: its column 'b' is empty; give .*--fill b=VALUE"):
        read(opened(tmp_path, "a,b", fill={"a": 0}))


def test_digits_are_bools_only_by_name(tmp_path):
    (tmp_path / "it.csv").write_text("a\n" + "true\n" * 720 + "1\n" + "false\n" * 1280)
    with pytest.raises(SourceError, match=r"it\.csv:722: its column 'a' holds '1', which is not bool"):
        rows_of(opened(tmp_path))
    assert rows_of(opened(tmp_path, "a=bool"))[720] == {"a": True}


def test_only_selected_columns_are_parsed(tmp_path):
    (tmp_path / "it.csv").write_bytes(b"a,b,c,d,e\n1,0,x,\xff,2.5\n2,1,y,\xfe,1e30\n")
    source = opened(tmp_path, "d=bytes,a=int8,b=bool,e=float32")
    assert list(map(str, source.fields.values())) == ["bytes", "int8", "bool", "float32"]
    columns = read(source)
    assert columns["d"] == [b"\xff", b"\xfe"]
    assert columns["b"].tolist() == [False, True]
    assert columns["e"].dtype == np.float32
    assert rows_of(opened(tmp_path, "a=text")) == [{"a": "1"}, {"a": "2"}]
    assert_error(FieldError, r"cannot become ragged:int32", tmp_path, "a=ragged:int32")


BAD_TABLES = {
    "empty": ({"it.csv": b""}, r"it\.csv is empty: it should hold the columns' names"),
    "blank": ({"it.csv": b"\xef\xbb\xbf\n\r\n\n"}, r"it\.csv is empty"),
    "no rows": ({"it.csv": b"a,b\n"}, "holds no row"),
    "the same name": ({"it.csv": b"a,b,a\n1,2,3\n"}, "'a' and 'a' of .* both make the field 'a'"),
    "no name": ({"it.csv": b",a\n0,1\n"}, r"column 1 of .*it\.csv has no name; .* index=False"),
    "no header": ({"it.csv": b"1.5,2\n3,4\n"}, r"it\.csv begins with the numbers 1\.5,2"),
    "headers differ": ({"a.csv": b"a,b\n1,2\n", "b.csv": b"b,a\n1,2\n"}, r"b\.csv has the header b,a, .*a\.csv a,b"),
    "open quote": ({"it.csv": b'a,b\n1,2\n\n3,"4\n5,6\n'}, r"it\.csv opens a quote in the record of line 4 that is"),
    "utf-16": ({"it.csv": "a,b\n1,2\n".encode("utf-16")}, r"it\.csv is text in UTF-16"),
    "latin header": ({"it.csv": "größe\n1\n".encode("latin-1")}, r"the header of .*it\.csv cannot be read: 'utf-8'"),
    "old line ends": ({"it.csv": b"a,b\r1,2\r3,4\r"}, r"it\.csv has lines that end in a carriage return alone"),
    "all rows bad": ({"it.csv": b"a,b\n1\n2\n"}, r"it\.csv:2: it cannot be cut into cells: .*2 columns, got 1"),
    "header too long": ({"it.csv": b"a" * 600_000 + b"\n1\n"}, r"it\.csv has a first line that is far too long"),
    "no line": ({"it.jsonl": b"\n \n"}, "holds no sample"),
    "no object": ({"it.jsonl": b"[1]\n2\n"}, r"it\.jsonl:1: it holds a list, expected an object"),
    "utf-16 lines": ({"it.jsonl": '{"a": 1}'.encode("utf-16")}, r"it\.jsonl is text in UTF-16"),
    "objects in lists": ({"it.jsonl": b'{"a": [{"b": 1}]}\n'}, r"1: its 'a' is a list that .* numbers; .* a=text"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_file_that_is_not_a_table_is_an_error_when_opened(case, tmp_path):
    contents, message = BAD_TABLES[case]
    files(contents)(tmp_path)
    assert_error((SourceError, UsageError), message, tmp_path)


GOOD_ROW, GOOD_LINE = b'1,2.5,"x\n\ny",true\n', b'{"n": 1, "x": 0.5, "t": "a", "v": [1, 2], "o": {"k": 1}}\n'
BAD_ROWS = {
    "too few": (b"1,2.5\n", r"it cannot be cut into cells: .*Expected 4 columns, got 2"),
    "too many": (b"1,2.5,x,true,\n", r"it cannot be cut into cells: .*Expected 4 columns, got 5"),
    "no int": (b"one,2.5,x,true\n", r"its column 'N' holds 'one', which is not int64; .* n=text in"),
    "float for int": (b"1.0,2.5,x,true\n", r"its column 'N' holds '1.0', which is not int64; .* n=float64 in"),
    "large": (b"9999999999999999999,2.5,x,true\n", "its column 'N' holds '9999999999999999999', which is not int64"),
    "empty int": (b",2.5,x,true\n", "its column 'N' is empty; give .*--fill n=VALUE.*, or .* n=text in"),
    "rounded": (b"1,9007199254740993,x,true\n", "'x' holds 9007199254740993, which float64 does not hold exactly"),
    "rounded, with a sign": (b"1,+9007199254740993,x,true\n", r"'x' holds \+9007199254740993, which float64 does not"),
    "rounded, with zeros": (b"1,-009007199254740993,x,true\n", "'x' holds -009007199254740993, which float64 does"),
    "infinite": (b"1,-1e400,x,true\n", "'x' holds -1e400, which float64 does not hold exactly"),
    "blank float": (b'1,"  ",x,true\n', "its column 'x' is empty"),
    "no float": (b'1,"2,5",x,true\n', "its column 'x' holds '2,5', which is not float64"),
    "no bool": (b"1,2.5,x,yes\n", "its column 'ok' holds 'yes', which is not bool"),
    "no text": (b"1,2.5,\xff,true\n", r"its column 't' is not UTF-8 text; .* t=bytes in"),
    "old line end": (b"1,2.5,x,true\r1,2.5,x,true\n", "a carriage return alone ends a line in it"),
}
BAD_LINES = {
    "no json": (b'{"n": 1,}\n', "it is not JSON: Expecting property name .* at character 9"),
    "cut": (b'{"n": 1, "x"\n', "it is not JSON: Expecting ':' delimiter at character 13"),
    "list": (b"[]\n", "it holds a list, expected an object"),
    "no utf-8": (b'{"n": "\xff"}\n', "it is not UTF-8 text: invalid start byte at byte 8"),
    "missing": (GOOD_LINE.replace(b'"n": 1, ', b""), "field 'n' of sample .* is missing"),
    "null": (GOOD_LINE.replace(b"1, ", b"null, ", 1), "field 'n' of sample .* is missing"),
    "twice": (b'{"n": 1, "n": 1}\n', "it has the key 'n' twice"),
    "twice inside": (b'{"o": {"k": 1, "k": 1}}\n', "it has the key 'k' twice"),
    "joined twice": (GOOD_LINE.replace(b"}}", b'}, "o_k": 1}'), "it has the key 'o_k' twice"),
    "nan": (b'{"n": NaN}\n', "it holds NaN, which is not a number in JSON"),
    "huge": (GOOD_LINE.replace(b"1, ", b"1" + b"0" * 20 + b", ", 1), "its 'n' is a whole number that 64 bits do not"),
    "endless": (GOOD_LINE.replace(b"1, ", b"1" * 5000 + b", ", 1), "Exceeds the limit .* 5000 digits"),
    "huge in list": (GOOD_LINE.replace(b"[1", b"[1" + b"0" * 20), "'v' is a list that holds whole numbers that no int"),
    "beyond floats in a list": (GOOD_LINE.replace(b"[1", b"[1e400"), "'v' is a list that holds a number that float64"),
    "null in a list": (GOOD_LINE.replace(b"[1", b"[null"), "'v' is a list that holds other values than numbers"),
    "uneven lists": (GOOD_LINE.replace(b"[1, 2]", b"[[1], [2, 3]]"), "'v' is not an array: "),
    "other shape": (GOOD_LINE.replace(b"[1, 2]", b"[1]"), r"field 'v' of sample .* has shape \(1,\), expected \(2,\)"),
    "other kind": (GOOD_LINE.replace(b'"a"', b"7"), "field 't' of sample .* is a ndarray; give a str"),
    "surrogate": (GOOD_LINE.replace(b'"a"', rb'"\ud800"'), "field 't' of sample .* is not valid text .surrogates"),
    "deep": (b'{"n": ' + b"[" * 200_000 + b"\n", "it is nested too deeply"),
    "deeper": (b'{"n":' * 900 + b"1" + b"}" * 900 + b"\n", "it (is nested too deeply|has keys of more than 1024)"),
}


def with_bad(kind, bad):
    """A file with one bad record amid 200 good ones, and the line of that."""
    good = GOOD_ROW if kind == "csv" else GOOD_LINE
    head = b"N,x,t,ok\n" if kind == "csv" else b""
    before = head + good * 60 + b"\n\r\n" + good * 40
    return before + bad + good * 100, before.count(b"\n") + 1


BAD_KINDS = [*(("csv", case) for case in BAD_ROWS), *(("jsonl", case) for case in BAD_LINES)]


@pytest.mark.quick(12)
@pytest.mark.parametrize("packed", ["", "gzip"])
@pytest.mark.parametrize(("kind", "case"), BAD_KINDS)
def test_a_bad_record_is_reported_by_file_and_line_and_left_out(kind, case, packed, tmp_path, monkeypatch):
    bad, message = (BAD_ROWS if kind == "csv" else BAD_LINES)[case]
    data, line = with_bad(kind, bad)
    fields = {"csv": "n=int64,x=float64,t=text,ok=bool", "jsonl": "n=int64,x=float64,t=text,v=int64[2],o_k=int64"}
    (tmp_path / f"it.{kind}").write_bytes(PACK[packed](data))
    monkeypatch.setattr(text, "MARK_BYTES", 700)
    source = opened(tmp_path, fields[kind])
    good, refused = bad_rows(source)
    values = {"csv": {"t": "x\n\ny", "ok": True}, "jsonl": {"t": "a", "v": [1, 2], "o_k": 1}}
    assert good == [{"n": 1, "x": 2.5 if kind == "csv" else 0.5, **values[kind]}] * 200
    assert [one.position for one in refused] == [100]
    assert refused[0].name.endswith(f"/it.{kind}:{line}")
    assert_error(SourceError, f"it.{kind}:{line}: .*{message}", source)
    assert rows_of(source, [99, 101]) == good[:2]


@pytest.mark.long
def test_many_bad_rows_are_all_found(tmp_path):
    good = (np.random.default_rng(0).random(2000) < 0.9).tolist()
    rows = b"".join(b"%d,x\n" % i if fine else b"?,x\n" for i, fine in enumerate(good))
    (tmp_path / "it.csv").write_bytes(b"n,t\n" + rows)
    found, refused = bad_rows(opened(tmp_path, "n=int64"))
    assert [one.position for one in refused] == [i for i, fine in enumerate(good) if not fine]
    assert [row["n"] for row in found] == [i for i, fine in enumerate(good) if fine]
    assert [one.name.rpartition(":")[2] for one in refused] == [str(one.position + 2) for one in refused]


def test_a_column_of_which_few_rows_were_seen_may_be_of_another_type_later(tmp_path):
    rows = b"".join(b"%d\n" % i for i in range(5000))
    (tmp_path / "it.csv").write_bytes(b"n\n" + rows.replace(b"\n2100\n", b"\n2100.5\n"))
    with pytest.raises(SourceError, match=r"it\.csv:2102: its column 'n' holds '2100\.5', .* n=float64"):
        read(opened(tmp_path))
    assert rows_of(opened(tmp_path, "n=float64"), [2100]) == [{"n": 2100.5}]


def test_values_that_no_field_holds_may_stay_json(tmp_path):
    filled = {"messages": [{"role": "user", "text": "hé"}], "n": 1, "o": {"a": {"b": None}}}
    lines = [filled, {"messages": [], "n": 2, "o": {}}]
    (tmp_path / "it.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = rows_of(opened(tmp_path, "messages=text,o=text,n"))
    assert [json.loads(row["messages"]) for row in found] == [line["messages"] for line in lines]
    assert [json.loads(row["o"]) for row in found] == [line["o"] for line in lines]
    assert rows_of(opened(tmp_path, "n")) == [{"n": 1}, {"n": 2}]


def test_a_list_of_short_texts_and_a_long_one_takes_no_more_memory_than_its_line(tmp_path):
    # numpy's array of it has 1.6 TB, and one of a tenth of this size is allocated
    (tmp_path / "it.jsonl").write_text(json.dumps({"n": 1, "texts": ["x" * 4_000_000, *[""] * 100_000]}))
    assert_error(SourceError, "'texts' is a list that holds other values than numbers", tmp_path)


def test_tables_beside_other_data_are_not_taken_for_the_data(tmp_path):
    png(tmp_path / "a" / "x.png")
    files({"labels.csv": b"x\n1\n", "metadata.jsonl": b'{"x": 1}\n'})(tmp_path)
    assert open_source(tmp_path, None, {}, FieldSelection())[0] == "imagefolder"
    assert rows_of(opened(tmp_path, name="csv")) == [{"x": 1}]
    assert rows_of(opened(tmp_path, name="jsonl")) == [{"x": 1}]


def test_a_readme_or_a_hidden_file_does_not_hide_a_table(tmp_path):
    others = dict.fromkeys(("README.md", "LICENSE", ".part.csv.crc", "_SUCCESS"), b"a,b")
    files({"it.csv": b"a\n1\n", **others})(tmp_path)
    assert rows_of(opened(tmp_path)) == [{"a": 1}]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_record_that_is_too_long_is_an_error(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_RECORD", 1 << 20)
    data = b"a,b\n1,2\n" + b'"' + b"x\n" * (1 << 20) if kind == "csv" else b'{"a": 1}\n"' + b"x" * (2 << 20)
    (tmp_path / f"it.{kind}").write_bytes(data)
    line = 3 if kind == "csv" else 2
    assert_error(SourceError, rf"it\.{kind} has a record of more than 1 MiB in line {line}", tmp_path)


def test_a_text_that_changes_after_the_scan_is_an_error(tmp_path):
    path = tmp_path / "it.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 100)
    source = opened(path)
    path.write_bytes(b'{"a":   1}' * 90)
    assert_error(SourceChangedError, r"it\.jsonl has other records than when it was scanned", source)
    path.write_bytes(PACK["gzip"](random.Random(0).randbytes(500).hex().encode()))
    source = Content(open_store(tmp_path), list_source(path, {}).files[0], "gzip", 2000)
    with pytest.raises(SourceChangedError, match=r"it\.jsonl ends at byte 1000 unpacked, .* it had 2000"):
        list(read_spans([(source, np.array([900]), np.array([2000]))]))


# compressed files


def pieces(data, size):
    return (memoryview(data)[at : at + size] for at in range(0, len(data), size))


def unpack(packed, data, size=1 << 20):
    return b"".join(decompressed(packed, pieces(data, size), "it"))


@pytest.mark.parametrize("packed", PACKINGS)
@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4), st.integers(1, 40), st.integers(0, 9), st.data())
@settings(max_examples=examples(60))
def test_all_members_are_unpacked_whatever_the_pieces_and_padding(packed, members, size, padding, data):
    raw = b"".join(PACK[packed](member) for member in members)
    assert compression_of(raw[: ranged_io.MAGIC_BYTES]) == packed
    assert unpack(packed, raw + bytes(padding), size) == b"".join(members)
    whole = PACK[packed](b"".join(members))
    cut = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(SourceError, match=f"it is truncated: its {packed} data end early, after {cut} bytes"):
        unpack(packed, whole[:cut], size)
    with pytest.raises(SourceError, match=f"it is (damaged, or not {packed} to its end|truncated)"):
        unpack(packed, whole + b"garbage", size)


def test_frames_to_be_skipped_are_passed_over():
    skipped = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"12345"
    raw = skipped + PACK["zstd"](b"one") + skipped + PACK["zstd"](b"two")
    assert compression_of(raw[:16]) == "zstd"
    assert unpack("zstd", raw, 7) == b"onetwo"


def test_text_that_begins_like_a_compressed_file_is_text(tmp_path):
    (tmp_path / "it.csv").write_text("BZh1,b\n1,2\n")
    assert rows_of(opened(tmp_path)) == [{"bzh1": 1, "b": 2}]
    (tmp_path / "it.csv").rename(tmp_path / "it.csv.gz")  # what a browser unpacked and named as before
    assert rows_of(opened(tmp_path)) == [{"bzh1": 1, "b": 2}]


@pytest.mark.parametrize("packed", PACKINGS)
def test_a_damaged_file_is_an_error_with_its_position(packed, tmp_path):
    draw = random.Random(0)
    raw = bytearray(PACK[packed](b"".join(b'{"a": "%s"}\n' % draw.randbytes(20).hex().encode() for _ in range(9000))))
    raw[len(raw) // 2] ^= 0x10
    (tmp_path / "it.jsonl").write_bytes(raw)
    assert_error(SourceError, rf"it\.jsonl is damaged, or not {packed} to its end, .* \d+ unpacked", tmp_path)


def rle_bomb():
    """A zstd frame in which each four bytes stand for 128 KiB: 512 MiB in all."""
    block, last = ((1 << 17 << 3 | 1 << 1 | end).to_bytes(3, "little") + b"x" for end in (0, 1))
    return b"\x28\xb5\x2f\xfd\x00\x38" + block * 4095 + last


BOMBS = {packed: lambda packed=packed: PACK[packed](bytes(64 << 20)) for packed in PACKINGS} | {"zstd blocks": rle_bomb}


@pytest.mark.quick(1)
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_unpacked_in_small_blocks(bomb):
    blocks = decompressed(bomb.split(maxsplit=1)[0], pieces(BOMBS[bomb](), 8 << 20), "it")
    sizes = [len(block) for block in blocks]
    assert sum(sizes) == (512 if bomb == "zstd blocks" else 64) << 20
    assert max(sizes) <= 18 << 20


def test_a_header_that_asks_for_gigabytes_of_memory_is_refused():
    wide = zstandard.ZstdCompressionParameters(window_log=30, compression_level=1)
    raw = zstandard.ZstdCompressor(compression_params=wide).compressobj().compress(bytes(300 << 20))
    with pytest.raises(SourceError, match=r"it is damaged, or not zstd .* too much memory"):
        unpack("zstd", raw)
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]
    coder = lzma.LZMACompressor(lzma.FORMAT_XZ, filters=[{**filters[0], "preset": 0, "mf": lzma.MF_HC3}])
    with pytest.raises(SourceError, match=r"it is damaged, or not xz .* Memory usage limit"):
        unpack("xz", coder.compress(b"x") + coder.flush())


def test_the_inner_extension_of_a_compressed_file():
    names = ["a.csv", "b/a.csv.gz", "a.TSV.ZST", "a.tgz", "a.tar.bz2", "a.txz", "a.gz", "gz", "a.b/c"]
    assert [inner_extension(name) for name in names] == ["csv", "csv", "tsv", "tar", "tar", "tar", "", "", ""]


@pytest.fixture
def requests(monkeypatch):
    """What is read of compressed files, in small requests."""
    monkeypatch.setattr(ranged_io, "REQUEST_BYTES", 64 << 10)
    monkeypatch.setattr(ranged_io, "BLOCK", 64 << 10)
    ranged_io._kept.get(dict).clear()
    return recorded(monkeypatch)


def write_lines(path, count, seed=0, size=500):
    """Lines that hardly shrink."""
    draw = random.Random(seed)
    lines = b"".join(b'{"n": %d, "t": "%s"}\n' % (i, draw.randbytes(size).hex().encode()) for i in range(count))
    path.write_bytes(gzip.compress(lines, 1))


def write_tar(path, count):
    """A compressed tar of members that do not shrink."""
    draw = random.Random(0)
    members = [{f"{i:04}.bin": draw.randbytes(500), f"{i:04}.n.cls": b"%d" % i} for i in range(count)]
    path.write_bytes(gzip.compress(tar_bytes({name: data for some in members for name, data in some.items()}), 1))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("write", "name", "key"), [(write_lines, "it.jsonl.gz", "n"), (write_tar, "it.tar", "n_cls")])
def test_ascending_parts_unpack_a_file_once(write, name, key, requests, tmp_path):
    write(tmp_path / name, 3000)
    source = opened(tmp_path)
    requests.drain()
    ranged_io._kept.get(dict).clear()
    for first in range(0, 3000, 100):
        part = pickle.loads(pickle.dumps(source.fragment(np.arange(first, first + 100))))
        assert part(raise_bad)[key].tolist() == list(range(first, first + 100))
    assert requests.drain() == (tmp_path / name).stat().st_size
    (kept,) = ranged_io._kept.get(dict).values()
    assert kept.at - kept.first < 2 * text.MARK_BYTES


def test_parts_in_any_order_and_in_many_threads_are_right(requests, tmp_path):
    write_lines(tmp_path / "it.jsonl.gz", 1000)
    source = opened(tmp_path)

    def work(seed):
        firsts = random.Random(seed).sample(range(950), 8)
        return [(first, read(source, range(first, first + 50))["n"].tolist()) for first in firsts]

    for first, found in chain.from_iterable(run_all(work, range(6), 6)):
        assert found == list(range(first, first + 50))
    assert len(ranged_io._kept.get(dict)) <= ranged_io.KEPT_STREAMS


def test_a_file_that_was_written_again_is_not_read_from_the_old_stream(requests, tmp_path):
    path = tmp_path / "it.jsonl.gz"
    write_lines(path, 1000)
    before = read(opened(path), range(100))["t"]
    assert ranged_io._kept.get(dict)
    write_lines(path, 1000, seed=1)
    assert read(opened(path), range(100, 110))["n"].tolist() == list(range(100, 110))
    assert read(opened(path), range(100))["t"] != before


SCRIPT = """
import os, re, sys, warnings
import numpy as np
import pyarrow.csv, zstandard
from streamloader.conversion.sources import ranged_io as streams
from streamloader.conversion.sources.base import raise_bad
from streamloader.conversion.sources.fields import parse_selection
from streamloader.conversion.sources.formats import open_source
"""
FORKED = """
warnings.simplefilter("ignore")
source = open_source(sys.argv[1], None, {}, parse_selection(None))[1]
read = lambda first: source.fragment(np.arange(first, first + 50))(raise_bad)["n"].tolist()
assert read(0) == list(range(50)) and streams._kept.get(dict)
child = os.fork()
if not child:
    good = read(50) == list(range(50, 100))
    os._exit(0 if good else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert read(50) == list(range(50, 100))
print("right in both")
"""


@pytest.mark.long
def test_a_forked_child_begins_anew(tmp_path):
    # several requests: one is under way when the process forks
    write_lines(tmp_path / "it.jsonl.gz", 1000, size=20_000)
    assert run_python("-c", SCRIPT + FORKED, tmp_path).stdout == "right in both\n"


MEMORY = """
# not getrusage's, which counts what the starter held when it forked
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) >> 10
for path in sys.argv[1:]:
    source = open_source(path, None, {}, parse_selection("n"))[1]
    total = 0
    for first in range(0, source.num_samples, 5000):
        rows = np.arange(first, min(first + 5000, source.num_samples))
        total += int(source.fragment(rows)(raise_bad)["n"].sum())
    print(source.num_samples, total, peak())
"""


@pytest.mark.long
@pytest.mark.parametrize(("kind", "packed"), [("jsonl", "gzip"), ("csv", "zstd"), ("csv", "")])
def test_memory_is_bounded_however_large_a_file_unpacks(kind, packed, tmp_path):
    head, line = (b"n,t\n", b"%d,") if kind == "csv" else (b"", b'{"n":%d,"t":"')
    tail = b"x" * 9000 + (b"\n" if kind == "csv" else b'"}\n')

    counts = (100, 23_000)  # 1 and 210 MB unpacked
    paths = [tmp_path / f"{count}.{kind}" for count in counts]
    for count, path in zip(counts, paths, strict=True):
        path.write_bytes(PACK[packed](head + b"".join(line % i + tail for i in range(count))))
    lines = run_python("-c", SCRIPT + MEMORY, *paths).stdout.splitlines()
    (*first, small), (*second, large) = (map(int, line.split()) for line in lines)
    assert (first, second) == tuple([count, count * (count - 1) // 2] for count in counts)
    assert large - small < (110 if packed else 150), f"{small} MiB, then {large}"


# compressed tars


TAR_PACKINGS = {"gzip": [".tar.gz", ".tgz", ".tar"], "bzip2": [".tar.bz2"], "xz": [".tar.xz"], "zstd": [".tar.zst"]}


@pytest.mark.quick(3)
@pytest.mark.parametrize(("packed", "ending"), [(packed, one) for packed in PACKINGS for one in TAR_PACKINGS[packed]])
def test_a_compressed_tar_is_read_like_a_plain_one(packed, ending, tmp_path):
    draw = random.Random(0)
    members = {f"{i:03}.{ext}": draw.randbytes(size) for i in range(40) for ext, size in (("bin", 30_000), ("raw", i))}
    files({"it.tar": tar_bytes(members)})(tmp_path)
    plain_one = rows_of(opened(tmp_path / "it.tar"))
    data = PACK[packed]((tmp_path / "it.tar").read_bytes())
    (tmp_path / "it.tar").unlink()
    (tmp_path / f"it{ending}").write_bytes(data)
    source = opened(tmp_path)
    assert rows_of(source) == plain_one
    assert rows_of(source, [3, 39]) == [plain_one[3], plain_one[39]]
    assert rows_of(source, [0]) == plain_one[:1]


def test_bad_samples_of_a_compressed_tar_are_named_by_their_members(requests, tmp_path):
    draw, members = random.Random(0), {}
    for i in range(400):
        members |= {f"{i:04}.bin": draw.randbytes(3000), f"{i:04}.cls": b"x" if i in (7, 300, 311) else b"%d" % i}
    (tmp_path / "it.tar").write_bytes(gzip.compress(tar_bytes(members), 1))
    source = opened(tmp_path)
    requests.drain()
    good, refused = bad_rows(source)
    assert len(good) == 397
    assert [one.name.rpartition("/")[2] for one in refused] == [f"it.tar: {i:04}.cls" for i in (7, 300, 311)]
    assert requests.drain() <= 2 * (tmp_path / "it.tar").stat().st_size  # once for the data, once for the names


BAD_TARS = {
    "tar cut in a member": (lambda raw: PACK["gzip"](raw[:5000]), "its member 1.bin extends to byte 9512, .* at 5000"),
    "tar cut between": (lambda raw: PACK["zstd"](raw[:9728]), "is truncated: it ends at byte 9728 without the end"),
    "gzip cut": (lambda raw: PACK["gzip"](raw)[:-20], "is truncated: its gzip data end early"),
    "check sum": (lambda raw: PACK["gzip"](raw)[:-8] + bytes(8), "is damaged, or not gzip to its end"),
    "no tar": (lambda raw: PACK["xz"](b"hello" * 200), "is not a tar, or damaged, at byte 0"),
    "nothing": (lambda raw: b"", "is truncated: it ends at byte 0"),
    "pickle": (lambda raw: PACK["bzip2"](tar_bytes({"1.npy": npy_bytes(np.array([{}]))})), "tar.gz: 1.npy: it is no"),
}


@pytest.mark.parametrize("case", BAD_TARS)
def test_a_compressed_tar_that_cannot_be_read_is_an_error(case, tmp_path):
    make, message = BAD_TARS[case]
    (tmp_path / "it.tar.gz").write_bytes(make(tar_bytes({"1.bin": b"x" * 9000})))
    assert_error(SourceError, message, tmp_path)
