"""`streamloader`: the commands, and how errors are printed. Imports stay light, so that `--help` is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from streamloader import __version__
from streamloader.cli.datasets import append, convert, export, inspect, rm_incomplete, verify
from streamloader.cli.measure import bench, plan
from streamloader.cli.options import INTERRUPTED
from streamloader.errors import StreamloaderError


@click.command()
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Work in this new folder and keep it.")
def demo(keep: Path | None) -> None:
    """Convert real images to a bucket, train from it, kill, resume, evaluate."""
    from streamloader.demo.story import run_demo

    run_demo(keep)


BAD_INPUT = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="streamloader")
def cli() -> None:
    """Make datasets for streaming from object storage into PyTorch, inspect and measure them."""


for _command in (convert, append, inspect, verify, export, rm_incomplete, plan, bench, demo):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 2 with one line on stderr for bad input, 130 after Ctrl-C."""
    try:
        status = cli.main(args=arguments, prog_name="streamloader", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        status = BAD_INPUT
    except (StreamloaderError, click.ClickException) as error:
        _say(error.format_message() if isinstance(error, click.ClickException) else str(error))
        status = BAD_INPUT
    except click.Abort:
        click.echo("interrupted", err=True)
        status = INTERRUPTED
    sys.exit(status)


def _say(problem: str) -> None:
    """Print an error in one line, without what may be secret in its URLs."""
    from streamloader.storage.url import redact  # 0.1 s to import, which help does not need

    click.echo(f"error: {' '.join(redact(problem).split())}", err=True)


if __name__ == "__main__":
    main()
