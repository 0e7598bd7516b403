"""Forecasts, checked against epochs that are run."""

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from amounts import longer
from commands import run
from folder_server import folder_server
from PIL import Image

from streamloader import errors
from streamloader.errors import MemoryBudgetError
from streamloader.format.writer import Writer
from streamloader.measure.forecast import Forecast, ForecastOptions, Mixing, forecast, forecast_mixture, mixings
from streamloader.options import Layout, Shuffle
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.schedule import Share, World
from streamloader.pytorch.dataset import Mixture, StreamingDataset

N = 603


@pytest.fixture(scope="module")
def folder(data: Any) -> Path:
    return Path(data(N, "x", "label", "tok"))


def mixing(count: int, params: OrderParams, batch: int, remainder: Any = "drop", *, shuffle: bool = True) -> Mixing:
    return mixings([Share(EpochOrder(count, params, 0, 0, shuffle), batch, World(0, 1), remainder)])[0]


def run_epoch(folder: Path, planned: Forecast, **options: Any) -> tuple[int, int]:
    """Run an epoch on every rank; return how many requests and bytes all of them together fetched."""
    size = planned.world_size
    loaders = [StreamingDataset(folder, world=(rank, size), **options) for rank in range(size)]
    assert {sum(1 for _ in ds) for ds in loaders} == {planned.steps}
    return sum(ds.stats().requests for ds in loaders), sum(ds.stats().bytes_fetched for ds in loaders)


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_requests_and_bytes_are_those_of_the_epoch_that_follows(folder, size, shuffle):
    planned = forecast(str(folder), ForecastOptions(world_size=size, batch_size=16, shuffle=shuffle))
    requests, fetched = run_epoch(folder, planned, batch_size=16, shuffle=shuffle)
    # blocks that two lanes share are fetched in two parts, and blocks at the border of two ranks by both
    assert planned.requests <= requests <= planned.requests + 2 * (planned.lanes + planned.steps * size)
    assert planned.bytes <= fetched <= 1.1 * planned.bytes
    assert planned.held == ("label",)


@pytest.mark.quick(3)
@pytest.mark.filterwarnings("ignore:2 ranks are more than the dataset's 1 lanes")
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_a_forecast_with_a_condition_is_of_the_selected_samples(folder, size, shuffle):
    where = f"label < {60 - 2**40} or label >= {500 - 2**40} and label != {550 - 2**40}"
    planned = forecast(str(folder), ForecastOptions(world_size=size, batch_size=8, where=where, shuffle=shuffle))
    assert planned.num_samples == 60 + N - 501
    requests, fetched = run_epoch(folder, planned, batch_size=8, where=where, shuffle=shuffle)
    # how far requests reach over samples that are not chosen depends on where a block is cut
    assert 0.9 * planned.requests <= requests <= planned.requests + 2 * (planned.lanes + planned.steps * size)
    assert 0.9 * planned.bytes <= fetched <= 1.2 * planned.bytes
    assert fetched < forecast(str(folder), ForecastOptions(batch_size=8, shuffle=shuffle)).bytes


def test_the_least_memory_of_a_forecast_is_what_the_loader_accepts(folder):
    planned = forecast(str(folder), ForecastOptions(batch_size=16))
    assert len(list(StreamingDataset(folder, batch_size=16, memory=planned.least_memory))) == planned.steps
    too_little = planned.least_memory - 1
    with pytest.raises(MemoryBudgetError, match=f"needs memory={planned.least_memory}"):
        forecast(str(folder), ForecastOptions(batch_size=16, memory=too_little))
    with pytest.raises(MemoryBudgetError, match=f"needs memory={planned.least_memory}"):
        iter(StreamingDataset(folder, batch_size=16, memory=too_little))
    least = forecast(str(folder), ForecastOptions(batch_size=16, memory=planned.least_memory))
    assert planned.memory > planned.least_memory == least.memory


def test_mixing_counts_the_blocks_of_a_batch():
    batch = mixing(100_000, OrderParams(10, 64, 40), 256, "pad")
    assert 150 < batch.blocks < 256
    assert 1 < batch.design_effect < 3
    in_order = mixing(100_000, OrderParams(10, 64, 40), 50, "pad", shuffle=False)
    assert (in_order.blocks, round(in_order.design_effect)) == (5, 10)
    assert mixing(0, OrderParams(10, 1, 20), 8, "pad").blocks == 0


