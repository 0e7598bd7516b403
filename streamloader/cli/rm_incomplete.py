"""`streamloader rm-incomplete`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from streamloader.cli.options import counted, parse_options, show_bytes
from streamloader.errors import UsageError

if TYPE_CHECKING:
    from streamloader.conversion.after.incomplete import Incomplete

SHOWN = 5  # paths


@click.command("rm-incomplete")
@click.argument("url")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--storage-option", "storage", multiple=True, metavar="NAME=VALUE", help="An option of the store; repeat."
)
def rm_incomplete(url: str, yes: bool, storage: tuple[str, ...]) -> None:
    """Remove the unfinished dataset at URL, or what killed writers left beside a finished one, which stays.

    Only while nothing writes there.
    """
    from streamloader.conversion.after.incomplete import find_incomplete, remove_incomplete
    from streamloader.storage import open_store

    store = open_store(url, parse_options(storage))
    found = find_incomplete(store)
    click.echo(found.said)
    if found.kind == "nothing":
        return
    for line in _shown(found):
        click.echo(line)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nobody can be asked here", "give --yes")
        if not click.confirm("Does nothing write there any more, and shall this be removed?"):
            click.echo("nothing was removed")
            return
    leftovers = remove_incomplete(store, found)
    more = f"; half-written files and unfinished uploads: {leftovers}" if leftovers else ""
    click.echo(f"removed {_amount(found)}{more}")


def _shown(found: Incomplete) -> list[str]:
    if not found.objects:
        return ["no leftovers are listed; half-written files and unfinished uploads will be removed if there are any"]
    paths = [f"  {info.path}, {show_bytes(info.size)}" for info in found.objects[:SHOWN]]
    more = [f"  ... and {len(found.objects) - SHOWN} more"] if len(found.objects) > SHOWN else []
    return [f"to be removed: {_amount(found)}", *paths, *more]


def _amount(found: Incomplete) -> str:
    return f"{counted(len(found.objects), 'object')}, {show_bytes(found.bytes)}"
