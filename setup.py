"""Compiles the C extensions. All else is in pyproject.toml, whose own table of extensions is still experimental."""

import os
import sysconfig

from setuptools import Extension, setup

# Without a C compiler, the module beside each does the same in Python.
SOURCES = ["streamloader/format/_rows.c", "streamloader/order/_packing.c"]
# abi3: one binary for each Python from 3.11 on, except free-threaded ones, which have no such ABI
ABI3 = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            path.removesuffix(".c").replace("/", "."),
            [path],
            py_limited_api=ABI3,
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if ABI3 else [],
            extra_compile_args=[] if os.name == "nt" else ["-g0"],  # else it names the folder that it was built in
            optional=True,
        )
        for path in SOURCES
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if ABI3 else {},
)
