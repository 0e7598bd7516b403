"""What notebooks and the viewer show of values: any value is shown, escaped, and says what it is."""

import io
import re
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
import torch
import zarr
from datasets import EPS, encoded, picture
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from viewing import FIELDS, HOSTILE, sound, value

import streamloader as sl
from streamloader.loader.showing import looks_of
from streamloader.show import media
from streamloader.show.cells import Looks, cell, rows_of
from streamloader.show.render import show_batch

VALUES = st.one_of(
    st.text(max_size=50),
    st.binary(max_size=50),
    st.integers(),
    st.floats(),
    st.none(),
    arrays.arrays(
        st.one_of(arrays.integer_dtypes(), arrays.unsigned_integer_dtypes(), arrays.floating_dtypes(), st.just("bool")),
        arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=8),
    ),
)
TEXT = Looks(classes={"label": ["ant", HOSTILE]})


class Tags(HTMLParser):
    """Collects the tags and attributes of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@given(st.dictionaries(st.text(min_size=1, max_size=12), VALUES, max_size=4), st.integers(1, 3))
def test_any_value_is_shown_and_nothing_of_it_is_a_tag(sample, rows):
    batch = {name: [each] * rows for name, each in sample.items()}
    html = show_batch(batch, TEXT).html
    known = {"style", "div", "p", "span", "b", "img", "svg", "rect", "title", "text", "polyline", "audio", "video"}
    for tag, attributes in Tags(html).tags:
        assert tag in known
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("src") or "data:").startswith("data:")


@given(st.text())
def test_a_text_is_shown_as_it_is_but_its_control_characters(text):
    shown = cell("caption", text, TEXT).text
    assert len(shown) >= min(len(text), 2000)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert [a for a, b in zip(text, shown, strict=False) if a != b and a.isprintable()] == []


def test_hostile_texts_and_class_names_are_escaped():
    batch = {"caption": [HOSTILE], "label": np.array([1]), HOSTILE: np.array([3])}
    html = show_batch(batch, TEXT, title=HOSTILE).html
    assert "<script>" not in html
    assert "<img src=x" not in html
    assert html.count("&lt;script&gt;") >= 4


def test_surrogates_which_json_may_have_are_no_error():
    html = show_batch({"t\ud800": ["a\udfff"], "label": np.array([0])}, Looks(classes={"label": ["b\ud800"]})).html
    assert {"a?", "b? (0)"} <= set(re.findall(r">([^<>]+)<", html))


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_an_encoded_image_is_shown_as_it_is(kind):
    data = encoded(picture(3), kind)
    shown = cell("image", data, TEXT)
    assert shown.kind == "image"
    assert shown.size == (32, 24)
    assert shown.media[0].type == f"image/{kind}"
    assert shown.media[0].read() == data


def test_a_large_image_is_sent_smaller_and_one_that_browsers_lack_as_png():
    noise = np.random.default_rng(0).integers(0, 256, (900, 1200, 3), np.uint8)
    for data in (encoded(noise, "jpeg"), _tiff(noise[:90, :120])):
        shown = cell("image", data, TEXT)
        with Image.open(io.BytesIO(shown.media[0].read())) as image:
            assert image.format == "PNG"
            assert max(image.size) <= media.THUMBNAIL
        assert len(shown.media[0].read()) < len(data) * 4


def _tiff(pixels: np.ndarray, kind: str = "TIFF") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize(
    ("kind", "dtype", "most"),
    [("PNG", np.uint16, 900), ("TIFF", np.uint16, 65535), ("TIFF", np.int32, 10**6), ("TIFF", np.float32, 0.5)],
)
def test_an_encoded_image_of_more_than_8_bits_is_shown_from_its_least_to_its_largest_value(kind, dtype, most):
    gradient = np.linspace(0, most, 60 * 50).reshape(60, 50).astype(dtype)
    shown = cell("image", _tiff(gradient, kind), TEXT)
    assert shown.text.endswith(", contrast stretched")
    with Image.open(io.BytesIO(shown.media[0].read())) as image:
        np.testing.assert_allclose(np.asarray(image), np.linspace(0, 255, 60 * 50).reshape(60, 50), atol=2)


def test_a_crop_is_shown_in_words():
    batch = {"image": np.zeros((1, 8, 8, 3), np.uint8), "image_crop": np.array([[59, 2, 83, 99, 1]])}
    (row,) = rows_of(batch, Looks(images={"image": None}))
    assert row.cells["image_crop"].text == "99 x 83 from column 2, row 59, flipped"


@pytest.mark.parametrize("fit", [None, "best"])
def test_packed_rows_have_a_cell_of_their_documents_apart_and_no_padding(tmp_path, fit):
    with sl.Writer(tmp_path / "d", {"tokens": "ragged:int32"}) as writer:
        for i in range(1, 9):
            writer.write({"tokens": np.full(9 * i, i, np.int32)})
    loader = sl.NumpyDataset(
        tmp_path / "d", batch_size=8, pack={"tokens": sl.Pack(64, fit=fit)}, remainder="uneven", with_index=True
    )
    batch = next(iter(loader))
    looks = Looks(fields=loader.fields, tokens=lambda numbers: [f"<{number}>" for number in numbers])
    rows = rows_of(batch, looks)
    assert [list(row.cells) for row in rows] == [["tokens"]] * len(batch["tokens"])
    texts = [piece for row in rows for piece in row.cells["tokens"].pieces]
    assert all(len(set(piece)) == 1 for piece in texts)
    found = [int(text.strip("<>")) for piece in texts for text in piece]
    assert sorted(found) == [i for i in range(1, 9) for _ in range(9 * i)]
    paddings = sum(int(row.cells["tokens"].text.rpartition(" ")[2]) for row in rows)
    assert paddings == batch["tokens"].size - len(found)


@pytest.mark.parametrize("lead", [2, (1, 3)])
@pytest.mark.parametrize("days", [np.arange(30), np.arange(30)[::-1]])
def test_frames_of_windows_have_their_times_and_channels(tmp_path, days, lead):
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=3)
    times = group.create_array("time", shape=(30,), dtype="i8", dimension_names=("time",))
    times[:] = days
    times.attrs["units"] = "days since 2001-01-01"
    for offset, name in ((0.0, "<b>u"), (100.0, "v")):
        array = group.create_array(name, shape=(30, 8, 9), dtype="f4", dimension_names=("time", "y", "x"))
        array[:] = np.broadcast_to(days[:, None, None] + offset, (30, 8, 9))
    window = sl.Window(history=3, lead=lead, step=2)
    channels = sl.Channels("<b>u", "v")
    loader = sl.NumpyDataset(
        str(tmp_path / "a.zarr"), batch_size=2, sample_axis="time", windows=window, channels=channels, num_workers=0
    )
    looks, batch = looks_of(loader), next(iter(loader))
    present = batch["channels"][0, -1, 0, 0, 0]
    for name in ("channels", "channels_target"):
        captions = rows_of(batch, looks)[0].cells[name].captions
        planes = batch[name][0].reshape(-1, 8, 9)[:, 0, 0]
        assert len(captions) == len(planes)
        for caption, plane in zip(captions, planes, strict=True):
            time, channel = caption.split(", ")
            assert plane == present + int(time[1:] or 0) + 100 * (channel == "v")
    assert "&lt;b&gt;u</span>" in show_batch(batch, looks).html


def test_normalised_images_are_images_without_their_dataset():
    pixels = np.random.default_rng(0).normal(size=(2, 24, 32, 3)).astype(np.float32)
    (first, _) = rows_of({"image": torch.from_numpy(pixels).permute(0, 3, 1, 2)}, Looks())
    assert (first.cells["image"].kind, first.cells["image"].size) == ("image", (32, 24))
    planes = torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))  # three variables on a grid
    assert rows_of({"image": planes}, Looks())[0].cells["image"].kind == "frames"


@pytest.mark.parametrize(("dtype", "most"), [(np.uint16, 65535), (np.float32, 1), (np.float64, 1e308)])
def test_an_array_of_three_channels_is_an_image_whatever_its_dtype(dtype, most):
    shown = cell("x", (picture(2, 40, 50) / 255 * most).astype(dtype), TEXT)
    assert (shown.kind, shown.size) == ("image", (50, 40))
    with Image.open(io.BytesIO(shown.media[0].read())) as image:
        assert image.mode == "RGB"


def test_an_image_that_says_it_is_enormous_is_shown_as_bytes():
    header = encoded(picture(0), "png")
    huge = header[:16] + (100_000).to_bytes(4, "big") * 2 + header[24:]
    assert cell("image", huge, TEXT).kind == "bytes"


def test_an_image_of_few_bytes_and_many_pixels_is_sent_smaller():
    out = io.BytesIO()
    Image.new("1", (5000, 4000)).save(out, "PNG")
    shown = cell("image", out.getvalue(), TEXT)
    assert len(out.getvalue()) < 10_000
    with Image.open(io.BytesIO(shown.media[0].read())) as image:
        assert image.size == (640, 512)


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_smaller_image_is_turned_by_its_orientation_whatever_else_its_exif_has(turn):
    exif = Image.Exif()
    exif[0x0100], exif[0x010E], exif[0x0112] = 40, "hello", turn
    odd = bytearray(exif.tobytes())
    odd[19] = 2  # the width is a text
    out = io.BytesIO()
    pixels = np.zeros((90, 120), np.uint8)
    pixels[:30, :30] = 255
    Image.fromarray(pixels).save(out, "JPEG", exif=bytes(odd))
    (sent,) = cell("image", out.getvalue() + bytes(media.MOST_BYTES), TEXT).media
    with Image.open(io.BytesIO(sent.read())) as image:
        found = np.asarray(image)
    white = [found[y, x] > 128 for y in (5, -5) for x in (5, -5)]
    corner = {1: 0, 2: 1, 3: 3, 4: 2, 5: 0, 6: 1, 7: 3, 8: 2}[turn]
    assert white == [place == corner for place in range(4)]
    assert found.shape == ((90, 120) if turn < 5 else (120, 90))


def test_no_other_program_runs_for_a_value(monkeypatch):
    ran = list[object]()
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *given: ran.append(given))
    assert cell("image", EPS, TEXT).kind == "bytes"
    assert media._thumbnail(EPS)
    assert not ran


def test_a_notebook_has_no_sound_that_would_fill_its_file():
    long, short = sound(440, 270), sound(440)
    assert len(long) > 4 << 20
    page = show_batch({"clip": [long, short]}, TEXT).html
    assert page.count("<audio") == 1
    assert "too large for a notebook" in page
    assert len(page) < 100_000


@given(st.integers(0, 1143), st.integers(0, 255))
def test_a_damaged_image_is_shown_or_grey_and_never_an_error(place, byte):
    data = bytearray(encoded(picture(1, 90, 120), "jpeg") + bytes(media.MOST_BYTES))  # large: decoded here
    data[place % 1000] = byte
    shown = cell("image", bytes(data), TEXT)
    assert all(each.read() for each in shown.media)


def test_sounds_and_videos_are_told_by_their_first_bytes():
    assert cell("clip", sound(440), TEXT).kind == "audio"
    assert media.media_type(b"fLaC\0\0") == "audio/flac"
    assert media.media_type(b"\0\0\0\x20ftypisom") == "video/mp4"
    assert media.media_type(b"RIFF....AVI LIST") == ""
    assert media.media_type(b"<svg onload=alert(1)>") == ""


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=2, max_side=40)))
def test_a_heat_map_has_the_lowest_value_dark_and_what_is_not_finite_transparent(values):
    with Image.open(io.BytesIO(media.heat_map(values).read())) as image:
        shown = np.asarray(image)
    factor = shown.shape[0] // values.shape[0]
    assert shown.shape == (values.shape[0] * factor, values.shape[1] * factor, 4)
    assert ((shown[::factor, ::factor, 3] == 255) == np.isfinite(values)).all()


def test_a_plot_has_no_point_for_what_is_not_finite_and_the_range_of_the_others():
    values = np.linspace(-1, 1, 100) * 1e308
    values[[3, 40, 41]] = np.nan, np.inf, -np.inf
    points = [tuple(map(float, point.split(","))) for point in media.polyline(values).split()]
    assert len(points) == 97
    assert (points[0], points[-1]) == ((0, 60), (240, 0))
    assert media.polyline(np.full(20, np.nan)) == ""


def test_complex_numbers_are_shown_as_they_are_and_by_their_magnitudes():
    assert cell("z", np.complex64(3 + 4j), TEXT).text == "(3+4j)"
    assert cell("z", np.array([3 + 4j, 0]), TEXT).text == "complex128 2, magnitudes 0 to 5 [3.+4.j, 0.+0.j]"
    plot = cell("z", np.arange(40) * 1j, TEXT)
    assert (plot.kind, plot.text) == ("plot", "complex128 40, magnitudes 0 to 39")
    assert cell("z", np.ones((9, 9)) * 1j, TEXT).kind == "heat"


def test_an_image_that_was_normalised_is_shown_in_its_own_colours():
    pixels = picture(5, 40, 50)
    mean, std = (np.array(each, np.float32) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    normalised = ((pixels / np.float32(255) - mean) / std).transpose(2, 0, 1)
    shown = cell("image", normalised, Looks(images={"image": (mean, std)}))
    with Image.open(io.BytesIO(shown.media[0].read())) as image:
        np.testing.assert_allclose(np.asarray(image).astype(int), pixels, atol=1)


def test_a_batch_of_tensors_is_shown_as_one_of_arrays():
    arrays_of = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "label": np.array([0, 1]), "name": ["a", "b"]}
    tensors = {**arrays_of, "x": torch.from_numpy(arrays_of["x"]), "label": torch.tensor([0, 1])}
    assert show_batch(tensors, TEXT).html == show_batch(arrays_of, TEXT).html
    assert cell("x", torch.ones(3, dtype=torch.bfloat16, requires_grad=True), TEXT).text.startswith("float32 3")


def test_rows_say_which_sample_they_are_and_what_is_wrong_with_them():
    batch = {"x": np.arange(3), "index": np.array([7, 8, 9]), "valid": np.array([True, True, False])}
    batch["error"] = np.array([False, True, False])
    rows = rows_of(batch, TEXT)
    assert [row.index["index"] for row in rows] == [7, 8, 9]
    assert [row.marks for row in rows] == [(), ("error",), ("padding",)]
    assert all(set(row.cells) == {"x"} for row in rows)


def test_stored_fields_are_values_whatever_their_names():
    batch = {"source": ["wiki", "web"], "error": np.array([0.5, 0.1]), "valid": np.array([False, True])}
    batch |= {"index": np.array([7, 8]), "index_x": np.array([np.nan, 1]), "replaced": np.ones((2, 3))}
    rows = rows_of(batch, Looks(fields=batch.keys() - {"index"}))
    assert rows[0].cells["source"].text == "wiki"
    assert rows[0].index == {"index": 7}
    assert all(row.cells.keys() == batch.keys() - {"index"} and not row.marks for row in rows)
    (row,) = rows_of({"index": np.zeros((1, 2)), "error": [np.zeros(3)], "source": ["a"]}, TEXT)  # of a notebook
    assert row.cells.keys() == {"index", "error", "source"}


@given(st.lists(st.integers(0, 20), max_size=6))
def test_ragged_columns_are_cut_at_their_offsets(lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    batch = {"tokens": np.arange(sum(lengths)), "tokens_offsets": offsets, "label": np.zeros(len(lengths), np.int64)}
    rows = rows_of(batch, Looks(tokens=lambda numbers: [f"<{n}>" for n in numbers]))
    texts = [[token for piece in row.cells["tokens"].pieces for token in piece] for row in rows]
    expected = [[f"<{n}>" for n in range(a, b)] for a, b in pairwise(offsets)]
    assert texts == expected


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    url = tmp_path_factory.mktemp("shown") / "d"
    with sl.Writer(url, FIELDS) as writer:
        for i in range(40):
            writer.write(value(i))
    return str(url)


def test_a_notebook_shows_a_step_as_it_is_trained_and_the_pass_goes_on(shown):
    decode = sl.Decode(size=(32, 32), crop="random", normalize="imagenet")
    ds = sl.StreamingDataset(shown, batch_size=4, fields=["image", "label"], decode=decode, seed=3, world=(1, 2))
    batches = iter(ds)
    next(batches)
    ours, other = ds.show(step=2), ds.show(step=2, rank=0)
    assert "epoch 0, step 2, rank 1 of 2" in ours.html
    assert ours._repr_html_() == ours.html
    assert other.html != ours.html
    expected = list(ds.__iter__.__func__(ds))[2]  # of a new pass
    assert (
        ds.show(expected).html.partition('<div class="samples">')[2] == ours.html.partition('<div class="samples">')[2]
    )
    assert next(iter(ds.replay(0, [2], rank=0)))["label"].tolist() != expected["label"].tolist()


def test_a_dataset_in_a_notebook_is_a_table_of_its_fields(shown):
    html = sl.StreamingDataset(shown, batch_size=4)._repr_html_()
    assert all(f"<td>{name}</td>" in html for name in FIELDS)
    opened = sl.open(shown)._repr_html_()
    assert "40 samples" in opened
    assert all(f"<td>{name}</td>" in opened for name in FIELDS)
