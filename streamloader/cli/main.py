"""`streamloader`: the commands, and what becomes of errors. Imports stay light, so that `--help` is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from streamloader import __version__
from streamloader.cli.append import append
from streamloader.cli.bench import bench
from streamloader.cli.convert import convert
from streamloader.cli.demo import demo
from streamloader.cli.export import export
from streamloader.cli.inspect import inspect
from streamloader.cli.options import INTERRUPTED
from streamloader.cli.plan import plan
from streamloader.cli.rm_incomplete import rm_incomplete
from streamloader.cli.verify import verify
from streamloader.errors import StreamloaderError

BAD_INPUT = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="streamloader")
def cli() -> None:
    """Make datasets for streaming from object storage into PyTorch, look into them, and measure them."""


for _command in (convert, append, inspect, verify, export, rm_incomplete, plan, bench, demo):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 2 with one line on stderr for bad input, 130 after Ctrl-C."""
    try:
        status = cli.main(args=arguments, prog_name="streamloader", standalone_mode=False)
    except StreamloaderError as error:
        _say(str(error))
        status = BAD_INPUT
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        status = BAD_INPUT
    except click.ClickException as error:
        _say(error.format_message())
        status = BAD_INPUT
    except click.Abort:
        click.echo("interrupted", err=True)
        status = INTERRUPTED
    sys.exit(status)


def _say(problem: str) -> None:
    """Print an error in one line, without what may be secret in its URLs."""
    from streamloader.storage.location import redact  # 0.1 s to import, which help does not need

    click.echo(f"error: {' '.join(redact(problem).split())}", err=True)


if __name__ == "__main__":
    main()
