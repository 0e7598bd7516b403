"""The page of `bench.device` from its lines, all runs with the newest first, and its pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from bench import device_trace
from bench.figures import Line
from bench.plots import plt
from bench.report import table

INTRODUCTION = """# Training on a GPU, fed by the loader

    make bench-device                 # where there is a GPU: six minutes at most
    sh bench/bare.sh bench/.bare      # collects what a bare machine lacks: see bench/README.md
"""
ABOUT = (
    "The bound is the same model trained with one batch that stays on the device, as the loader delivers it (bfloat16,"
    " normalised), in the same process just before. nginx and the loader use the cores of one machine, and the data is"
    " in the page cache. ResNets train in bfloat16, channels last, with batches of 256 images of 224 x 224; raw"
    " images are uint8, JPEGs have about 500 x 375. The transformer has 8 layers of 512 and takes 16 rows of 2,049"
    " packed tokens, each row one causal sequence. `raw`, `jpeg`, `nvjpeg` and `tokens` are `StreamingDataset("
    'device="cuda", ahead=2, cast="bfloat16")`, which copies uint8 and normalises on the device; `nvjpeg` also decodes'
    " there. Others move batches by hand, and normalise them in the step by one kernel.",
    "Waited in next(): the share of the step that the training loop spent there. Waited on the device: its share by"
    " `stats()`. No kernel: the share of some traced steps in which no kernel ran. Loading: CPU time that the training"
    " process spends on it for each step: the greater of what the process takes beyond the bound, and of `next()`"
    " together with what its other threads take beyond the bound (a loop that is ahead of the device spins, which"
    " would hide some of it); also as a share of a core. Worker processes are not in it. Batches: the peak of device"
    " memory beyond that of the model alone, in delivered batches, the one in use and what nvJPEG allocates included;"
    " images that wait are uint8, half of a delivered batch in bfloat16."
    " Copies beside kernels: the share of their time during which kernels ran. Waits for events in next(): the"
    " loader waits so while `ahead` copies have not ended.",
    "TorchCodec's `decode_jpeg` decodes on the device, through nvJPEG, or else torchvision's; the list has each alone.",
)
NONE_YET = (
    "No run on a GPU has measured the loader's own copies to the device yet, nor its decoding there: figures below are"
    " of other ways, and of torchvision's call alone. TorchCodec's call is not measured here either; its developers"
    " found it as fast as torchvision's or faster (https://github.com/meta-pytorch/torchcodec/issues/1560)."
)
OURS = ("raw", "jpeg", "nvjpeg", "tokens")
ON_THE_DEVICE = "on the device (bound)"
COLOURS = {True: "#0b6e99", False: "#d08c60"}
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Target:
    """A figure, what it should be, and what it is: None where it was not measured. `most`: it should not be more."""

    figure: str
    bound: float
    value: float | None
    most: bool = False

    @property
    def verdict(self) -> str:
        """Return "met", "missed" or "not measured"."""
        if self.value is None:
            return NOT_MEASURED
        return "met" if (self.value <= self.bound if self.most else self.value >= self.bound) else "missed"


def write(name: str, results: Path) -> Path:
    """Make the page and the pictures of `results`/<name>.jsonl; return the page."""
    runs: dict[str, list[Line]] = {}
    for text in (results / f"{name}.jsonl").read_text().splitlines():
        line = json.loads(text)
        runs.setdefault(line["run"], []).append(line)
    newest_first = [runs[number] for number in sorted(runs, reverse=True)]
    pictures = list(draw(newest_first, results, name))
    page = results / f"{name}.md"
    page.write_text(markdown(newest_first, pictures))
    return page


def markdown(runs: Sequence[Sequence[Line]], pictures: Sequence[str] = ()) -> str:
    """Return the page; targets are those of the first run."""
    is_measured = any(
        "bound_rate" in line and line["feed"] in OURS and is_on_gpu(line) for lines in runs for line in lines
    )
    about = ABOUT if is_measured else (*ABOUT, NONE_YET)
    parts = [INTRODUCTION, *(f"{fill(text, 120)}\n" for text in about), targets_section(runs[0])]
    parts += [f"![{picture}]({picture})\n" for picture in pictures]
    return "\n".join([*parts, *(part for lines in runs for part in sections(lines))])


def targets_section(lines: Sequence[Line]) -> str:
    """Return what was aimed at, and whether it was reached."""
    body = [
        [
            one.figure,
            f"{'<=' if one.most else '>='} {one.bound:g}",
            "" if one.value is None else f"{one.value:.3g}",
            f"**{one.verdict}**" if one.verdict == "missed" else one.verdict,
        ]
        for one in targets(lines)
    ]
    return f"## Targets, {lines[0]['time'][:10]}\n\n" + table(["", "target", "reached", ""], body)


def targets(lines: Sequence[Line]) -> list[Target]:
    """Return every target, with what the run reached on a GPU."""
    measured = [line for line in lines if "bound_rate" in line and is_on_gpu(line)]
    found = {(line["model"], line["feed"]): line for line in measured}
    ours = [line for (_, feed), line in found.items() if feed in OURS and "fed" in line]
    names = {"raw": "raw", "jpeg": "from JPEG, decoded on the CPU", "nvjpeg": "from JPEG, decoded on the device"}

    def rated(model: str, feed: str, bound: float) -> Target:
        line, title = found.get((model, feed)), {"resnet50": "ResNet-50", "resnet18": "ResNet-18"}[model]
        return Target(f"{title} {names[feed]}, share of the bound", bound, share(line) if line else None)

    def worst(take: Callable[[Line], float | None]) -> float | None:
        return max((value for line in ours if (value := take(line)) is not None), default=None)

    ahead = max((line["ahead"] for line in ours), default=2)
    return [
        *(rated("resnet50", feed, 0.97) for feed in names),
        *(rated("resnet18", feed, 0.9) for feed in ("raw", "nvjpeg")),
        Target("CPU time of loading in the training process, share of a core", 0.1, worst(loading_share), True),
        Target(
            "calls in the traced loops that wait for the stream of the kernels, beyond the bound's",
            0,
            worst(blocking),
            True,
        ),
        Target("device memory in delivered (bfloat16) batches (ahead + 1)", ahead + 1, worst(memory_batches), True),
    ]


def is_on_gpu(line: Line) -> bool:
    """Whether the model itself was trained on a GPU, no small one in its place."""
    return bool(line["device"]["name"] != "cpu" and not line.get("small"))


def share(line: Line) -> float:
    """Return the rate as a share of the bound."""
    return float(line["rate"] / line["bound_rate"])


def per_step(usage: dict[str, Any], name: str) -> float:
    """Return a figure of a loop for each of its steps."""
    return float(usage[name] / usage["steps"])


def loading_seconds(line: Line) -> float | None:
    """Return the CPU seconds of a step that the training process spends on loading."""
    if "fed" not in line:
        return None
    beyond = {
        name: per_step(line["fed"], name) - per_step(line["bound"], name)
        for name in ("cpu_seconds", "other_threads_seconds")
    }
    asking = per_step(line["fed"], "next_cpu_seconds")
    return max(beyond["cpu_seconds"], asking + beyond["other_threads_seconds"])


def loading_share(line: Line) -> float | None:
    """Return the same as a share of a core."""
    seconds = loading_seconds(line)
    return None if seconds is None else seconds / per_step(line["fed"], "seconds")


def blocking(line: Line) -> float | None:
    """Return how many calls waited for the stream of the kernels, beyond those of the bound; nothing without a GPU."""
    trace, bound = line.get("trace", {}), line.get("bound_trace", {})
    if not trace.get("kernels"):
        return None
    return float(max(0, sum(trace["blocking"].values()) - sum(bound.get("blocking", {}).values())))


def memory_batches(line: Line) -> float | None:
    """Return how many delivered batches the loader's device memory was at most; nothing without a GPU.

    What libraries allocate beside torch's allocator, such as nvJPEG, counts.
    """
    if not line.get("fed", {}).get("peak_bytes"):
        return None
    beyond = {name: line["fed"][name] - line["bound"][name] for name in ("peak_bytes", "outside_bytes")}
    return float((beyond["peak_bytes"] + max(0, beyond["outside_bytes"])) / line["batch_bytes"] + 1)


def sections(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what one run measured."""
    yield head(lines[0])
    trained = [line for line in lines if "bound_rate" in line]
    for model in dict.fromkeys(line["model"] for line in trained):
        yield of_model([line for line in trained if line["model"] == model])
    if traces := [line for line in trained if "trace" in line]:
        yield of_traces(traces)
    yield others(lines)


