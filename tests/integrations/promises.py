"""The figures of docs/reliability.md: what it promises, what tests record, and the page's tables of both.

As a script, it writes what `bench/results/faults.jsonl` has to the page, as `make test-faults` does at its end.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from streamloader.testing.proxy import KINDS

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "bench" / "results" / "faults.jsonl"
RATES = (0.01, 0.05, 0.2)
ALL_KINDS = [*KINDS, "mixed"]

FEW_REQUESTS = "requests with faults at 1 and 5 %, of those without"
MANY_REQUESTS = "requests with faults at 20 %, of those without"
LATEST = "seconds from a request's first failure to the error, in the table"
RATE = "rate with faults at 5 %, of the rate without"
WAIT = "seconds, p99 of the wait of a step, with 1 % of responses stalled"
RESUMED = "seconds from the server's return to the next right batch"
RESTARTED = "seconds from the kill of all ranks to the first right batch of the next run"
RELOADED = "seconds from the kill of a DataLoader worker to the first right batch of the next loop"
REPLACED = "seconds that a step waits at most after the kill of a worker process"
LOST = "samples lost or doubled by kills"

# kinds whose requests wait by themselves, or are refused by a store that asks for fewer: their rate is only recorded
SLOW = {"stall", "trickle", "half-open", "bandwidth", "brown-out", "delay", "503-retry-after", "429", "503", "mixed"}
# kinds that a store never sends by chance, and of which three in a row, or one, end the run
ENDING = {"403", "404"}

Results = Sequence[dict[str, Any]]


@cache
def promise(name: str) -> float:
    """The figure of a row of the page's table of promises."""
    (figure,) = re.findall(rf"^\| {re.escape(name)} \| [^|\d]*([\d.]+)", PAGE.read_text(), re.M)
    return float(figure)


def record(**figures: Any) -> None:
    """Append figures to the file that the environment names: `make test-faults` does."""
    if file := os.environ.get("STREAMLOADER_FAULT_RESULTS"):
        with Path(file).open("a") as out:
            print(json.dumps(figures), file=out)


def _requests(results: Results, rates: Sequence[float]) -> str:
    """The number of requests with faults at these rates, as a multiple of that without."""
    found = [
        one["requests"] / one["clean_requests"]
        for one in results
        if one.get("outcome") == "right" and one["rate"] in rates
    ]
    return f"mean {mean(found):.2f}, most {max(found):.2f}, in {len(found):,} runs" if found else "-"


def _span(results: Results, name: str, unit: str) -> str:
    """The least and the greatest of the values that results have under a name."""
    found = [value for one in results if name in one for value in one[name]]
    return f"{min(found):.2f} to {max(found):.2f} in {len(found)} {unit}" if found else "-"


ATTEMPTS = re.compile(r"\((\d+) attempts in ([\d.]+) s\)")  # in the message of an error, unless it was one


def _errors(results: Results) -> str:
    """How long the requests of the errors were repeated."""
    errors = [one["error"] for one in results if one.get("error")]
    found = [float(times[2]) for error in errors if (times := ATTEMPTS.search(error))]
    return f"{min(found):.1f} to {max(found):.1f} in {len(found)} errors of {len(errors)}" if found else "-"


def _rates(results: Results) -> str:
    found = {one["rate_of"]: one["ratio"] for one in results if one.get("ratio") and one["rate_of"] not in SLOW}
    return f"{min(found.values()):.2f} to {max(found.values()):.2f} for {len(found)} kinds" if found else "-"


def _waits(results: Results) -> str:
    shown = "{p99:.2f}, without faults {p99_clean:.2f}; longest {longest:.2f}"
    return next((shown.format(**one) for one in results if "p99" in one), "-")


def _lost(results: Results) -> str:
    found = [one for one in results if "kills" in one]
    wrong, kills = sum(one["wrong"] for one in found), sum(one["kills"] for one in found)
    return f"{wrong} in {kills} kills" if found else "-"


PROMISES: dict[str, Callable[[Results], str]] = {
    FEW_REQUESTS: lambda results: _requests(results, RATES[:2]),
    MANY_REQUESTS: lambda results: _requests(results, RATES[2:]),
    LATEST: _errors,
    RATE: _rates,
    WAIT: _waits,
    RESUMED: lambda results: _span(results, "resumed", "outages"),
    RESTARTED: lambda results: _span(results, "restarted", "kills"),
    RELOADED: lambda results: _span(results, "reloaded", "kills"),
    REPLACED: lambda results: _span(results, "replaced", "kills"),
    LOST: _lost,
}


def _outcomes(results: Results, kind: str, rate: float) -> str:
    """How the runs with a kind of fault at a rate ended."""
    found = {one["outcome"] for one in results if one.get("kind") == kind and one["rate"] == rate}
    return ", ".join(sorted(found)) or "-"


def _ratio(results: Results, kind: str) -> str:
    """The rate of a run with a kind of fault, of that without, or how it ended."""
    (one,) = [one for one in results if one.get("rate_of") == kind][-1:] or [{}]
    return f"{one['ratio']:.2f}" if one.get("ratio") else one.get("ended", "-")


def recorded(text: str) -> dict[str, str]:
    """The columns of the page that come from lines of results, by the first column of their rows."""
    results = [json.loads(line) for line in text.splitlines()]
    rows = {name: shown(results) for name, shown in PROMISES.items()}
    for kind in ALL_KINDS:
        columns = [_outcomes(results, kind, rate) for rate in RATES]
        rows[f"`{kind}`"] = " | ".join([*columns, _ratio(results, kind)])
    return rows


def with_results(page: str, text: str) -> str:
    """The page with these results in the rows of its tables."""
    for name, shown in recorded(text).items():
        begin = rf"^(\| {re.escape(name)} \| " + (r"[^|\n]*\| )" if name in PROMISES else ")")
        page, count = re.subn(rf"{begin}.*$", lambda found, shown=shown: f"{found[1]}{shown} |", page, flags=re.M)
        assert count == 1, name
    return page


if __name__ == "__main__":
    PAGE.write_text(with_results(PAGE.read_text(), RESULTS.read_text()))
