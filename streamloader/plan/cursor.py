"""Where a run stands in its order, as plain values that any world size can go on from (rules 9 and 10)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import astuple, dataclass, replace
from typing import Any, Self

from streamloader.errors import StateError, UsageError
from streamloader.options import REMAINDERS, Remainder
from streamloader.plan.gaps import NO_GAPS, Gap, Gaps
from streamloader.plan.order import OrderParams, lanes_for_world
from streamloader.plan.world import Part

__all__ = [
    "ORDER_NAMES",
    "STATE_FORMAT",
    "Cursor",
    "Standing",
    "get",
    "order_dict",
    "read_format",
    "read_order",
    "read_place",
    "same_order",
]

STATE_FORMAT = 1
ORDER_NAMES = ("block", "lanes", "window")

_NEW_RUN = "load a state that streamloader's state_dict() gave, or start without one"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What was delivered of an endless run: everything before `position` of `epoch`.

    The same on every rank, and free of the world size. `workers` DataLoader workers deliver in turn; `extra` of
    them have delivered one batch each from `position` on, on each of `ranks` ranks, of `batch` samples. Without
    workers these are 1 and 0; where no round is under way, the last two are 0. `inside`: one of several workers says
    where it stands itself; it does not know how far the others are. `skipped` are the steps that the run left out.

    Two values belong to this process and to no state. `fresh`: the run has not begun, so its lanes may still follow the
    number of ranks. `given`: the parameters of the order that the caller chose, so that a state must have the same;
    the others are taken from a state.
    """

    remainder: Remainder
    seed: int
    epoch: int = 0
    position: int = 0
    extra: int = 0
    workers: int = 1
    ranks: int = 0
    batch: int = 0
    inside: bool = False
    skipped: tuple[Gap, ...] = ()
    fresh: bool = False
    given: tuple[str, ...] = ORDER_NAMES

    @property
    def pin(self) -> int:
        """A number that tells the order from others, where it may change on the way: 0 for a single dataset."""
        return 0

    @property
    def order(self) -> tuple[int, int, int]:
        """Block, lanes and window of a run over one dataset, once they are settled; else zeros."""
        return 0, 0, 0

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes of each dataset that shuffles."""
        return ()

    def with_order(self, block: int, lanes: int, window: int) -> Self:
        """The same place in the order that `order` of another process told; zeros change nothing."""
        assert (block, lanes, window) == (0, 0, 0)
        return self

    def place(self) -> dict[str, Any]:
        """Return the values that change as a run goes on, as plain JSON values."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "extra": self.extra,
            "workers": self.workers,
            **({"ranks": self.ranks, "batch": self.batch} if self.ranks else {}),
            **({"inside": True} if self.inside else {}),
            **({"skipped": [list(astuple(gap)) for gap in self.skipped]} if self.skipped else {}),
        }

    def advance(self, batches: int, share: Part, gaps: Gaps = NO_GAPS) -> Self:
        """The standing when `batches` more have been delivered on every rank, at most to the end of the epoch.

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
        ranks, batch = (share.world.size // self.workers, share.batch) if extra else (0, 0)
        return replace(self.moved(position, share, gaps), extra=extra, ranks=ranks, batch=batch)

    def moved(self, position: int, share: Part, gaps: Gaps = NO_GAPS) -> Self:
        """The standing at a later position of this epoch, which `gaps.walk` gave; past the end, of the next one."""
        over = not share.global_steps(position)
        skipped = (*self.skipped, *gaps.passed(self.epoch, self.position, None if over else position))
        if over:
            return replace(self.next_epoch(), skipped=skipped)
        return replace(self, position=position, skipped=skipped)

    def next_epoch(self) -> Self:
        """The beginning of the next epoch: where a run stands when it has delivered all its batches."""
        return self.beginning(self.epoch + 1)

    def beginning(self, epoch: int) -> Self:
        """The beginning of an epoch."""
        return replace(self, epoch=epoch, position=0, extra=0, ranks=0, batch=0, inside=False)

    def with_workers(self, workers: int, ranks: int, batch: int) -> tuple[Self, int]:
        """(cursor, repeated): this standing for so many workers on each of so many ranks, and batches of `batch`.

        Where it stands within a round of other numbers, it goes on from that round's beginning, and `repeated` batches
        of each rank come again: the batches of one round do not fill a part of the other.
        Raises StateError for such a state of one worker: which batches of the round were delivered, it does not know.
        """
        if workers < 1:
            raise UsageError(f"{workers} consumers cannot be", "give 1 or more")
        same = (workers, ranks, batch) == (self.workers, self.ranks, self.batch)
        if self.inside and not same:
            raise StateError(
                f"the state was saved inside one of {self.workers} DataLoader workers on each of {self.ranks} ranks "
                f"with batch_size={self.batch}, and here are {workers} on each of {ranks} with batch_size={batch}",
                "load it with the same numbers, or save state_dict(batches=, workers=) instead",
            )
        if same or (workers == self.workers and not self.ranks):
            return self, 0
        return replace(self, extra=0, ranks=0, batch=0, workers=workers), self.extra


@dataclass(frozen=True, kw_only=True)
class Cursor(Standing):
    """Where a run over one dataset stands, in the order that the other values pin.

    `selection` is the digest of the samples that take part, where these are not all.
    """

    digest: str
    params: OrderParams
    split: str | None
    shuffle: bool
    selection: str | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        """Block, lanes and window once they are settled; else zeros."""
        return (0, 0, 0) if self.fresh else (self.params.block, self.params.lanes, self.params.window)

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes of the dataset; none without shuffle."""
        return (self.params.lanes,) if self.shuffle else ()

    def with_order(self, block: int, lanes: int, window: int) -> Cursor:
        """The same place in an order of these parameters; zeros change nothing."""
        return replace(self, params=OrderParams(block, lanes, window), fresh=False) if block else self

    def settled(self, num_samples: int, world_size: int) -> Cursor:
        """Return the cursor with the lanes of a run that begins on so many ranks; one under way keeps its own."""
        if not self.fresh:
            return self
        lanes = self.params.lanes
        if self.shuffle and "lanes" not in self.given:
            lanes = lanes_for_world(num_samples, self.params, world_size)
        return replace(self, params=replace(self.params, lanes=lanes), fresh=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which `from_dict` makes an equal cursor."""
        return {
            "format": STATE_FORMAT,
            "digest": self.digest,
            "order": order_dict(self.params),
            "split": self.split,
            "shuffle": self.shuffle,
            "remainder": self.remainder,
            "seed": self.seed,
            **self.place(),
            **({} if self.selection is None else {"selection": self.selection}),
        }

    @classmethod
    def from_dict(cls, state: Any) -> Cursor:
        """The cursor that `to_dict` wrote. Raises StateError for another format, missing keys or impossible values."""
        read_format(state)
        if "sources" in state:
            raise StateError("the state is of a mixture", "load it into a Mixture of the same sources")
        return cls(
            digest=get(state, "digest", str),
            params=read_order(state),
            split=get(state, "split", str, type(None)),
            selection=get(state, "selection", str) if "selection" in state else None,
            shuffle=get(state, "shuffle", bool),
            **read_place(state),
        )

    def check(self, expected: Cursor, num_samples: int, *, force: bool = False) -> None:
        """Raises StateError, with both values, unless this state belongs to the run that `expected` describes.

        Compares all that pins the order, so not epoch, position and workers; of the parameters those that the caller
        chose (`given`). `force` lets the digest differ: for a copy of the dataset with the same samples.
        """
        names = ("digest", "split", "selection", "params", "shuffle", "remainder", "seed")
        differing = [name for name in names if getattr(self, name) != getattr(expected, name)]
        if "params" in differing and same_order(self.params, expected.params, expected.given):
            differing.remove("params")
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


def read_format(state: Any) -> None:
    """Raise StateError unless this is a state of the format that this version writes."""
    if not isinstance(state, dict):
        raise StateError(f"a state is a dict, not {state!r:.60}", _NEW_RUN)
    found = state.get("format")
    if found != STATE_FORMAT:
        raise StateError(f"the state has format {found!r}, this version reads {STATE_FORMAT}", _NEW_RUN)


def read_place(state: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `Standing` in a state. Raises StateError for what is missing or cannot be."""
    remainder = get(state, "remainder", str)
    if remainder not in REMAINDERS:
        raise StateError(f"the state's remainder is {remainder!r}, not one of {', '.join(REMAINDERS)}", _NEW_RUN)
    numbers = {name: get(state, name, int) for name in ("seed", "epoch", "position", "extra", "workers")}
    numbers |= {name: get(state, name, int) if name in state else 0 for name in ("ranks", "batch")}
    if min(numbers.values()) < 0 or not numbers["extra"] < numbers["workers"]:
        raise StateError(f"the state {state} cannot be", _NEW_RUN)
    inside = get(state, "inside", bool) if "inside" in state else False
    skipped = _gaps(state["skipped"]) if "skipped" in state else ()
    return {"remainder": remainder, **numbers, "inside": inside, "skipped": skipped}


def order_dict(params: OrderParams) -> dict[str, int]:
    """Return the parameters of an order as a state has them."""
    return {"block": params.block, "lanes": params.lanes, "window": params.window}


def same_order(found: OrderParams, expected: OrderParams, names: Collection[str]) -> bool:
    """Return whether two orders agree in these parameters."""
    return all(getattr(found, name) == getattr(expected, name) for name in names)


def read_order(state: dict[str, Any]) -> OrderParams:
    """Return the parameters of the order in a state. Raises StateError for what cannot be."""
    order = get(state, "order", dict)
    try:
        return OrderParams(*(get(order, name, int) for name in ("block", "lanes", "window")))
    except UsageError as error:
        raise StateError(f"the state's order cannot be: {error.problem}", _NEW_RUN) from error


def _gaps(value: Any) -> tuple[Gap, ...]:
    """The gaps of a state: a list of [epoch, start, stop]."""
    kinds = isinstance(value, list) and all(
        isinstance(one, list) and len(one) == 3 and all(type(number) is int and number >= 0 for number in one)
        for one in value
    )
    if not kinds:
        raise StateError(f"the state's skipped is {value!r:.60}, no list of [epoch, start, stop]", _NEW_RUN)
    return tuple(Gap(*one) for one in value)


def get(state: dict[str, Any], name: str, *types: type) -> Any:
    """The value of a key; StateError where it is missing or of another type."""
    if name not in state:
        raise StateError(f"the state has no {name!r}", _NEW_RUN)
    value = state[name]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        wanted = " or ".join(kind.__name__ for kind in types)
        raise StateError(f"the state's {name} is {value!r}, not of type {wanted}", _NEW_RUN)
    return value
