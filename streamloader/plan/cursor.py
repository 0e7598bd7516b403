"""Where a run stands in its order, as plain values that any world size can go on from (rules 9 and 10)."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

from streamloader.errors import StateError, UsageError
from streamloader.options import REMAINDERS, Remainder
from streamloader.plan.gaps import NO_GAPS, Gap, Gaps
from streamloader.plan.order import OrderParams
from streamloader.plan.world import Share

__all__ = ["STATE_FORMAT", "Cursor"]

STATE_FORMAT = 1

_NEW_RUN = "load a state that streamloader's state_dict() gave, or start without one"


@dataclass(frozen=True)
class Cursor:
    """What was delivered: everything before `position` of `epoch`, in the order that the other values pin.

    The same on every rank, and free of the world size. `workers` DataLoader workers deliver in turn; `extra` of
    them have delivered one batch each (on every rank) from `position` on, of a round of `round` positions. Without
    workers these are 1, 0 and 0. `inside`: one of several workers says where it stands itself; it does not know how far
    the others are.
    `selection` is the digest of the samples that take part, where these are not all. `skipped` are the steps that the
    run left out on its way.
    """

    digest: str
    params: OrderParams
    split: str | None
    shuffle: bool
    remainder: Remainder
    seed: int
    epoch: int = 0
    position: int = 0
    extra: int = 0
    workers: int = 1
    round: int = 0
    inside: bool = False
    selection: str | None = None
    skipped: tuple[Gap, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which `from_dict` makes an equal cursor."""
        return {
            "format": STATE_FORMAT,
            "digest": self.digest,
            "order": {"block": self.params.block, "lanes": self.params.lanes, "window": self.params.window},
            "split": self.split,
            "shuffle": self.shuffle,
            "remainder": self.remainder,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "extra": self.extra,
            "workers": self.workers,
            **({"round": self.round} if self.round else {}),
            **({"inside": True} if self.inside else {}),
            **({} if self.selection is None else {"selection": self.selection}),
            **({"skipped": [list(astuple(gap)) for gap in self.skipped]} if self.skipped else {}),
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Cursor:
        """The cursor that `to_dict` wrote. Raises StateError for another format, missing keys or impossible values."""
        if not isinstance(state, dict):
            raise StateError(f"a state is a dict, not {state!r:.60}", _NEW_RUN)
        found = state.get("format")
        if found != STATE_FORMAT:
            raise StateError(f"the state has format {found!r}, this version reads {STATE_FORMAT}", _NEW_RUN)
        order = _get(state, "order", dict)
        remainder = _get(state, "remainder", str)
        if remainder not in REMAINDERS:
            raise StateError(f"the state's remainder is {remainder!r}, not one of {', '.join(REMAINDERS)}", _NEW_RUN)
        try:
            params = OrderParams(*(_get(order, name, int) for name in ("block", "lanes", "window")))
        except UsageError as error:
            raise StateError(f"the state's order cannot be: {error.problem}", _NEW_RUN) from error
        cursor = cls(
            digest=_get(state, "digest", str),
            params=params,
            split=_get(state, "split", str, type(None)),
            selection=_get(state, "selection", str) if "selection" in state else None,
            shuffle=_get(state, "shuffle", bool),
            remainder=remainder,
            **{name: _get(state, name, int) for name in ("seed", "epoch", "position", "extra", "workers")},
            round=_get(state, "round", int) if "round" in state else 0,
            inside=_get(state, "inside", bool) if "inside" in state else False,
            skipped=_gaps(state["skipped"]) if "skipped" in state else (),
        )
        if min(cursor.seed, cursor.epoch, cursor.position) < 0 or not 0 <= cursor.extra < cursor.workers:
            raise StateError(f"the state {cursor.to_dict()} cannot be", _NEW_RUN)
        return cursor

    def check(self, expected: Cursor, num_samples: int, *, force: bool = False) -> None:
        """Raises StateError, with both values, unless this state belongs to the run that `expected` describes.

        Compares all that pins the order, so not epoch, position and workers. `force` lets the digest differ: for a
        copy of the dataset with the same samples.
        """
        names = ("digest", "split", "selection", "params", "shuffle", "remainder", "seed")
        differing = [name for name in names if getattr(self, name) != getattr(expected, name)]
        if force and "digest" in differing:
            differing.remove("digest")
        if not differing and self.position > num_samples:
            raise StateError(
                f"the state has position {self.position}, the dataset {num_samples} samples",
                "load a state that was saved with this dataset",
            )
        if not differing:
            return
        pairs = [f"{name} {getattr(self, name)!r} and not {getattr(expected, name)!r}" for name in differing]
        remedy = "open the dataset as it was when the state was saved, or start without the state"
        if differing == ["digest"]:
            remedy = "open the dataset that the state is of, or pass force=True if this is a copy of it"
        raise StateError(f"the state was saved with {', '.join(pairs)} as here", remedy)

    def advance(self, batches: int, share: Share, gaps: Gaps = NO_GAPS) -> Cursor:
        """The cursor when `batches` more have been delivered on every rank, at most to the end of the epoch.

        `share` is that of the consumer: the rank's, or with DataLoader workers that of a worker (its world is
        `workers` times as large). After the last step it is at position 0 of the next epoch.
        """
        if not batches:
            return self
        rounds, extra = divmod(self.extra + batches, self.workers)
        last, position = (
            gaps.walk(self.epoch, self.position, count, share.global_batch) for count in (max(0, rounds - 1), rounds)
        )
        if (rounds and not share.global_steps(last)) or (extra and not share.global_steps(position)):
            raise UsageError(f"{batches} batches from position {self.position} pass the end", "advance less at once")
        return replace(self.moved(position, share, gaps), extra=extra, round=share.global_batch if extra else 0)

    def moved(self, position: int, share: Share, gaps: Gaps = NO_GAPS) -> Cursor:
        """The cursor at a later position of this epoch, which `gaps.walk` gave; past the last step, of the next one."""
        over = not share.global_steps(position)
        skipped = (*self.skipped, *gaps.passed(self.epoch, self.position, None if over else position))
        if over:
            return replace(self.next_epoch(), skipped=skipped)
        return replace(self, position=position, skipped=skipped)

    def next_epoch(self) -> Cursor:
        """The beginning of the next epoch: where a run stands when it has delivered all its batches."""
        return self.beginning(self.epoch + 1)

    def beginning(self, epoch: int) -> Cursor:
        """The beginning of an epoch."""
        return replace(self, epoch=epoch, position=0, extra=0, round=0, inside=False)

    def with_workers(self, workers: int, round_: int) -> tuple[Cursor, int]:
        """(cursor, repeated): this cursor for so many workers, whose round has so many positions on all ranks.

        Where it stands within a round of another number, world size or batch size, it goes on from that round's
        beginning, and `repeated` batches of each rank come again: those of one round do not fill a part of the other.
        Raises StateError for such a state of one worker: which batches of the round were delivered, it does not know.
        """
        if workers < 1:
            raise UsageError(f"{workers} consumers cannot be", "give 1 or more")
        if self.inside and self.round != round_:
            raise StateError(
                f"the state was saved inside one of {self.workers} DataLoader workers that took {self.round} samples "
                f"in turn over all ranks, and here {workers} take {round_}",
                "load it with the same number of ranks and batch_size, or save state_dict(batches=, workers=) instead",
            )
        if workers == self.workers and self.round in (0, round_):
            return self, 0
        return replace(self, extra=0, round=0, workers=workers), self.extra


def _gaps(value: Any) -> tuple[Gap, ...]:
    """The gaps of a state: a list of [epoch, start, stop]."""
    kinds = isinstance(value, list) and all(
        isinstance(one, list) and len(one) == 3 and all(type(number) is int and number >= 0 for number in one)
        for one in value
    )
    if not kinds:
        raise StateError(f"the state's skipped is {value!r:.60}, no list of [epoch, start, stop]", _NEW_RUN)
    return tuple(Gap(*one) for one in value)


def _get(state: dict[str, Any], name: str, *types: type) -> Any:
    """The value of a key; StateError where it is missing or of another type."""
    if name not in state:
        raise StateError(f"the state has no {name!r}", _NEW_RUN)
    value = state[name]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        wanted = " or ".join(kind.__name__ for kind in types)
        raise StateError(f"the state's {name} is {value!r}, not of type {wanted}", _NEW_RUN)
    return value
