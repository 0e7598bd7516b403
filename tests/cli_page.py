"""docs/cli.md: what the page has of each command, from click. `python tests/cli_page.py` writes it again.

The tables of JSON keys, which end each section, are written by hand.
"""

import re
from pathlib import Path

import click

from streamloader.cli.main import cli

PAGE = Path(__file__).parent.parent / "docs/cli.md"
KEYS = "With `--json`:\n"  # ends what this file makes of a section
SECTION = re.compile(r"^## (\S+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
KEY = re.compile(r"^\| `(\w+)`", re.MULTILINE)


def head(command: click.Command) -> str:
    """Return the section of a command up to its JSON keys: what it does, its arguments and its options."""
    settings = dict(cli.context_settings)
    context = click.Context(command, info_name=f"streamloader {command.name}", **settings)
    usage = command.get_usage(context).removeprefix("Usage: ")
    help_text, _, commands = (command.help or "").partition("\b\n")  # lines as they are
    paragraphs = "\n\n".join(" ".join(part.split()) for part in help_text.split("\n\n")).strip()
    paragraphs += f"\n\n```text\n{commands.strip()}\n```" if commands else ""
    options = [param for param in command.params if isinstance(param, click.Option)]
    records = [record for option in options if (record := option.get_help_record(context)) is not None]
    rows = "\n".join(f"| `{_cell(names)}` | {_cell(text)} |" for names, text in records)
    return f"```text\n{' '.join(usage.split())}\n```\n\n{paragraphs}\n\n| option | |\n|---|---|\n{rows}\n\n{KEYS}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def sections(page: str) -> dict[str, str]:
    """Return the sections of commands by name."""
    return {name: body for name, body in SECTION.findall(page) if name in cli.commands}


def keys(section: str) -> set[str]:
    """Return the keys of the JSON document that a section names."""
    return set(KEY.findall(section.partition(KEYS)[2]))


def main() -> None:
    """Write the page with the sections as they are now; a new command gets an empty one."""
    page = PAGE.read_text()
    for name, command in cli.commands.items():
        old = sections(page).get(name)
        new = f"\n{head(command)}{'' if old is None else old.partition(KEYS)[2]}"
        page = f"{page}\n## {name}\n{new}" if old is None else page.replace(f"## {name}\n{old}", f"## {name}\n{new}")
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
