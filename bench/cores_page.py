"""The page of scaling from its lines, after what was measured before the engine had workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from bench.figures import Line, later_rate
from bench.report import last_run, table

BEFORE = Path(__file__).parent / "results" / "cores-before.md"
IMAGE_BYTES = 224 * 224 * 3


@dataclass(frozen=True)
class Unit:
    """How a workload is counted: `amount` of bytes, or of samples, is one `name`; `cost`: of one, times `times`."""

    name: str
    amount: float
    of_bytes: bool
    cost: str
    times: float = 1.0

    def of(self, line: Line) -> float:
        """Return how many the line counts."""
        return float(line["bytes" if self.of_bytes else "samples"]) / self.amount


UNITS = {
    "images": Unit("GB", 1e9, True, "s/GB"),
    "jpeg": Unit("images", 1, False, "µs each", 1e6),
    "vectors": Unit("million rows", 1e6, False, "s/million"),
    "tokens": Unit("GB", 1e9, True, "s/GB"),
}


def write(name: str, results: Path) -> Path:
    """Make the page of the last run in `results`/<name>.jsonl and return it."""
    page = results / f"{name}.md"
    page.write_text(markdown(last_run(results / f"{name}.jsonl")))
    return page


def markdown(lines: Sequence[Line]) -> str:
    """Return the page."""
    parts = [BEFORE.read_text(), head(lines)]
    for workload in dict.fromkeys(line["workload"] for line in lines):
        parts.append(section([line for line in lines if line["workload"] == workload], UNITS[workload]))
    parts.append(checks(lines))
    return "\n".join(part for part in parts if part)


def head(lines: Sequence[Line]) -> str:
    """Return what was measured, and where."""
    first, machine = lines[0], lines[0]["machine"]
    about = (
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_bytes'] / 1e9:.0f} GB, Linux"
        f" {machine['kernel']}, Python {machine['python']}, commit {first['commit']}. One rank, default settings,"
        " data in the page cache. A run is a process that may use so many cores, by affinity; nginx may use all. Rates"
        " are of epochs after the first. JPEGs of about 500 x 375 become random crops of 224, uint8. Other loaders read"
        " local files with a DataLoader worker for each core, two at least. Plain GETs are of 4 MiB, by 32"
        " threads, and count what the loader would deliver from them. Parent: CPU time of the process that trains,"
        " without its workers. Memory is the proportional set size within a pass."
    )
    versions = "Versions: " + ", ".join(f"{name} {value}" for name, value in first["versions"].items()) + "."
    return f"## {first['time'][:10]}\n\n{fill(about, 120)}\n\n{fill(versions, 120, break_on_hyphens=False)}\n"


def section(lines: Sequence[Line], unit: Unit) -> str:
    """Return the rates by cores, and what the loader's own runs cost."""
    rates: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, rate in rates_of(line, unit):
            rates.setdefault(name, {})[line["cores"]] = rate
    cores = sorted({count for found in rates.values() for count in found})
    if not rates:
        return ""
    body = [[name, *(shown(found.get(count)) for count in cores)] for name, found in rates.items()]
    parts = [
        f"### {lines[0]['workload']}, {unit.name}/s\n",
        table(["", *(f"{count} core{'s'[: count > 1]}" for count in cores)], body),
    ]
    own = [line for line in lines if line["kind"] == "loader" and "seconds" in line]
    if own:
        titles = ["", "cores", f"parent, {unit.cost}", "all, " + unit.cost, "first batch, s", "later ones, s"]
        parts.append(table([*titles, "parent, MB", "workers, MB"], [costs(line, unit) for line in own]))
    return "\n".join(parts)


def rates_of(line: Line, unit: Unit) -> Iterable[tuple[str, float]]:
    """Yield the rows that a line belongs to, with its rates."""
    if line["kind"] == "loader" and "seconds" in line:
        yield label(line), unit.of(line) / line["seconds"]
    elif line["kind"] == "peer" and "parts" in line:
        size = IMAGE_BYTES if unit.of_bytes else 1
        yield f"{line['contestant']}, files", later_rate({"epochs": line["parts"]}) * size / unit.amount
    elif line["kind"] == "bound":
        for part in line.get("parts", [line] if "seconds" in line else []):
            name = {"whole": "decoding whole, a process a core", "crop": "decoding crops, a process a core"}
            yield name.get(part.get("decode", ""), "plain GETs"), unit.of(part) / part["seconds"]


def label(line: Line) -> str:
    """Return the row of the loader's rate."""
    return f"**{line['workers']} workers, {line['place']}**"


def costs(line: Line, unit: Unit) -> list[str]:
    """Return the row of a run's costs."""
    units = unit.of(line) / unit.times
    return [
        f"{line['workers']} workers ({line['children']} processes), {line['place']}",
        str(line["cores"]),
        shown(line["parent_cpu_seconds"] / units),
        shown(line["cpu_seconds"] / units),
        f"{line['first_batch_seconds']:.2f}",
        f"{line['later_first_batch_seconds']:.3f}",
        f"{line['parent_bytes'] / 1e6:,.0f}",
        f"{line['children_bytes'] / 1e6:,.0f}",
    ]


def checks(lines: Sequence[Line]) -> str:
    """Return whether batches were equal, and what failed."""
    found = [
        f"- {line['workload']}: the batches of an epoch are {'the same' if line['equal'] else '**not the same**'} with"
        f" {' and '.join(line['digests'])} workers."
        for line in lines
        if "equal" in line
    ]
    for line in lines:
        if why := line.get("failed") or line.get("unsupported"):
            found.append(
                f"- {line['contestant']} {line['workload']}, {line['workers']} workers, {line['cores']}: {why}"
            )
    return "\n".join(["### Checks\n", *found, ""]) if found else ""


def shown(value: float | None) -> str:
    """Return three digits, or nothing."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
