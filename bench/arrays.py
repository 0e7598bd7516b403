"""Arrays read in place, beside other readers of Zarr: python -m bench.arrays [--stores NAME ...] [--loaders NAME ...]

Each loader reads shuffled samples of the same store from the same server (nginx over a folder, plain and with the
latency of a cloud) in a process of its own, for whole epochs until `--seconds` have passed; slower ones are cut within
an epoch, after `--seconds` at least. `ceiling` fetches and decodes every chunk once, by threads, without a loader.
`streamloader` reads every epoch from the store (give no large --memory), `kept` keeps all decoded blocks in 16 GiB.
The others run in environments of their own, see bench/peers/requirements; insitubatch and annbatch need Python 3.12.
Writes one JSON line for each run to bench/results/arrays.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bench import venvs
from bench.workloads import ROOT

DATA = ROOT / "bench" / ".data" / "arrays"
RESULTS = ROOT / "bench" / "results" / "arrays.jsonl"
BUCKET = "arrays"
VARIABLES = ("t2m", "u10", "v10", "msl", "tp", "z500", "t850", "q700")
GRID = (721, 1440)
LEAST_EPOCHS = 3  # of those that read whole epochs: the first is apart
WORKERS = 2  # of the loaders that need them: the cores of the machine
CEILING_THREADS = {"plain": 4, "delay": 16}  # more are slower on 2 cores
MOST_STORED = 256 << 20  # bytes of a chunk
LOADERS = ("ceiling", "streamloader", "kept", "xbatcher", "zarr", "tensorstore", "insitubatch", "annbatch")
ENVIRONMENTS = dict.fromkeys(("xbatcher", "zarr", "tensorstore"), "arrays")
ENVIRONMENTS |= {name: name for name in ("insitubatch", "annbatch")}
# The kinds of stores that a loader cannot read, or has no documented way for.
UNREADABLE = {"xbatcher": ("csr",), "insitubatch": ("ome", "table", "csr"), "annbatch": ("era5", "ome")}
GENES = 20_000


@dataclass(frozen=True)
class Store:
    """A store to read: its samples are `steps` of the sample axis, or patches; `batch` samples in a batch."""

    name: str
    kind: str
    steps: int
    chunk: int
    codec: str
    batch: int

    @property
    def path(self) -> Path:
        """Where it is written."""
        return DATA / BUCKET / self.name


STORES = {
    store.name: store
    for store in (
        *(
            Store(f"era5-{chunk}-{codec}", "era5", 160, chunk, codec, 4)
            for chunk in (1, 8, 40)
            for codec in ("lz4", "zstd")
        ),
        Store("ome", "ome", 24, 1, "zstd", 64),
        Store("table", "table", 200_000, 1024, "lz4", 256),
        Store("csr", "csr", 100_000, 1 << 17, "lz4", 256),  # chunks of elements
    )
}


def write(store: Store) -> None:
    """Write a store by zarr-python, unless it is there: under another name until it is complete."""
    import zarr
    from zarr.codecs import BloscCodec

    if store.path.exists():
        return
    partial = store.path.with_name(f"{store.name}.partial")
    codec = BloscCodec(cname=store.codec, clevel=5 if store.codec == "lz4" else 3, shuffle="shuffle")
    group = zarr.open_group(partial, mode="w")
    rng = np.random.default_rng(0)
    if store.kind == "csr":
        write_csr(store, group, codec)
    elif store.kind == "era5":
        smooth = np.cumsum(np.cumsum(rng.normal(size=GRID), 0), 1)
        smooth = (smooth / np.abs(smooth).max() * 30 + 280).astype("f4")
        noise = rng.normal(scale=0.05, size=(8, *GRID)).astype("f4").round(2)
        for number, name in enumerate(VARIABLES):
            dims = ("time", "lat", "lon")
            array = group.create_array(
                name,
                shape=(store.steps, *GRID),
                chunks=(store.chunk, *GRID),
                dtype="f4",
                compressors=codec,
                dimension_names=dims,
            )
            for first in range(0, store.steps, store.chunk):
                steps = range(first, min(first + store.chunk, store.steps))
                array[first : steps.stop] = np.stack(
                    [np.roll(smooth, step + number, 1) + noise[step % 8] for step in steps]
                )
    elif store.kind == "ome":
        shape, dims = (store.steps, 4096, 4096), ("t", "y", "x")
        array = group.create_array(
            "0", shape=shape, chunks=(1, 2048, 2048), dtype="u2", compressors=codec, dimension_names=dims
        )
        plane = (np.abs(np.cumsum(rng.normal(size=(4096, 4096)), 1)) * 40 + 100).astype("u2")
        for step in range(store.steps):
            array[step] = np.roll(plane, 97 * step, 1)
    else:
        array = group.create_array(
            "X",
            shape=(store.steps, 2000),
            chunks=(store.chunk, 2000),
            dtype="f4",
            compressors=codec,
            dimension_names=("obs", "var"),
        )
        for first in range(0, store.steps, 16 * store.chunk):
            rows = min(16 * store.chunk, store.steps - first)
            values = rng.poisson(0.3, size=(rows, 2000)).astype("f4")
            array[first : first + rows] = np.log1p(values)
    zarr.consolidate_metadata(partial)
    partial.rename(store.path)


def write_csr(store: Store, group: Any, codec: Any) -> None:
    """Write a matrix of single cells, as AnnData does: about 750 of 20,000 values a row, in shards of 64 chunks."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(500, 1000, store.steps)
    rows = np.concatenate([[0], np.cumsum(lengths)])
    shape = {"shape": [store.steps, GENES], "encoding-type": "csr_matrix", "encoding-version": "0.1.0"}
    matrix = group.create_group("X", attributes=shape)
    options = {"chunks": (store.chunk,), "shards": (64 * store.chunk,), "compressors": codec}
    data = matrix.create_array("data", shape=(int(rows[-1]),), dtype="f4", **options)
    indices = matrix.create_array("indices", shape=(int(rows[-1]),), dtype="i4", **options)
    matrix.create_array("indptr", data=rows.astype("i8"))
    for first in range(0, store.steps, 10_000):
        span = slice(int(rows[first]), int(rows[min(first + 10_000, store.steps)]))
        gaps = rng.integers(1, 20, span.stop - span.start)
        ends = np.cumsum(gaps)
        before = np.concatenate([[0], ends])[rows[first : first + 10_000] - span.start]
        indices[span] = ends - np.repeat(before, lengths[first : first + 10_000])
        data[span] = np.log1p(rng.poisson(0.5, span.stop - span.start) + 1)


