"""Metrics of a running training: what is ready; endpoints and files are read back, and nothing else happens."""

import dataclasses
import gc
import json
import logging
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest
from amounts import examples
from datasets import assert_threads_end, within, write
from folder_server import folder_server
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Gauge, InMemoryMetricReader, Sum
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector as RegisteredCollector
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.tensorboard import SummaryWriter
from torchrun import environment, run_python

import streamloader as sl
from streamloader.errors import EndpointError, FormatError, NotFoundError, UsageError
from streamloader.metrics import METRICS, read_stats
from streamloader.metrics.exporters import Collector
from streamloader.metrics.files import _of_metrics, _parsed
from streamloader.stats import BatchReport, Counters, Stats

N = 700
ROOT = Path(__file__).parent.parent
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def url(data: Callable[..., str]) -> str:
    return data(N, "x", "label")


def dataset(url: str, **options: Any) -> sl.NumpyDataset:
    return sl.NumpyDataset(url, **{"batch_size": 16, "num_workers": 0, "world": (0, 1)} | options)


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def scrape(address: str, accept: str = "text/plain") -> str:
    with urlopen(Request(address, headers={"Accept": accept}), timeout=30) as response:
        return str(response.read().decode())


class Waiting:
    """A transform that waits for a number of permits: one for each sample."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.permits.acquire()
        return sample


class Failing(sl.NumpyDataset):
    """A dataset of a user, whose statistics fail."""

    def stats(self) -> Stats:
        raise KeyError("of the user")


class Fixed:
    """A dataset whose statistics are given."""

    def stats(self) -> Stats:
        return Stats(batches=3, samples=48, seconds=2.0, wait_seconds=1.5, url="s3://bucket/data", step=2, epoch=0)


FIXED: Any = Fixed()
SCRAPED = generate_latest(Collector(FIXED))  # type: ignore[arg-type]


# ---- what `stats()` says of this moment


@pytest.mark.parametrize(
    "options",
    [
        {},  # many steps at once
        {"transform": dict},
        {"memory": "64MiB"},
        pytest.param({"num_workers": 2}, marks=pytest.mark.long),
        pytest.param({"batch_size": None}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_while_training_computes_the_loader_gets_ahead_as_far_as_it_may(url, options):
    ds = dataset(url, **options)
    batches = iter(ds)
    for number in range(1, 4):
        next(batches)
        steps = ds._engine().core._steps  # of a plan, whose first ones training had
        expected = ds.stats().ready_batches_limit - (number - 1) % steps
        until(lambda expected=expected: ds.stats().ready_batches == expected)
    stats = ds.stats()
    assert stats.ready_batches > 0
    assert 0 <= stats.ready_blocks <= stats.ready_blocks_limit
    assert stats.memory_bytes > 0
    assert stats.memory_limit > 0
    ds.close()
    stats = ds.stats()
    assert (stats.ready_batches, stats.ready_batches_limit, stats.ready_blocks) == (0, 0, 0)


def test_a_rank_whose_transform_is_late_has_no_batch_ready(url):
    transform = Waiting()
    ds = dataset(url, transform=transform)
    thread = threading.Thread(target=lambda: next(iter(ds)))
    thread.start()
    try:
        until(lambda: ds._cached_engine and ds._cached_engine.core and len(ds._cached_engine.core._assembled) == 2)
        assert (ds.stats().ready_batches, ds.stats().ready_batches_limit) == (0, 2)
    finally:
        transform.permits.release(10 * N)
        thread.join()


def test_a_rank_whose_store_is_late_has_no_block_ready(url):
    with folder_server(Path(url)) as server:
        server.behave = "stall"
        ds = dataset(server.url, fields=["x"])
        batches: list[Any] = []
        thread = threading.Thread(target=lambda: batches.append(iter(ds)) or next(batches[0]))
        thread.start()
        try:
            assert server.met.wait(60)
            until(lambda: ds.stats().ready_blocks_limit)
            assert (ds.stats().ready_blocks, ds.stats().ready_batches) == (0, 0)
        finally:
            server.behave = ""
            server.released.set()
            thread.join()
        until(lambda: ds.stats().ready_blocks > 0)
        ds.close()


def test_stats_name_the_rank_its_data_and_the_step_of_the_last_batch(url):
    reports: list[BatchReport] = []
    ds = dataset(url, world=(1, 3), on_batch=reports.append)
    stats = ds.stats()
    assert (stats.rank, stats.world_size, stats.worker, stats.url) == (1, 3, 0, url)
    assert (stats.epoch, stats.step) == (-1, -1)
    for _ in range(2):
        for _ in ds:
            assert (ds.stats().epoch, ds.stats().step) == (reports[-1].epoch, reports[-1].step)
    assert ds.stats().step == 2 * len(ds) - 1


def test_stats_before_a_pass_make_nothing_that_the_pass_would_replace(url):
    ds = dataset(url)
    assert ds.stats() == dataclasses.replace(Stats(), url=url)
    assert ds._cached_engine is None


# ---- the table


def test_the_table_has_each_number_of_stats_once_and_names_by_convention():
    numbers = {field.name for field in dataclasses.fields(Stats) if type(field.default) in (int, float)}
    named = [metric.field for metric in METRICS if not metric.labels and not metric.values]
    assert sorted(named) == sorted(numbers - {"rank", "world_size", "worker"} | {"waiting_for"})
    assert len({metric.prometheus for metric in METRICS}) == len({m.opentelemetry for m in METRICS}) == len(METRICS)
    sums = dataclasses.asdict(Stats(batches=1).since(Stats()))
    for metric in METRICS:
        assert re.fullmatch(r"streamloader_[a-z_]+", metric.prometheus)
        assert metric.prometheus.endswith("_total") == (metric.kind == "counter")
        assert re.fullmatch(r"s|By|\{[a-z]+\}", metric.unit)
        assert ("seconds" in metric.field) == (metric.unit == "s") == ("_seconds" in metric.prometheus)
        assert (metric.unit == "By") == ("_bytes" in metric.prometheus)
        assert re.fullmatch(r"[A-Z1].{10,90}\.?|1.{10,90}", metric.description)
        assert metric.field in sums or metric.values


PAGE = (ROOT / "docs/metrics.md").read_text()
DASHBOARD = json.loads((ROOT / "docs/grafana.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_page_has_the_table():
    rows = [f"| `{each.prometheus}` | {each.kind} | {each.unit} | {each.description} |" for each in METRICS]
    assert re.findall(r"^\| `streamloader_.*$", PAGE, re.MULTILINE) == rows
    for name in re.findall(r"`(streamloader_\w+)`", PAGE):
        assert name in {metric.prometheus for metric in METRICS}


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_a_query_of_the_dashboard_names_metrics_of_the_table_and_takes_the_rate_of_counters(title, query):
    kinds = {metric.prometheus: metric.kind for metric in METRICS}
    named = list(re.finditer(r"(rate\()?(streamloader_\w+)(\{.*?\})(\[\$__rate_interval\]\))?", query))
    assert len(named) == query.count("streamloader_") > 0
    for rate, name, labels, interval in (each.groups() for each in named):
        since_begin = title == "Bad samples and missing chunks"
        assert (rate is not None) == (interval is not None) == (kinds[name] == "counter" and not since_begin)
        assert labels == '{job=~"$job", dataset=~"$dataset", rank=~"$rank"}'


def test_the_dashboard_is_one_that_grafana_imports_and_the_page_lists_its_panels():
    panels, variables = DASHBOARD["panels"], DASHBOARD["templating"]["list"]
    assert DASHBOARD["schemaVersion"] >= 36
    assert not {"id", "__inputs"} & set(DASHBOARD), "it replaces no dashboard, and asks for nothing"
    assert (variables[0]["name"], variables[0]["type"], variables[0]["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    sources = [each["datasource"] for each in (*panels, *(t for p in panels for t in p["targets"]), *variables[1:])]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert [each["query"]["query"] for each in variables[1:]] == [
        f"label_values(streamloader_info, {name})" for name in ("job", "dataset", "rank")
    ]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    cells = [
        (x, y)
        for each in (panel["gridPos"] for panel in panels)
        for x in range(each["x"], each["x"] + each["w"])
        for y in range(each["y"], each["y"] + each["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert all(panel["fieldConfig"]["defaults"].get("unit") for panel in panels if panel["type"] != "table")
    listed = re.findall(r"^\| ([^|`]+) \| [^|]*\|$", PAGE.partition("## Grafana")[2].partition("###")[0], re.MULTILINE)
    assert [title for title in listed if title != "panel"] == [panel["title"] for panel in panels]


# ---- Prometheus


def test_a_scrape_during_training_has_what_stats_has(url):
    ds = dataset(url, world=(2, 4))
    with sl.metrics.serve(ds, 0) as server:
        assert read_stats(server.url)[0].stats == ds.stats()
        for number, _ in enumerate(ds):
            if number % 4 == 0:
                before, found, after = ds.stats(), read_stats(server.url)[0].stats, ds.stats()
                assert before.samples == found.samples == after.samples == (number + 1) * 16
                assert (found.step, found.rank, found.world_size, found.url) == (number, 2, 4, url)
                assert before.requests <= found.requests <= after.requests
        ds.close()
        until(lambda: read_stats(server.url)[0].stats == ds.stats())  # once its last threads have ended
        assert ds.stats().samples > 0


def test_a_scrape_is_valid_in_both_formats_and_has_units_and_types(url):
    ds = dataset(url)
    list(ds)
    with sl.metrics.serve(ds, 0) as server:
        families = {family.name: family for family in text_string_to_metric_families(scrape(server.url, OPENMETRICS))}
        text = scrape(server.url)
    assert len(families) == len(METRICS)
    for metric in METRICS:
        family = families[metric.prometheus.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.description)
        assert f"# HELP {metric.prometheus} {metric.description}" in text
    limits = {sample.labels["limit"]: sample.value for sample in families["streamloader_limit"].samples}
    assert [limit for limit, value in limits.items() if value] == [ds.stats().limit]
    assert sum(limits.values()) == 1


def test_several_datasets_have_their_names_as_labels(url):
    train, val = dataset(url), dataset(url, shuffle=False)
    list(train)
    with sl.metrics.serve({"train": train, "val": val}, 0) as server:
        assert 'streamloader_samples_total{dataset="train",rank="0",world_size="1"} 704.0' in scrape(server.url)
        found = read_stats(server.url)
    assert [(each.dataset, each.stats.samples) for each in found] == [("train", 704), ("val", 0)]


def test_each_rank_is_read_from_its_port_and_all_from_their_folder(url, tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/metrics_rank.py"), url, str(tmp_path)],
            env={**environment(), "RANK": str(rank), "WORLD_SIZE": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        scraped = [read_stats(rank.stdout.readline().strip())[0].stats for rank in ranks]  # type: ignore[union-attr]
    finally:
        ends = [float(rank.communicate(timeout=60)[0]) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
        assert time.monotonic() - max(ends) < 30, "no thread holds up the end of a process"
    written = read_stats(tmp_path)
    assert [stats.rank for stats in scraped] == [each.stats.rank for each in written] == [0, 1]
    assert [stats.samples for stats in scraped] == [each.stats.samples for each in written] == [352, 352]
    assert {each.stats.world_size for each in written} == {2}
    assert all(each.closed for each in written)


def test_the_name_and_the_path_of_a_dataset_may_have_any_bytes(tmp_path):
    folder = Path(os.fsdecode(bytes(tmp_path) + b'/\xff"\n{}'))
    write(folder, 40, ["x"])
    dataset = sl.NumpyDataset(str(folder), batch_size=4, num_workers=0)
    with sl.metrics.serve({'a"\n\udcff': dataset}, port=0) as server:
        (found,) = read_stats(server.url)
    assert found.dataset == 'a"\n\\udcff'
    with sl.metrics.StatsFile(dataset, tmp_path / "stats"):
        pass
    assert read_stats(tmp_path / "stats")[0].stats.url == str(folder)


@pytest.mark.parametrize("place", [{"host": "a..b"}, {"port": None}, {"port": -1}, {"port": 70_000}], ids=str)
def test_a_host_or_a_port_that_cannot_be_is_an_error(url, place):
    dataset = sl.NumpyDataset(url, batch_size=4, num_workers=0)
    with pytest.raises(UsageError, match="metrics cannot be served"):
        sl.metrics.serve(dataset, **{"port": 0} | place)


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(url):
    ds = dataset(url)
    with sl.metrics.serve(ds, 0) as server, pytest.raises(UsageError, match=f"{server.port}: .*port of its own"):
        sl.metrics.serve(ds, server.port)
    sl.metrics.serve(ds, server.port).close()  # a closed one frees it


@pytest.mark.parametrize("given", [3, {}, {"a": 3}, {1: Failing}, [Failing]], ids=str)
def test_what_has_no_stats_is_refused(given):
    with pytest.raises(UsageError, match=r"has no stats\(\)|datasets="):
        sl.metrics.Collector(given)


def test_metrics_import_no_optional_package_before_they_are_used():
    code = "import sys, streamloader as sl; sl.metrics.serve; print(*set(sys.argv) & set(sys.modules))"
    rare = "torch", "fsspec", "prometheus_client", "opentelemetry", "wandb", "tensorboard"
    assert run_python("-c", code, *rare).stdout == "\n"


@pytest.mark.parametrize(("package", "call"), [("prometheus_client", "serve"), ("opentelemetry", "observe")])
def test_a_missing_package_is_named(url, package, call, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=f"pip install {package.replace('_', '-')}"):
        getattr(sl.metrics, call)(dataset(url), None)


def test_a_collector_is_for_a_registry_of_yours_which_takes_it_once(url):
    ds, registry = dataset(url), CollectorRegistry(auto_describe=True)
    list(ds)
    collector: Any = sl.metrics.Collector(ds)
    registry.register(collector)
    labels = {"rank": "0", "world_size": "1"}
    assert registry.get_sample_value("streamloader_samples_total", labels) == 704
    again: RegisteredCollector = sl.metrics.Collector(ds)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(again)


# ---- OpenTelemetry


def test_opentelemetry_gets_the_table_with_what_stats_has(url):
    ds, reader = dataset(url, world=(1, 2)), InMemoryMetricReader()
    with closing(Meters(reader)) as meters:
        sl.metrics.observe({"train": ds}, meters.provider.get_meter("training"))
        list(ds)
        ds.close()
        assert_threads_end()  # and change no values
        found = {metric.name: metric for metric in collected(reader)}
    assert found.keys() == {metric.opentelemetry for metric in METRICS}
    stats = ds.stats()
    for metric in METRICS:
        ours = found[metric.opentelemetry]
        assert (ours.unit, ours.description) == (metric.unit, metric.description)
        assert isinstance(ours.data, Sum if metric.kind == "counter" else Gauge)
        assert getattr(ours.data, "is_monotonic", False) == (metric.kind == "counter")
        points = {frozenset(point.attributes.items()): point.value for point in ours.data.data_points}
        common = {"rank": 1, "world_size": 2, "dataset": "train"}
        assert points == {frozenset({**common, **own}.items()): value for own, value in metric.points(stats)}


class Meters:
    def __init__(self, reader: InMemoryMetricReader) -> None:
        self.provider = MeterProvider([reader], shutdown_on_exit=False)
        self.close = self.provider.shutdown


def collected(reader: InMemoryMetricReader) -> Iterator[Any]:
    data = reader.get_metrics_data()
    for resource in data.resource_metrics if data is not None else ():
        for scope in resource.scope_metrics:
            yield from scope.metrics


# ---- nothing happens unless it is asked for


def test_nothing_is_in_the_hot_path(url, tmp_path, monkeypatch):
    taken: list[int] = []
    snapshot = Counters.snapshot
    monkeypatch.setattr(Counters, "snapshot", lambda self, **now: taken.append(1) or snapshot(self, **now))
    ds, reader = dataset(url), InMemoryMetricReader()
    with closing(Meters(reader)) as meters, sl.metrics.serve(ds, 0) as server:
        sl.metrics.observe(ds, meters.provider.get_meter("training"))
        with sl.metrics.StatsFile(ds, tmp_path, seconds=3600):
            until(lambda: list(tmp_path.iterdir()))
            batches = iter(ds)
            next(batches)
            begun = len(taken)
            for number, _ in enumerate(batches, 2):
                if number == 10:
                    scrape(server.url)
                    assert len(taken) == begun + 1
                if number == 20:
                    assert list(collected(reader))
                    assert len(taken) == begun + 2, "a collection of all instruments is one snapshot"
                    assert list(collected(reader))
                    assert len(taken) == begun + 3
            assert len(taken) == begun + 3
        assert len(taken) == begun + 4, "the file's last values"


def test_a_dataset_that_is_deleted_ends_its_threads_and_frees_its_port(url, tmp_path):
    ds, other = dataset(url), dataset(url)
    server = sl.metrics.serve({"a": ds, "b": other}, 0)
    sl.metrics.StatsFile(ds, tmp_path, seconds=3600)
    reader = InMemoryMetricReader()
    with closing(Meters(reader)) as meters:
        sl.metrics.observe(ds, meters.provider.get_meter("training"))
        list(ds)
        del ds
        gc.collect()
        assert "rank" not in str([metric.data for metric in collected(reader)])
    until(lambda: "streamloader-stats" not in names_of_threads())
    assert [each.dataset for each in read_stats(server.url)] == ["b"], "the other one is still served"
    del other
    gc.collect()
    until(lambda: "streamloader-metrics" not in names_of_threads())
    with pytest.raises(EndpointError, match="cannot be read"):
        read_stats(server.url)


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_a_failure_is_logged_once_and_ends_nothing(url, tmp_path, caplog):
    ds, good, reader = Failing(url, batch_size=16), dataset(url), InMemoryMetricReader()
    with closing(Meters(reader)) as meters, sl.metrics.serve({"good": good, "bad": ds}, 0) as server:
        sl.metrics.observe(ds, meters.provider.get_meter("training"))
        for _ in range(3):
            assert [each.dataset for each in read_stats(server.url)] == ["good"]
            assert "rank" not in str([metric.data for metric in collected(reader)])
    messages = [record.getMessage() for record in caplog.records if record.name == "streamloader"]
    assert (
        messages
        == ["the statistics of a dataset are missing: KeyError: 'of the user'; later failures are not logged"] * 2
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_reports_nothing_and_does_not_keep_the_port(url, tmp_path):
    ds, reader = dataset(url), InMemoryMetricReader()
    meters, server, file = Meters(reader), sl.metrics.serve(ds, 0), sl.metrics.StatsFile(ds, tmp_path, seconds=3600)
    collector = sl.metrics.Collector(ds)
    sl.metrics.observe(ds, meters.provider.get_meter("training"))
    list(ds)
    context = multiprocessing.get_context("fork")
    results, leave = context.SimpleQueue(), context.Event()

    def child() -> None:
        file.close()
        server.close()
        samples = [sample for family in collector.collect() for sample in family.samples]
        points = [point for metric in collected(reader) for point in metric.data.data_points]
        results.put((len(samples), len(points), ds.stats().samples))
        leave.wait(60)

    process = context.Process(target=child)
    process.start()
    try:
        assert results.get() == (0, 0, 0)
        assert read_stats(server.url)[0].stats.samples == 704
        server.close()
        sl.metrics.serve(ds, server.port).close()
    finally:
        leave.set()
        process.join()
        file.close()
        meters.close()
    assert read_stats(tmp_path)[0].closed


# ---- DataLoader workers


def write_stats(folder: Path) -> Callable[[int], None]:
    """What a user gives as `worker_init_fn`."""

    def begin(_: int) -> None:
        info: Any = get_worker_info()
        info.dataset.kept = sl.metrics.StatsFile(info.dataset, folder, seconds=0.01)

    return begin


@pytest.mark.filterwarnings("ignore:2 DataLoader workers")
def test_dataloader_workers_write_files_of_their_own_and_log_nothing(url, tmp_path, caplog):
    folder, written = tmp_path / "stats", tmp_path / "written"  # which a process that writes would leave
    writer: Any = SimpleNamespace(add_scalar=lambda *_: written.touch())
    log = sl.metrics.TensorBoard(writer, every=1)
    ds = sl.StreamingDataset(url, batch_size=16, on_batch=log, world=(0, 1))
    fork = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}
    loader = DataLoader(ds, batch_size=None, worker_init_fn=write_stats(folder), **fork)
    assert len(list(loader)) == 44
    until(lambda: sum(each.stats.samples for each in read_stats(folder)) == 704)
    assert [(each.stats.rank, each.stats.worker) for each in read_stats(folder)] == [(0, 0), (0, 1)]
    assert ds.stats().samples == 0
    assert not written.exists()
    del loader


# ---- callbacks


class Written:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, *scalar: Any) -> None:
        self.scalars.append(scalar)


def test_tensorboard_has_each_group_of_batches(url, tmp_path):
    reports: list[BatchReport] = []
    with closing(SummaryWriter(str(tmp_path))) as writer:
        log = sl.metrics.TensorBoard(writer, every=10)
        ds = dataset(url, on_batch=lambda report: (reports.append(report), log(report)))
        for _ in range(2):
            list(ds)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    names = ["wait_seconds", "wait_fraction", "samples_per_second", "epoch"]
    assert sorted(events.Tags()["scalars"]) == sorted(f"data/{name}" for name in names)
    groups = [reports[first : first + 10] for first in range(0, 80, 10)]
    waits = [sum(report.wait_seconds for report in group) for group in groups]
    seconds = [sum(report.seconds for report in group) for group in groups]
    expected = {
        "wait_seconds": [wait / 10 for wait in waits],
        "wait_fraction": [wait / whole for wait, whole in zip(waits, seconds, strict=True)],
        "samples_per_second": [160 / whole for whole in seconds],
        "epoch": [group[-1].epoch for group in groups],
    }
    for name, values in expected.items():
        scalars = events.Scalars(f"data/{name}")
        assert [scalar.step for scalar in scalars] == [9, 19, 29, 39, 49, 59, 69, 79]
        assert [scalar.value for scalar in scalars] == pytest.approx(values, rel=1e-5)


class Row:
    """A run of Weights & Biases whose rows are kept."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = [{}]

    def log(self, data: dict[str, Any], *, commit: bool = True) -> None:
        self.rows[-1].update(data)
        if commit:
            self.rows.append({})


