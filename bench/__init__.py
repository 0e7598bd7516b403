"""Measures the loader, its ceilings and other loaders side by side: `python -m bench --help`."""
