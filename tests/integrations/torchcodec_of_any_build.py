"""Imports TorchCodec beside a torch of another build, such as torch for the CPU: `import torchcodec_of_any_build`.

It does not load there for want of libraries that decoding on the CPU does not call. Empty ones stand for them here.

As a plugin of pytest: `Decode(device="cpu")` decodes by TorchCodec's batch call, which the device "cuda" calls too.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from streamloader.pytorch import images

CUDA = (
    "EventCreate EventDestroy EventRecord Free GetDevice GetErrorString Malloc Memcpy2D MemcpyAsync SetDevice"
    " StreamSynchronize StreamWaitEvent"
)
KERNELS = (
    "GetKernel LaunchKernel PopCallConfiguration PushCallConfiguration RegisterFatBinary RegisterFatBinaryEnd"
    " RegisterFunction RegisterVar UnregisterFatBinary"
)
FUNCTIONS = (
    "aoti_torch_get_current_cuda_stream",
    *(f"cuda{name}" for name in CUDA.split()),
    *(f"__cuda{name}" for name in KERNELS.split()),
)
LIBRARIES = ("libnvrtc.so.13", "libc10_cuda.so", "libcudart.so.13", "libtorch_cuda.so")


def load_empty_libraries() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "all.c").write_text("".join(f"long {name}(void) {{ return 1; }}\n" for name in FUNCTIONS))
        for name in LIBRARIES:
            (folder / "version").write_text(f"{name} {{ global: *; }};\n")
            options = ["-shared", "-fPIC", f"-Wl,-soname,{name}", f"-Wl,--version-script={folder / 'version'}"]
            subprocess.run(["cc", *options, "-o", folder / name, folder / "all.c"], check=True)
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)


def decode(files: list[torch.Tensor], device: torch.device, channels: int) -> Sequence[torch.Tensor]:
    return images.nvjpeg()(files, mode="RGB" if channels == 3 else "GRAY", device=device)


if torch.version.cuda is None:
    load_empty_libraries()
assert images.nvjpeg().__module__.startswith("torchcodec."), "TorchCodec is not installed, or does not load"
images._decode_here = decode