def test_wandb_gets_no_rows_of_its_own(url):
    run = Row()
    ds = dataset(url, on_batch=sl.metrics.WandB(run, every=4))
    for _ in ds:
        run.log({"loss": 1.0})
    assert len(run.rows) == 45
    assert [row["data/step"] for row in run.rows if "data/step" in row] == list(range(3, 44, 4))
    names = {"loss", "data/step", "data/epoch", "data/wait_seconds", "data/wait_fraction", "data/samples_per_second"}
    assert set(run.rows[3]) == names


def test_a_copy_for_another_process_writes_nothing_and_says_so(caplog):
    written = Written()
    log = pickle.loads(pickle.dumps(sl.metrics.TensorBoard(written, every=1)))
    for step in range(3):
        log(BatchReport(0, step, 1, 0.0, 1.0))
    assert [record.getMessage()[:26] for record in caplog.records] == ["TensorBoard logs nothing in"[:26]]
    assert not written.scalars


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
@pytest.mark.parametrize("kind", [sl.metrics.TensorBoard, sl.metrics.WandB])
def test_every_is_a_whole_number(kind, every):
    with pytest.raises(UsageError, match="every"):
        kind(Written(), every=every)


# ---- files


def test_a_file_has_what_stats_has_and_is_never_seen_in_part(url, tmp_path):
    ds = dataset(url, world=(3, 5))
    with sl.metrics.StatsFile(ds, tmp_path, seconds=0.001):
        until(lambda: list(tmp_path.iterdir()))
        samples = 0
        for _ in range(3):
            for _ in ds:
                (found,) = read_stats(tmp_path)
                assert not found.closed
                assert samples <= found.stats.samples <= ds.stats().samples
                samples = found.stats.samples
        ds.close()
        until(lambda: read_stats(tmp_path)[0].stats == ds.stats())  # once its last threads have ended
    (found,) = read_stats(tmp_path)
    assert found == sl.metrics.RankStats(ds.stats(), found.time, closed=True)
    assert abs(found.time - time.time()) < 60
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00003.json"]
    values = json.loads((tmp_path / "rank-00003.json").read_text())
    assert (values["limit"], values["verdict"]) == (ds.stats().limit, ds.stats().verdict)
    assert read_stats(tmp_path / "rank-00003.json") == [found]