def head(line: Line) -> str:
    """Return when and where a run was."""
    machine, device = line["machine"], next((line[name] for name in ("device",) if name in line), {})
    versions = line.get("versions", {})
    about = [
        f"{device.get('name', 'no device')}",
        f"{machine['cores']} cores{' of ' + machine['processor'] if 'processor' in machine else ''}",
        f"{machine['memory_bytes'] / 1e9:.0f} GB",
        *([f"Python {machine['python']}"] if "python" in machine else []),
        *(f"{name} {versions[name]}" for name in ("torch", "numpy", "simplejpeg") if name in versions),
        *([f"data from {line['server']}"] if "server" in line else []),
        *([f"commit {line['commit']}"] if "commit" in line else []),
        *([line["note"]] if "note" in line else []),
    ]
    return f"## {line['time'][:10]}\n\n{fill(', '.join(about) + '.', 120, break_on_hyphens=False)}\n"


def of_model(lines: Sequence[Line]) -> str:
    """Return the rates of a model and what its loading took."""
    first = lines[0]
    small = " (a small model instead)" if first.get("small") else ""
    rates = sorted(line["bound_rate"] for line in lines)
    spread = f"{rates[0]:,.0f}" if rates[0] == rates[-1] else f"{rates[0]:,.0f} to {rates[-1]:,.0f}"
    idle = next((line["bound_trace"].get("idle") for line in lines if "bound_trace" in line), None)
    body = [[ON_THE_DEVICE, spread, "1", "", "", percent(idle), *[""] * 4], *map(row, lines)]
    titles = ["", f"{first['unit']}/s", "of the bound", "waited in next()", "waited on the device", "no kernel"]
    titles += ["loading, ms a step", "of a core", "batches", "MB"]
    return f"### {first['model']}{small}\n\n" + table(titles, body)


