"""Packed rows: documents in rows of one shape, each token once, the same at any world size and number of workers."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commands import run
from test_bad_samples import damage

import streamloader as sl
from streamloader import errors
from streamloader.cli.measure import parse_packs
from streamloader.engine.packing import row_items
from streamloader.format.opening import open_root
from streamloader.format.tables import LengthTable, digest_of_pages, encode_lengths, lengths_digest, lengths_path
from streamloader.loader import join, packing
from streamloader.loader.dataset import NumpyMixture as Mixture
from streamloader.measure.forecast import ForecastOptions, PackedRows, forecast, forecast_mixture
from streamloader.order.packing import Packed
from streamloader.storage import open_store
from streamloader.testing import order as reference

N, LENGTH, PAD = 700, 64, -1
LAYOUT = sl.Layout(chunk_size=1 << 10, block_size=1 << 12, samples_per_shard=64)
PACK = sl.Pack(LENGTH, fit="best", pad=PAD)
PACK64 = sl.Pack(64, fit="best")
Item = tuple[int, int]  # a document, and where it is cut


def length_of(document: int) -> int:
    """Documents of 0 to 40 tokens, and some of up to 299."""
    size = (document * 7919) % 41
    return size + 37 * size // 5 if document % 9 == 0 else size


def write(path: Path, first: int = 0, count: int = N, others: Mapping[str, str] | None = None) -> str:
    """Write documents whose token k is 1000 * document + k, and masks of the last digits of these."""
    fields = {"tokens": "ragged:int32", "mask": "ragged:uint8", **(others or {})}
    with sl.Writer(path, fields, layout=LAYOUT, num_samples=count) as out:
        for document in range(first, first + count):
            tokens = np.arange(length_of(document), dtype=np.int32) + 1000 * document
            sample = {"tokens": tokens, "mask": (tokens % 10).astype(np.uint8), "label": document, "short": tokens[1:]}
            out.write({name: sample[name] for name in fields})
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("packed") / "d")


def stream(url: str, **given: Any) -> sl.NumpyDataset:
    options = {"batch_size": 8, "pack": {"tokens": PACK}, "fields": ["tokens"], "num_workers": 0, "with_index": True}
    return sl.NumpyDataset(**{"url": url, **options, **given})


def rows_of(batch: Mapping[str, Any], length: int = LENGTH, first: int = 0) -> list[list[Item]]:
    """The items of each row of a batch, after checking all its columns against each other. `first`: of the corpus."""
    tokens, documents = batch["tokens"], batch["tokens_documents"]
    count = len(tokens)
    assert tokens.shape == documents.shape == batch["tokens_positions"].shape == (count, length)
    assert (tokens.dtype, documents.dtype, batch["tokens_positions"].dtype) == (np.int32, np.int32, np.int32)
    cu, flat = batch["tokens_cu_seqlens"], {name: batch[name].ravel() for name in batch if batch[name].ndim == 2}
    assert cu.dtype == np.int32
    assert cu[0] == 0
    assert set(cu[np.append(False, np.diff(cu) <= 0)].tolist()) <= {tokens.size}
    rows: list[list[Item]] = [[] for _ in range(count)]
    for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        if begin == end:
            continue
        assert begin // length == (end - 1) // length
        (document,) = {*flat["tokens_documents"][begin:end].tolist()}
        part = flat["tokens"][begin:end]
        if document < 0:
            assert end % length == 0
            assert {*part.tolist(), *flat["tokens_positions"][begin:end].tolist()} == {PAD, 0}
            continue
        number = document + first
        start = int(part[0]) - 1000 * number
        assert start % length == 0
        size = min(length, length_of(number) - start)
        assert part.tolist() == list(range(int(part[0]), int(part[0]) + size))
        assert flat["tokens_positions"][begin:end].tolist() == list(range(end - begin))
        rows[begin // length].append((document, start))
    return rows


def naive(length: int = LENGTH, *, split: bool = True, documents: range = range(N)) -> list[list[Item]]:
    """The items of all rows by the reference."""
    case = reference.Packing(tuple(map(length_of, documents)), length, split)
    return [[(documents[d], piece * length) for d, piece in row] for row in reference.rows(case)]


def take(dataset: Any, count: int | None = None) -> list[list[tuple[int, list[Item]]]]:
    """The (number, items) of the rows of each step; of all of an epoch, or of the first ones."""
    steps = []
    for number, batch in enumerate(dataset):
        steps.append(list(zip(batch["index"].tolist(), rows_of(batch), strict=True)))
        if number + 1 == count:
            break
    return steps


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"memory": "4MB"}, {"shuffle": sl.Shuffle(block=3)}])
def test_an_epoch_has_every_row_once_and_rows_are_those_of_the_plan(corpus, workers, options):
    dataset = stream(corpus, num_workers=workers, **options)
    expected = naive()
    for epoch in range(2):
        steps = take(dataset)
        assert [len(step) for step in steps] == [8] * len(dataset)
        found = {number: items for step in steps for number, items in step}
        assert [found[number] for number in range(len(expected))] == expected
        assert [number for number, _ in steps[3]] == dataset.samples(epoch, 3).tolist()
    items = [item for row in expected for item in row]
    assert sorted(items) == [(d, start) for d in range(N) for start in range(0, length_of(d), LENGTH)]
    assert dataset.num_samples == len(expected)
    tokens = sum(map(length_of, range(N)))
    assert dataset.stats().padding_share == pytest.approx(1 - tokens / len(expected) / LENGTH, abs=0.02)
    dataset.close()


@pytest.mark.long
def test_every_world_size_has_the_same_steps_of_one_shape_and_resumes_at_the_others_states(corpus):
    options = {"batch_size": 12, "remainder": "drop", "shuffle": sl.Shuffle(lanes=4, block=8)}
    whole = [sorted(step) for step in take(stream(corpus, **options))]
    for stop, size in ((1, 2), (4, 3), (7, 1), (2, 4)):
        saved = stream(corpus, **options)
        assert [sorted(step) for step in take(saved, stop)] == whole[:stop]
        state = json.loads(json.dumps(saved.state_dict()))
        assert len(json.dumps(state)) < 700
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            each = {"batch_size": 12 // size}
            ranks = [stream(corpus, **{**options, **each}, world=(rank, size)) for rank in range(size)]
            for rank in ranks:
                rank.load_state_dict(state)
            steps = list(zip(*map(take, ranks), strict=True))
        assert {len(rows) for step in steps for rows in step} == {12 // size}
        assert [sorted(row for rows in step for row in rows) for step in steps] == whole[stop:]
        (replayed,) = ranks[0].replay(0, [3])
        assert {*replayed["index"].tolist()} <= {number for number, _ in whole[3]}


@pytest.mark.parametrize(
    "change",
    [{"pack": {"tokens": sl.Pack(32, fit="best")}}, {"pack": {"tokens": sl.Pack(64)}}, {"where": slice(0, 690)}],
)
def test_a_state_belongs_to_its_rows(corpus, change):
    state = stream(corpus).state_dict()
    assert stream(corpus).load_state_dict(state) is None
    with pytest.raises(errors.StateError, match=r"packed|selection"):
        stream(corpus, **change).load_state_dict(state)


def test_documents_that_are_longer_than_a_row_are_left_out_and_counted_without_split(corpus):
    dataset = stream(corpus, pack={"tokens": sl.Pack(LENGTH, fit="best", split=False, pad=PAD)})
    found = {number: items for step in take(dataset) for number, items in step}
    assert [found[number] for number in range(dataset.num_samples)] == naive(split=False)
    assert dataset.dropped == sum(length_of(d) > LENGTH for d in range(N)) > 0
    assert f"{dataset.dropped} documents" in repr(dataset)
    assert stream(corpus).dropped == 0
    assert "rows of 64" in repr(stream(corpus))


@pytest.mark.long
def test_several_fields_of_equal_lengths_are_packed_alike(corpus):
    packs = {"tokens": PACK, "mask": sl.Pack(LENGTH, fit="best", pad=100)}
    for workers in (0, 2):
        for batch in stream(corpus, pack=packs, fields=["mask", "tokens"], num_workers=workers):
            rows_of({name: column for name, column in batch.items() if name != "mask"})
            real = batch["tokens_documents"] >= 0
            assert np.array_equal(batch["mask"], np.where(real, batch["tokens"] % 10, 100))


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("columns", [(), ("cu_seqlens",), ("documents",), ("positions", "cu_seqlens")])
def test_a_batch_has_the_columns_that_are_named_and_a_state_goes_on_with_others(corpus, columns, workers):
    whole = [*stream(corpus)]
    some = stream(corpus, pack={"tokens": replace(PACK, columns=columns)}, num_workers=workers)
    begun = stream(corpus)
    for _ in zip(range(2), begun, strict=False):
        pass
    some.load_state_dict(begun.state_dict())
    names = {"tokens", "index", "valid", *(f"tokens_{column}" for column in columns)}
    for expected, batch in zip(whole[2:], some, strict=True):
        assert {*batch} == names
        assert all(np.array_equal(batch[name], expected[name]) for name in names)
    some.close()


def test_selected_and_remaining_documents_are_packed(corpus, tmp_path):
    url = str(tmp_path / "copy")
    copytree(corpus, url)
    gone = [*range(5, 130, 3), 699]
    for given, left in (
        ({"where": slice(100, 400)}, range(100, 400)),
        ({"exclude": gone}, [d for d in range(N) if d not in gone]),
    ):
        found = [item for step in take(stream(url, **given)) for _, items in step for item in items]
        assert {*found} == {(d, start) for d in left for start in range(0, length_of(d), LENGTH)}
    sl.delete(url, ids=gone)
    found = []
    left = [d for d in range(N) if d not in gone]
    for batch in stream(url):
        documents = np.array([*left, -1], np.int32)[batch["tokens_documents"]]
        found += [item for row in rows_of({**batch, "tokens_documents": documents}) for item in row]
    assert {*found} == {(d, start) for d in left for start in range(0, length_of(d), LENGTH)}


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_packs_each_source_by_itself_and_follows_its_schedule(tmp_path, workers):
    urls = [write(tmp_path / str(number), 1000 * number, 200 + 50 * number) for number in range(3)]
    by_step = {0: dict(zip(urls, (6, 1, 1), strict=True)), 5: dict(zip(urls, (1, 1, 6), strict=True))}
    given: dict[str, Any] = {"pack": {"tokens": PACK}, "fields": ["tokens"], "num_workers": workers}
    given |= {"schedule": {5: by_step[5]}, "with_index": True, "stop": "last"}
    given |= {"shuffle": sl.Shuffle(lanes=4, block=8)}

    def steps(batch_size: int = 8, state: Any = None, **options: Any) -> list[list[Any]]:
        mixture = Mixture(by_step[0], batch_size=batch_size, **given, **options)
        if state is not None:
            mixture.load_state_dict(state)
        found = []
        for _, batch in zip(range(10), mixture, strict=False):
            rows = []
            for row, source in enumerate(batch["source"].tolist()):
                part = {name: column[row : row + 1] for name, column in batch.items() if column.shape[0] == batch_size}
                edges = np.flatnonzero(np.diff(part["tokens_documents"][0])) + 1
                part["tokens_cu_seqlens"] = np.array([0, *edges, LENGTH], np.int32)
                (items,) = rows_of(part, first=1000 * source)
                rows.append((source, int(batch["index"][row]), items))
            found.append(rows)
        states.append(mixture.state_dict())
        return found

    states: list[Any] = []
    whole = steps()
    counts = [np.bincount([source for source, _, _ in rows], minlength=3).tolist() for rows in whole]
    assert np.sum(counts[:4], axis=0).argmax() == 0
    assert np.sum(counts[6:], axis=0).argmax() == 2
    expected = [naive(documents=range(1000 * n, 1000 * n + 200 + 50 * n)) for n in range(3)]
    for source, number, items in (row for rows in whole for row in rows):
        assert [(d + 1000 * source, start) for d, start in items] == expected[source][number]
    ranks = [steps(4, world=(rank, 2)) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == [sorted(rows) for rows in whole]
    after = [steps(4, states[0], world=(rank, 2)) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*after, strict=True)] == [sorted(rows) for rows in steps(8, states[0])]


@pytest.mark.parametrize(("documents", "dtype"), [(2**31, "int32"), (2**31 + 1, "int64")])
def test_numbers_of_documents_have_32_bits_unless_a_dataset_has_more_documents(documents, dtype):
    packed = Packed([np.ones(9, np.uint8)], 4)
    sizes = [SimpleNamespace(num_remaining=count) for count in (9, documents)]
    assert row_items([SimpleNamespace(packed=packed, manifest=size, num_samples=3) for size in sizes])[1:] == (5, dtype)


def test_weights_by_tokens_count_those_of_rows_without_padding(tmp_path):
    urls = [write(tmp_path / str(number), 1000 * number, 300) for number in range(2)]
    packs = {"tokens": PACK}
    mixture = Mixture(dict.fromkeys(urls, 1), batch_size=8, pack=packs, fields=["tokens"], weigh="tokens")
    assert [*mixture.shares("tokens").values()] == pytest.approx([0.5, 0.5], abs=1e-3)


@pytest.mark.long
def test_rows_of_like_attention_cost_come_together_at_any_world_size(corpus):
    pack = {"tokens": sl.Pack(LENGTH, fit="best", pad=PAD, balance="attention")}
    options = {"pack": pack, "batch_size": 12, "remainder": "drop", "shuffle": sl.Shuffle(lanes=4, block=8)}
    balanced = take(stream(corpus, **options))
    plain = take(stream(corpus, **{**options, "pack": {"tokens": PACK}}))

    def spread(steps: Any) -> float:
        costs = [[sum(min(LENGTH, length_of(d) - at) ** 2 for d, at in items) for _, items in step] for step in steps]
        return float(np.mean([max(each) - min(each) for each in costs]))

    assert spread(balanced) < 0.6 * spread(plain)
    assert sorted(row for step in balanced for row in step)[:5] == sorted(row for step in plain for row in step)[:5]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ranks = [take(stream(corpus, **{**options, "batch_size": 4}, world=(rank, 3))) for rank in range(3)]
    assert [sorted(a + b + c) for a, b, c in zip(*ranks, strict=True)] == [sorted(step) for step in balanced]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["mask", "replace"])
def test_bad_documents_are_left_out_of_their_rows_or_rows_are_replaced(corpus, tmp_path, kind):
    path = tmp_path / "bad"
    copytree(corpus, path)
    lost = set(damage(path, "tokens", 100))
    assert len(lost) > 3
    expected, column = naive(), "error" if kind == "mask" else "replaced"
    dataset = stream(str(path), on_error=kind, max_bad=1.0)
    flagged = 0
    for batch in dataset:
        for row, (number, items) in enumerate(zip(batch["index"].tolist(), rows_of(batch), strict=True)):
            assert items == [item for item in expected[number] if item[0] not in lost]
            if kind == "mask":
                assert batch[column][row] == (items != expected[number])
            assert batch["valid"][row] or items != expected[number] or number < 8
            flagged += int(batch[column][row])
    assert flagged
    with pytest.raises(errors.CorruptError):
        list(stream(str(path)))


def test_a_bad_document_of_many_rows_counts_once(tmp_path):
    path = tmp_path / "d"
    with sl.Writer(path, {"tokens": "ragged:int32"}, layout=LAYOUT, num_samples=4) as out:
        for document in range(4):
            out.write({"tokens": np.full(150 * LENGTH if document == 1 else 5 * LENGTH, document, np.int32)})
    assert damage(path, "tokens", 1) == [1]
    given = {"on_error": "mask", "shuffle": False, "remainder": "uneven", "error_log": str(tmp_path / "log")}
    dataset = stream(str(path), max_bad=1, **given)
    assert sum(int(batch["error"].sum()) for batch in dataset) == dataset.stats().bad_samples == 150
    with pytest.raises(errors.BadSamplesError, match=r"1 of 8 samples .* are bad"):
        list(stream(str(path), max_bad=0, **given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fields": None}, r"fields=\[.tokens"),
        ({"pack": {"tokens": PACK, "mask": sl.Pack(32, fit="best")}, "fields": None}, "differently"),
        ({"pack": {"tokens": PACK, "mask": 64}, "fields": None}, "differently"),
        ({"weights": np.ones(N)}, "Mixture"),
        ({"collate": "pad"}, "collate="),
        ({"bucket_by": "tokens"}, "balance="),
        ({"transform": dict}, "with a transform"),
        ({"batch_size": None}, "batch_size=None"),
        ({"shuffle": False, "pack": {"tokens": sl.Pack(64, fit="best", balance="attention")}}, "shuffle"),
        ({"batch_size": 2**25}, "have 2147483648 elements.* at most 33554431"),
    ],
)
def test_what_does_not_fit_packed_rows_is_an_error_that_names_the_remedy(corpus, given, message):
    with pytest.raises(errors.UsageError, match=message):
        stream(corpus, **given)


def test_fields_of_different_lengths_and_rows_without_documents_are_errors(tmp_path):
    url = write(tmp_path / "d", count=20, others={"short": "ragged:int32"})
    packs = {"tokens": PACK, "short": PACK}
    with pytest.raises(errors.FieldError, match="'tokens' and 'short' of document"):
        stream(url, pack=packs, fields=["tokens", "short"])
    with pytest.raises(errors.SelectionError, match="no document to pack"):
        stream(url, pack={"tokens": PACK}, where=[0])
    unknown = [{"fit": "best", "columns": value} for value in ("documents", ["documents"], ("document",))]
    unknown += [{"columns": ("documents",)}]
    for given in ({"fit": "first"}, {"split": False}, {"balance": "attention"}, {"fit": "best", "split": 1}, *unknown):
        with pytest.raises(errors.UsageError):
            sl.Pack(64, **given)


def rewrite_lengths(path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change all lengths of a field in its table, as a writer does that computes them wrongly."""
    store, document, digests = open_store(path), json.loads((path / "zarr.json").read_text()), []
    manifest = open_root(store).manifest
    table, layout = LengthTable(store, manifest, name), manifest.fields[name]
    for shard in range(layout.num_shards(manifest.num_samples)):
        lengths = change(table.shard(shard))
        (path / lengths_path(name, shard)).write_bytes(encode_lengths(lengths, layout))
        digests.append(lengths_digest(lengths))
    document["attributes"]["streamloader"]["lengths"][name] = digest_of_pages(digests)
    (path / "zarr.json").write_text(json.dumps(document))


