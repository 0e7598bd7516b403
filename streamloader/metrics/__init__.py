"""Metrics of a running training: Prometheus, OpenTelemetry, TensorBoard, Weights & Biases, and files.

    server = sl.metrics.serve(dataset, port=9400)  # http://127.0.0.1:9400/metrics

All of them read `dataset.stats()` when they are asked to, or report what `on_batch=` is given; the loader does nothing
for them. `METRICS` has the names, units and descriptions.
"""

from streamloader.metrics.callbacks import TensorBoard, WandB
from streamloader.metrics.definitions import METRICS, Metric
from streamloader.metrics.exporters import Collector, Server, observe, serve
from streamloader.metrics.files import RankStats, StatsFile, read_stats

__all__ = [
    "METRICS",
    "Collector",
    "Metric",
    "RankStats",
    "Server",
    "StatsFile",
    "TensorBoard",
    "WandB",
    "observe",
    "read_stats",
    "serve",
]
