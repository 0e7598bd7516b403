"""What several commands share: `--storage-option name=value`, and sizes as people read them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from streamloader.errors import UsageError

INTERRUPTED = 130  # the exit status after Ctrl-C: 128 + SIGINT, as shells say it


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Return the options of `name=value` texts; a value that is JSON is read as such. Raises `UsageError`."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UsageError(
                "a storage option without a name or '='",
                "write it as name=value, say endpoint_url=http://host or anon=true",
            )
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def parse_fill(pairs: Iterable[str]) -> dict[str, str]:
    """Return the fill values of `field=value` texts. Raises `UsageError`."""
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals or name in values:
            raise UsageError(f"fill value {pair!r}", "write it as field=value, each field once")
        values[name] = value
    return values


def counted(count: int, noun: str) -> str:
    """Return a number of things like `1 shard`, `1,024 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def show_bytes(size: float) -> str:
    """Return a number of bytes like `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
