from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

def copy(
    source: Any, starts: Ints, sizes: Ints, target: Any, at: Ints | None, padding: Any, first: int, stop: int, /
) -> int: ...
def parse(data: Any, edges: Ints, /) -> int: ...