def row(line: Line) -> list[str]:
    """Return the row of a feed."""
    fed = line.get("fed")
    waited = fed["next_seconds"] / fed["seconds"] if fed else None
    stats, trace = line.get("stats", {}), line.get("trace", {})
    is_counted = line["feed"] in OURS and line["device"]["name"] != "cpu"  # no others measure it
    on_device = stats.get("device_wait_seconds") if is_counted else None
    seconds, batches = loading_seconds(line), memory_batches(line)
    return [
        f"**{line['feed']}**" if line["feed"] in OURS else line["feed"],
        f"{line['rate']:,.0f}",
        f"{share(line):.3f}" if fed else f"{share(line):.2f}",
        percent(waited),
        percent(on_device / fed["seconds"] if fed and on_device is not None else None),
        percent(trace.get("idle")),
        "" if seconds is None else f"{seconds * 1e3:.2f}",
        percent(loading_share(line)),
        *(["", ""] if batches is None else [f"{batches:.2f}", f"{batches * line['batch_bytes'] / 1e6:.1f}"]),
    ]


def percent(value: float | None) -> str:
    """Return a share as a percentage, or nothing."""
    return "" if value is None else f"{value:.1%}"


def of_traces(lines: Sequence[Line]) -> str:
    """Return what the traces say."""
    body = []
    for line in lines:
        trace = line["trace"]
        if "failed" in trace:
            body.append([f"{line['model']} {line['feed']}", trace["failed"], *[""] * 6])
            continue
        copied = f"{trace['copied_bytes'] / trace['steps'] / 1e6:.1f}" if "copies" in trace else ""
        waits = [", ".join(f"{n} {name}" for name, n in trace[kind].items()) or "none" for kind in WAITS]
        name, overlap = f"{line['model']} {line['feed']}", percent(trace.get("overlap"))
        waits.append(str(trace.get("event_waits", "")))
        body.append([name, str(trace["steps"]), str(trace.get("streams", "")), copied, overlap, *waits])
    titles = ["", "steps", "streams with kernels", "MB copied a step", "copies beside kernels"]
    titles += ["waits for the stream of the kernels", "for other streams", "for events in next()"]
    return "### traces\n\n" + table(titles, body)


WAITS = ("blocking", "elsewhere")


