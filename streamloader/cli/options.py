"""Options that several commands have."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial, reduce
from typing import Any

import click
from click.shell_completion import CompletionItem

from streamloader.errors import UsageError
from streamloader.options import parse_size


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse storage options from `name=value` texts; values that are valid JSON are decoded. Raises `UsageError`."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:  # the message does not quote the text, which may be a secret
            remedy = "write it as name=value, say endpoint_url=http://host or anon=true"
            raise UsageError("a storage option without a name or '='", remedy)
        options[name] = value
        with suppress(ValueError):
            options[name] = json.loads(value)
    return options


def parse_fill(pairs: Iterable[str]) -> Mapping[str, str]:
    """Parse fill values from `field=value` texts. Raises `UsageError`."""
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals or name in values:
            raise UsageError(f"fill value {pair!r}", "write it as field=value, each field once")
        values[name] = value
    return values


def parse_names(text: str) -> tuple[str, ...]:
    """Parse field names from `image,label`."""
    return tuple(name.strip() for name in text.split(","))


def option(*names: str, parse: Callable[[Any], Any] | None = None, **settings: Any) -> Callable[[Any], Any]:
    """Return the decorator of a command's option; `parse` converts its value unless that is None."""
    if parse is not None:
        settings["callback"] = lambda _context, _option, value: None if value is None else parse(value)
    return click.option(*names, **settings)


def place(name: str, **settings: Any) -> Callable[[Any], Any]:
    """Return the decorator of an argument that is a URL or a local path; shells complete it as a path."""
    return click.argument(name, shell_complete=_complete_path, **settings)


def _complete_path(_context: Any, _parameter: Any, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def several(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the decorator that adds all of these options to a command."""
    return lambda command: reduce(lambda changed, add: add(changed), reversed(options), command)


def size_option(name: str, **settings: Any) -> Callable[[Any], Any]:
    """Return an option whose value, such as 64MiB, is converted to bytes."""
    return option(name, parse=partial(parse_size, name=f"{name} "), metavar="SIZE", **settings)


PAIRS: Mapping[str, Any] = {"multiple": True, "metavar": "NAME=VALUE"}


def store_option(kind: str, text: str, default: Mapping[str, Any] | None = None) -> Callable[[Any], Any]:
    """Return `--KIND-option`, whose pairs become the argument `KIND_options`; `default` if there are none."""
    name = f"{kind}_options"
    return option(f"--{kind}-option", name, parse=lambda pairs: parse_options(pairs) or default, help=text, **PAIRS)


_STORE = "An option of the store, by its fsspec name; the value may be JSON. May be repeated."
storage_option = store_option("storage", _STORE, {})
source_option = store_option("source", "The same for the store of SRC, if its options differ.")
target_option = store_option("target", "The same for the store of DST, if its options differ.")
_FILL = "Value that replaces missing ones of a field. May be repeated."
fill_option = option("--fill", parse=parse_fill, help=_FILL, **PAIRS)
quiet_option = option("--quiet", is_flag=True, help="Print errors only.")
json_option = option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, also of an error.")
split_option = option("--split", help="The split, if the dataset has splits.")
_WHERE = 'The samples to read: "label in (1, 2) and width >= 256", 0:800, or times of arrays: 2001-01:2017-12.'
where_option = option("--where", metavar="CONDITION|RANGE", help=_WHERE)
_EXCLUDE = "The file of samples to leave out, or the folder of such files if it ends in a slash."
exclude_option = option("--exclude", metavar="FILE", help=_EXCLUDE)
fields_option = option(
    "--fields", parse=parse_names, metavar="NAME,...", help="Fields to read, say image,label; default: all."
)
