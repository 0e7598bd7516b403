"""The metrics as a table: all names, units and descriptions of every exporter, of the documentation and the dashboard.

A name is that of OpenTelemetry without its prefix, `wait`; its unit is a UCUM code: "s", "By", or what is counted in
braces. The Prometheus name has the unit as a suffix, as OpenTelemetry's own translation makes it: a counter `wait` in
"s" is `streamloader_wait_seconds_total`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from streamloader.stats import Stats

PREFIX = "streamloader"
LIMITS = ("network", "gather", "decode", "transform", "consumer")  # the values of `Stats.limit`
_SUFFIXES = {"s": "_seconds", "By": "_bytes"}
Kind = Literal["counter", "gauge"]


@dataclass(frozen=True)
class Metric:
    """One metric, computed from the field or property `field` of `Stats`.

    `labels`: fields of text that are labels of it, whose value is 1. With `values` there is a point for each value that
    the field may have, 1 for the present one and 0 for the others.
    """

    name: str
    kind: Kind
    unit: str
    field: str
    description: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def opentelemetry(self) -> str:
        """The name in OpenTelemetry."""
        return f"{PREFIX}.{self.name}"

    @property
    def prometheus(self) -> str:
        """The name in Prometheus."""
        total = "_total" if self.kind == "counter" else ""
        return f"{PREFIX}_{self.name}{_SUFFIXES.get(self.unit, '')}{total}"

    def points(self, stats: Stats) -> Iterator[tuple[dict[str, str], float]]:
        """Yield the value for each set of labels, besides those of the rank."""
        value = getattr(stats, self.field)
        if self.values:
            yield from (({self.field: each}, float(each == value)) for each in self.values)
        elif self.labels:
            yield {name: _label(getattr(stats, name)) for name in self.labels}, 1
        else:
            yield {}, int(bool(value)) if isinstance(value, str) else value


def _metrics(kind: Kind, rows: str) -> Iterator[Metric]:
    """Yield the metrics of a table with the columns name, unit, field and description."""
    for row in rows.strip().splitlines():
        name, unit, field, description = (part.strip() for part in row.split("|"))
        yield Metric(name, kind, unit, field, description)


_COUNTERS = """
samples            | {sample}  | samples                | Samples that training received, padded rows included.
batches            | {batch}   | batches                | Batches that training received; samples with batch_size=None.
run                | s         | seconds                | Time from the request for the first batch to the last batch.
wait               | s         | wait_seconds           | Time that the training loop waited for batches.
fetch_wait         | s         | fetch_wait_seconds     | Time that the loader waited for bytes, also during training.
decode_wait        | s         | decode_wait_seconds    | Time that the loader waited for images, also during training.
transform_wait     | s         | transform_wait_seconds | Time that it waited for the transform, also during training.
gather             | s         | gather_seconds         | Time that the thread that gathers batches was busy.
full               | s         | full_seconds           | Time that the loader was ahead and waited for training.
device_wait        | s         | device_wait_seconds    | Time that the device had nothing to do for lack of a batch.
requests           | {request} | requests               | Requests to the store, with retries and hedges.
retries            | {request} | retries                | Requests that were sent again after a failure.
hedges             | {request} | hedges                 | Second requests for a slow first one.
request            | s         | request_seconds        | Time of all requests; its rate is the mean number in flight.
fetched            | By        | bytes_fetched          | Bytes read from the store.
cache_hits         | {request} | cache_hits             | Ranges read from the cache on local disk instead of the store.
cache_read         | By        | cache_bytes            | Bytes read from the cache on local disk.
decoded            | By        | bytes_decoded          | Bytes of decompressed chunks.
unpack             | s         | unpack_seconds         | Processor time of checking and decompressing chunks.
decode             | s         | decode_seconds         | Processor time of decoding images.
transform          | s         | transform_seconds      | Time that the transform ran, in all its threads or workers.
cpu                | s         | cpu_seconds            | Processor time of the process, without its workers.
bad_samples        | {sample}  | bad_samples            | Samples that were masked or replaced (on_error=).
cpu_decoded_images | {image}   | decoded_on_cpu         | Images that the processor decoded, since the device cannot.
elements           | {element} | elements               | Elements of padded fields, with padding.
padding_elements   | {element} | padding_elements       | Elements of padding.
chunks_read        | {chunk}   | chunks_read            | Chunks of arrays that were read.
missing_chunks     | {chunk}   | missing_chunks         | Chunks of arrays that do not exist: they have the fill value.
workers_replaced   | {process} | workers_replaced       | Worker processes that were killed and replaced.
buffers            | {buffer}  | buffers_allocated      | Buffers of batches that were allocated.
"""

_GAUGES = """
epoch               | {epoch}   | epoch               | Epoch of the last batch, -1 before it.
step                | {step}    | step                | Step of the last batch, counted from epoch 0; -1 before it.
ready_batches       | {batch}   | ready_batches       | Batches that are finished and wait for training.
ready_batches_limit | {batch}   | ready_batches_limit | Batches that may be finished and wait for training.
ready_blocks        | {block}   | ready_blocks        | Blocks that are loaded, and that no batch has needed yet.
ready_blocks_limit  | {block}   | ready_blocks_limit  | Blocks that fit into memory.
memory              | By        | memory_bytes        | Bytes of blocks and batches of all datasets of the process.
memory_limit        | By        | memory_limit        | Bytes that the loader may use.
first_batch         | s         | first_batch_seconds | Time that training waited for the first batch.
request_limit       | {request} | in_flight           | Requests that may be in flight at once.
outage              | {outage}  | waiting_for         | 1 while the store does not respond or asks to wait, else 0.
workers             | {process} | workers             | Worker processes, 0 for threads.
cores               | {core}    | cores               | Cores that the rank decodes with.
transformers        | {thread}  | transformers        | Threads or workers that run the transform.
epoch_chunks        | {chunk}   | chunks              | Chunks of arrays that an epoch reads, on all ranks.
"""

METRICS: tuple[Metric, ...] = (
    *_metrics("counter", _COUNTERS),
    *_metrics("gauge", _GAUGES),
    Metric("limit", "gauge", "{limit}", "limit", "1 for the stage that limits the run so far, else 0.", values=LIMITS),
    Metric(
        *("info", "gauge", "{info}", "url", "1, with the dataset's URL, the client and the choice of workers."),
        labels=("url", "client", "workers_reason"),
    ),
)
assert {metric.kind for metric in METRICS} == {*get_args(Kind)}


def labels_of(stats: Stats, name: str) -> dict[str, Any]:
    """Return the labels that all metrics of a rank have; `dataset` only if it has a name."""
    return {"rank": stats.rank, "world_size": stats.world_size, **({"dataset": _label(name)} if name else {})}


def _label(text: str) -> str:
    """Return a text that UTF-8 has: a path of other bytes has half surrogates, for which a scrape would fail."""
    return text.encode(errors="backslashreplace").decode()
