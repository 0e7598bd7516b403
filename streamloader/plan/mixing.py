"""How well an order mixes: from how many blocks a batch comes, and what that does to its mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamloader.plan.ledger import step_samples
from streamloader.plan.order import EpochOrder
from streamloader.plan.world import Share

__all__ = ["Mixing", "mixing"]

STEPS = 16  # that are looked at: their spread is a few percent


@dataclass(frozen=True)
class Mixing:
    """Of batches of `rows` rows: the mean number of distinct `blocks`, and with how many rows a row shares its own.

    For rows drawn evenly from n blocks `sharing` is (rows - 1) / n.
    """

    rows: int
    blocks: float
    sharing: float

    def design_effect(self, correlation: float) -> float:
        """Return the variance of a batch's mean over that of as many independent rows.

        `correlation` is that of two rows of one block: 1 where all are alike (a source in class order), 0 where the
        source was shuffled. 1 + correlation * sharing: Kish, Survey Sampling (1965), for clusters.
        """
        return 1 + correlation * self.sharing


def mixing(order: EpochOrder, share: Share) -> Mixing:
    """Look at whole batches of the share's rank, evenly spread over the epoch; the only one where there is one."""
    steps = share.global_steps(0)
    chosen = np.unique(np.linspace(0, max(0, steps - 2), STEPS).astype(np.int64)).tolist() if steps else []
    rows, blocks, pairs = 0, 0, 0
    for step in chosen:
        samples = step_samples(order, share, step * share.global_batch)
        counts = np.unique(samples // order.params.block, return_counts=True)[1]
        rows, blocks, pairs = rows + samples.size, blocks + counts.size, pairs + int((counts * (counts - 1)).sum())
    return Mixing(share.batch, blocks / max(1, len(chosen)), pairs / max(1, rows))
