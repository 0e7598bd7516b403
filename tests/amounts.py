"""How much of a property or a product the tests try: a part in `make test`, the rest in `make test-long`."""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import settings

LONG = pytest.mark.long


def examples(count: int) -> int:
    """How many examples hypothesis draws for a test that takes long: a fifth, or all in `make test-examples`."""
    return count if settings.get_current_profile_name() == "long" else max(5, count // 5)


def longer(*values: Any) -> Any:
    """Values of parameters that only `make test-long` takes."""
    return pytest.param(*values, marks=LONG)


def covering(*axes: Iterable[Any], together: int = 1) -> list[Any]:
    """The product of axes as parameters of a test, all marked `long` but a few.

    These few have every value of each axis, or every combination of values of `together` axes.
    """
    values = [list(axis) for axis in axes]
    places = list(product(*(range(len(axis)) for axis in values)))
    left = {part for place in places for part in _parts(place, together)}
    few, had = set(), Counter[tuple[tuple[int, int], ...]]()

    def gain(place: tuple[int, ...]) -> tuple[int, int]:
        """What is new in a place, and how little of the rest others have."""
        often = sum(had[part] for size in range(1, len(axes) + 1) for part in _parts(place, size))
        return len(_parts(place, together) & left), -often

    while left:
        best = max(places, key=gain)
        few.add(best)
        left -= _parts(best, together)
        had.update(part for size in range(1, len(axes) + 1) for part in _parts(best, size))
    return [
        pytest.param(*(axis[i] for axis, i in zip(values, place, strict=True)), marks=() if place in few else LONG)
        for place in places
    ]


def _parts(place: tuple[int, ...], size: int) -> set[tuple[tuple[int, int], ...]]:
    """The values of each `size` axes in a place of the product."""
    return set(combinations(enumerate(place), size))
