"""Prometheus and OpenTelemetry: both take a snapshot of `stats()` when they are asked for values, and never before."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

from streamloader.errors import UsageError, message
from streamloader.metrics.definitions import METRICS, Metric, labels_of
from streamloader.stats import Stats
from streamloader.storage.optional import need
from streamloader.storage.process import Finalizer, Owner

if TYPE_CHECKING:
    from opentelemetry import metrics as otel
    from prometheus_client.metrics_core import Metric as Family

PROMETHEUS, OPENTELEMETRY = "prometheus-client", "opentelemetry-api"


class HasStats(Protocol):
    """A dataset that is iterated: `StreamingDataset`, `Mixture`, `NumpyDataset`, or a subclass of the user's."""

    def stats(self) -> Stats:
        """Return the statistics of this process's loader."""
        ...


Datasets = HasStats | Mapping[str, HasStats]


class Watched:
    """Weak references to datasets by name, in the process that made them: forked ones have other counters.

    A failure of `stats()` is logged once, and never raised: metrics must not end what asks for them.
    """

    def __init__(self, datasets: Datasets) -> None:
        given = datasets if isinstance(datasets, Mapping) else {"": datasets}
        for dataset in given.values():
            if not callable(getattr(dataset, "stats", None)):
                remedy = "give a StreamingDataset, a Mixture or a NumpyDataset, or a dict of these by name"
                raise UsageError(f"a {type(dataset).__name__} has no stats()", remedy)
        if not given or not all(isinstance(name, str) for name in given):
            raise UsageError(f"datasets={list(given)!r:.200}", "give one dataset, or a dict of datasets by name")
        self._refs = {name: weakref.ref(dataset) for name, dataset in given.items()}
        self._owner, self._failed = Owner("metrics"), False

    def call_when_gone(self, call: Callable[[], object]) -> None:
        """Call a function in a thread once all datasets are deleted."""
        for ref in self._refs.values():
            Finalizer(ref(), _call_when_gone, self._refs, call).atexit = False

    def take(self) -> list[tuple[str, Stats]]:
        """Return the statistics of each dataset that still exists, with its name."""
        found = []
        for name, ref in self._refs.items():
            dataset = ref() if self._owner.here else None
            if dataset is not None:
                try:
                    found.append((name, dataset.stats()))
                except Exception as error:  # noqa: BLE001 - a subclass may raise anything, in a thread of a server
                    self.warn(f"the statistics of a dataset are missing: {type(error).__name__}: {message(error)}")
        return found

    def warn(self, text: str) -> None:
        """Log a warning, the first one only."""
        if not self._failed:
            self._failed = True
            logging.getLogger("streamloader").warning("%s; later failures are not logged", text)


def _call_when_gone(refs: Mapping[str, weakref.ref[HasStats]], call: Callable[[], object]) -> None:
    if all(ref() is None for ref in refs.values()):
        call()


class Collector:
    """A collector of `prometheus_client`: register it with a registry of yours."""

    def __init__(self, datasets: Datasets) -> None:
        self._families: Any = need("prometheus_client.core", PROMETHEUS)
        self.watched = Watched(datasets)

    def describe(self) -> Iterable[Family]:
        """Return the metrics without values, by which a registry finds duplicates."""
        return [self._family(metric, []) for metric in METRICS]

    def collect(self) -> Iterator[Family]:
        """Yield the metrics, from one snapshot of each dataset. A dataset that was deleted has none."""
        taken = [(labels_of(stats, name), stats) for name, stats in self.watched.take()]
        return (self._family(metric, taken) for metric in METRICS)

    def _family(self, metric: Metric, taken: Iterable[tuple[dict[str, Any], Stats]]) -> Family:
        make = self._families.CounterMetricFamily if metric.kind == "counter" else self._families.GaugeMetricFamily
        family: Family = make(metric.prometheus.removesuffix("_total"), metric.description)
        for labels, stats in taken:
            for own, value in metric.points(stats):
                named = {name: str(value) for name, value in {**labels, **own}.items()}
                family.add_sample(metric.prometheus, named, value)
        return family


class Server:
    """Serves metrics to Prometheus until it is closed, or the datasets are deleted. A context manager.

    `url`: its address. `port`: the one that it listens on.
    """

    def __init__(self, datasets: Datasets, port: int, host: str) -> None:
        client, collector = need("prometheus_client", PROMETHEUS), Collector(datasets)
        registry = client.CollectorRegistry()
        registry.register(collector)
        try:
            httpd, self._thread = client.start_http_server(port, host, registry)
        except (OSError, OverflowError, TypeError, UnicodeError) as error:  # of any host and port
            remedy = "give each rank of a machine a port of its own, such as port=9400 + local rank, or port=0 for any"
            raise UsageError(f"metrics cannot be served at {host}:{port}: {error}", remedy) from error
        self._thread.name = "streamloader-metrics"
        self.port = int(httpd.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"
        self._close = Finalizer(self._thread, _stop, httpd)
        self._close.atexit = False  # the thread is a daemon, and to stop it takes up to half a second
        collector.watched.call_when_gone(self._close)
        if hasattr(os, "register_at_fork"):  # else a child would keep the port
            socket = weakref.ref(httpd.socket)
            os.register_at_fork(after_in_child=lambda: _close_socket(socket()))

    def close(self) -> None:
        """Free the port."""
        self._close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stop(httpd: Any) -> None:
    httpd.shutdown()
    httpd.server_close()


def _close_socket(socket: Any) -> None:
    if socket is not None:
        socket.close()


def serve(datasets: Datasets, port: int = 9400, *, host: str = "127.0.0.1") -> Server:
    """Serve the metrics of a dataset, or of several by name, to Prometheus at `http://host:port/metrics`.

    Each rank serves its own: `port=9400 + local_rank` for the ranks of a machine, 0 for any free port. `host`:
    "0.0.0.0" lets other machines connect. The server ends with the datasets, by `close()`, or with the process; it
    need not be kept. In DataLoader workers and other forked processes there is none.

    Raises `UsageError` if the port is taken, or prometheus-client is not installed.
    """
    return Server(datasets, port, host)


class _Sweep:
    """One snapshot for all instruments of a collection: an instrument that has used the present one takes the next."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched  # without a lock, which a forked child could inherit locked
        self._taken: list[tuple[str, Stats]] = []
        self._used: set[str] | None = None

    def __call__(self, metric: Metric) -> list[tuple[str, Stats]]:
        if self._used is None or metric.name in self._used:
            self._taken, self._used = self._watched.take(), set()
        self._used.add(metric.name)
        return self._taken


def observe(datasets: Datasets, meter: otel.Meter) -> None:
    """Report the metrics of a dataset, or of several by name, by observable instruments of an OpenTelemetry meter.

    The meter asks for them as often as its reader says. A dataset that was deleted has none any more.
    """
    kind = need("opentelemetry.metrics", OPENTELEMETRY).Observation
    sweep = _Sweep(Watched(datasets))

    def observed(metric: Metric, _: otel.CallbackOptions) -> list[otel.Observation]:
        points = ((labels_of(stats, name), metric.points(stats)) for name, stats in sweep(metric))
        return [kind(value, {**labels, **own}) for labels, each in points for own, value in each]

    for metric in METRICS:
        create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        create(metric.opentelemetry, [partial(observed, metric)], metric.unit, metric.description)
