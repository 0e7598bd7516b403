"""Compiles the C extensions. All else is in pyproject.toml, whose own table of extensions is still experimental."""

from setuptools import Extension, setup

# abi3: one binary for each Python from 3.11 on. Without a C compiler, the module beside each does the same in Python.
SOURCES = ["streamloader/format/_rows.c", "streamloader/order/_packing.c"]
setup(
    ext_modules=[
        Extension(path.removesuffix(".c").replace("/", "."), [path], py_limited_api=True, optional=True)
        for path in SOURCES
    ]
)
