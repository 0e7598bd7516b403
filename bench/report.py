"""From the lines of a run to a page and its plots: bench/results/<name>.md, <name>-rates.png, <name>-laws.png."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from bench import plots
from bench.figures import Line, Row, Spread, is_loader, rows, traffic
from bench.targets import reached

FRONTS = {
    "store": "SeaweedFS, on the same cores",
    "delay": "Cloud latency: 30 ms before the first byte, 85 MB/s for each connection",
    "tls": "Over TLS",
}
BY_HAND = 3  # the group of rows that are no loaders
EXACTNESS = Path(__file__).parent / "results" / "exactness.json"


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
        _fronts(lines),
        _exactness(lines),
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
        "All epochs are whole and count from `iter()` to the last sample, the first batch included, imports and",
        "opening excluded. Later ones: all epochs after the first together; Mosaic and LitData then read local files.",
        "No loader is set to hold more than a quarter of the data to shuffle it; loaders too slow for all of it get a",
        "part (marked). Figures are medians, with the least and the greatest in brackets.",
        "Mixing is the measured design effect: of data stored in the order of 128 classes, the variance of a class's",
        "share of a batch over that of independent draws; 1 is best.",
    ]
    if memory.get("gigabytes"):
        about.append(
            f"This machine hands out memory that lay idle at {memory['gigabytes_per_second']:g} GB/s, so each"
            " contestant touches four times the raw data and 0.5 GB, 2.5 GB at most, and gives it back just before it"
            " begins; NOTES.md says what that helps."
        )
    if settings:
        workers = ", ".join(map(str, settings["workers"])) or "2 (vectors and tokens: 0)"
        about += [
            f"Epochs after the first take {settings['seconds']:g} s together at least.",
            f"Other loaders run with {workers} workers (`w` is the best count).",
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
    head = [
        *("", f"first epoch, {unit}/s", "later ones", "MB/s", "mixing", "CPU s/GB first", "later", "faults/GB"),
        *("peak MB", "first batch s", "w"),
    ]
    found.sort(key=lambda row: (_group(row), -row.rates[0].median))
    parts = [table(head, [_row(row) for row in found if _group(row) < BY_HAND])]
    by_hand = [_row(row) for row in found if _group(row) == BY_HAND]
    if by_hand:
        parts.append("Blocks read with other libraries, as you would write it yourself:\n\n" + table(head, by_hand))
    return f"## {cell}\n\n" + "\n".join(parts)


def _group(row: Row) -> int:
    return {"ceiling": 0, "ours": 1}.get(row.kind, 2 if is_loader(row) else BY_HAND)


def _row(row: Row) -> list[str]:
    name = f"**{row.contestant}**" if row.kind == "ours" else row.contestant
    return [
        f"{name}, 1/{row.part} of the data" if row.part > 1 else name,
        *map(_spread, row.rates),
        f"{row.rates[1].median * row.unit_bytes / 1e6:,.0f}",
        f"{row.design_effect:.2f}" if row.design_effect else "",
        *(f"{cost.median:.2f}" for cost in row.cpu_per_gigabyte),
        f"{row.faults_per_gigabyte.median:,.0f}",
        f"{row.peak.greatest / 1e6:,.0f}",
        f"{row.first_batch.median:.2f}" if row.kind != "ceiling" else "",
        ", ".join(map(str, dict.fromkeys(row.workers))) if row.kind == "peer" else "",
    ]


def _exactness(lines: Sequence[Line]) -> str:
    """What is the same again, as `bench.exactness` measured it for the loaders of this page."""
    if not EXACTNESS.exists():
        return ""
    page, names = json.loads(EXACTNESS.read_text()), {row.contestant for row in rows(lines) if row.kind != "ceiling"}
    body = [[name, *found.values()] for name, found in page["loaders"].items() if name in names]
    if not body:
        return ""
    text = (
        f"{page['samples']:,} shuffled images without workers, batch by batch: a second run, two ranks, and a run that"
        f" ended after {page['stop']} samples and was resumed (`python -m bench.exactness`, {page['time'][:10]})."
    )
    head = ["", "two runs", "two ranks", "resumed", "resumed by two ranks"]
    return f"## What is exact\n\n{fill(text, 120)}\n\n" + table(head, body)


def _fronts(lines: Sequence[Line]) -> str:
    parts = []
    for front, title in FRONTS.items():
        plain = {(row.cell, row.contestant): row for row in rows(lines)}
        body = []
        for row in rows(lines, front):
            beside = plain.get((row.cell, row.contestant))
            ratios = (
                [f"{a.median / b.median:.2f}" for a, b in zip(row.rates, beside.rates, strict=True)] if beside else []
            )
            body.append([row.cell, row.contestant, *(_number(rate.median) for rate in row.rates), *ratios])
        if body:
            head = ["", "", "first epoch, units/s", "later ones", "first over the server above", "later ones"]
            parts.append(f"## {title}\n\n" + table(head, body))
    return "\n".join(parts)


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
