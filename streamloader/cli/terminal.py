"""What a terminal can do: colours, lines that are drawn again, characters beyond ASCII. Pure but for `isatty`."""

import os
from collections.abc import Mapping
from typing import Any

import click

NO = ("", "0", "false")  # values of a variable that is not set
DUMB = ("dumb", "unknown")  # values of TERM
WIDEST_BAR, NARROWEST_BAR = 40, 10  # characters


def has_colors(stream: Any, env: Mapping[str, str] = os.environ) -> bool:
    """Return whether text on a stream may have colours.

    NO_COLOR forbids them. FORCE_COLOR and CLICOLOR_FORCE require them, also in a pipe. Otherwise a terminal has them,
    unless TERM is dumb, CI is set or CLICOLOR is 0.
    """
    if env.get("NO_COLOR"):
        return False
    if any(env.get(name, "") not in NO for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return redraws(stream, env) and env.get("CLICOLOR") != "0"


def redraws(stream: Any, env: Mapping[str, str] = os.environ) -> bool:
    """Return whether a progress bar may be drawn on a stream: on a terminal that moves its cursor, and not in CI.

    Some CI systems provide a terminal, and all set CI.
    """
    return stream.isatty() and env.get("TERM") not in DUMB and env.get("CI", "").lower() in NO


def has_unicode(stream: Any, env: Mapping[str, str] = os.environ, *, posix: bool = os.name == "posix") -> bool:
    """Return whether a stream shows characters beyond ASCII.

    Python writes UTF-8 in the locales C and POSIX too, so the locale decides what a terminal shows.
    """
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
    if not encoding.startswith("utf"):
        return False
    if not posix or not stream.isatty():
        return True
    locale = next((env[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if env.get(name)), "C")
    return "utf" in locale.lower()


def paint(text: str, stream: Any, **style: Any) -> str:
    """Return a text in a style of `click.style` if the stream has colours, else unchanged."""
    return click.style(text, **style) if has_colors(stream) else text


def echo(text: str, stream: Any) -> None:
    """Print a line that `paint` has made for this stream."""
    click.echo(text, file=stream, color=has_colors(stream))


def progress_line(width: int, unicode: bool, share: float | None, description: str, *details: str) -> tuple[str, ...]:
    """Return a line of progress of less than `width` characters: what is before the bar, the bar, and what follows.

    `share` is how much is done, None if that is unknown. The first of the `details` is shown if it fits, the others
    that follow if they fit beside a bar, which has from `NARROWEST_BAR` to `WIDEST_BAR` characters or is left out.
    """
    most, shown = width - 1, list[str]()
    description = description[: max(0, most)]
    used = len(description)
    for detail in filter(None, details):
        if used + 1 + len(detail) + (NARROWEST_BAR + 1) * bool(shown) > most:
            break
        used, shown = used + 1 + len(detail), [*shown, detail]
    size = min(WIDEST_BAR, most - used - 1)
    if size < NARROWEST_BAR:
        return description, "", "".join(f" {detail}" for detail in shown)
    full, empty, ends = ("━", "─", ("", "")) if unicode else ("#", ".", ("[", "]"))
    inner = size - len("".join(ends))
    done = round(inner * min(1.0, max(0.0, share or 0.0)))
    drawn = f"{ends[0]}{full * done}{empty * (inner - done)}{ends[1]}"
    return f"{description} ", drawn, "".join(f" {detail}" for detail in shown)
