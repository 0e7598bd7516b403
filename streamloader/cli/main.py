"""The command `streamloader`: its subcommands and the printing of errors. Imports stay light, so `--help` is fast."""

import errno
import sys
from contextlib import nullcontext, redirect_stdout, suppress
from itertools import takewhile
from pathlib import Path

import click

from streamloader import __version__
from streamloader.cli.completion import PROGRAM, completion
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
from streamloader.cli.doctor import doctor
from streamloader.cli.measure import bench, plan, stats
from streamloader.cli.options import json_option
from streamloader.cli.show import INTERRUPTED, print_json
from streamloader.cli.stores import cp, ls
from streamloader.cli.terminal import echo, paint
from streamloader.cli.view import view
from streamloader.errors import StorageError, StreamloaderError, UsageError

BAD_INPUT = 2  # the exit status of every foreseen error, as click's own


@click.command()
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Run in this new folder and keep it.")
@json_option
def demo(keep: Path | None, *, as_json: bool) -> None:
    """Convert images, train, kill the ranks, resume and evaluate.

    The images go to a bucket of a server that is started for it.
    """
    from streamloader.demo.run import run_demo

    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        results = run_demo(keep)
    if as_json:
        print_json(results)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name=PROGRAM)
def cli() -> None:
    """Make, inspect and measure datasets that stream from object storage into PyTorch."""


_DATASETS = convert, append, delete, lengths, log, diff, ls, inspect, verify, export, cp, rm_incomplete, cache
for _command in (*_DATASETS, plan, bench, stats, doctor, view, demo, completion):
    cli.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit. A foreseen error is one line on stderr, without secrets, and status 2; Ctrl-C is 130.

    With --json, the error is also a JSON document on stdout.
    """
    given = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in takewhile(lambda argument: argument != "--", given)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # of a program that has replaced it
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        status = cli.main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        status = BAD_INPUT
    except (StreamloaderError, click.ClickException, OSError) as error:
        from streamloader.storage.url import redact  # takes 0.1 s to import, which --help does not need

        known = _of_our_tree(error)
        problem = " ".join(redact(str(known)).split())
        echo(f"{paint('error:', sys.stderr, fg='red', bold=True)} {problem}", sys.stderr)
        _print_error(known.code, problem, as_json=as_json)
        status = BAD_INPUT
    except click.Abort as error:
        click.echo(str(error) or "interrupted", err=True)
        _print_error("interrupted", str(error) or "interrupted", as_json=as_json)
        status = INTERRUPTED
    sys.exit(status)


def _of_our_tree(error: StreamloaderError | click.ClickException | OSError) -> StreamloaderError:
    """Return the error of our tree for one of click, of a wrong option or argument, and for a full disk.

    Raises any other `OSError`.
    """
    if isinstance(error, StreamloaderError):
        return error
    if isinstance(error, OSError):  # of what the command prints, or of a file for its result
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise error
        return StorageError(f"the result cannot be written: {error}", "free some space, or choose another location")
    context = getattr(error, "ctx", None)
    command = PROGRAM if context is None else context.command_path
    return UsageError(error.format_message().rstrip("."), f"see {command} --help")


def _print_error(code: str, message: str, *, as_json: bool) -> None:
    if as_json:
        with suppress(OSError):  # of a full disk
            print_json({"error": {"code": code, "message": message}})


if __name__ == "__main__":
    main()
