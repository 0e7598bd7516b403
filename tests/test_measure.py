"""Measuring: ceilings do what an epoch of the loader does, no more and no less; a bench tells what limits it."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import encoded, picture, write, write_images
from folder_server import folder_server

import streamloader as sl
from streamloader.errors import CorruptError, DecodeError, FieldError, NotADatasetError, UsageError
from streamloader.measure.bench import BenchOptions, BenchProgress, bench, judge
from streamloader.measure.ceiling import Ceiling, image_ceiling, read_ceiling
from streamloader.options import Layout
from streamloader.stats import Stats

ZSTD = Layout(shard_size=1 << 16, block_size=1 << 14, chunk_size=1 << 12, codec="zstd")


@pytest.fixture(scope="module")
def everything(data: Any) -> Path:
    """Every kind of field, in several shards and blocks."""
    return Path(data(700, layout=ZSTD))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs and their labels."""
    folder = tmp_path_factory.mktemp("measure") / "images"
    write_images(folder, (encoded(picture(i), "jpeg") for i in range(60)))
    return folder


@pytest.mark.quick(1)
@pytest.mark.parametrize("fields", [None, ["x"], ["label"], ["tok", "wide", "flag"]])
def test_a_ceiling_makes_the_requests_of_a_first_epoch(everything, fields, monkeypatch):
    monkeypatch.setattr("streamloader.engine.pace.LEAST_SAMPLES", 10**9)  # no hedges, which are more requests
    one_lane = sl.Shuffle(lanes=1)  # a block that two lanes share is asked for in two parts
    dataset = sl.StreamingDataset(everything, batch_size=64, fields=fields, shuffle=one_lane, world=(0, 1))
    assert sum(int(batch["valid"].sum()) for batch in dataset) == 700
    stats = dataset.stats()
    dataset.close()
    for unpack in (False, True):
        ceiling = read_ceiling(str(everything), fields=fields, unpack=unpack)
        assert (ceiling.samples, ceiling.bytes, ceiling.requests) == (700, stats.bytes_fetched, stats.requests)
        assert ceiling.seconds > 0
        assert ceiling.samples_per_second == pytest.approx(700 / ceiling.seconds)


def test_later_passes_do_not_fetch_held_fields_again(everything):
    held, bulk = (read_ceiling(str(everything), fields=[name]) for name in ("label", "x"))
    seconds = 0.3
    while (both := read_ceiling(str(everything), fields=["x", "label"], seconds=seconds)).samples <= 700:
        seconds *= 2  # a machine that is busy has not begun a second pass
    assert both.bytes - held.bytes == pytest.approx(bulk.bytes * both.samples / 700, rel=0.1)
    assert read_ceiling(str(everything), fields=["label"], seconds=60.0).samples == 700


@pytest.mark.alone
def test_a_ceiling_stops_in_time_and_counts_what_it_did(everything):
    counted: list[tuple[int, int, int]] = []
    begin = time.perf_counter()
    options: dict[str, Any] = {"unpack": True, "seconds": 0.3, "in_flight": 2}
    options["watch"] = lambda tally: counted.append((tally.samples, tally.bytes, tally.requests))
    ceiling = read_ceiling(str(everything), **options)
    assert 0.3 <= ceiling.seconds <= time.perf_counter() - begin < 100
    assert (ceiling.samples, ceiling.bytes, ceiling.requests) == counted[-1]
    assert ceiling.requests == len(counted)
    assert 0 < ceiling.cpu_seconds <= 3 * ceiling.seconds


@pytest.mark.long
def test_a_ceiling_reads_a_split_of_a_bucket(seaweedfs):
    url, options = seaweedfs.url("measured"), seaweedfs.storage_options
    split = {"train": 0.6, "val": 0.4}
    sl.convert({"label": np.arange(20)}, url, split=split, workers=0, storage_options=options)
    assert read_ceiling(url, options, split="train").samples == 12


def test_a_throttled_ceiling_retries(everything):
    with folder_server(everything) as server:
        server.behave, server.times = "503", 3
        ceiling = read_ceiling(server.url, fields=["x"], in_flight=2)
        assert server.times == 0
        assert (ceiling.samples, ceiling.requests) == (700, server.gets - 3)


def test_decoding_checks_and_fetching_does_not(everything, tmp_path):
    write(tmp_path / "damaged", 100, ["x"])
    shard = next(path for path in (tmp_path / "damaged" / "x" / "c").rglob("*") if path.is_file())
    body = bytearray(shard.read_bytes())
    body[100] ^= 1
    shard.write_bytes(body)
    assert read_ceiling(str(tmp_path / "damaged")).samples == 100
    with pytest.raises(CorruptError, match="damaged"):
        read_ceiling(str(tmp_path / "damaged"), unpack=True)


def test_an_empty_dataset_has_a_ceiling_of_nothing(tmp_path):
    write(tmp_path / "none", 0, ["x", "label"])
    ceiling = read_ceiling(str(tmp_path / "none"))
    assert (ceiling.samples, ceiling.bytes, ceiling.requests) == (0, 0, 0)
    assert Ceiling("", 0, 0, 0.0, 0, 0.0).megabytes_per_second == 0


def test_images_are_decoded_from_memory(images):
    cropped = sl.Decode(size=(16, 16), crop="random", normalize="imagenet")
    for decode in (None, sl.Decode(size=(16, 16)), sl.Decode(backend="pillow", mode="L"), cropped):
        ceiling = image_ceiling(str(images), field="image", decode=decode, seconds=0.1)
        assert ceiling.samples >= 60
        assert ceiling.requests == 0
        assert ceiling.bytes >= sum(len(encoded(picture(i), "jpeg")) for i in range(60))