class Counting:
    """Samples per second of the batches of an iterable, over whole epochs or at least some seconds."""

    def __init__(self, seconds: float, near: bool) -> None:
        self.seconds, self.near = seconds, near
        self.rates: list[float] = []
        self.first = 0.0

    def run(self, epoch: Callable[[], Iterator[int]], whole: bool) -> None:
        """Iterate over epochs; `epoch` yields the number of samples in each batch."""
        begin = time.perf_counter()
        while time.perf_counter() - begin < self.seconds or (whole and len(self.rates) < LEAST_EPOCHS):
            start, samples = time.perf_counter(), 0
            for count in epoch():
                self.first = self.first or time.perf_counter() - start
                samples += count
                if not whole and time.perf_counter() - begin > self.seconds:
                    break
            self.rates.append(samples / (time.perf_counter() - start))


def read_ours(store: Store, endpoint: str, counting: Counting, memory: str | None, *, keep: bool) -> dict[str, Any]:
    """Read by streamloader, in every epoch from the store unless `keep`."""
    import streamloader as sl
    from streamloader.engine import budget

    mock.patch.object(budget, "KEPT_SHARE", 0).start()  # of what a loader without memory= may take
    axes: dict[str, str | int] = {"table": "obs", "ome": "t", "csr": 0}
    options: dict[str, Any] = {"sample_axis": axes.get(store.kind, "time")}
    if store.kind == "ome":
        options["patches"] = sl.Patch({"y": 256, "x": 256})
    dataset = sl.StreamingDataset(
        f"s3://{BUCKET}/{store.name}",
        batch_size=store.batch,
        memory=memory or ("16GiB" if keep else None),
        remainder="uneven",
        **options,
        storage_options={"endpoint_url": endpoint, "key": "k", "secret": "s"},
    )
    name = next(iter(dataset.fields))
    rows = f"{name}_offsets" if store.kind == "csr" else name
    counting.run(lambda: (len(batch[rows]) - (rows != name) for batch in dataset), whole=True)
    stats = dataset.stats()
    return {"requests": stats.requests, "verdict": stats.verdict, "bytes_fetched": stats.bytes_fetched}


