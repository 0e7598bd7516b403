"""Runs with a cache: what a node reads again, and that nothing but the number of requests depends on the cache."""

import re
import shutil
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from amounts import covering, examples
from folder_server import FolderServer, folder_server
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_workers import digest
from torch.utils.data import DataLoader

import streamloader as sl
from streamloader.engine import engine
from streamloader.engine.budget import Budget, Demand
from streamloader.errors import UsageError
from streamloader.loader.dataset import NumpyMixture
from streamloader.loader.world import LAUNCHERS, LOCAL_RANKS, LOCAL_SIZES, ranks_of_node
from streamloader.measure import cache as cache_forecast
from streamloader.measure.cache import simulate, visits_of
from streamloader.measure.forecast import ForecastOptions, forecast, forecast_mixture
from streamloader.options import Layout
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.schedule import Share, World


def visits(order: EpochOrder, epoch: int, lanes: list[int]) -> dict[int, list[float]]:
    """When some lanes read each block, or a part of it, by the block's first sample: in epochs."""
    of_epoch = EpochOrder(order.num_samples, order.params, order.seed, epoch)
    found: dict[int, list[float]] = defaultdict(list)
    length = max(1, order.num_samples // order.lanes)
    for ordinal in range(order.num_blocks):
        first, stop = of_epoch.first_arrivals(np.array([ordinal, ordinal + 1])).tolist()
        number = int(of_epoch.block_numbers(np.array([ordinal]))[0])
        for lane in lanes:
            begin, count = of_epoch.lane_bounds(lane)
            if first < begin + count and begin < stop:
                found[number * order.params.block].append(epoch + max(0, first - begin) / length)
    return found


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_the_order_tells_when_a_node_reads_a_block_next(data):
    block = data.draw(st.integers(1, 6))
    params = OrderParams(block, data.draw(st.sampled_from((1, 2, 4, 8))), 2 * block)
    count, seed = data.draw(st.integers(8 * block, 120)), data.draw(st.integers(0, 9))
    epoch = data.draw(st.integers(0, 3))
    size = data.draw(st.sampled_from([ranks for ranks in (1, 2, 4, 8) if params.lanes % ranks == 0]))
    node = tuple(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))))
    order = EpochOrder(count, params, seed, epoch)
    lanes = [lane for lane in range(params.lanes) if lane % size in node]
    now, after = visits(order, epoch, lanes), visits(order, epoch + 1, lanes)
    reads: dict[int, list[float]] = defaultdict(list)
    for rank in node:
        for plan in Share(order, 4, World(rank, size, node), "drop").plans(0):
            for ref in plan.needs:
                reads[ref.block].append(ref.now)
                later = [each for each in now[ref.block] if each > ref.now] + after.get(ref.block, [])
                assert ref.node_use == min(later, default=np.inf)
    assert all(set(times) <= set(now[first]) for first, times in reads.items())


LAYOUT = Layout(shard_size=1 << 20, block_size=1 << 15, chunk_size=1 << 13, codec="none")
ROWS = replace(LAYOUT, block_size=1 << 14)
SHUFFLE = sl.Shuffle(lanes=4, window=16)
COUNT, ROW_COUNT = 480, 2000  # of rows, in 250 blocks


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Few blocks and many lanes are the subject of other tests, and so are their warnings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(lanes|blocks are read|begins anew|DataLoader workers)")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("cached"), np.random.default_rng(0)
    fields = {"x": "float32[1000]", "label": "int32", "text": "bytes"}
    for name in ("data", "more"):
        with sl.Writer(path / name, fields, layout=LAYOUT) as out:
            for i in range(COUNT):
                x = rng.random(1000, np.float32)
                out.write({"x": x, "label": i, "text": rng.bytes(int(rng.integers(0, 2000)))})
    for name in ("rows", "rows2"):
        with sl.Writer(path / name, {"x": "float32[500]", "label": "int32"}, layout=ROWS) as out:
            for i in range(ROW_COUNT):
                out.write({"x": rng.random(500, np.float32), "label": i})
    return path