def test_a_table_of_lengths_with_less_than_the_documents_have_is_an_error_that_names_it(tmp_path):
    """Otherwise rows would have what the table says, and leave out the end of each document."""
    url = write(tmp_path / "d")
    rewrite_lengths(tmp_path / "d", "tokens", lambda lengths: np.minimum(lengths, 4 * LENGTH))
    for given in ({}, {"where": [1, 2]}, {"pack": None, "bucket_by": "tokens", "collate": "pad"}):
        with pytest.raises(errors.FormatError, match=r"_streamloader/lengths/tokens are .* bytes in all, the samples"):
            stream(url, **given)


def test_documents_of_other_lengths_than_their_tables_are_an_error(corpus, tmp_path, monkeypatch):
    url = write(tmp_path / "d", others={"short": "ragged:int32"})
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_alike", lambda dataset, names: packing._lengths(dataset, names[0]))
        packs = {"tokens": PACK, "short": PACK}
        with pytest.raises(errors.CorruptError, match=r"packed row \d+ of 'tokens', 'short' have other lengths"):
            list(stream(url, pack=packs, fields=[*packs]))
    monkeypatch.setattr(packing, "_lengths", lambda *_: iter([np.ones(N, np.uint32)]))
    for workers in (0, 2):
        with pytest.raises(errors.CorruptError, match=r"packed row \d+ of 'tokens' have other lengths"):
            list(stream(corpus, num_workers=workers))


