"""Live statistics of a run: each rank writes them to a file, and `read_stats` reads those, or a Prometheus endpoint."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from http.client import HTTPException
from math import inf
from typing import Any, Self
from urllib.request import Request, urlopen

from streamloader.errors import EndpointError, FormatError, NotFoundError, UsageError, message
from streamloader.metrics.definitions import METRICS, Metric
from streamloader.metrics.exporters import PROMETHEUS, HasStats, Watched
from streamloader.stats import Stats
from streamloader.storage import Store, open_store, split_url
from streamloader.storage.optional import need
from streamloader.storage.process import Owner
from streamloader.storage.url import redact, url_text

MOST_BYTES = 4 << 20  # of a document or a scrape
HTTP_SECONDS = 10.0
CLOSE_SECONDS = 10.0  # that `close` waits for a write, which lasts longer during an outage of the store
_KINDS: dict[str, type] = {field.name: type(field.default) for field in fields(Stats)}


@dataclass(frozen=True)
class RankStats:
    """The statistics of one rank at a `time`, in seconds since 1970.

    `dataset`: its name, if several have one. `closed`: the run has closed the file, and writes it no more.
    """

    stats: Stats
    time: float
    dataset: str = ""
    closed: bool = False


class StatsFile:
    """Writes the statistics of a dataset to a file of its rank, `rank-00000.json`, in a folder. A context manager.

    `url`: the folder, a path or a URL, which all ranks may share, but not two datasets. `seconds`: between two writes.
    Each replaces the file as a whole: one JSON object with the fields of `Stats`, `limit`, `verdict`, `time` and
    `closed`. A daemon thread writes it until the dataset is deleted, or until `close()`, which writes the last values.
    A failure is logged once. A forked process writes nothing. A DataLoader worker may have a `StatsFile` of its own
    dataset: `rank-00000-worker-1.json`.

    Raises `UsageError` for an invalid argument.
    """

    def __init__(
        self,
        dataset: HasStats,
        url: str | os.PathLike[str],
        *,
        seconds: float = 10.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < threading.TIMEOUT_MAX:
            raise UsageError(f"seconds={seconds!r:.60}", "give the seconds between two writes, such as 10")
        self._watched, self._store = Watched({"": dataset}), open_store(url, storage_options)
        self._ended, self._owner = threading.Event(), Owner("statistics")
        given = self._watched, self._store, self._ended, seconds
        self._thread = threading.Thread(target=_write_often, args=given, name="streamloader-stats", daemon=True)
        self._thread.start()
        self._watched.call_when_gone(self._ended.set)

    def close(self) -> None:
        """Write the last values, unless it is closed."""
        if self._ended.is_set() or not self._owner.here:
            return
        self._ended.set()
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            _write(self._watched, self._store, closed=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_often(watched: Watched, store: Store, ended: threading.Event, seconds: float) -> None:
    while True:
        _write(watched, store, closed=False)
        if ended.wait(seconds):
            return


def _write(watched: Watched, store: Store, *, closed: bool) -> None:
    for _, stats in watched.take():
        worker = f"-worker-{stats.worker}" if stats.worker else ""
        values = {"time": time.time(), "closed": closed, "limit": stats.limit, "verdict": stats.verdict}
        try:
            data = json.dumps(values | asdict(stats), ensure_ascii=False, indent=1)
            store.put(f"rank-{stats.rank:05}{worker}.json", f"{data}\n".encode(errors="backslashreplace"))
        except Exception as error:  # noqa: BLE001 - a full disk or a client's error must not end the run
            watched.warn(f"statistics are not written to {store.url}: {type(error).__name__}: {message(error)}")


def read_stats(url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> list[RankStats]:
    """Return the last statistics of a run, of each rank in order.

    `url`: the folder that its `StatsFile`s write to, one file of it (`.json`), or the address of a Prometheus endpoint
    (`http://host:9400/metrics`), whose texts, but for the client, are lost. Files of a run with another world size, and
    earlier ones, are left out. Raises `NotFoundError` if there are none, `EndpointError` and other `StorageError`s, and
    `FormatError` for something else.
    """
    text = url_text(url)
    if text.lower().startswith(("http://", "https://")):
        found = _scraped(text)
    else:
        folder, name = split_url(text) if text.endswith(".json") else (text, "")
        store = open_store(folder, storage_options)
        names = [name] if name else [each.path for each in store.list() if _is_ours(each.path)]
        found = [_parsed(store.get_range(each, 0, MOST_BYTES), f"{store.url}/{each}") for each in names]
    if not found:
        remedy = "give the folder of sl.metrics.StatsFile, or the address of sl.metrics.serve, of a run that has begun"
        raise NotFoundError(f"{redact(text)} has no statistics of a run", remedy)
    size = max(found, key=lambda each: each.time).stats.world_size
    of_run = [each for each in found if each.stats.world_size == size]
    return sorted(of_run, key=lambda each: (each.dataset, each.stats.rank, each.stats.worker))


def _is_ours(path: str) -> bool:
    return path.startswith("rank-") and path.endswith(".json") and "/" not in path


def _parsed(document: bytes, where: str) -> RankStats:
    try:
        values = json.loads(document)
        stats = {key: value for key, value in values.items() if key in _KINDS}
        kinds = {**_KINDS, "time": float, "closed": bool}
        for key, kind in kinds.items():
            given = values.get(key, kind())
            if type(given) is not kind and (kind, type(given)) != (float, int):
                raise ValueError(f"{key} is {given!r:.60}")
        if not -inf < values["time"] < inf:
            raise ValueError("its time is not finite")
        return RankStats(Stats(**stats), values["time"], closed=values.get("closed", False))
    except (ValueError, AttributeError, KeyError, RecursionError) as error:
        problem = f"{where} has no statistics of a run: {type(error).__name__}: {message(error):.200}"
        raise FormatError(problem, "give a file that sl.metrics.StatsFile has written") from None


def _scraped(url: str) -> list[RankStats]:
    try:
        with urlopen(Request(url, headers={"Accept": "text/plain"}), timeout=HTTP_SECONDS) as response:
            text = response.read(MOST_BYTES)
    except (OSError, HTTPException, ValueError) as error:
        problem = f"{redact(url)} cannot be read: {redact(message(error))}"
        raise EndpointError(problem, "give the address of sl.metrics.serve of a process that runs") from None
    return _of_metrics(text, redact(url))


def _of_metrics(text: bytes, url: str) -> list[RankStats]:
    """Return the statistics of the ranks whose metrics are in a text of Prometheus."""
    parse = need("prometheus_client.parser", PROMETHEUS).text_string_to_metric_families
    by_name, now = {metric.prometheus: metric for metric in METRICS}, time.time()
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    try:
        for sample in (each for family in parse(text.decode()) for each in family.samples):
            if (metric := by_name.get(sample.name)) is not None:
                labels = sample.labels
                key = labels.get("dataset", ""), labels["rank"], labels["world_size"]
                values = found.setdefault(key, {"rank": int(labels["rank"]), "world_size": int(labels["world_size"])})
                values |= _values(metric, sample.value, labels)
    except (ValueError, OverflowError, KeyError) as error:
        problem = f"{url} does not serve metrics: {type(error).__name__}: {message(error):.200}"
        raise FormatError(problem, "give the address of sl.metrics.serve") from None
    return [RankStats(Stats(**values), now, key[0]) for key, values in found.items()]


def _values(metric: Metric, value: float, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `Stats` that a point of a metric has."""
    if metric.labels:
        return {name: labels[name] for name in metric.labels}
    if metric.values:  # computed from other fields
        return {}
    kind = _KINDS[metric.field]
    return {metric.field: kind(value) if kind is not str else "the store does not respond" * bool(value)}