def test_files_of_an_earlier_run_with_another_world_size_are_left_out(url, tmp_path):
    for world in [(0, 4), (3, 4), (0, 2), (1, 2)]:
        sl.metrics.StatsFile(dataset(url, world=world), tmp_path).close()
    assert [each.stats.rank for each in read_stats(tmp_path)] == [0, 1]


def test_files_may_be_in_a_bucket(url, moto):
    ds = dataset(url)
    where, options = f"{moto.url()}/stats", {"storage_options": moto.storage_options}
    sl.metrics.StatsFile(ds, where, **options).close()
    assert [each.stats.url for each in read_stats(where, **options)] == [url]


def test_a_folder_that_cannot_be_written_is_logged_once_and_training_goes_on(url, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with sl.metrics.StatsFile(ds := dataset(url), tmp_path / "file" / "folder", seconds=0.001):
        until(lambda: caplog.records)
        assert len(list(ds)) == 44
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert re.match(r"statistics are not written to .*/file/folder: \w+Error: ", record.getMessage())


ENDING = """
import sys, time, streamloader as sl
ds = sl.NumpyDataset(sys.argv[1], batch_size=16)
options = {"endpoint_url": sys.argv[2], "key": "any", "secret": "any"}
file = sl.metrics.StatsFile(ds, "s3://bucket/stats", seconds=0.01, storage_options=options)
server = sl.metrics.serve(ds, 0)
list(ds)
print(time.time())
"""


@pytest.mark.long
def test_a_store_that_does_not_respond_holds_up_no_end_of_a_process(url, tmp_path):
    with folder_server(tmp_path) as server:
        server.behave = "stall"
        done = run_python("-c", ENDING, url, server.endpoint)
        assert time.time() - float(done.stdout) < 10
        server.released.set()


@pytest.mark.parametrize("seconds", [0, -1, True, "1", float("nan"), float("inf")])
def test_seconds_between_writes_are_above_0(url, tmp_path, seconds):
    with pytest.raises(UsageError, match="seconds"):
        sl.metrics.StatsFile(dataset(url), tmp_path, seconds=seconds)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"3", b'"a"', b"\xff", b"null", b'{"time": "now"}', b'{"time": true}', b"[" * 100_000),
        *(b'{"time": 1, "samples": "many"}', b'{"time": 1, "samples": 1.5}', b'{"time": 1, "rank": null}', b"{}"),
        *(b'{"time": 1, "url": 3}', b'{"time": 1, "closed": 1}', b'{"time": 1e999}', b'{"time": NaN}'),
    ],
    ids=lambda content: content[:30].decode(errors="replace"),
)
def test_what_is_no_file_of_statistics_is_an_error(tmp_path, content):
    (tmp_path / "rank-00000.json").write_bytes(content)
    with within(1 << 22), pytest.raises(FormatError, match=r"rank-00000.json has no statistics of a run"):
        read_stats(tmp_path)


