"""`streamloader doctor` prints the checks of the installation, the machine and a URL, with advice."""

from __future__ import annotations

import sys
from typing import Any

import click

from streamloader.cli import options as shared
from streamloader.cli.show import counted, print_json, print_table, printable
from streamloader.cli.terminal import echo, paint

PROBLEMS = 1  # the exit status if there is a problem
COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command()
@shared.place("url", required=False)
@shared.storage_option
@shared.json_option
def doctor(*, url: str | None, storage_options: dict[str, Any], as_json: bool) -> None:
    """Check installation, machine and access, and give advice.

    Versions, what decodes images, processors, memory, limits; credentials (where they are, never what), endpoint,
    latency, clock, the dataset at URL; how many workers a loader starts. Changes nothing. Exits with 1 if there is a
    problem.
    """
    from streamloader.measure.doctor import examine

    checks = examine(url, storage_options)
    counts = {status: sum(check.status == status for check in checks) for status in COLORS}
    if as_json:
        print_json({"ok": not counts["problem"], "checks": [check.to_dict() for check in checks]})
    else:
        # what is optional and not installed is neither right nor wrong
        rows = [(each.name, "" if each.absent else each.status, each.found) for each in checks]
        print_table(("check", "status", "found"), rows, (), COLORS)
        for check in checks:
            if check.status != "ok":
                status = paint(f"{check.status}:", sys.stdout, fg=COLORS[check.status])
                echo(f"{status} {printable(f'{check.name}: {check.advice}')}", sys.stdout)
        found = [counted(counts[status], status) for status in ("problem", "warning") if counts[status]]
        worst = "problem" if counts["problem"] else "warning" if found else "ok"
        echo(paint(", ".join(found) or "OK", sys.stdout, fg=COLORS[worst], bold=True), sys.stdout)
    if counts["problem"]:
        sys.exit(PROBLEMS)