@pytest.fixture
def server(folder: Path) -> Iterator[FolderServer]:
    with folder_server(folder) as running:
        yield running


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders keep no blocks in memory for later epochs."""
    allot = engine.allot

    def limited(demand: Demand, *given: Any) -> Budget:
        return allot(replace(demand, kept_bytes=0), *given)._replace(kept_slots=0)

    monkeypatch.setattr(engine, "allot", limited)


def data_gets(server: FolderServer) -> list[str]:
    """The paths that were asked for since the last call, but manifests."""
    with server.lock:
        paths, server.paths[:] = list(server.paths), []
    return [path for path in paths if not path.endswith("zarr.json")]


def open_ranks(server: FolderServer, count: int = 1, name: str = "data", **options: Any) -> list[sl.NumpyDataset]:
    given = {"batch_size": 16, "seed": 5, "with_index": True, "shuffle": SHUFFLE, **options}
    return [sl.NumpyDataset(f"{server.url}/{name}", world=(rank, count), **given) for rank in range(count)]


def digests(dataset: Any, count: int = 2) -> list[str]:
    return [digest([digest(batch) for batch in dataset]) for _ in range(count)]


@pytest.mark.long
@pytest.mark.parametrize(("workers", "order"), covering([0, 2], [SHUFFLE, sl.Shuffle(lanes=3), False]))
def test_only_the_requests_depend_on_the_cache(server, tmp_path, nothing_kept, workers, order):
    (plain,) = open_ranks(server, shuffle=order, num_workers=workers)
    expected = digests(plain, 3)
    state = plain.state_dict()
    plain.close()
    data_gets(server)
    for run in range(2):
        (dataset,) = open_ranks(server, shuffle=order, num_workers=workers, cache=sl.Cache(tmp_path, free=0))
        assert repr(dataset) == repr(plain)
        assert digests(dataset, 1) == expected[:1]
        first = data_gets(server)
        # of what a later epoch reads, an earlier run has all
        assert bool(first) == (run == 0)
        assert digests(dataset, 2) == expected[1:]
        assert dataset.state_dict() == state
        assert data_gets(server) == []
        stats = dataset.stats()
        dataset.close()
        assert stats.cache_hits > 0
        assert (stats.requests, stats.bytes_fetched) == (0, 0) if run else stats.requests <= len(first)
        assert stats.hedges == 0
        assert ("from the cache" in str(stats)) and ("100% hits" in str(stats)) == bool(run)


@pytest.mark.long
def test_a_loader_with_all_in_the_cache_does_not_notice_an_outage(folder, tmp_path, nothing_kept, caplog):
    with folder_server(folder) as server:
        (dataset,) = open_ranks(server, cache=sl.Cache(tmp_path, free=0))
        expected = digests(dataset, 1)
    with folder_server(folder) as other:
        (plain,) = open_ranks(other)
        assert [expected[0], *digests(dataset, 2)] == digests(plain, 3)
    assert dataset.stats().retries == 0
    assert dataset.stats().waiting_for == ""
    assert not [record for record in caplog.records if "no request to" in record.getMessage()]


def reads_of_epochs(open_loaders: Callable[[], list[Any]]) -> list[list[int]]:
    """The requests and the hits of three epochs, each by loaders of its own, which prefetch nothing of the next one."""
    found = []
    for epoch in range(3):
        loaders = open_loaders()
        for loader in loaders:
            loader.set_epoch(epoch)
        for batches in zip(*loaders, strict=True):
            assert len(batches) == len(loaders)
        found.append([sum(getattr(loader.stats(), name) for loader in loaders) for name in ("requests", "cache_hits")])
        for loader in loaders:
            loader.close()
    return found


@pytest.mark.long
@pytest.mark.parametrize(("share", "ranks", "workers"), covering([0.25, 0.5, 0.75, 1.0], [1, 2], [0, 2], together=1))
def test_a_cache_hits_as_often_as_the_plan_says(folder, server, tmp_path, nothing_kept, caplog, share, ranks, workers):
    options = ForecastOptions(world_size=ranks, ranks_here=ranks, batch_size=16, shuffle=SHUFFLE)
    needed = forecast(str(folder / "rows"), replace(options, cache=1 << 40)).cache.needed
    planned = forecast(str(folder / "rows"), replace(options, cache=round(needed * share))).cache
    assert planned.needed == needed
    cache = sl.Cache(tmp_path, limit=round(needed * (1.02 if share == 1 else share)), free=0)
    found = reads_of_epochs(lambda: open_ranks(server, ranks, "rows", num_workers=workers, cache=cache))
    requests, hits = np.sum(found[1:], axis=0).tolist()
    assert abs(hits / (hits + requests) - np.mean(planned.hits[:2])) <= 0.02, (found, planned, caplog.messages)
    assert (share < 1) or (requests, planned.requests) == (0, (0, 0, 0))


@pytest.mark.long
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_cache_of_a_mixture_hits_as_often_as_the_plan_says(folder, server, tmp_path, nothing_kept, share):
    options = ForecastOptions(batch_size=16, shuffle=SHUFFLE, fields=("x",))
    weights = [(str(folder / "rows"), 2.0), (str(folder / "rows2"), 1.0)]
    needed = forecast_mixture(weights, replace(options, cache=1 << 40)).cache.needed
    planned = forecast_mixture(weights, replace(options, cache=round(needed * share))).cache
    cache = sl.Cache(tmp_path, limit=round(needed * share), free=0)
    sources = {f"{server.url}/{Path(path).name}": weight for path, weight in weights}
    given = {"batch_size": 16, "shuffle": SHUFFLE, "fields": ["x"], "cache": cache}
    found = reads_of_epochs(lambda: [NumpyMixture(sources, **given)])
    requests, hits = np.sum(found[1:], axis=0).tolist()
    assert abs(hits / (hits + requests) - np.mean(planned.hits[:2])) <= 0.02, (found, planned)
    assert requests == pytest.approx(sum(planned.requests[:2]), rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_cache_of_arrays_hits_as_often_as_the_plan_says(server, tmp_path, nothing_kept, share):
    group = zarr.open_group(server.folder / f"arrays{share}", mode="w", zarr_format=3)
    data = np.random.default_rng(0).random((1200, 16, 16), np.float32)
    group.create_array("x", data=data, chunks=(8, 16, 16), dimension_names=("time", "y", "x"))
    sampling = sl.options.Sampling(sample_axis="time")
    options = ForecastOptions(batch_size=16, shuffle=SHUFFLE, fields=("x",), sampling=sampling)
    url = str(server.folder / f"arrays{share}")
    needed = forecast(url, replace(options, cache=1 << 40)).cache.needed
    planned = forecast(url, replace(options, cache=round(needed * share))).cache
    cache = sl.Cache(tmp_path, limit=round(needed * share), free=0, arrays=True)
    given = {"sample_axis": "time", "fields": ["x"], "cache": cache}
    found = reads_of_epochs(lambda: open_ranks(server, 1, f"arrays{share}", **given))
    requests, hits = np.sum(found[1:], axis=0).tolist()
    assert abs(hits / (hits + requests) - np.mean(planned.hits[:2])) <= 0.02, (found, planned)


@pytest.mark.long
def test_with_weights_other_samples_are_read_and_the_plan_says_so(folder, server, tmp_path, nothing_kept):
    weights = str(tmp_path / "weights.npy")
    np.save(weights, np.random.default_rng(1).random(ROW_COUNT))
    options = ForecastOptions(batch_size=16, shuffle=SHUFFLE, fields=("x",), weights=weights)
    needed = forecast(str(folder / "rows"), replace(options, cache=1 << 40)).cache.needed
    planned = forecast(str(folder / "rows"), replace(options, cache=needed)).cache
    cache = sl.Cache(tmp_path / "cache", limit=needed, free=0)
    given = {"weights": weights, "fields": ["x"], "seed": 0, "cache": cache}
    found = reads_of_epochs(lambda: open_ranks(server, 1, "rows", **given))
    requests, hits = np.sum(found[1:], axis=0).tolist()
    assert abs(hits / (hits + requests) - np.mean(planned.hits[:2])) <= 0.02, (found, planned)


def test_a_cache_of_part_of_the_data_hits_as_often_as_it_has_room_whatever_it_keeps():
    """Every block is read once an epoch: what the next epoch finds is in the cache at the border between the two."""
    order, sizes = EpochOrder(40_000, OrderParams(8, 8, 16), 3, 0), np.full(5000, 10)
    share = Share(order, 16, World(0, 2, (0, 1)), "pad")
    epochs = [visits_of(share, epoch) for epoch in range(5)]
    for part in (0.1, 0.5, 0.9):
        for found in simulate(epochs, sizes, part * sizes.sum())[1:]:
            assert found == pytest.approx(part, abs=0.005)  # and the parts of blocks that two lanes share


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_a_node_reads_its_part_of_the_blocks_again_whichever_ranks_it_has(nodes):
    order, size = EpochOrder(80_000, OrderParams(8, 16, 16), 3, 0), 8
    chosen = [tuple(range(first, first + size // nodes)) for first in range(0, size, size // nodes)]
    chosen += [tuple(range(first, size, nodes)) for first in range(nodes)]
    for node in chosen:
        share = Share(order, 16, World(node[0], size, node), "pad")
        first, second = ({block for block, _ in visits_of(share, epoch)} for epoch in (0, 1))
        assert len(first & second) / len(first) == pytest.approx(1 / nodes, abs=0.03)


@pytest.mark.long
def test_of_a_large_dataset_a_part_is_simulated(monkeypatch, folder):
    options = ForecastOptions(batch_size=16, shuffle=SHUFFLE, fields=("x",), cache=3_000_000)
    whole = forecast(str(folder / "data"), options).cache
    monkeypatch.setattr(cache_forecast, "MOST_BLOCKS", 100)
    monkeypatch.setattr(cache_forecast, "READ_BLOCKS", 20)
    part = forecast(str(folder / "data"), options).cache
    assert part.needed == pytest.approx(whole.needed, rel=0.05)
    assert part.hits == pytest.approx(whole.hits, abs=0.05)
    assert part.requests == pytest.approx(whole.requests, abs=0.05 * whole.needed / 32768)


# A process that reads an epoch by a cache, and tells of its first batch.
RANK = """
import os, sys, warnings
import streamloader as sl
warnings.simplefilter("ignore")
url, folder, rank, size, batches = sys.argv[1:]
options = {"batch_size": 16, "seed": 5, "shuffle": sl.Shuffle(lanes=4, window=16)}
options["cache"] = sl.Cache(folder, free=0)
dataset = sl.NumpyDataset(url, world=(int(rank), int(size)), **options)
for number, _ in enumerate(dataset):
    if number == int(batches):
        os.write(1, b"reached\\n")
        sys.stdin.read()
