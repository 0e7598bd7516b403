"""Lets torch's build for CUDA load without the CUDA packages: 3 GB that tests on a CPU never call.

    pip install --no-deps torch
    python tests/torch_without_cuda.py

For a Python of which pip finds no build for the CPU. Libraries of the names that torch links are compiled into its
folder, whose functions return "no device", and its metadata requires the packages no longer. Other builds stay as they
are.
"""

import re
import subprocess
from collections import defaultdict
from importlib.metadata import distribution
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice


def output(*command: str | Path) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Replace the CUDA packages of the installed torch."""
    package = distribution("torch")
    names, versions = set[str](), defaultdict[str, set[str]](set)
    for library in Path(str(package.locate_file("torch/lib"))).glob("*.so"):
        names |= set(re.findall(r" [Uw] ((?:cu|nv|nccl|__cuda)[A-Za-z]\w*)", output("nm", "-D", library)))
        linked = output("readelf", "--dynamic", "--version-info", "--wide", library)
        for found in re.findall(r"\[(lib(?:cu|nv|nccl).*)\]", linked):
            versions[found].update()
        for found, needs in re.findall(r"File: (lib(?:cu|nv|nccl)\S+).*\n((?:.*Name: .*\n)*)", linked):
            versions[found].update(re.findall(r"Name: (\S+)", needs))
    source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(names))
    for name, needed in versions.items():
        target = Path(str(package.locate_file(f"torch/lib/{name}")))
        script = target.with_suffix(".map")
        script.write_text("".join(f"{version} {{ global: *; }};\n" for version in needed or {"UNVERSIONED"}))
        command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}"]
        subprocess.run([*command, "-x", "c", "-", "-o", target], input=source, text=True, check=True)
        script.unlink()
    metadata = Path(str(package.locate_file(f"torch-{package.version}.dist-info/METADATA")))
    kept = re.sub(r"Requires-Dist: (?:cuda|nvidia|triton).*\n", "", metadata.read_text())
    metadata.write_text(kept)


if __name__ == "__main__":
    main()
