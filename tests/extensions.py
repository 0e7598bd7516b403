"""The C extensions as they are here now, not as they were when the package was installed, and modules without them."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

ROOT = Path(__file__).parent.parent

needs_compiler = pytest.mark.skipif(
    not shutil.which("cc") or sys.platform != "linux" or bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="compiling the extension needs cc, on Linux, and the stable ABI",
)


def module_with(name: str, extension_name: str, extension: ModuleType | None) -> ModuleType:
    """The module of this name as it is where this is its extension; None: where there is none."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {extension_name: extension}):
        spec.loader.exec_module(module)
    return module


def compiled(name: str, folder: Path) -> ModuleType:
    """The extension of this name, compiled into a folder."""
    path = folder / f"{name.rpartition('.')[2]}.abi3.so"
    source = ROOT / f"{name.replace('.', '/')}.c"
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, f"-I{sysconfig.get_path('include')}", source, "-o", path], check=True)
    spec = importlib.util.spec_from_file_location(name, path)
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension
