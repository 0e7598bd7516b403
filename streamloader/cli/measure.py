"""`streamloader plan` forecasts training on a dataset; `streamloader bench` measures what limits the loader."""

from __future__ import annotations

import html
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import IntRange

from streamloader.cli import arrays
from streamloader.cli import options as shared
from streamloader.cli.options import option, parse_names
from streamloader.cli.show import counted, display, print_json, print_result, print_table, say, show_bytes
from streamloader.cli.terminal import echo, paint
from streamloader.errors import DestinationError, UsageError
from streamloader.options import Channels, Clips, Pack, Sampling, Shuffle

if TYPE_CHECKING:
    from streamloader.measure.bench import BenchProgress
    from streamloader.measure.ceiling import Ceiling
    from streamloader.measure.forecast import Forecast, MixtureForecast

MIN_BYTES = 1_000_000  # for CPU seconds per GB: fewer say nothing
DOTS = 20_000  # a plot cannot resolve more
SHARES = 8  # of classes that are printed
PLOTS = (".png", ".svg", ".html")
_PLOT = "Draw the plan to this .png, .svg or .html file (needs matplotlib)."
_OUTPUT = "Write them to this file, for normalize=; default: print them."
PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<body style="font: 14px sans-serif"><h1>{title}</h1><pre>{text}</pre>{picture}
"""


def parse_output(text: str) -> Path:
    """Return the path of a file to write. Raises `DestinationError` before anything is computed if that cannot be."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DestinationError(f"{text} cannot be written", "name a file in a folder that exists and is writable")
    return path


def parse_image_size(text: str) -> tuple[int, int] | None:
    """Parse `192x256` or `224` into (height, width); None for 0. Raises `UsageError`."""
    height, by, width = text.lower().partition("x")
    if not height.isdecimal() or (by and not width.isdecimal()):
        raise UsageError(f"--image-size {text!r}", "write it as 224, as 192x256 (height x width), or 0")
    size = (int(height), int(width if by else height))
    return size if all(size) else None


def parse_weights(text: str) -> tuple[float, ...] | str:
    """Parse `0.7,0.3`; other text is returned as it is."""
    with suppress(ValueError):
        return tuple(map(float, text.split(",")))
    return text


def parse_key(text: str) -> str | tuple[str, ...]:
    """Parse `key`, or `id,image_id`."""
    names = parse_names(text)
    if len(names) > 2 or not all(names):
        raise UsageError(f"--on {text!r}", "write the key of both sides, or of the left and the right: id,image_id")
    return names if len(names) > 1 else names[0]


def parse_clips(text: str) -> dict[str, Clips]:
    """Parse `video=16,stride=2` into the clips of a field. Raises `UsageError`."""
    (field, _, frames), *others = (part.strip().partition("=") for part in text.split(","))
    values: dict[str, Any] = {name: value for name, _, value in others} | {"frames": frames}
    if not field or values.keys() - vars(Clips()).keys() or len(values) <= len(others):
        raise UsageError(f"--clips {text!r}", "write it as video=16,stride=2,step=8,size=224x224,unit=frames")
    for name, value in values.items():
        with suppress(ValueError):  # `Clips` says what is invalid
            values[name] = tuple(map(int, value.split("x"))) if name == "size" else json.loads(value)
    return {field: Clips(**values)}


def parse_schedule(texts: Sequence[str]) -> dict[int, tuple[float, ...]]:
    """Parse each `10000:0.5,0.5` into weights by what they begin after. Raises `UsageError`."""
    schedule = {}
    for text in texts:
        begin, _, weights = text.partition(":")
        parsed = parse_weights(weights)
        if not begin.isdecimal() or isinstance(parsed, str) or int(begin) in schedule:
            remedy = "write from when on, and a weight for each URL: --schedule 10000:0.5,0.5"
            raise UsageError(f"--schedule {text!r}", remedy)
        schedule[int(begin)] = parsed
    return schedule


def parse_packs(text: str) -> dict[str, int]:
    """Parse `tokens=2049` or `tokens=2049,loss_mask=2049` into lengths by field. Raises `UsageError`."""
    packs = {}
    for part in text.split(","):
        name, by, length = part.strip().rpartition("=")
        if not by or not length.isdecimal() or name in packs:
            raise UsageError(f"--pack {text!r}", "write a field and the length of its rows: tokens=2049")
        packs[name] = int(length)
    return packs


@click.command()
@shared.place("urls", nargs=-1, required=True, metavar="URL...")
@option(
    "--weights",
    parse=parse_weights,
    help="The weight of each URL in a mixture of them: 0.7,0.3. Of one URL: what its samples are drawn by, a field or "
    "file of their weights, or balanced:label.",
)
@option("--no-replacement", is_flag=True, help="Draw each sample at most once in an epoch.")
@option("--weigh", help="The field whose elements the weights count, say tokens; default: samples.")
@option(
    "--stop", type=click.Choice(["first", "last"]), help="The source that ends an epoch of a mixture; default: first."
)
@option(
    "--schedule",
    multiple=True,
    parse=parse_schedule,
    help="Other weights of a mixture from a step on, 10000:0.5,0.5; may be repeated.",
)
@option("--schedule-by", help="What --schedule counts: steps (the default), samples, or a field such as tokens.")
@option("--unit", type=int, help="Samples of a turn of a mixture; default: 8, if it divides the global batch.")
@option("--world-size", type=int, default=1, help="Number of ranks.")
@option("--batch-size", type=int, default=256, help="Samples per batch of a rank.")
@shared.fields_option
@shared.split_option
@arrays.sampling_options
@shared.where_option
@shared.exclude_option
@option("--bucket-by", help="The field by whose length batches get samples of like length.")
@option("--bucket-steps", type=int, default=100, help="Steps among which samples exchange their places.")
@option("--max-tokens", type=int, help="With --bucket-by: the most elements of a padded batch, whose samples vary.")
@option(
    "--pack",
    parse=parse_packs,
    help='The field and the length of the rows that documents are packed into, with fit="best": tokens=2049.',
)
@option("--clips", parse=parse_clips, help="The field of videos, and its clips: video=16,stride=2,step=8.")
@option("--join", metavar="URL", help="The dataset that has more fields for the samples of each URL.")
@option("--on", parse=parse_key, help="The field that joins them: key, or id,image_id; default: sample by sample.")
@option("--no-split", is_flag=True, help="Leave documents out that are longer than a row.")
@option("--block", type=int, help="Samples that are fetched together; default: the dataset's.")
@option("--lanes", type=int, help="Lanes that batches take samples from in turn; default: the dataset's.")
@option("--window", type=int, help="Samples within which a lane is shuffled; default: the dataset's.")
@option("--no-shuffle", is_flag=True, help="Read samples in stored order.")
@shared.size_option("--memory", help="Memory for the loader of a rank, say 2GiB; default: what it needs.")
@shared.size_option("--cache", help="The limit of a cache on each machine's disk, say 200GiB: what later epochs find.")
@option("--ranks-per-machine", "ranks_here", type=int, default=1, help="Ranks that share a machine.")
@shared.storage_option
@shared.json_option
@option("--plot", parse=parse_output, metavar="FILE", help=_PLOT)
def plan(*, urls: tuple[str, ...], no_shuffle: bool, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Forecast training: memory, requests, how well batches mix.

    Several URLs with --weights are a mixture: prints the share of each in samples, and in the elements of
    variable-length fields such as tokens. The other options hold for every source. With --weights of one URL, prints
    how many different samples an epoch has, and the share of each class.

    Reads no samples; with --where it reads the small fields that the condition names.
    """
    from streamloader.measure.forecast import ForecastOptions, forecast, forecast_mixture

    sampling, weights = arrays.take_sampling(options), options.pop("weights")
    names = "weigh", "stop", "unit", "schedule", "schedule_by"
    mixture = {name: value for name in names if (value := options.pop(name)) not in (None, {})}
    options["replacement"] = not options.pop("no_replacement")
    options["pack"] = packs(options["pack"], split=not options.pop("no_split"))
    if isinstance(weights, str) and len(urls) == 1:
        options["weights"], weights = weights, None
    mixed = weights is not None or len(urls) > 1 or bool(mixture)
    if mixed and (isinstance(weights, str) or len(weights or ()) != len(urls)):
        if isinstance(weights, str):
            raise UsageError(f"--weights {weights!r}", "give a number for each URL: 0.7,0.3")
        problem = f"{counted(len(urls), 'URL')} with {counted(len(weights or ()), 'weight')}"
        raise UsageError(problem, "give a weight for each URL: --weights 0.7,0.3")
    if plot is not None and (mixed or plot.suffix not in PLOTS):
        raise UsageError(f"--plot {plot}", "name a .png, .svg or .html file, and one URL without --weights")
    order = {name: options.pop(name) for name in ("block", "lanes", "window")}
    if no_shuffle and any(order.values()):
        raise UsageError("--no-shuffle with --block, --lanes or --window", "leave one of them out")
    chosen = ForecastOptions(shuffle=not no_shuffle and Shuffle(**order), sampling=sampling, **options)
    if mixed:
        print_mixture(forecast_mixture(list(zip(urls, weights, strict=True)), chosen, **mixture), as_json=as_json)
        return
    planned = forecast(urls[0], chosen)
    if plot is not None:  # before anything is printed: matplotlib may be missing
        draw(planned, plot)
    print_result(planned.to_dict(), "\n".join(forecast_lines(planned)), as_json=as_json)


def packs(lengths: Mapping[str, int] | None, *, split: bool = True) -> dict[str, Pack] | None:
    """Return what `--pack` asks for: rows that documents fit best. Raises `UsageError` for `--no-split` without it."""
    if lengths is None and not split:
        raise UsageError("--no-split without --pack", "give both, or leave it out: --pack tokens=2049 --no-split")
    if lengths is None:
        return None
    return {name: Pack(length, fit="best", split=split) for name, length in lengths.items()}


def forecast_lines(planned: Forecast) -> list[str]:
    """Return the forecast as lines of text."""
    mixed = [
        f"({mixing.rows:,} rows) comes from {mixing.blocks:,.0f} blocks; the variance of its mean is at most "
        f"{mixing.design_effect:.2f} times that of independent rows"
        for mixing in (planned.rank, planned.together)
    ]
    return [
        f"{planned.url}: {planned.num_samples:,} samples",
        *_copies_lines(planned),
        *_packed_line(planned),
        _steps_line(planned),
        f"order     blocks of {counted(planned.block, 'sample')}, {counted(planned.lanes, 'lane')}, "
        f"a window of {planned.window:,} in each",
        *_more_lanes(planned),
        _memory_line(planned),
        _requests_line(planned),
        f"reading   {_reading(planned)}",
        *_cache_lines(planned),
        *arrays.unused_lines(planned.unused),
        *arrays.reads_lines(planned.url, planned.arrays, planned.rechunking),
        f"mixing    the batch of a rank {mixed[0]}",
        f"          the global batch {mixed[1]}",
        *_better_mixing(planned),
        *_padding_line(planned),
    ]


def _cache_lines(planned: Forecast | MixtureForecast) -> Iterator[str]:
    if (cache := planned.cache) is None:
        return
    shares = ", ".join(f"{hits:.1%}" for hits in cache.hits)
    counts = ", ".join(f"{count:,}" for count in cache.requests)
    yield f"cache     {show_bytes(cache.limit)}, of {show_bytes(cache.needed)} that hold all: later ones have {shares}"
    yield f"          of their blocks there, and send {counts} requests"
    if cache.nodes > 1:
        again = f"{cache.again:.1%} of its blocks again in the next epoch"
        yield f"          each of {cache.nodes:,} machines reads {again}"


def _copies_lines(planned: Forecast) -> Iterator[str]:
    if planned.copies is None:
        return
    times = "each once" if planned.copies.most == 1 else f"one up to {planned.copies.most:,} times"
    yield f"weights   {planned.num_samples:,} draws an epoch, of {planned.copies.samples:,} samples, {times}"
    shares = [f"{name} {share:.2%}" for name, share in planned.copies.shares.items()]
    if shares:
        more = f", ... ({len(shares):,} classes)" if len(shares) > SHARES else ""
        yield f"          {', '.join(shares[:SHARES])}{more}"


def _packed_line(planned: Forecast) -> Iterator[str]:
    if (packed := planned.packed) is not None:
        left_out = f"; {packed.dropped:,} longer documents are left out" if packed.dropped else ""
        documents = f"rows of {packed.length:,} elements, of {packed.documents:,} documents"
        yield f"packing   {documents}, {packed.padding:.2%} of them padding{left_out}"


def _padding_line(planned: Forecast | MixtureForecast) -> Iterator[str]:
    if planned.padding is not None:
        within, without = planned.padding
        yield f"padding   {within:.1%} of a padded batch, without buckets {without:.1%}"


def _steps_line(planned: Forecast | MixtureForecast) -> str:
    ranks, size = planned.world_size, planned.batch_size
    together = f"{counted(size, 'sample')} on each of {counted(ranks, 'rank')} ({ranks * size:,} together)"
    return f"steps     {planned.steps:,} an epoch, of {'up to ' * bool(planned.max_tokens)}{together}"


def _memory_line(planned: Forecast | MixtureForecast) -> str:
    held = f"; {', '.join(planned.held)} held in memory" if planned.held else ""
    if planned.kept:
        blocks = "blocks are" if planned.kept == 1 else f"{planned.kept:.0%} of the blocks are"
        held += f"; {blocks} kept in memory, and not read again in later epochs"
    return f"memory    {show_bytes(planned.memory)} for each rank, at least {show_bytes(planned.least_memory)}{held}"


def _requests_line(planned: Forecast | MixtureForecast, about: str = "") -> str:
    each = show_bytes(planned.bytes / planned.requests) if planned.requests else "0 B"
    return f"requests  {about}{planned.requests:,} an epoch over all ranks, of {each}: {show_bytes(planned.bytes)}"


def print_mixture(planned: MixtureForecast, *, as_json: bool) -> None:
    """Print the forecast of a mixture as JSON, or as lines of text and a table of its sources."""
    if as_json:
        print_json(planned.to_dict())
        return
    say(f"mixture of {counted(len(planned.sources), 'source')}: {planned.num_samples:,} samples an epoch")
    lines = [_steps_line(planned), _memory_line(planned), _requests_line(planned, "about ")]
    say("\n".join([*lines, *_cache_lines(planned), *_padding_line(planned)]))
    for begin, later in planned.schedule:
        shown = ", ".join(f"{share:.1%}" for share in later)
        say(f"schedule  from {begin:,} {planned.schedule_by} on, {shown} of the samples")
    say(f"reading   {f'more than that: {planned.rereads}' if planned.rereads else 'each block once'}")
    fields = planned.sources[0].field_shares
    right = ["weight", "share of samples", *(f"share of {name}" for name in fields), "samples", "passes"]
    right += ["requests", "bytes"]
    rows = []
    for source in planned.sources:
        shares = [f"{share:.1%}" for share in (source.share, *(source.field_shares[name] for name in fields))]
        counts = f"{source.num_samples:,}", f"{source.passes:.2f}", f"{source.requests:,}", show_bytes(source.bytes)
        rows.append([source.url, f"{source.weight:g}", *shares, *counts])
    print_table(["source", *right], rows, right)


def _more_lanes(planned: Forecast) -> Iterator[str]:
    if planned.lanes != planned.pinned_lanes:
        yield (
            f"          the dataset has {planned.pinned_lanes} lanes: a run begun on {planned.world_size:,} ranks takes"
            f" {planned.lanes:,} and keeps them; a single rank that resumes it needs {show_bytes(planned.memory_alone)}"
        )


def _better_mixing(planned: Forecast) -> Iterator[str]:
    if planned.better is not None:
        effect, memory = f"{planned.better.design_effect:.2f}", show_bytes(planned.better.memory)
        better = f"that of a rank is at most {effect} times, in {memory} at least"
        yield f"          with --lanes {planned.better.lanes} {better}"


def _reading(planned: Forecast) -> str:
    ranks, lanes, factor = planned.world_size, planned.lanes, f"{planned.read_factor:.1f}"
    if planned.read_factor == 1:
        return "each block once"
    if not planned.shuffle:
        return f"each chunk by about {factor} ranks; take a --batch-size of {planned.block} or a multiple"
    if ranks > planned.blocks // 4:
        return f"each block about {factor} times, since {ranks} ranks share {planned.blocks:,} blocks"
    better = f"take --lanes {-(-lanes // ranks) * ranks}"
    return f"each block about {factor} times, since {ranks} ranks do not divide {lanes} lanes; {better}"


def draw(planned: Forecast, path: Path) -> None:
    """Draw the forecast to a file; a page has its text too. Raises `UsageError` if matplotlib is not installed."""
    from streamloader.storage.optional import need

    figure = need("matplotlib.figure").Figure(figsize=(11, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    dots = [(step, block) for step, blocks in enumerate(planned.drawn) for block in sorted(set(blocks))]
    dots = dots[:: max(1, -(-len(dots) // DOTS))]
    left.scatter([step for step, _ in dots], [block for _, block in dots], s=4, color="#0b6e99", linewidths=0)
    left.set(title="blocks in each global batch", xlabel="step", ylabel="block, as stored")
    left.set_ylim(-0.5, max(1, planned.blocks) - 0.5)
    counts = [len(set(blocks)) for blocks in planned.drawn]
    right.plot(range(len(counts)), counts, color="#0b6e99")
    right.set(title="distinct blocks per global batch", xlabel="step", ylim=(0, max([1, *counts]) * 1.1))
    figure.suptitle(f"{planned.num_samples:,} samples, {planned.world_size} ranks, {planned.batch_size} a batch")
    if path.suffix != ".html":
        figure.savefig(path, dpi=120)
        return
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg, title = picture.getvalue(), html.escape(f"Plan of {planned.url}")
    text = html.escape("\n".join(forecast_lines(planned)))
    path.write_text(PAGE.format(title=title, text=text, picture=svg[svg.index("<svg") :]), "utf-8")


@click.command()
@shared.place("url")
@shared.fields_option
@shared.split_option
@option("--sample-axis", parse=arrays.parse_extent, help="The dimension that samples lie along.")
@option("--channels", parse=parse_names, help="Arrays, and slices of them: z@500,t2m; default: all arrays.")
@shared.where_option
@shared.exclude_option
@option("--raw", is_flag=True, help="Take values as stored, without CF attributes.")
@shared.size_option("--memory", help="Memory for the loader, say 2GiB; default: what it needs.")
@option("--output", parse=parse_output, metavar="FILE", help=_OUTPUT)
@option("--save", is_flag=True, help="Save them in the dataset, for normalize=True.")
@shared.storage_option
@shared.json_option
def stats(*, url: str, raw: bool, output: Path | None, save: bool, as_json: bool, **options: Any) -> None:
    """Fit mean and standard deviation of arrays and images.

    The result is what normalize= takes. Those of images are numbers from 0 to 1 for each channel:
    Decode(normalize=(mean, std)). Prints the JSON document that normalize= reads; with --output or --save only if
    --json is given too.
    """
    from streamloader.measure.statistics import fit_document, save_in

    axis, channels = options.pop("sample_axis"), options.pop("channels")
    sampling = Sampling(sample_axis=axis, channels=Channels(*channels) if channels else None, decode_cf=not raw)
    document = fit_document(url, sampling, **options)
    if save:
        save_in(url, document, options["storage_options"])
    if output is not None:
        output.write_text(document + "\n")
    if as_json or (not save and output is None):
        print_json(json.loads(document))


@click.command()
@shared.place("url")
@option("--batch-size", type=IntRange(min=1), help="Samples per batch; default: 256, or all of a smaller dataset.")
@shared.fields_option
@shared.split_option
@option("--seconds", type=float, default=10.0, help="Duration of each stage.")
@shared.size_option("--memory", help="Memory for the loader, say 2GiB; default: what its window needs.")
@option(
    "--image-size",
    default="224",
    parse=parse_image_size,
    metavar="SIZE|HxW",
    help="Image size, 224 or 192x256; 0: do not decode.",
)
@shared.storage_option
@shared.json_option
def bench(*, url: str, as_json: bool, **options: Any) -> None:
    """Measure store and loader, and find what limits the loader.

    The dataset at URL is read. The stages: fetch, fetch and unpack, decode images from memory, the loader. Nothing is
    written.
    """
    from streamloader.measure.bench import BenchOptions
    from streamloader.measure.bench import bench as run

    with display() as shown:

        def listen(progress: BenchProgress) -> None:
            rates = {"samples/s": progress.samples_per_second, "MB/s": progress.megabytes_per_second}
            rate = ", ".join(f"{value:,.0f} {unit}" for unit, value in rates.items() if value)
            shown.show(progress.stage, progress.done_seconds, progress.total_seconds, "s", rate)

        result = run(url, BenchOptions(**options), listen)
    if as_json:
        print_json(result.to_dict())
        return
    measured = f"{result.url}: {result.num_samples:,} samples, batches of {result.batch_size}"
    say(f"{measured}, the first after {result.first_batch_seconds:.2f} s")
    right = ("samples/s", "MB/s", "CPU s/GB", "requests", "per request")
    print_table(("stage", *right), map(_cells, (*result.ceilings, result.loader)), right)
    limit, colon, rest = result.verdict.partition(":")
    echo(paint(limit, sys.stdout, bold=True) + colon + rest, sys.stdout)


def _cells(row: Ceiling) -> list[str]:
    cpu = f"{row.cpu_seconds / row.bytes * 1e9:.2f}" if row.bytes >= MIN_BYTES else ""
    requests, size = (f"{row.requests:,}", show_bytes(row.bytes / row.requests)) if row.requests else ("", "")
    return [row.name, f"{row.samples_per_second:,.0f}", f"{row.megabytes_per_second:,.1f}", cpu, requests, size]
