"""Compiles the C extension. All else is in pyproject.toml, whose own table of extensions is still experimental."""

from setuptools import Extension, setup

# abi3: one binary for each Python from 3.11 on. Without a C compiler, format/rows.py does the same in Python.
ROWS = Extension("streamloader.format._rows", ["streamloader/format/_rows.c"], py_limited_api=True, optional=True)
setup(ext_modules=[ROWS])
