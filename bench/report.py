"""From the lines of a run to a page and its plots: bench/results/<name>.md, <name>-rates.png, <name>-laws.png."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from bench import plots
from bench.figures import Line, Row, Spread, rows, traffic
from bench.targets import reached


def write(name: str, results: Path) -> Path:
    """Make the page of the last run in `results`/<name>.jsonl and return it. Exits where there are no lines."""
    source = results / f"{name}.jsonl"
    if not source.exists():
        sys.exit(f"{source} does not exist: measure first")
    lines = last_run(source)
    pictures = plots.draw(lines, results, name)
    page = results / f"{name}.md"
    page.write_text(markdown(lines, [picture.name for picture in pictures]))
    return page


def last_run(source: Path) -> list[Line]:
    """Return the lines of the last run of the file."""
    lines = [json.loads(line) for line in source.read_text().splitlines() if line]
    return [line for line in lines if line["run"] == lines[-1]["run"]]


def markdown(lines: Sequence[Line], pictures: Iterable[str] = ()) -> str:
    """Return the page."""
    parts = [
        _head(lines),
        _targets(lines),
        *(f"![{picture}]({picture})\n" for picture in pictures),
        *(_cell(lines, cell) for cell in dict.fromkeys(row.cell for row in rows(lines))),
        _tls(lines),
        _requests(lines),
        _left_out(lines),
    ]
    return "\n".join(part for part in parts if part)


def _head(lines: Sequence[Line]) -> str:
    first, machine = lines[0], lines[0]["machine"]
    settings, memory = first.get("settings", {}), first.get("fresh_memory", {})
    counts = {line["workload"]: line["samples"] for line in lines if "samples" in line and "workload" in line}
    about = [
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_bytes'] / 1e9:.0f} GB, Linux",
        f"{machine['kernel']}, Python {machine['python']}; server {first['server']}, on the same cores.",
        f"Commit {first['commit']}.",
        f"Samples: {', '.join(f'{name} {count:,}' for name, count in counts.items())}.",
        "Contestants take turns, each time in a fresh process, the first epoch with an empty cache.",
        "Figures are medians, with the least and the greatest in brackets.",
        "Later ones: all epochs after the first together, four of the project, which fetches the beginning of the",
        "next epoch from its second on, the last time in vain; one of the others.",
    ]
    if memory.get("gigabytes"):
        about.append(
            f"This machine hands out memory that lay idle at {memory['gigabytes_per_second']:g} GB/s, so each"
            " contestant touches four times the raw data and 0.5 GB, 2.5 GB at most, and gives it back just before it"
            " begins; NOTES.md says what that helps."
        )
    if settings:
        about += [
            f"Peers run with each of {', '.join(map(str, settings['workers']))} workers (`w` is the best count).",
            f"Their epochs were cut {settings['seconds']:g} s after the first batch; the rate of a cut epoch",
            "(marked \\*) leaves the time to the first batch out, in favour of whoever was cut.",
        ]
    about.append("MB/s are of raw data; of JPEGs as encoded.")
    versions = "Versions: " + ", ".join(f"{name} {value}" for name, value in first["versions"].items()) + "."
    text = "\n\n".join(fill(part, 120, break_on_hyphens=False) for part in (" ".join(about), versions))
    return f"# Streaming side by side, {first['time'][:10]}\n\n{text}\n"


def _targets(lines: Sequence[Line]) -> str:
    found = reached(lines)
    if not found:
        return ""
    body = [
        [
            one.figure,
            f"{'<=' if one.most else '>='} {one.bound:,g}",
            _number(one.value),
            one.spread,
            "yes" if one.met else "**no**",
            one.note,
        ]
        for one in found
    ]
    return "## Targets\n\n" + table(["figure", "target", "reached", "spread", "met", "besides"], body)


def _cell(lines: Sequence[Line], cell: str) -> str:
    found = [row for row in rows(lines) if row.cell == cell]
    unit = found[0].unit
    head = ["", f"first epoch, {unit}/s", "second", "later ones", "MB/s", "CPU s/GB", "peak MB", "first batch s", "w"]
    order = {"ceiling": 0, "ours": 1, "peer": 2}
    found.sort(key=lambda row: (order[row.kind], -row.rates[0].median))
    return f"## {cell}\n\n" + table(head, [_row(row) for row in found])


def _row(row: Row) -> list[str]:
    star = "\\*" if row.cut and row.kind == "peer" else ""
    name = f"**{row.contestant}**" if row.kind == "ours" else row.contestant
    return [
        name,
        *(_spread(rate) + star for rate in (row.rates[0], row.second, row.rates[1])),
        f"{row.rates[0].median * row.unit_bytes / 1e6:,.0f}",
        f"{row.cpu_per_gigabyte.median:.2f}",
        f"{row.peak.greatest / 1e6:,.0f}",
        f"{row.first_batch.median:.2f}" if row.kind != "ceiling" else "",
        ", ".join(map(str, row.workers)) if row.kind == "peer" else "",
    ]


def _tls(lines: Sequence[Line]) -> str:
    found = rows(lines, "tls")
    if not found:
        return ""
    body = [[row.cell, row.contestant, _number(row.rates[0].median), _number(row.rates[1].median)] for row in found]
    return "## Over TLS (one round)\n\n" + table(["", "", "first epoch, units/s", "later ones"], body)


def _requests(lines: Sequence[Line]) -> str:
    body = [
        [cell, contestant, f"{seen.requests_per_gigabyte:,.0f}", f"{seen.fetched_over_needed:.3f}"]
        for (cell, contestant), seen in traffic(lines).items()
    ]
    if not body:
        return ""
    head = ["", "", "requests for each raw GB", "bytes fetched over stored"]
    return "## Requests (one untimed epoch through a counting proxy)\n\n" + table(head, body)


def _left_out(lines: Sequence[Line]) -> str:
    found = []
    for line in lines:
        for why in ("unsupported", "failed", "skipped"):
            if why in line:
                name = f"{line.get('workload', '')} {line.get('variant', '')}".strip()
                workers = f", {line['workers']} workers" if line.get("workers") else ""
                found.append([line.get("contestant", line.get("name", "")), name + workers, f"{why}: {line[why]}"])
    return "## Left out\n\n" + table(["", "", ""], found) if found else ""


def table(head: Sequence[str], body: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; a bar inside a cell is escaped."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _spread(spread: Spread) -> str:
    if spread.count == 1:
        return _number(spread.median)
    return f"{_number(spread.median)} ({_number(spread.least)} - {_number(spread.greatest)})"


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
