import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Sizes = NDArray[np.uint32]

def pack(rests: Sizes, edges: Ints, length: int, out: tuple[NDArray[np.uint16], Sizes, Ints], /) -> int: ...
