"""The command `streamloader`: its subcommands and the printing of errors. Imports stay light, so `--help` is fast."""

import sys
from pathlib import Path

import click

from streamloader import __version__
from streamloader.cli.datasets import (
    append,
    cache,
    convert,
    delete,
    diff,
    export,
    inspect,
    lengths,
    log,
    rm_incomplete,
    verify,
)
from streamloader.cli.measure import bench, plan, stats
from streamloader.cli.show import INTERRUPTED
from streamloader.errors import StreamloaderError

BAD_INPUT = 2  # the exit status of every foreseen error, as click's own


@click.command()
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Run in this new folder and keep it.")
def demo(keep: Path | None) -> None:
    """Convert images to a bucket, train from it, kill the ranks, resume and evaluate."""
    from streamloader.demo.run import run_demo

    run_demo(keep)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="streamloader")
def cli() -> None:
    """Make, inspect and measure datasets that stream from object storage into PyTorch."""


_DATASETS = convert, append, delete, lengths, log, diff, inspect, verify, export, rm_incomplete, cache
for _command in (*_DATASETS, plan, bench, stats, demo):
    cli.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit. A foreseen error is one line on stderr, without secrets, and status 2; Ctrl-C is 130."""
    try:
        status = cli.main(args=arguments, prog_name="streamloader", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        status = BAD_INPUT
    except (StreamloaderError, click.ClickException) as error:
        from streamloader.storage.url import redact  # takes 0.1 s to import, which --help does not need

        problem = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"error: {' '.join(redact(problem).split())}", err=True)
        status = BAD_INPUT
    except click.Abort:
        click.echo("interrupted", err=True)
        status = INTERRUPTED
    sys.exit(status)


if __name__ == "__main__":
    main()
