"""`pack=`: documents as rows of one length, without a change to the order or the state."""

import math
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamloader.errors import UsageError
from streamloader.format.manifest import Field
from streamloader.format.writer import Writer
from streamloader.loader.arguments import choose_packs
from streamloader.options import Pack
from streamloader.pytorch.dataset import StreamingDataset

KINDS = {
    "tokens": Field.parse("ragged:uint16"),
    "signed": Field.parse("ragged:int32"),
    "floats": Field.parse("ragged:float16"),
    "flags": Field.parse("ragged:bool"),
    "boxes": Field.parse("ragged:float32[4]"),
    "x": Field.parse("int64"),
    "name": Field.parse("text"),
}


def chosen(choice: Any, batch_size: int | None = 8, transformed: bool = False) -> dict[str, Pack]:
    return choose_packs(KINDS, choice, batch_size=batch_size, transformed=transformed)


def test_a_number_is_the_length_of_the_rows():
    assert chosen({"tokens": 2049, "signed": Pack(7, pad=-100)}) == {"tokens": Pack(2049), "signed": Pack(7, pad=-100)}
    assert chosen(None) == chosen({}) == chosen({}, batch_size=None, transformed=True) == {}


REFUSED = [
    (2049, "pack=2049 names no field"),
    ("tokens", "names no field"),
    ({"label": 8}, "'label', which is not a fetched field"),
    ({"x": 8}, "'x', which is int64"),
    ({"name": 8}, "'name', which is text"),
    ({"boxes": 8}, r"'boxes', which is ragged:float32\[4\]"),
    ({"tokens": 0}, "length=0"),
    ({"tokens": 2**31}, "length=2147483648.*from 1 to 1073741824"),
    ({"tokens": True}, "length=True"),
    ({"tokens": 2.5}, "length=2.5"),
]


@pytest.mark.parametrize(("choice", "message"), REFUSED)
def test_a_field_that_cannot_be_packed_is_an_error(choice, message):
    with pytest.raises(UsageError, match=message) as caught:
        chosen(choice)
    assert "\n" not in str(caught.value)


def test_single_samples_and_transforms_are_an_error():
    with pytest.raises(UsageError, match="with batch_size=None"):
        chosen({"tokens": 8}, batch_size=None)
    with pytest.raises(UsageError, match="with a transform"):
        chosen({"tokens": 8}, transformed=True)


PADDINGS = [
    *[("tokens", pad, fits) for pad, fits in ((0, True), (65535, True), (-1, False), (65536, False), (0.5, False))],
    *[("signed", pad, fits) for pad, fits in ((-100, True), (3.0, True), (math.inf, False), (math.nan, False))],
    *[("floats", pad, fits) for pad, fits in ((0.1, True), (-math.inf, True), (math.nan, True), (1e9, False))],
    *[("flags", pad, fits) for pad, fits in ((0, True), (1, True), (2, False))],
]


@pytest.mark.parametrize(("name", "pad", "fits"), PADDINGS)
def test_padding_must_be_of_the_field(name, pad, fits):
    choice = {name: Pack(8, pad)}
    if fits:
        assert chosen(choice) == choice
    else:
        with pytest.raises(UsageError, match=rf"fills '{name}' with .*, which is not "):
            chosen(choice)


def write(folder: Path, count: int, longest: int) -> list[np.ndarray[Any, Any]]:
    """Write documents of 0 to `longest` tokens, and return them."""
    rng = np.random.default_rng([count, longest])
    documents = [np.arange(i, i + rng.integers(0, longest + 1), dtype=np.int32) for i in range(count)]
    with Writer(folder, {"tok": "ragged:int32", "label": "int64"}, layout=datasets.SMALL) as out:
        for i, document in enumerate(documents):
            out.write({"tok": document, "label": i})
    return documents


def check_rows(batch: dict[str, Any], documents: list[np.ndarray[Any, Any]], pack: Pack) -> None:
    """The batch's rows are the documents that `index` names, end to end, and at most one row of padding."""
    flat = [value for i in batch["index"].tolist() for value in documents[i].tolist()]
    padding = -len(flat) % pack.length
    assert batch["tok"].shape == ((len(flat) + padding) // pack.length, pack.length)
    assert batch["tok"].dtype == torch.int32
    assert batch["tok"].flatten().tolist() == flat + [pack.pad] * padding
    edges = [0, *np.cumsum([len(documents[i]) for i in batch["index"].tolist()]).tolist()]
    assert batch["tok_offsets"].tolist() == edges
    assert batch["label"].tolist() == batch["index"].tolist()


@pytest.mark.long
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    count=st.integers(1, 200),
    longest=st.sampled_from((0, 5, 300)),
    pack=st.builds(Pack, st.sampled_from((1, 7, 64, 5000)), st.integers(-9, 9)),
    size=st.integers(1, 3),
    remainder=st.sampled_from(("pad", "uneven")),
    data=st.data(),
)
@pytest.mark.filterwarnings("ignore:.* (consumers|ranks) .* lanes")
def test_every_document_comes_once_at_any_world_size(tmp_path_factory, count, longest, pack, size, remainder, data):
    folder = tmp_path_factory.mktemp("pack") / "d"
    documents = write(folder, count, longest)
    batch_size = data.draw(st.integers(1, min(count, 20)))
    seen: list[int] = []
    for rank in range(size):
        ds = StreamingDataset(
            folder, batch_size=batch_size, remainder=remainder, world=(rank, size), with_index=True, pack={"tok": pack}
        )
        kept = [batch for _ in range(2) for batch in ds]  # batches that are kept are never overwritten
        for batch in kept:
            check_rows(batch, documents, pack)
            seen += datasets.numbers(batch)
    assert sorted(seen) == sorted(2 * list(range(count)))


def test_packing_changes_neither_the_order_nor_the_state(tmp_path):
    documents = write(tmp_path / "d", 150, 90)
    plain = StreamingDataset(tmp_path / "d", batch_size=16, with_index=True)
    order = [batch["index"].tolist() for batch in plain]
    packed = StreamingDataset(tmp_path / "d", batch_size=16, with_index=True, pack={"tok": 100})
    packed = pickle.loads(pickle.dumps(packed))  # as workers get it
    for _, batch in zip(range(5), packed, strict=False):
        check_rows(batch, documents, Pack(100))
    state = packed.state_dict()
    plain.load_state_dict(state)
    packed.load_state_dict(state)
    rest = [batch["index"].tolist() for batch in packed]
    assert rest == [batch["index"].tolist() for batch in plain] == order[5:]
