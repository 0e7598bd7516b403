from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Sizes = NDArray[np.uint32]

def pack(rests: Sizes, edges: Ints, length: int, out: tuple[NDArray[np.uint16], Sizes, Ints], /) -> int: ...
def find(rows: Ints, tables: tuple[Any, ...], out: tuple[Ints, Ints, Ints], /) -> int: ...
def locate(known: Ints, block: int, items: tuple[Ints, Ints, Ints], out: Ints, /) -> int: ...
def place(
    items: tuple[Ints, Ints, Ints, Ints], length: int, step_rows: int, out: tuple[NDArray[Any], ...], /
) -> int: ...