def others(lines: Sequence[Line]) -> str:
    """Return the rates without a model, and what failed."""
    found = []
    for line in lines:
        name = f"{line['model']} {line['feed']}".strip() or line["kind"]
        if line["kind"] == "copies" and "gigabytes_per_second" in line:
            rates = ", ".join(
                f"{rate:g} GB/s from {memory.replace('_', '-')} memory"
                for memory, rate in line["gigabytes_per_second"].items()
            )
            found.append(f"- Copies to the device: {rates}.")
        for package, rate in line.get("rates", {}).items():
            found.append(f"- nvJPEG through {package}: {rate:,.0f} images/s, batches of {line['batch']}.")
        if why := line.get("failed") or line.get("unsupported"):
            found.append(f"- {name} {NOT_MEASURED}: {why}")
    return "\n".join([*found, ""]) if found else ""


# --- pictures


def draw(runs: Sequence[Sequence[Line]], folder: Path, name: str) -> Iterator[str]:
    """Draw the shares of the bound, and the streams of the newest run where its traces are; yield the files' names."""
    if any("bound_rate" in line for run in runs for line in run):
        yield shares(runs, folder / f"{name}.png")
    traces = folder / f"{name}-traces"
    good = [line for line in runs[0] if "trace" in line and "failed" not in line["trace"]]
    panels = [(f"{line['model']} {line['feed']}", traces / line["trace"]["file"]) for line in good]
    panels = [(title, file) for title, file in panels if file.exists()]
    if panels:
        yield streams(panels, folder / f"{name}-streams.png")


def shares(runs: Sequence[Sequence[Line]], path: Path) -> str:
    """One panel for each model: a bar for each feed of each run, up to the bound."""
    lines = [line for run in runs for line in run if "bound_rate" in line]
    models = [model for model in ("resnet50", "resnet18", "transformer") if any(x["model"] == model for x in lines)]
    counts = [sum(line["model"] == model for line in lines) for model in models]
    figure, axes = plt.subplots(
        len(models), 1, figsize=(10, 0.4 + 1.0 * len(models) + 0.34 * sum(counts)), squeeze=False, height_ratios=counts
    )
    for axis, model in zip(axes.flat, models, strict=True):
        found = [line for line in lines if line["model"] == model][::-1]
        places = list(range(len(found)))
        axis.barh(places, list(map(share, found)), color=[COLOURS[line["feed"] in OURS] for line in found])
        axis.set_yticks(places, [f"{line['feed']}, {line['time'][:10]}" for line in found], fontsize=8)
        most = max(1.0, *map(share, found))
        for place, line in zip(places, found, strict=True):
            text = f"{share(line):.2f}   {line['rate']:,.0f} of {line['bound_rate']:,.0f} {line['unit']}/s"
            axis.text(most * 1.03, place, text, va="center", fontsize=8)
        axis.axvline(1, color="#555555", linestyle="--", linewidth=1)
        axis.set_xlim(0, 1.01 * most)
        axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axis.set_title(f"{model}, share of training with a batch on the device", fontsize=10, loc="left")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    colours = {True: "blue: the loader copies to the device", False: "brown: other ways"}
    shown = {line["feed"] in OURS for line in lines}
    figure.suptitle("; ".join(text for ours, text in colours.items() if ours in shown), fontsize=9)
    return saved(figure, path)


def streams(panels: Sequence[tuple[str, Path]], path: Path) -> str:
    """One panel for each trace: when the streams of the device worked during three steps."""
    drawn = [(title, device_trace.timeline(device_trace.read(file))) for title, file in panels]
    heights = [len(rows) for _, rows in drawn]
    figure, axes = plt.subplots(
        len(drawn), 1, figsize=(11, 0.9 * len(drawn) + 0.35 * sum(heights)), squeeze=False, height_ratios=heights
    )
    for axis, (title, rows) in zip(axes.flat, drawn, strict=True):
        for place, (name, intervals) in enumerate(rows.items()):
            spans = [(begin, end - begin) for begin, end in intervals]
            colour = COLOURS["kernels" in name or "operators" in name]
            axis.broken_barh(spans, (place - 0.35, 0.7), facecolors=colour, edgecolors=colour, linewidth=0.6)
        axis.set_yticks(range(len(rows)), list(rows), fontsize=8)
        axis.invert_yaxis()
        axis.set_title(f"{title}: three steps, ms", fontsize=10, loc="left")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return saved(figure, path)


def saved(figure: Any, path: Path) -> str:
    """Write the picture and return its name."""
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path.name