"""


def start_rank(*arguments: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", RANK, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parent)


@pytest.mark.long
def test_the_ranks_of_a_node_fetch_each_range_once(server, tmp_path):
    # they all read all of it, as an evaluation does, at the same time
    with ExitStack() as stack:
        processes = [stack.enter_context(start_rank(f"{server.url}/data", tmp_path, 0, 1, -1)) for _ in range(3)]
        for process in processes:
            process.communicate()
            assert process.returncode == 0
    with server.lock:
        shards = [(path, span) for path, span in server.ranges if "/c/" in path]
    assert len(shards) == len(set(shards)) > 0


@pytest.mark.long
def test_a_run_that_was_killed_in_its_first_epoch_goes_on_with_what_it_had_read(server, tmp_path, nothing_kept):
    (plain,) = open_ranks(server)
    expected = digests(plain, 2)
    plain.close()
    with start_rank(f"{server.url}/data", tmp_path, 0, 1, 15) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reached\n"
        process.kill()
    (dataset,) = open_ranks(server, cache=sl.Cache(tmp_path, free=0))
    assert digests(dataset, 2) == expected
    assert dataset.stats().cache_hits > dataset.stats().requests > 0
    dataset.close()


@pytest.mark.long
def test_what_was_damaged_on_its_way_does_not_stay_in_the_cache(server, tmp_path, nothing_kept):
    (plain,) = open_ranks(server)
    expected = digests(plain, 2)
    server.faults |= {"/data/x/c/": ["flip"] * 2, "/chunks/": ["flip"], "/label/c/": ["flip"], "/text/c/": ["flip"]}
    (dataset,) = open_ranks(server, cache=sl.Cache(tmp_path, free=0))
    assert digests(dataset, 1) == expected[:1]
    assert not any(server.faults.values())
    data_gets(server)
    assert digests(dataset, 1) == expected[1:]
    (again,) = open_ranks(server, cache=sl.Cache(tmp_path, free=0))
    assert digests(again, 2) == expected
    assert data_gets(server) == []


@pytest.mark.parametrize(
    ("world", "variables", "expected"),
    [
        ((5, 8), {}, range(8)),
        ((5, 8), {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}, range(4, 8)),
        ((5, 8), {"SLURM_PROCID": 5, "SLURM_STEP_NUM_TASKS": 8, "SLURM_LOCALID": 1}, range(8)),  # how many are here?
        ((1, 2), {"RANK": 9, "WORLD_SIZE": 16, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 8}, [1]),  # 8 processes a replica
        ((1, 4), {"RANK": 5, "WORLD_SIZE": 16, "LOCAL_RANK": 5, "LOCAL_WORLD_SIZE": 8}, [0, 1]),
        ((3, 4), {"RANK": 5, "WORLD_SIZE": 16, "LOCAL_RANK": 5, "LOCAL_WORLD_SIZE": 8}, range(4)),  # another numbering
        ((0, 1), {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}, [0]),
    ],
)
def test_the_launcher_tells_which_ranks_share_a_disk(monkeypatch, world, variables, expected):
    for names in (*LAUNCHERS, LOCAL_RANKS, LOCAL_SIZES):
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert ranks_of_node(World(*world)) == tuple(expected)


def test_the_workers_of_a_dataloader_have_the_lanes_of_their_node():
    node = World(2, 4, (2, 3)).consumer(1, 3)
    assert (node.rank, node.size, node.node) == (6, 12, (2, 3, 6, 7, 10, 11))
    assert np.flatnonzero(node.lanes(24, node.node)).tolist() == sorted([*range(2, 24, 4), *range(3, 24, 4)])


@pytest.mark.long
def test_mixtures_joins_and_random_access_read_by_the_cache(server, tmp_path, nothing_kept):
    cache = sl.Cache(tmp_path, free=0)
    sources = {f"{server.url}/data": 2, sl.Source(f"{server.url}/more"): 1}
    join = sl.Join(f"{server.url}/data", f"{server.url}/more", fields={"x": "y"})
    options = {"batch_size": 16, "seed": 5, "shuffle": SHUFFLE}
    found = []
    for more in ({}, {"cache": cache}):
        loaders = NumpyMixture(sources, **more, **options), sl.NumpyDataset(join, **more, **options)
        found.append([digests(loader, 1) for loader in loaders])
        for loader in loaders:
            loader.close()
    expected = found[0]
    assert found[1] == expected
    data_gets(server)
    again = NumpyMixture(sources, cache=cache, **options), sl.NumpyDataset(join, cache=cache, **options)
    assert [digests(loader, 1) for loader in again] == expected
    assert data_gets(server) == []
    opened = sl.open(f"{server.url}/data", cache=cache)
    samples = [opened[number] for number in (0, COUNT // 2, COUNT - 1)]
    data_gets(server)
    once_more = sl.open(f"{server.url}/data", cache=cache)
    assert digest(samples[1]) == digest(once_more[COUNT // 2])
    assert data_gets(server) == []


def spans(server: FolderServer) -> set[tuple[str, int]]:
    """The bytes of the shards of field x that were asked for since the last call, in pieces of 1,000."""
    with server.lock:
        ranges, server.ranges[:] = list(server.ranges), []
    found = set()
    for path, text in ranges:
        if "/x/c/" in path and (bounds := re.fullmatch(r"bytes=(\d+)-(\d+)", text)):
            first, last = map(int, bounds.groups())
            found |= {(path, number) for number in range(-(-first // 1000), last // 1000)}
    return found


@pytest.mark.long
def test_after_an_append_only_what_is_new_is_requested_and_nothing_of_what_was_overwritten_is_served(
    folder, server, tmp_path, nothing_kept
):
    cache, grown = sl.Cache(tmp_path, free=0), folder / "grown"
    shutil.copytree(folder / "rows", grown)
    (dataset,) = open_ranks(server, name="grown", cache=cache)
    digests(dataset, 1)
    dataset.close()
    before = spans(server)
    sl.append(grown, folder / "rows", workers=0)
    (other,) = open_ranks(server, name="grown", cache=sl.Cache(tmp_path / "other", free=0))
    expected = digests(other, 1)
    other.close()
    every = spans(server)
    (dataset,) = open_ranks(server, name="grown", cache=cache)
    assert digests(dataset, 1) == expected
    asked = spans(server)
    assert asked == every - before
    assert asked
    assert len(every) > 1.9 * len(before)
    dataset.close()
    shutil.rmtree(grown)
    rng = np.random.default_rng(7)
    with sl.Writer(grown, {"x": "float32[500]", "label": "int32"}, layout=ROWS) as out:
        for i in range(ROW_COUNT):
            out.write({"x": rng.random(500, np.float32), "label": i})
    (plain,), (dataset,) = open_ranks(server, name="grown"), open_ranks(server, name="grown", cache=cache)
    assert digests(dataset, 1) == digests(plain, 1)


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_workers_of_a_dataloader_read_by_the_cache_however_they_are_started(server, tmp_path, method):
    options = {"name": "rows", "with_index": True, "cache": sl.Cache(tmp_path, free=0)}
    (filled,) = open_ranks(server, **options)
    expected = [batch["index"].tolist() for batch in filled]
    filled.close()
    given = {"batch_size": 16, "seed": 5, "with_index": True, "shuffle": SHUFFLE, "cache": options["cache"]}
    dataset = sl.StreamingDataset(f"{server.url}/rows", **given)
    data_gets(server)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method)
    assert [batch["index"].tolist() for batch in loader] == expected
    assert data_gets(server) == []


@pytest.mark.long
def test_arrays_of_others_are_cached_if_they_do_not_change(tmp_path, nothing_kept):
    group = zarr.open_group(tmp_path / "arrays", mode="w", zarr_format=3)
    data = np.random.default_rng(0).random((200, 16, 16), np.float32)
    group.create_array("x", data=data, chunks=(8, 16, 16), dimension_names=("time", "y", "x"))
    with folder_server(tmp_path) as server:
        given = {"name": "arrays", "sample_axis": "time", "fields": ["x"]}
        with pytest.raises(UsageError, match=r"arrays are read in place.*Cache\(\.\.\., arrays=True\)"):
            open_ranks(server, cache=sl.Cache(tmp_path / "cache"), **given)
        (dataset,) = open_ranks(server, cache=sl.Cache(tmp_path / "cache", free=0, arrays=True), **given)
        (plain,) = open_ranks(server, **given)
        expected = digests(plain)
        assert digests(dataset, 1) == expected[:1]
        data_gets(server)
        assert digests(dataset, 1) == expected[1:]
        assert data_gets(server) == []
        dataset.close()
        plain.close()


def test_a_cache_is_given_as_one(server):
    for opened in (sl.open, partial(sl.NumpyDataset, batch_size=4), partial(sl.StreamingDataset, batch_size=4)):
        with pytest.raises(UsageError, match=r"cache='/tmp'; give sl\.Cache"):
            opened(f"{server.url}/data", cache="/tmp")