def objects_of(store: Store) -> list[tuple[str, str]]:
    """The chunks of a store: (array, key)."""
    paths = [path for path in store.path.rglob("*") if path.is_file() and path.name != "zarr.json"]
    return [(path.relative_to(store.path).parts[0], path.relative_to(store.path).as_posix()) for path in paths]


def read_csr_ceiling(store: Store, endpoint: str, counting: Counting) -> None:
    """Fetch and decode every chunk of a sparse matrix once an epoch, by the largest requests that the loader makes."""
    from streamloader.storage import open_store
    from streamloader.zarr.metadata import read_group
    from streamloader.zarr.reader import ArrayReader

    place = open_store(f"s3://{BUCKET}/{store.name}", {"endpoint_url": endpoint, "key": "k", "secret": "s"})
    arrays = read_group(place, ["X"]).arrays
    readers = [ArrayReader(place, arrays[f"X/{part}"]) for part in ("data", "indices")]
    work = [(reader, run) for reader in readers for run in reader.runs([((0,), reader.array.shape)])]
    local = threading.local()

    def load(item: Any) -> None:
        array, run = item
        if not hasattr(local, "out"):
            local.out, local.body = np.empty(array.array.chunks, "u4"), np.empty(MOST_STORED, np.uint8).data
        body = array.fetch(place.reader(), run, lambda size: local.body[:size])
        for chunk in run.chunks:
            array.decode(run, chunk, body, local.out.view(array.array.dtype))

    threads = ThreadPoolExecutor(CEILING_THREADS["plain" if counting.near else "delay"])

    def epoch() -> Iterator[int]:
        for _ in threads.map(load, work):
            yield 0
        yield store.steps

    counting.run(epoch, whole=True)


def read_ceiling(store: Store, endpoint: str, counting: Counting) -> None:
    """Fetch and decode every chunk once an epoch, by threads, each into its own memory, which is used again."""
    from streamloader.storage import open_store
    from streamloader.zarr.codecs import chunk_codec
    from streamloader.zarr.metadata import read_group

    place = open_store(f"s3://{BUCKET}/{store.name}", {"endpoint_url": endpoint, "key": "k", "secret": "s"})
    arrays = read_group(place).arrays
    codecs = {name: chunk_codec(array) for name, array in arrays.items()}
    reader, objects, local = place.reader(), objects_of(store), threading.local()
    samples = store.steps * (256 if store.kind == "ome" else 1)

    def load(item: tuple[str, str]) -> None:
        name, key = item
        if not hasattr(local, "out"):
            local.out, local.body = {}, np.empty(MOST_STORED, np.uint8).data
        if name not in local.out:
            local.out[name] = np.empty(arrays[name].chunks, arrays[name].dtype)
        body = reader.read(key, 0, MOST_STORED, lambda size: local.body[:size])
        codecs[name].decode(body, local.out[name])

    threads = ThreadPoolExecutor(CEILING_THREADS["plain" if counting.near else "delay"])

    def epoch() -> Iterator[int]:
        for _ in threads.map(load, objects):
            yield 0
        yield samples

    counting.run(epoch, whole=True)