@pytest.mark.quick(4)
@pytest.mark.parametrize(("blocks", "lanes"), [(1, 1), (8, 1), (20, 2), (64, 8), (640, 64)])
def test_the_design_effect_of_few_blocks_is_that_of_their_batches(blocks, lanes):
    """The forecast of a small dataset, or a small selection, is what its own batches have."""
    block, batch = 96, 64
    n = blocks * block
    params = OrderParams(block, lanes, 4 * block)
    planned = mixing(n, params, batch).design_effect
    ratios = []
    for seed in range(60):
        values = np.repeat(np.random.default_rng(seed).standard_normal(blocks), block)
        rows = values[EpochOrder(n, params, seed, 0).samples_at(0, n // batch * batch)].reshape(-1, batch)
        ratios.append((np.mean((rows.mean(1) - values.mean()) ** 2) * batch, values.var()))
    measured = np.sum(ratios, axis=0)
    assert planned == pytest.approx(measured[0] / measured[1] if blocks > 1 else 1.0, rel=0.3, abs=0.3)
    assert planned < 1 + batch / 4


def test_a_short_last_block_does_not_blur_the_design_effect():
    """Of a full shuffle: 1 for independent rows, whatever a few batches hold of each block."""
    params = OrderParams(4096, 1, 4 * 4096)
    shares = [Share(EpochOrder(10_000, params, seed, 0), 1024, World(0, 1), "drop") for seed in range(20)]
    found = [mixings([share])[0].design_effect for share in shares]
    assert 0.2 < min(found) <= max(found) < 2.5
    assert np.mean(found) == pytest.approx(1 - 1024 / 10_000, abs=0.25)


@pytest.fixture(scope="module")
def many_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forecast") / "blocks"
    with Writer(path, {"tok": "ragged:int32"}, layout=Layout(1 << 18, 128, 64, "none"), num_samples=40_000) as out:
        out.write_batch({"tok": [np.arange(i % 7, dtype=np.int32) for i in range(40_000)]})
    return path


@pytest.mark.long
@pytest.mark.parametrize("size", [64, 256, 1024])
def test_ranks_beyond_the_lanes_read_each_block_once(many_blocks, size, capsys):
    planned = forecast(str(many_blocks), ForecastOptions(world_size=size, batch_size=4))
    assert (planned.pinned_lanes, planned.lanes, planned.blocks // planned.lanes >= 4) == (64, size, True)
    assert planned.read_factor <= 1.05
    order = EpochOrder(planned.num_samples, OrderParams(planned.block, planned.lanes, planned.window), 0, 0)
    ranks = range(0, size, size // 32)
    plans = (Share(order, 4, World(rank, size), "uneven").plans(0) for rank in ranks)
    fetched = sum(ref.stop - ref.start for plan in chain.from_iterable(plans) for ref in plan.needs)
    assert fetched <= 1.05 * planned.num_samples * len(ranks) / size
    lines = run(capsys, "plan", many_blocks, "--world-size", size, "--batch-size", 4)[1].splitlines()
    assert sum("a single rank that resumes it needs" in line for line in lines) == (size > 64)
    assert planned.memory_alone > (planned.least_memory if size > 1 else 0)


def test_a_world_that_does_not_divide_the_lanes_reads_more(folder):
    one, three = (forecast(str(folder), ForecastOptions(world_size=size, batch_size=8)) for size in (1, 3))
    assert one.read_factor == 1 < three.read_factor
    assert three.bytes > one.bytes


def test_the_command_prints_a_line_for_each_topic(folder, capsys):
    status, out, err = run(capsys, "plan", folder, "--world-size", 3, "--batch-size", 8)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    topics = "steps order memory requests reading mixing"
    assert " ".join(line.split()[0] for line in lines[1:-1]) == topics
    assert lines[0].endswith(": 603 samples")
    assert "26 an epoch, of 8 samples on each of 3 ranks (24 together)" in lines[1]
    assert re.search(r"about \d\.\d times, since 3 ranks do not divide 4 lanes; take --lanes 6$", lines[5])
    assert "label held in memory" in lines[3]
    out = run(capsys, "plan", folder, "--world-size", 3, "--batch-size", 8, "--lanes", 6)[1]
    assert out.splitlines()[5].endswith("once")


def test_ranks_that_take_parts_of_a_chunk_in_turn_all_read_it(folder, capsys):
    for size, text in ((1, "each chunk by about 4.0 ranks"), (64, "each block once")):
        assert text in run(capsys, "plan", folder, "--no-shuffle", "--world-size", 4, "--batch-size", size)[1]


LENGTHS = {
    "web": (1800, 20),
    "books": (120, 500),
    "code=1": (600, 100),
}  # the samples of each source, and tokens of one


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """URLs of three datasets whose documents have different lengths; one of them has a = in its name."""
    folder = tmp_path_factory.mktemp("sources")
    for name, (count, length) in LENGTHS.items():
        with Writer(folder / name, {"tok": "ragged:int32", "label": "int64"}, layout=Layout(1 << 16, 32, 8)) as out:
            tok = [np.zeros(length + i % 3 - 1, np.int32) for i in range(count)]
            out.write_batch({"tok": tok, "label": np.arange(count)})
    return [str(folder / name) for name in LENGTHS]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("weigh", "stop", "size"), [(None, "first", 2), (None, "last", 1), ("tok", "first", 1), longer("tok", "last", 2)]
)
def test_the_shares_of_a_mixture_are_those_of_the_epoch_that_follows(sources, weigh, stop, size):
    chosen, weights = ForecastOptions(size, batch_size=16, fields=("tok",)), (0.6, 0.3, 0.1)
    planned = forecast_mixture(list(zip(sources, weights, strict=True)), chosen, weigh=weigh, stop=stop)
    options: dict[str, Any] = {"batch_size": 16, "fields": ["tok"], "weigh": weigh, "stop": stop, "with_index": True}
    ranks = [Mixture(dict(zip(sources, weights, strict=True)), world=(rank, size), **options) for rank in range(size)]
    batches = [batch for ds in ranks for batch in ds]
    origins = np.concatenate([batch["source"][batch["valid"]] for batch in batches])
    lengths = np.concatenate([np.diff(batch["tok_offsets"])[batch["valid"]] for batch in batches])
    samples, tokens = np.bincount(origins, minlength=3), np.bincount(origins, lengths, minlength=3)
    assert (planned.num_samples, planned.steps * size) == (origins.size, len(batches))
    assert [each.share for each in planned.sources] == pytest.approx(samples / samples.sum(), abs=0.025)
    assert [each.field_shares["tok"] for each in planned.sources] == pytest.approx(tokens / tokens.sum(), abs=0.05)
    assert [each.passes * each.num_samples for each in planned.sources] == samples.tolist()
    weighed = [each.share if weigh is None else each.field_shares["tok"] for each in planned.sources]
    assert weighed == pytest.approx(weights, abs=0.001)
    assert sum(ds.stats().requests for ds in ranks) == pytest.approx(planned.requests, rel=0.25)
    assert sum(ds.stats().bytes_fetched for ds in ranks) == pytest.approx(planned.bytes, rel=0.25)
    least = {**options, "memory": planned.least_memory}
    assert next(iter(Mixture(dict(zip(sources, weights, strict=True)), world=(0, size), **least)))


def test_the_command_shows_both_shares_of_each_source_of_a_mixture(sources, capsys):
    arguments = (*sources, "--weights", "0.6,0.3,0.1", "--batch-size", 16)
    status, out, err = run(capsys, "plan", *arguments)
    assert (status, err) == (0, "")
    assert re.search(r"source +┃ weight ┃ share of samples ┃ share of tok ┃ samples ┃ passes", out)
    for name, shares in (("web", "60.0% .* 7.0%"), ("books", "30.0% .* 87.2%"), ("code=1", "10.0% .* 5.8%")):
        assert re.search(rf"/{name} .* {shares} ", out)
    assert out.startswith("mixture of 3 sources: 392 samples an epoch\nsteps     25 an epoch, of 16 samples")
    shown = run(capsys, "plan", *arguments, "--weigh", "tok", "--world-size", 3, "--json")[1]
    parts = json.loads(shown)["sources"]
    assert [round(part["field_shares"]["tok"], 3) for part in parts] == [0.6, 0.3, 0.1]
    assert parts[0]["share"] > 0.9
    assert "more than that: 3 consumers" in run(capsys, "plan", *arguments, "--world-size", 3)[1]
    assert "begin a run with unit=3, shuffle=Shuffle(lanes=" in run(capsys, "plan", *arguments, "--world-size", 3)[1]
    assert "take parts of the same" in run(capsys, "plan", *arguments, "--world-size", 2, "--no-shuffle")[1]


def test_a_plan_has_the_shares_of_a_schedule_and_the_epoch_that_follows(sources, capsys):
    later = {20: (0.5, 0.5, 0), 50: (0, 0.5, 0.5)}
    arguments: list[Any] = ["plan", *sources, "--weights", "1,0,0", "--batch-size", 16, "--stop", "last"]
    for begin, weights in later.items():
        arguments += ["--schedule", f"{begin}:{','.join(map(str, weights))}"]
    planned = json.loads(run(capsys, *arguments, "--json")[1])
    schedule = {begin: dict(zip(sources, weights, strict=True)) for begin, weights in later.items()}
    first = dict(zip(sources, (1, 0, 0), strict=True))
    batches = list(Mixture(first, schedule=schedule, stop="last", batch_size=16, fields=["label"], with_index=True))
    samples = np.bincount(np.concatenate([batch["source"][batch["valid"]] for batch in batches]), minlength=3)
    assert planned["steps"] == len(batches)
    assert [round(part["passes"] * part["num_samples"]) for part in planned["sources"]] == samples.tolist()
    assert planned["schedule"] == [[begin, list(weights)] for begin, weights in later.items()]
    assert "schedule  from 20 steps on, 50.0%, 50.0%, 0.0% of the samples\n" in run(capsys, *arguments)[1]
    by_tokens = run(capsys, *arguments, "--schedule-by", "tok")[1]
    assert "schedule  from 50 tok on, 0.0%, 50.0%, 50.0%" in by_tokens


@pytest.mark.parametrize("given", ["20", "20:many", "x:1,1,1", "20:1,1"])
def test_a_schedule_that_cannot_be_planned_is_an_error_that_says_how_it_is_written(sources, capsys, given):
    status, _, err = run(capsys, "plan", *sources, "--weights", "1,1,1", "--schedule", given)
    assert status == 2
    assert "a weight for each URL" in err


def test_sources_without_lengths_have_a_share_of_samples_alone(sources, folder, capsys):
    where = "--where", "label >= 0", "--fields", "label"
    shown = run(capsys, "plan", *sources[:2], "--weights", "1,3", "--batch-size", 8, *where, "--json")[1]
    parts = json.loads(shown)["sources"]
    assert [(part["share"], part["field_shares"]) for part in parts] == [(0.25, {}), (0.75, {})]


def test_the_command_prints_json(folder, capsys):
    status, out, _ = run(capsys, "plan", folder, "--batch-size", 32, "--no-shuffle", "--json")
    planned = json.loads(out)
    assert status == 0
    assert (planned["num_samples"], planned["steps"], planned["lanes"]) == (N, 19, 1)
    assert planned["rank"]["design_effect"] > 1
    assert "drawn" not in planned


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["plan.png", "plan.svg", "plan.html"])
def test_the_plan_is_drawn(folder, tmp_path, name, capsys):
    assert run(capsys, "plan", folder, "--batch-size", 32, "--plot", tmp_path / name)[0] == 0
    if name.endswith("png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.width > 800
            assert len(set(picture.convert("L").resize((40, 20)).tobytes())) > 10  # not one colour
    else:
        page = (tmp_path / name).read_text()
        assert "<svg" in page
        assert ("comes from" in page) == name.endswith("html")
        assert not re.search(r"https?://(?!www.w3.org|matplotlib.org|purl.org|creativecommons.org)", page)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"world_size": 0}, "WorldError", "rank 0 is invalid for world size 0"),
    ({"batch_size": 0}, "BatchError", "batch_size=0"),
    ({"fields": ("x", "nothing")}, "FieldError", "no field 'nothing'"),
    ({"shuffle": Shuffle(block=3)}, "UsageError", r"Shuffle\(block=3\) cuts chunks"),
    ({"ranks_here": 0}, "UsageError", "ranks_here=0"),
    ({"where": "nothing > 1"}, "SelectionError", "uses 'nothing'"),
    ({"where": "label > 2"}, "SelectionError", "selects none"),
]