def test_a_plan_has_the_rows_and_their_padding(corpus, capsys):
    given = "--fields", "tokens", "--pack", "tokens=64", "--no-split", "--batch-size", 8
    _, shown, _ = run(capsys, "plan", corpus, *given)
    dataset = stream(corpus, pack={"tokens": sl.Pack(64, fit="best", split=False)})
    assert f"{dataset.num_samples:,} samples" in shown
    assert f"{dataset.dropped} longer documents are left out" in shown
    options = ForecastOptions(batch_size=8, fields=("tokens",), pack={"tokens": PACK})
    planned = forecast(corpus, options)
    tokens = sum(map(length_of, range(N)))
    assert planned.packed == PackedRows(64, N, 0, 1 - tokens / (planned.num_samples * 64))
    assert len(take(stream(corpus, memory=planned.least_memory))) == planned.steps
    assert forecast_mixture([(corpus, 1.0)], options).num_samples == planned.num_samples
    with pytest.raises(errors.UsageError, match="--pack"):
        parse_packs("tokens")


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_joined_field_is_packed_like_that_of_its_left_side(tmp_path, workers):
    left, right = write(tmp_path / "left", count=200, others={"label": "int64"}), str(tmp_path / "right")
    with sl.Writer(right, {"label": "int64", "weight": "ragged:uint8"}, layout=LAYOUT, num_samples=200) as out:
        for document in reversed(range(200)):
            tokens = np.arange(length_of(document)) + 1000 * document
            out.write({"label": document, "weight": (tokens % 7).astype(np.uint8)})
    packs, fields = {"tokens": PACK, "weight": sl.Pack(LENGTH, fit="best")}, ["tokens", "weight"]
    dataset = stream(sl.Join(left, right, on="label"), pack=packs, fields=fields, num_workers=workers, exclude=[3, 7])
    for batch in dataset:
        rows_of({name: column for name, column in batch.items() if name != "weight"})
        real = batch["tokens_documents"] >= 0
        assert np.array_equal(batch["weight"], np.where(real, batch["tokens"] % 7, 0))
        assert not {3, 7} & {*batch["tokens_documents"].ravel().tolist()}


