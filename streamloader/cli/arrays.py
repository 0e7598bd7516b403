"""Options of commands that read arrays in place, and how what they read of them is shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from click import IntRange

from streamloader.cli.options import option, parse_names, several
from streamloader.cli.show import counted, print_json, print_table, say, show_bytes
from streamloader.errors import UsageError
from streamloader.options import Channels, Extent, Patch, Sampling, Window

if TYPE_CHECKING:
    from streamloader.measure.arrays import ArrayReads, ArraySummary, Rechunking


def parse_extent(text: str) -> Extent:
    """Parse a number of elements, or leave a duration such as 6h as it is."""
    return int(text) if text.isdecimal() else text


def parse_lead(text: str) -> Extent | tuple[Extent, ...]:
    """Parse `24h`, or offsets after the present element: `6h,24h`."""
    leads = tuple(parse_extent(part.strip()) for part in text.split(","))
    return leads if len(leads) > 1 else leads[0]


def parse_sizes(text: str) -> dict[str, int]:
    """Parse `y=256,x=256`. Raises `UsageError`."""
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not size.strip().isdecimal():
            raise UsageError(f"{text!r} is not a size for each dimension", "write it as y=256,x=256")
        sizes[name.strip()] = int(size)
    return sizes


_STEP = "From one element of a window to the next; default: 1."
# the options that declare the samples of arrays, but --step
_sampling_options = several(
    option(
        "--sample-axis",
        parse=parse_extent,
        help="Read arrays of any Zarr store in place: the dimension that samples lie along.",
    ),
    option("--length", parse=parse_extent, help="Elements of a window, or a duration such as 24h."),
    option("--stride", parse=parse_extent, help="From one window to the next; default: 1 element."),
    option("--history", parse=parse_extent, help="Elements of the inputs of a forecast, with --lead."),
    option("--lead", parse=parse_lead, help="Elements of its targets, or offsets: 6h,24h."),
    option("--group", help="Windows have elements of one group: the array with its number."),
    option("--patch", parse=parse_sizes, help="Sizes of patches: y=256,x=256."),
    option("--patch-stride", parse=parse_sizes, help="From one patch to the next; default: its size."),
    option("--channels", parse=parse_names, help="Arrays to stack into one tensor: z@500,t2m."),
    option("--zarr-format", type=IntRange(2, 3), help="The version of Zarr, 2 or 3; default: what is found."),
)
sampling_options = several(_sampling_options, option("--step", parse=parse_extent, help=_STEP))
# of a command whose --step is a step of training
window_step_options = several(_sampling_options, option("--window-step", parse=parse_extent, help=_STEP))


def take_sampling(options: dict[str, Any]) -> Sampling:
    """Remove the options of `sampling_options` from a command's options; return what they declare."""
    lengths = {name: options.pop(name) for name in ("length", "stride", "step", "history", "lead", "group")}
    lengths = {name: value for name, value in lengths.items() if value is not None}
    patch, patch_stride, channels = (options.pop(name) for name in ("patch", "patch_stride", "channels"))
    if patch_stride and not patch:
        raise UsageError("--patch-stride without --patch", "give both")
    windows, patches = Window(**lengths) if lengths else None, Patch(patch, stride=patch_stride) if patch else None
    shared = {name: options.pop(name) for name in ("sample_axis", "zarr_format")}
    return Sampling(windows=windows, patches=patches, channels=Channels(*channels) if channels else None, **shared)


def unused_lines(unused: Mapping[str, int]) -> Iterator[str]:
    """Yield a line that counts the elements that no sample reads, if there are any."""
    counts = [f"{count:,} of {axis}" for axis, count in unused.items() if count]
    if counts:
        yield f"unused    elements that no sample reads: {', '.join(counts)}"


def reads_lines(url: str, reads: Iterable[ArrayReads], cure: Rechunking | None) -> Iterator[str]:
    """Yield a line for each array: what an epoch reads of it, and what its samples use; then the conversion to run."""
    title = "arrays"
    for each in reads:
        stored = f" ({show_bytes(each.stored)} stored)" if each.stored != each.read else ""
        sizes = f"reads {show_bytes(each.read)}{stored} for {show_bytes(each.used)} that samples use"
        again = f", each chunk {each.read / each.least:.2f} times" if each.read > each.least else ""
        yield f"{title:<10}{each.array}: {sizes}, {each.ratio:.1f} times{again}"
        title = ""
    if cure is not None:
        names, axis = ",".join(cure.names), f" --sample-axis {cure.sample_axis}" if cure.sample_axis is not None else ""
        less = cure.after < cure.before
        goal = "to read less" if less else "for smaller blocks, which mix better"
        yield f"          {goal}: streamloader convert {url} DST --rechunk {names}{axis}"
        if less:
            yield f"          an epoch then reads about {show_bytes(cure.after)}, now {show_bytes(cure.before)}"


def inspect_arrays(url: str, storage_options: Mapping[str, Any], sampling: Sampling, *, as_json: bool) -> None:
    """Show the arrays of a group that others wrote, and what samples read of them if they are declared."""
    from streamloader.measure.arrays import rechunking, sampled_reads, summarize
    from streamloader.storage import open_store, references_url

    shown, arrays = open_store(references_url(url), storage_options).url, summarize(url, storage_options)
    reads = sampled_reads(url, storage_options, sampling) if sampling.used else []
    cure = rechunking(reads, sampling)
    if as_json:
        facts = {"arrays": [asdict(array) for array in arrays], "reads": [asdict(each) for each in reads]}
        print_json({"url": shown, **facts, "rechunking": cure and asdict(cure)})
        return
    say(f"{shown}: {counted(len(arrays), 'array')}")
    rows = [(a.name, a.dtype, ", ".join(a.dims), *_sizes(a), a.codecs, a.problem) for a in arrays]
    print_table(("array", "dtype", "dimensions", "shape", "chunk", "shard", "codecs", "problem"), rows, ())
    for line in reads_lines(url, reads, cure):
        say(line)
    if not sampling.used:
        say("give --sample-axis to see what samples read")


def _sizes(array: ArraySummary) -> list[str]:
    return [" x ".join(map(str, sizes)) for sizes in (array.shape, array.chunks, array.shards)]
