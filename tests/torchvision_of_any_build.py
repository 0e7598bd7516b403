"""Imports torchvision beside a torch of another build, such as torch for the CPU: `import torchvision_of_any_build`.

Its compiled operators do not load there, and it refuses to be imported because it describes two of them. They are
declared here; transforms and datasets call none. The package lies in a folder of its own (see the Makefile), so that
others, which import it where they find it, do not.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(sys.prefix) / "torchvision"))
try:
    import torchvision
except RuntimeError:
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401