NAMES = st.sampled_from([*Stats.__dataclass_fields__, "time", "closed"]) | st.text()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(NAMES, each, max_size=3),
)


@settings(max_examples=examples(200))
@given(st.dictionaries(NAMES, JSON) | JSON)
def test_any_document_gives_statistics_or_an_error_that_says_why(document):
    with suppress(FormatError):
        found = _parsed(json.dumps(document).encode(), "here")
        assert str(found.stats)
        assert isinstance(found.time, int | float)


@settings(max_examples=examples(200))
@given(st.data())
def test_any_text_of_metrics_gives_statistics_or_an_error_that_says_why(data):
    first, stop = sorted(data.draw(st.tuples(*2 * [st.integers(0, len(SCRAPED))])))
    stop = min(stop, first + data.draw(st.integers(0, 40)))
    other = data.draw(
        st.binary(max_size=20) | st.text().map(str.encode) | st.sampled_from([b"1e999", b"NaN", b"-3", b"}"])
    )
    with suppress(FormatError):
        for found in _of_metrics(SCRAPED[:first] + other + SCRAPED[stop:], "here"):
            assert str(found.stats)


def test_values_that_a_later_version_adds_are_ignored(tmp_path):
    (tmp_path / "rank-00000.json").write_text('{"time": 1, "samples": 7, "wait_seconds": 2, "of_later": [1]}')
    assert read_stats(tmp_path)[0].stats == Stats(samples=7, wait_seconds=2)