def test_a_field_without_images_and_a_damaged_image_are_errors(images, tmp_path):
    with pytest.raises(FieldError, match="label"):
        image_ceiling(str(images), field="label")
    write_images(tmp_path / "bad", [b"\xff\xd8\xff nothing"])
    with pytest.raises(DecodeError, match="sample 0"):
        image_ceiling(str(tmp_path / "bad"))


def test_invalid_arguments_are_errors(everything):
    with pytest.raises(UsageError, match="in_flight=0"):
        read_ceiling(str(everything), in_flight=0)
    for bad in ({"seconds": 0.0}, {"fields": ()}):
        with pytest.raises(UsageError):
            BenchOptions(**bad)
    for url, options, error, shown in (
        (everything, {"fields": ["nope"]}, FieldError, "no field 'nope'"),
        (everything, {"fields": "x"}, FieldError, "give a list"),
        (everything / "nothing", {}, NotADatasetError, "nothing"),
    ):
        with pytest.raises(error, match=shown):
            read_ceiling(str(url), **options)


# ---- the verdict, from made-up figures


def figures(samples_per_second: float, name: str = "") -> Ceiling:
    """One second of samples of 1 MB, that keeps 1.8 cores busy."""
    return Ceiling(name, round(samples_per_second), round(samples_per_second * 1e6), 1.0, 41, 1.8)


STATS = Stats(batches=10, seconds=1.0, wait_seconds=1.0, request_seconds=41.0, bytes_fetched=10**9, requests=10)
FAST: dict[str, Any] = {"fetch": figures(1000), "unpack": figures(950), "images": [], "loader": figures(930)}
FAST |= {"stats": STATS, "cores": 2, "resident": False}


def test_a_loader_near_the_endpoint_is_network_bound():
    ratio, verdict = judge(**FAST)
    assert ratio == pytest.approx(0.93)
    assert verdict.startswith("network-bound: 0.93 of what this endpoint gives; 41 requests in flight; ")


def test_unpacking_that_halves_the_ceiling_is_decode_bound():
    ratio, verdict = judge(**FAST | {"unpack": figures(500), "loader": figures(480)})
    assert ratio == pytest.approx(0.96)
    assert verdict.startswith("decode-bound: 0.96 of what fetching and unpacking chunks give; 2 cores busy; ")
    assert "lz4" in verdict
    idle = replace(figures(500), cpu_seconds=0.3)
    assert judge(**FAST | {"unpack": idle})[1].startswith("network-bound"), "it is not unpacking that took the time"


def test_images_that_decode_slower_than_they_come_are_decode_bound():
    ratio, verdict = judge(**FAST | {"images": [figures(200), figures(200)], "loader": figures(90), "cores": 1})
    assert ratio == pytest.approx(0.9), "two images of each sample: 100 samples/s"
    assert verdict.startswith("decode-bound: 0.90 of what decoding the images alone gives; 1 core busy; ")
    assert "fewer pixels" in verdict
    assert judge(**FAST | {"images": [figures(5000)]})[1].startswith("network-bound")


def test_a_loader_far_below_its_ceilings_says_so_and_why():
    ratio, verdict = judge(**FAST | {"loader": figures(400)})
    assert ratio == pytest.approx(0.4)
    assert verdict.startswith("loader-bound: 0.40 of what this endpoint gives; 41 requests in flight; what it waited")
    assert STATS.verdict in verdict


# ---- real runs


@pytest.mark.alone
def test_a_bench_measures_every_stage_and_reports_progress(everything):
    reported: list[BenchProgress] = []
    result = bench(str(everything), BenchOptions(seconds=0.3, batch_size=64), reported.append)
    names = [ceiling.name for ceiling in result.ceilings]
    assert names == ["fetch, 16 at once", "fetch, 64 at once", names[2]]
    assert names[2] in ("fetch and unpack, 16 at once", "fetch and unpack, 64 at once")
    for row in (*result.ceilings, result.loader):
        assert row.samples > 0
        assert row.bytes > 0
        assert 0.3 <= row.seconds < 5
    assert result.loader.samples == result.stats.samples
    assert result.num_samples == 700
    assert [one.stage for one in reported if one.samples_per_second == 0] != []
    assert {one.stage for one in reported} == {*names, "loader"}
    assert all(0 <= one.done_seconds <= one.total_seconds == pytest.approx(1.2) for one in reported)
    assert [one.done_seconds for one in reported] == sorted(one.done_seconds for one in reported)
    assert "-bound: " in result.verdict
    assert json.loads(json.dumps(result.to_dict()))["stages"][-1]["name"] == "loader"


@pytest.mark.long
def test_a_bench_of_images_decodes_them(images):
    result = bench(str(images), BenchOptions(seconds=0.3, image_size=(200, 300)))
    assert result.batch_size == 60
    assert result.ceilings[-1].name == "decode image from memory"
    assert result.stats.decode_seconds > 0
    encoded_only = bench(str(images), BenchOptions(seconds=0.1, image_size=None))
    assert all("decode image" not in ceiling.name for ceiling in encoded_only.ceilings)


def test_a_bench_of_held_fields_is_memory_bound(everything):
    result = bench(str(everything), BenchOptions(seconds=0.2, fields=("label", "flag")))
    assert result.verdict.startswith("memory-bound: every field is held in memory")


def test_a_bench_reads_a_field_named_as_a_column_of_the_batch(tmp_path):
    with sl.Writer(tmp_path / "data", {"index": "int64"}) as out:
        out.write_batch({"index": list(range(50))})
    assert bench(str(tmp_path / "data"), BenchOptions(seconds=0.1)).loader.samples >= 50