def torch_epochs(store: Store, dataset: Any, counting: Counting) -> None:
    """Read a map-style dataset by torch's DataLoader, shuffled, with workers."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    sparse = {"collate_fn": list} if store.kind == "csr" else {}
    loader = DataLoader(
        dataset,
        **sparse,
        batch_size=store.batch,
        shuffle=True,
        num_workers=WORKERS,
        multiprocessing_context="spawn",
        persistent_workers=True,
        prefetch_factor=2,
    )
    counting.run(
        lambda: (len(next(iter(batch.values())) if isinstance(batch, dict) else batch) for batch in loader), whole=False
    )


class Samples:
    """A map-style dataset over readers of arrays, which each process opens for itself."""

    def __init__(self, store: Store, endpoint: str, opened: Callable[[Store, str], dict[str, Any]]) -> None:
        self.store, self.endpoint, self.opened, self.arrays = store, endpoint, opened, {}

    def __len__(self) -> int:
        return self.store.steps * (256 if self.store.kind == "ome" else 1)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not self.arrays:
            self.arrays = self.opened(self.store, self.endpoint)
        if self.store.kind == "ome":
            step, patch = divmod(index, 256)
            y, x = 256 * (patch // 16), 256 * (patch % 16)
            return {name: read(step, slice(y, y + 256), slice(x, x + 256)) for name, read in self.arrays.items()}
        if self.store.kind == "csr":
            rows = slice(*self.rows[index : index + 2].tolist())
            return {name: read(rows) for name, read in self.arrays.items()}
        return {name: read(index) for name, read in self.arrays.items()}

    @cached_property
    def rows(self) -> Any:
        """The first element of each row of a sparse matrix."""
        import zarr

        return zarr.open_array(s3_store(self.store, self.endpoint), path="X/indptr", mode="r")[:]


def s3_store(store: Store, endpoint: str) -> Any:
    """zarr-python's store over obstore."""
    from obstore.store import S3Store
    from zarr.storage import ObjectStore

    options = {"endpoint": endpoint, "access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}
    return ObjectStore(
        S3Store(BUCKET, prefix=store.name, client_options={"allow_http": True}, **options), read_only=True
    )


def open_zarr(store: Store, endpoint: str) -> dict[str, Any]:
    """Readers by zarr-python."""
    import zarr

    group = zarr.open_group(s3_store(store, endpoint), mode="r")
    if store.kind == "csr":
        return {name: group[f"X/{name}"].__getitem__ for name in ("data", "indices")}
    return {name: (lambda *at, array=array: array[at]) for name, array in group.arrays()}


def open_tensorstore(store: Store, endpoint: str) -> dict[str, Any]:
    """Readers by TensorStore, with a cache of decoded chunks."""
    import tensorstore as ts

    context = ts.Context({"cache_pool": {"total_bytes_limit": 2 << 30}})
    names = {"table": ["X"], "ome": ["0"], "csr": ["X/data", "X/indices"]}.get(store.kind, VARIABLES)
    kvstore = {"driver": "http", "base_url": f"{endpoint}/{BUCKET}/{store.name}/"}
    found = {}
    for name in names:
        spec = {"driver": "zarr3", "kvstore": {**kvstore, "path": f"{name}/"}}
        found[name] = ts.open(spec, context=context, open=True, read=True).result()
    return {name: (lambda *at, array=array: array[at].read().result()) for name, array in found.items()}


def read_xbatcher(store: Store, endpoint: str, counting: Counting) -> None:
    """Read by xbatcher, as its documentation shows: a map-style dataset of a BatchGenerator."""
    torch_epochs(store, XBatches(store, endpoint), counting)


class XBatches:
    """xbatcher's batches of one sample each."""

    def __init__(self, store: Store, endpoint: str) -> None:
        self.store, self.endpoint, self.generator = store, endpoint, None

    def __len__(self) -> int:
        return self.store.steps * (256 if self.store.kind == "ome" else 1)

    def __getitem__(self, index: int) -> Any:
        if self.generator is None:
            import xarray
            import xbatcher

            opened = xarray.open_zarr(s3_store(self.store, self.endpoint), chunks=None, consolidated=True)
            sizes = {
                "era5": {"time": 1, "lat": GRID[0], "lon": GRID[1]},
                "ome": {"t": 1, "y": 256, "x": 256},
                "table": {"obs": 1, "var": 2000},
            }[self.store.kind]
            self.generator = xbatcher.BatchGenerator(opened, sizes, preload_batch=False)
        batch = self.generator[index]
        return {name: np.asarray(values.values) for name, values in batch.data_vars.items()}


def read_insitubatch(store: Store, endpoint: str, counting: Counting) -> None:
    """Read by insitubatch, without a framework, shuffled in windows of about 30 steps."""
    from insitubatch import InSituDataset, obstore_store, open_geometries, split_by_chunk

    access = {"access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}
    opened = obstore_store(
        f"s3://{BUCKET}/{store.name}", endpoint=endpoint, client_options={"allow_http": True}, **access
    )
    geometries = open_geometries(opened, variables=list(VARIABLES))
    manifest = split_by_chunk(geometries[VARIABLES[0]], fractions=(1.0, 0.0, 0.0))
    blocks = max(2, 32 // store.chunk)
    dataset = InSituDataset(opened, manifest, geometries=geometries, batch_size=store.batch, block_chunks=blocks)
    epochs = itertools.count()

    def epoch() -> Iterator[int]:
        dataset.set_epoch(next(epochs))
        yield from (len(batch.sample_indices) for batch in dataset.train)

    counting.run(epoch, whole=True)


def read_annbatch(store: Store, endpoint: str, counting: Counting) -> None:
    """Read by annbatch with its defaults, 32 chunks of 512 rows at a time, which its batches mix."""
    import anndata
    import zarr
    from annbatch import Loader

    group = zarr.open_group(s3_store(store, endpoint), mode="r")
    rows = anndata.io.sparse_dataset(group["X"]) if store.kind == "csr" else group["X"]
    loader = Loader(shuffle=True, batch_size=store.batch, chunk_size=512, preload_nchunks=32, preload_to_gpu=False)
    loader.add_dataset(rows)
    counting.run(lambda: (batch["X"].shape[0] for batch in loader), whole=False)


def measure(loader: str, store: Store, endpoint: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run a loader in this process."""
    counting, notes, memory = Counting(given.seconds, given.fronts == ["plain"]), {}, given.memory
    readers = {"xbatcher": read_xbatcher, "insitubatch": read_insitubatch, "annbatch": read_annbatch}
    readers["ceiling"] = read_csr_ceiling if store.kind == "csr" else read_ceiling
    if loader in ("streamloader", "kept"):
        notes = read_ours(store, endpoint, counting, memory, keep=loader == "kept")
    elif loader in readers:
        readers[loader](store, endpoint, counting)
    else:
        torch_epochs(
            store, Samples(store, endpoint, {"zarr": open_zarr, "tensorstore": open_tensorstore}[loader]), counting
        )
    usage = resource.getrusage(resource.RUSAGE_SELF)
    later = sorted(counting.rates[1:] or counting.rates)
    return {
        "samples_per_second": round(later[len(later) // 2], 2),
        "first_epoch": round(counting.rates[0], 2),
        "epochs": len(counting.rates),
        "first_batch_seconds": round(counting.first, 3),
        "peak_mib": usage.ru_maxrss >> 10,
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        **notes,
    }


def report() -> None:
    """Write bench/results/arrays.md from the last line of each store, front and loader."""
    last: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in RESULTS.read_text().splitlines():
        run = json.loads(line)
        last[run["store"], run["front"], run["loader"]] = run
    lines = [
        "# Arrays read in place",
        "",
        "Made by `python -m bench.arrays --report`. Samples per second of later epochs (of the first one), of",
        "a server of static files on the same two cores; `delay` adds 30 ms and 85 MB/s for each connection.",
        "`ceiling` fetches and decodes every chunk once, by threads, each into memory that it uses again.",
        "`streamloader` reads every epoch from the store; `kept` has memory=16GiB, in which all decoded blocks are",
        f"kept. xbatcher, zarr-python and TensorStore are read by torch's DataLoader with {WORKERS} workers,",
        "shuffled; TensorStore keeps 2 GiB of decoded chunks in each, which holds all of `ome`, `table` and `csr`.",
        "insitubatch keeps chunks in a pool, which holds all of `era5-40`. Memory is the peak of the process, without",
        "workers. Ratios: `streamloader` over `ceiling`, and over the best of xbatcher, zarr-python and TensorStore.",
        "",
        "| store | server | " + " | ".join(LOADERS) + " | over ceiling, over best | its memory |",
        "|---|---|" + "---|" * (len(LOADERS) + 2),
    ]
    for store, front in dict.fromkeys((store, front) for store, front, _ in last):
        runs = {loader: last.get((store, front, loader), {}) for loader in LOADERS}
        rates = {loader: run.get("samples_per_second", 0.0) for loader, run in runs.items()}
        cells = [
            f"{_shown(rate)} ({_shown(runs[name]['first_epoch'])})" if rate else "" for name, rate in rates.items()
        ]
        others = max(rates[loader] for loader in ("xbatcher", "zarr", "tensorstore"))
        ratios = [f"{rates['streamloader'] / other:.2f}" if other else "" for other in (rates["ceiling"], others)]
        lines.append(
            f"| {store} | {front} | {' | '.join(cells)} | {', '.join(filter(None, ratios))} | "
            f"{runs['streamloader'].get('peak_mib', 0) / 1024:.1f} GiB |"
        )
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _shown(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def main() -> None:
    """Run the loaders on the stores, or one of them in this process (`--run`)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", nargs="*", default=list(STORES))
    parser.add_argument("--loaders", nargs="*", default=list(LOADERS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--fronts", nargs="*", default=["plain"])
    parser.add_argument("--memory")
    parser.add_argument("--report", action="store_true", help="only write the page again, from its lines")
    parser.add_argument("--run", nargs=2, metavar=("LOADER", "ENDPOINT"))
    given = parser.parse_args()
    if given.run:
        print(json.dumps(measure(given.run[0], STORES[given.stores[0]], given.run[1], given)))
        return
    if given.report:
        report()
        return
    from bench.servers import nginx

    for name in given.stores:
        write(STORES[name])
    for name in {ENVIRONMENTS[loader] for loader in given.loaders if loader in ENVIRONMENTS}:
        problem = venvs.make(name, print)
        if problem:
            print(problem)
    for front in given.fronts:
        with nginx(DATA, front) as endpoint:
            for name in given.stores:
                for loader in given.loaders:
                    if STORES[name].kind in UNREADABLE.get(loader, ()):
                        continue
                    environment = ENVIRONMENTS.get(loader)
                    interpreter = sys.executable if environment is None else str(venvs.python_of(environment))
                    command = [interpreter, "-m", "bench.arrays", "--stores", name, "--seconds", str(given.seconds)]
                    command += [
                        "--fronts",
                        front,
                        "--run",
                        loader,
                        endpoint.url,
                        *(["--memory", given.memory] if given.memory else []),
                    ]
                    done = subprocess.run(
                        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ
                    )
                    lines = done.stdout.strip().splitlines()
                    result = json.loads(lines[-1]) if lines and not done.returncode else {"error": done.stderr[-600:]}
                    line = {"store": name, "front": front, "loader": loader, **asdict(STORES[name]), **result}
                    print(
                        json.dumps({key: line[key] for key in line if key not in ("name", "kind", "steps")}), flush=True
                    )
                    with RESULTS.open("a") as out:
                        out.write(json.dumps(line) + "\n")
    report()


if __name__ == "__main__":
    main()