def test_an_empty_folder_and_a_foreign_server_have_no_statistics(tmp_path):
    with pytest.raises(NotFoundError, match="has no statistics of a run"):
        read_stats(tmp_path)
    (tmp_path / "metrics").write_text("other_metric 3\n")
    (tmp_path / "page").write_text("<html>")
    (tmp_path / "cut").write_text('streamloader_samples_total{rank="0"} 3\n')
    (tmp_path / "wrong").write_text('streamloader_samples_total{rank="0",world_size="1"} NaN\n')
    with folder_server(tmp_path) as server:
        for name, kind in [("metrics", NotFoundError), ("none", EndpointError)]:
            with pytest.raises(kind):
                read_stats(f"{server.url}/{name}")
        for name in ("page", "cut", "wrong"):
            with pytest.raises(FormatError, match="does not serve metrics"):
                read_stats(f"{server.url}/{name}")


def test_no_secret_of_a_url_is_shown(data, url, tmp_path):
    with folder_server(Path(url)) as server:
        secret = server.url.replace("://", "://somebody:hunter2@")
        ds = dataset(secret)
        list(ds)
        with sl.metrics.serve(ds, 0) as endpoint, sl.metrics.StatsFile(ds, tmp_path):
            shown = scrape(endpoint.url)
    shown += (tmp_path / "rank-00000.json").read_text()
    assert f'url="{server.url}"' in shown
    assert "hunter2" not in shown