@pytest.mark.parametrize(("options", "error", "shown"), BAD)
def test_invalid_options_are_errors(folder, options, error, shown):
    with pytest.raises(getattr(errors, error), match=shown):
        forecast(str(folder), ForecastOptions(**options))


def test_errors_of_the_command_are_one_line(folder, tmp_path, capsys):
    for arguments, shown in (
        ((folder, "--memory", "1KB"), "but memory=1000; give memory="),
        ((folder, "--memory", "1KB"), " or more, or a smaller batch_size or shuffle=Shuffle(window=, lanes=) ["),
        ((folder, "--plot", "plan.pdf"), "name a .png, .svg or .html file"),
        ((folder, "--no-shuffle", "--lanes", 4), "--no-shuffle with"),
        ((folder, folder), "2 URLs with 0 weights"),
        ((folder, "--weigh", "tok"), "1 URL with 0 weights"),
        ((folder, folder, "--weights", "1"), "2 URLs with 1 weight;"),
        ((folder, folder, "--weights", "1,x"), "--weights '1,x'"),
        ((folder, folder, "--weights", "1,nan"), "SL107"),
        ((folder, "--weights", "1", "--weigh", "nothing"), "no variable-length field 'nothing'"),
        ((folder, "--weights", "1", "--plot", "plan.png"), "one URL without --weights"),
        ((tmp_path / "nothing",), "SL301"),
    ):
        status, out, err = run(capsys, "plan", *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert shown in err


def test_no_sample_is_read(folder):
    with folder_server(folder) as server:
        planned: Forecast = forecast(server.url, ForecastOptions(batch_size=16, world_size=2))
        assert planned.requests
        assert server.gets == 0  # of data


def test_an_empty_dataset_takes_nothing(tmp_path):
    datasets.write(tmp_path / "empty", 0, ["x", "label"])
    planned = forecast(str(tmp_path / "empty"), ForecastOptions())
    assert (planned.steps, planned.requests, planned.bytes) == (0, 0, 0)