@pytest.mark.quick(1)
@pytest.mark.parametrize(("size", "block"), [(20, 40), (400, 160)])
def test_the_first_pass_warns_of_a_packed_join_that_is_read_many_times(tmp_path, monkeypatch, size, block):
    """The factor that it names is that of the bytes that are read, of documents that share rows or have several."""
    monkeypatch.setattr(join, "BYTES", 0)
    layout = sl.Layout(chunk_size=40 * size, block_size=80 * size, codec="none")
    orders = {"tokens": np.arange(1200), "weight": np.random.default_rng(1).permutation(1200)}
    for name, order in orders.items():
        with sl.Writer(tmp_path / name, {"id": "int64", name: "ragged:uint8"}, layout=layout, num_samples=1200) as out:
            for number in order.tolist():
                out.write({"id": number, name: np.full(size - number % 3, number % 256, np.uint8)})
    given: dict[str, Any] = {"shuffle": sl.Shuffle(block=block), "batch_size": 4}
    alone = sl.NumpyDataset(tmp_path / "tokens", pack={"tokens": PACK64}, fields=["tokens"], num_workers=0, **given)
    packs = {"tokens": PACK64, "weight": PACK64}
    joined = sl.Join(tmp_path / "tokens", tmp_path / "weight", on="id")
    both = sl.NumpyDataset(joined, pack=packs, fields=[*packs], num_workers=0, **given)
    steps = sum(1 for _ in alone)
    with pytest.warns(UserWarning, match=rf"blocks of {block} samples of .* chunks of 'weight'") as caught:
        assert sum(np.array_equal(batch["tokens"], batch["weight"]) for batch in both) == steps
    times = int(str(caught[0].message).split("about ")[1].split()[0])
    stored = sl.open(tmp_path / "weight").manifest.fields["weight"].stored
    assert both.stats().bytes_fetched - alone.stats().bytes_fetched == pytest.approx(times * stored, rel=0.2)
