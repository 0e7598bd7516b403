"""One dataset of a conversion while it is written: which shards are still to do, also when samples turn out bad."""

from __future__ import annotations

from streamloader.conversion.plan import SplitPlan
from streamloader.conversion.refused import Refusal, RefusedSample, read_refusals
from streamloader.conversion.task import Outcome
from streamloader.errors import SourceError
from streamloader.format.destination import BAD, PARTS
from streamloader.format.receipts import receipt_path
from streamloader.format.sink import Receipt, check_receipts, read_receipts
from streamloader.storage.protocol import Store

SETTLED = f"{BAD}/settled"  # every sample was looked at: the bad ones are known


class SplitRun:
    """The receipts of a split's shards, and its bad samples.

    First every shard is done as if no sample were bad; one that has bad samples leaves a refusal instead of a receipt.
    Only when all are known do the last rows move into the holes, so that what each shard holds is a function of the
    source alone. Then the shards with holes, and the last ones, are done again.
    """

    def __init__(self, plan: SplitPlan, store: Store, keep_bad: bool, job: str) -> None:
        self.store = store
        self.receipts: dict[int, Receipt] = {}
        self.refused: dict[int, RefusedSample] = read_refusals(store, job, plan.geometry.samples_per_shard)
        self._base, self._keep_bad = plan, keep_bad
        if self.refused and not keep_bad:
            first = self.refused[min(self.refused)]
            problem = f"{first.name}: {first.problem} (an earlier run left out {len(self.refused)} such samples)"
            raise SourceError(problem, "go on with --on-error skip or quarantine, or repair it and --overwrite")
        self._settled = bool(self.refused) and store.head(SETTLED) is not None
        self._plan: SplitPlan | None = None  # made once for the bad samples that are known
        found = read_receipts(store, job=job)
        wrong = set(check_receipts(store, found))
        self.receipts = {shard: receipt for shard, receipt in found.items() if shard not in wrong}
        self._prune()

    @property
    def plan(self) -> SplitPlan:
        """The plan: without the bad samples, as soon as all of them are known."""
        if self._plan is None:
            self._plan = self._base.without(self.refused) if self._settled else self._base
        return self._plan

    def missing(self) -> list[int]:
        """Return the shards that are to be done now; none when the split is written. May settle the bad samples."""
        holes = self._prune()
        todo = [shard for shard in range(self._base.num_shards) if shard not in self.receipts and shard not in holes]
        if not self._settled and not todo and self.refused:
            self.store.put(SETTLED, b"")
            self._settled, self._plan = True, None
            self._prune()
        if self._settled:
            plan = self.plan
            if not plan.num_samples:
                first = self.refused[min(self.refused)]
                problem = f"all {len(self.refused)} samples are bad; {first.name}: {first.problem}"
                raise SourceError(problem, "repair the source, or choose another format")
            return [shard for shard in range(plan.num_shards) if shard not in self.receipts]
        return todo

    def note(self, shard: int, outcome: Outcome) -> None:
        """Take the outcome of a shard's task."""
        if isinstance(outcome, Receipt):
            self.receipts[shard] = outcome
            return
        self._refuse(outcome)

    def wrong(self) -> int:
        """Forget the receipts of shards whose objects are not as they say; return how many samples that were."""
        found = [self.receipts.pop(shard) for shard in check_receipts(self.store, self.receipts)]
        return sum(receipt.num_samples for receipt in found)

    def remove_surplus(self) -> None:
        """Delete the shards at the end that bad samples made superfluous."""
        surplus = range(self.plan.num_shards, self._base.num_shards)
        bulk = [(name, layout) for name, layout in self._base.geometry.layouts.items() if not layout.resident]
        paths = [layout.shard_key(name, shard) for name, layout in bulk for shard in surplus]
        self.store.delete([*paths, *(f"{PARTS}/{i}" for i in surplus), *(receipt_path(i) for i in surplus)])

    def _refuse(self, refusal: Refusal) -> None:
        if self._settled:  # a row that was good before: its source is not steady, so begin the second half again
            self._settled = False
            self.store.delete([SETTLED])
        self.refused |= {one.row: one for one in refusal.samples}
        self._plan = None  # the next call of `missing` looks at the receipts again, once for all refusals

    def _holes(self) -> set[int]:
        """Return the shards, as planned without bad samples, that hold some."""
        if not self.refused:
            return set()
        return self._base.shards_with(self.refused)

    def _prune(self) -> set[int]:
        """Forget receipts of shards that the present plan cuts otherwise; return the shards that hold bad samples."""
        plan, holes = self.plan, set() if self._settled else self._holes()
        self.receipts = {
            shard: receipt
            for shard, receipt in self.receipts.items()
            if 0 <= shard < plan.num_shards
            and shard not in holes
            and receipt.num_samples == len(plan.shard_rows(shard))
        }
        return holes
