"""How well an order mixes: from how many blocks a batch comes, and what that does to its mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamloader.plan.ledger import step_samples
from streamloader.plan.order import EpochOrder
from streamloader.plan.touch import Ints
from streamloader.plan.world import Share

__all__ = ["Mixing", "mixing", "mixings"]

STEPS = 16  # that are looked at: their spread is a few percent
MAX_EXAMINED = 1 << 27  # arrivals, about: a second or two; of an order with long windows fewer steps are looked at


@dataclass(frozen=True)
class Mixing:
    """Of batches of `rows` rows: the mean number of distinct `blocks`, and with how many rows a row shares its own.

    For rows drawn evenly from n blocks `sharing` is (rows - 1) / n. `alike` is the probability that two samples drawn
    from the whole epoch share a block.
    """

    rows: int
    blocks: float
    sharing: float
    alike: float = 0.0

    def design_effect(self, correlation: float) -> float:
        """Return the variance of a batch's mean, around that of the epoch, over that of as many independent rows.

        `correlation` is that of two rows of one block: 1 where all are alike (a source in class order), 0 where the
        source was shuffled. With many blocks it is 1 + correlation * sharing: Kish, Survey Sampling (1965), for
        clusters; few blocks are a finite population, of which a batch that has them all in proportion is the mean.
        """
        if self.alike >= 1:  # one block, which is shuffled whole
            return 1.0
        spread = 1 + correlation * (self.sharing - self.rows * self.alike)
        return max(0.0, spread / (1 - correlation * self.alike))


def mixing(order: EpochOrder, share: Share) -> Mixing:
    """Look at whole batches of the share's rank, evenly spread over the epoch; the only one where there is one."""
    return mixings(order, (share,))[0]


def mixings(order: EpochOrder, shares: Sequence[Share]) -> list[Mixing]:
    """Do so for several ranks, or groups of them, that take the same steps: each step's order is computed once."""
    first, size = shares[0], order.num_samples
    steps = first.global_steps(0)
    work = min(2 * order.params.window, size) * order.lanes + first.global_batch
    count = max(2, min(STEPS, MAX_EXAMINED // max(1, work)))
    chosen = np.unique(np.linspace(0, max(0, steps - 2), count).astype(np.int64)).tolist() if steps else []
    found = np.zeros((len(shares), 3))
    for position in (step * first.global_batch for step in chosen):
        blocks = order.samples_at(position, min(size, position + first.global_batch)) // order.params.block
        for number, share in enumerate(shares):
            source = share.source(share.positions(position)[0]) - position
            rows = blocks[source] if not source.size or source.min() >= 0 else _blocks_of(order, share, position)
            counts = np.unique(rows, return_counts=True)[1]
            found[number] += rows.size, counts.size, (counts * (counts - 1)).sum()
    full, last = divmod(size, order.params.block)
    alike = (full * order.params.block**2 + last**2) / max(1, size) ** 2
    pairs = zip(shares, found.tolist(), strict=True)
    return [
        Mixing(one.batch, blocks / max(1, len(chosen)), met / max(1, rows), alike) for one, (rows, blocks, met) in pairs
    ]


def _blocks_of(order: EpochOrder, share: Share, position: int) -> Ints:
    """The blocks of a step whose padded rows repeat those of the step before."""
    return step_samples(order, share, position) // order.params.block
