"""One run of a job: what it found done, what it does, and the finish."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from streamloader.conversion import destination
from streamloader.conversion.engines.engine import run_tasks
from streamloader.conversion.means import Means
from streamloader.conversion.plan import Job
from streamloader.conversion.progress import Phase, Progress
from streamloader.conversion.refused import Quarantine, RefusedSample
from streamloader.conversion.splitrun import SplitRun
from streamloader.conversion.task import Outcome, Task
from streamloader.errors import DestinationError
from streamloader.format.destination import Claim
from streamloader.format.manifest import Manifest
from streamloader.format.opening import ROOT, open_manifest
from streamloader.format.sink import Receipt, clean, finish, write_split_root
from streamloader.storage.protocol import Store

FINISH_THREADS = 8  # small objects: each is a round trip
CLAIM_SECONDS = 1.0  # how often the claim is checked while tasks are handed out
ROUNDS = 5  # what others delete or overwrite while we write is done again, but not for ever; bad samples take two


class Run:
    """Does what is missing of a job, as long as it holds the claim.

    `check_source` raises `SourceChangedError` where the source is not what it was when the job was made. `kept_shards`
    were finished before; `left_out` are the bad samples, by split.
    """

    def __init__(self, job: Job, claim: Claim, store: Store, means: Means, check_source: Callable[[], None]) -> None:
        self._job, self._claim, self._store, self._means = job, claim, store, means
        self._check_source = check_source
        self.kept_shards = self._kept = self._done = self._stored = 0
        self.left_out: dict[str, tuple[RefusedSample, ...]] = {}

    def complete(self) -> dict[str, Manifest]:
        """Write what is missing, publish every dataset, and return the manifests by split."""
        job, store = self._job, self._store
        stores = {split.name: store.child(split.name) if split.name else store for split in job.splits}
        manifests = {name: open_manifest(below)[0] for name, below in stores.items() if below.head(ROOT)}
        keep_bad = self._means.on_error != "raise"
        splits = [
            SplitRun(plan, stores[plan.name], keep_bad, job.id) for plan in job.splits if plan.name not in manifests
        ]
        self._write(splits, manifests)
        self._tell("finish")
        self._check_source()
        self._claim.check()
        destination.remove_leftovers(store)  # nothing writes here now
        store.delete([destination.FILES])  # before the job file goes, so that nothing of it can stay
        self.left_out = {split.plan.name: tuple(one for _, one in sorted(split.refused.items())) for split in splits}
        if self._means.on_error == "quarantine":
            quarantine = Quarantine(store, job.id)
            for split in splits:
                quarantine.add_all(split.plan.name, split.store, split.refused)
            quarantine.flush()
        if job.record:
            store.put(destination.RECORD, json.dumps(job.record, sort_keys=True).encode())
        for split in splits:
            split.remove_surplus()
            plan = split.plan
            manifests[plan.name] = finish(
                split.store, plan.geometry, split.receipts, plan.provenance, FINISH_THREADS, claim=self._claim
            )
        manifests = {plan.name: manifests[plan.name] for plan in job.splits}
        if "" in manifests:
            if not splits:  # a run that was killed after its last step but one
                clean(store, self._claim)
        else:
            write_split_root(store, manifests, self._claim)
        return manifests

    def _write(self, splits: list[SplitRun], finished: Mapping[str, Manifest]) -> None:
        """Do the tasks that are missing, until none is."""
        shards = {plan.name: plan.num_shards for plan in self._job.splits}
        self.kept_shards = sum(len(split.receipts) for split in splits) + sum(shards[name] for name in finished)
        self._kept = sum(receipt.num_samples for split in splits for receipt in split.receipts.values())
        self._kept += sum(manifest.num_samples for manifest in finished.values())
        self._done = self._kept
        self._tell("write")
        by_url = {split.store.url: split for split in splits}

        def note(task: Task, outcome: Outcome) -> None:
            by_url[task.store.url].note(task.shard, outcome)
            if isinstance(outcome, Receipt):
                self._done += outcome.num_samples
                self._stored += sum(one.size for one in outcome.objects.values())
            self._tell("write")

        for _ in range(ROUNDS):
            todo = [(split, shard) for split in splits for shard in split.missing()]
            if not todo:
                return
            processes = self._means.processes(self._store.url, self._job.source.url)
            run_tasks(self._means.engine, self._tasks(todo), min(processes, len(todo)), note, self._means.spare)
            self._done -= sum(split.wrong() for split in splits)
        raise DestinationError(
            f"objects at {self._store.url} change while it is written", "let nothing else write there, and run again"
        )

    def _tasks(self, todo: list[tuple[SplitRun, int]]) -> Iterator[Task]:
        plans = {split.store.url: split.plan for split, _ in todo}
        for split, shard in todo:  # one at a time: a part of an image folder holds its paths
            self._claim.check(CLAIM_SECONDS)
            plan = plans[split.store.url]
            yield plan.task(self._job, split.store, shard, self._means.on_error != "raise")

    def _tell(self, phase: Phase) -> None:
        total = self._job.num_samples
        self._means.listener(Progress(phase, min(self._done, total), total, self._kept, self._stored))
