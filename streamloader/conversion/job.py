"""A conversion from its beginning to its end: scan, plan, write, finish."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from streamloader.conversion import destination
from streamloader.conversion.engines.local import run_tasks
from streamloader.conversion.plan import Job, SplitPlan, make_job
from streamloader.conversion.progress import Listener, Progress, Report, ignore
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.wish import Wish
from streamloader.conversion.splits import parse_splits
from streamloader.conversion.task import Task
from streamloader.errors import DestinationError, UsageError
from streamloader.format.manifest import Manifest
from streamloader.format.opening import ROOT, open_manifest
from streamloader.format.sink import Receipt, check_receipts, clean, finish, read_receipts, write_split_root
from streamloader.format.threads import cpu_count
from streamloader.options import Layout
from streamloader.storage import open_store
from streamloader.storage.protocol import Store

FINISH_THREADS = 8  # small objects: each is a round trip
ROUNDS = 3  # what others delete or overwrite while we write is done again, but not for ever


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - as the command's option is called
    split: str | Mapping[str, float] | None = None,
    layout: Layout | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
    progress: Listener | None = None,
) -> Report:
    """Convert a folder of images, WebDataset tars or NumPy files into a dataset at the URL `dst`.

    `split` is `"train=0.9,val=0.1"` or a mapping: each becomes a dataset of its own, with samples dealt out at
    random by row number. `workers` are processes, by default one a core; 0 works in this process. An
    interrupted conversion goes on when it is called again in the same way, to the same bytes; `overwrite`
    replaces what is there. `source_options` default to `storage_options` where both URLs have one protocol.

    Raises `SourceError` for what cannot be converted, with the file; `SourceChangedError` or
    `DestinationError` where it cannot go on; a `StorageError` for what the stores refuse.
    """
    listener = progress or ignore
    splits = parse_splits(split)
    if workers is not None and workers < 0:
        raise UsageError(f"workers={workers}", "give the number of processes; 0 works in this one")
    store = open_store(dst, storage_options)
    found = destination.look(store, overwrite)
    listener(Progress("scan", detail=os.fspath(src)))
    if source_options is None:
        source_options = storage_options if _protocol(src) == _protocol(dst) else None
    name, source = open_source(src, format, source_options or {}, Wish())
    if _inside(store.url, source.url):
        raise DestinationError(
            f"the destination {store.url} lies in the source {source.url}", "choose another destination"
        )
    job = make_job(source, name, splits, layout or Layout())
    listener(Progress("scan", detail=f"{name}, {source.num_samples} samples in {len(source.files)} files"))
    destination.take(store, job, found, overwrite)
    run = _Run(job, store, listener, _count_workers(workers, source.url, store.url))
    manifests = run.complete()
    return Report(store.url, name, manifests, job.num_shards, run.kept_shards)


def _inside(url: str, folder: str) -> bool:
    return f"{url}/".removeprefix("file://").startswith(f"{folder}/".removeprefix("file://"))


def _protocol(url: str | os.PathLike[str]) -> str:
    text = os.fspath(url)
    return text.partition("://")[0] if "://" in text else "file"


def _count_workers(workers: int | None, *urls: str) -> int:
    """Return the number of processes: none where a store lives in this process's memory."""
    if any(url.startswith("memory:") for url in urls):
        return 0
    return cpu_count() if workers is None else workers


@dataclass
class _Run:
    """One run of a job: what it found, what it wrote."""

    job: Job
    store: Store
    listener: Listener
    workers: int
    kept_shards: int = 0
    kept: int = 0
    done: int = 0
    stored: int = 0

    def complete(self) -> dict[str, Manifest]:
        """Write what is missing, publish every dataset, and return the manifests by split."""
        stores = {split.name: self.store.child(split.name) if split.name else self.store for split in self.job.splits}
        manifests = {name: open_manifest(store)[0] for name, store in stores.items() if store.head(ROOT)}
        open_splits = [split for split in self.job.splits if split.name not in manifests]
        receipts = self._write([_SplitRun(split, stores[split.name]) for split in open_splits], manifests)
        self._tell("finish")
        destination.remove_leftovers(self.store)  # nothing writes here now
        self.store.delete([destination.FILES])  # before the job file goes, so that nothing of it can stay
        for split in open_splits:
            store = stores[split.name]
            manifests[split.name] = finish(
                store, split.geometry, receipts[split.name], split.provenance, FINISH_THREADS
            )
        manifests = {split.name: manifests[split.name] for split in self.job.splits}
        if "" in manifests:
            clean(self.store)  # a run that was killed after its last step but one
        else:
            write_split_root(self.store, manifests)
        return manifests

    def _write(self, splits: list[_SplitRun], finished: Mapping[str, Manifest]) -> dict[str, dict[int, Receipt]]:
        for split in splits:
            split.receipts = split.finished_before()
        shards = {split.name: split.num_shards for split in self.job.splits}
        self.kept_shards = sum(len(split.receipts) for split in splits) + sum(shards[name] for name in finished)
        self.kept = sum(receipt.num_samples for split in splits for receipt in split.receipts.values())
        self.kept += sum(manifest.num_samples for manifest in finished.values())
        self.done = self.kept
        self._tell("write")
        for _ in range(ROUNDS):
            tasks = [(split, shard) for split in splits for shard in split.missing()]
            if not tasks:
                return {split.plan.name: split.receipts for split in splits}
            by_url = {split.store.url: split for split in splits}

            def note(task: Task, receipt: Receipt) -> None:
                by_url[task.store.url].receipts[task.shard] = receipt  # noqa: B023 - used in this round only
                self.done += receipt.num_samples
                self.stored += sum(one.size for one in receipt.objects.values())
                self._tell("write")

            run_tasks(self._tasks(tasks), min(self.workers, len(tasks)), note)
            for split in splits:
                for shard in split.wrong():
                    self.done -= split.receipts.pop(shard).num_samples
        url = self.store.url
        raise DestinationError(
            f"objects at {url} change while it is written", "let nothing else write there, and run again"
        )

    def _tasks(self, tasks: list[tuple[_SplitRun, int]]) -> Iterator[Task]:
        for split, shard in tasks:  # one at a time: a part of an image folder holds its paths
            part = self.job.source.part(split.plan.shard_rows(shard))
            yield Task(part, split.store, split.plan.geometry, shard)

    def _tell(self, phase: Any) -> None:
        self.listener(Progress(phase, self.done, self.job.num_samples, self.kept, self.stored))


class _SplitRun:
    """A split that is being written: its plan, its store, and the receipts so far."""

    def __init__(self, plan: SplitPlan, store: Store) -> None:
        self.plan, self.store = plan, store
        self.receipts: dict[int, Receipt] = {}

    def finished_before(self) -> dict[int, Receipt]:
        """Return the receipts of earlier runs whose objects are still as they were written."""
        found = {
            shard: receipt
            for shard, receipt in read_receipts(self.store).items()
            if 0 <= shard < self.plan.num_shards and receipt.num_samples == len(self.plan.shard_rows(shard))
        }
        wrong = set(check_receipts(self.store, found))
        return {shard: receipt for shard, receipt in found.items() if shard not in wrong}

    def missing(self) -> list[int]:
        """Return the shards without a receipt."""
        return [shard for shard in range(self.plan.num_shards) if shard not in self.receipts]

    def wrong(self) -> list[int]:
        """Return the shards whose objects are not as their receipts say."""
        return check_receipts(self.store, self.receipts)
