"""`streamloader completion` prints the script by which a shell completes commands, options and choices."""

import click
from click.shell_completion import ShellComplete, get_completion_class

from streamloader.cli.options import json_option
from streamloader.cli.show import print_result

PROGRAM = "streamloader"
VARIABLE = "_STREAMLOADER_COMPLETE"  # by which click's scripts ask the program
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@json_option
@click.pass_context
def completion(context: click.Context, *, shell: str, as_json: bool) -> None:
    """Print the script by which SHELL completes commands.

    Also options, choices and local paths.

    \b
    bash, in ~/.bashrc:  eval "$(streamloader completion bash)"
    zsh, in ~/.zshrc:    eval "$(streamloader completion zsh)"
    fish:  streamloader completion fish > ~/.config/fish/completions/streamloader.fish
    """
    complete = get_completion_class(shell)
    assert complete is not None
    # not the source of a subclass, which looks for the shell on this machine
    script = ShellComplete.source(complete(context.find_root().command, {}, PROGRAM, VARIABLE))
    print_result({"shell": shell, "script": script}, script, as_json=as_json)
