"""Blocks and their pieces while they are on their way."""

from __future__ import annotations

from dataclasses import dataclass

from streamloader.engine.source import Stored
from streamloader.errors import StreamloaderError
from streamloader.format.reader import FieldReader, Run
from streamloader.plan.booking import BlockRef

NEVER = float("inf")


@dataclass(slots=True, eq=False)
class LoadingBlock:
    """A block of a dataset, in its numbers, on its way: `left` pieces are missing; `error` is the first that failed.

    `expected` bytes of variable-size fields are estimated from the chunk table, `held` are there.
    """

    stored: Stored
    ref: BlockRef
    left: int
    expected: int = 0
    held: int = 0
    error: StreamloaderError | None = None


@dataclass(slots=True, eq=False)
class Piece:
    """A run on its way into its block, by its first request, number 0, and `hedges` more where that is late.

    `requests` are under way or wait for a thread. `fresh`: none was sent yet. `sent`: when the latest went out, `NEVER`
    where there is none to be late. `writer`: the number of the one whose body is being decoded, since `body_at`, in
    processor time of its thread. `unpacked`: bytes that it was decoded to so far, which `LoadingBlock.held` includes.
    `over`: it is in its slot, or has failed.
    """

    block: LoadingBlock
    field: FieldReader
    run: Run
    requests: int = 1
    hedges: int = 0
    fresh: bool = True
    sent: float = NEVER
    body_at: float = 0.0
    unpacked: int = 0
    writer: int | None = None
    over: bool = False
    error: StreamloaderError | None = None
