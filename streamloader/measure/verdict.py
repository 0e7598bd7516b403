"""What limits a dataset on this machine, from its ceilings and what the loader made of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamloader.measure.ceiling import Ceiling
from streamloader.stats import BUSY, Stats

# Unpacking chunks is the limit where it takes the ceiling below this share of fetching alone and keeps the cores busy:
# else other programs took the difference.
UNPACKING_COSTS = 0.8
# A loader below this share of its ceiling is itself the limit.
NEAR = 0.7


@dataclass(frozen=True)
class Measured:
    """What the verdict is made from. `fetch` and `unpack` are ceilings of the same bytes, `images` of decoding alone.

    `held`: every field is held in memory, so that only the first epoch fetched. `stats` are the loader's, if known.
    """

    fetch: Ceiling
    unpack: Ceiling
    images: Sequence[Ceiling]
    loader: Ceiling
    stats: Stats | None
    cores: int
    held: bool = False


def judge(measured: Measured) -> tuple[float, str]:
    """Return the share of the lowest ceiling that the loader reached, and one sentence: the limit, how far, what helps.

    Of bytes, where they are the limit: samples of the shuffle window that is still being filled were fetched, but
    not handed out.
    """
    loader, stats = measured.loader, measured.stats
    if measured.held:
        rate = f"{loader.samples_per_second:,.0f} samples/s"
        return 1.0, f"memory-bound: every field is held in memory after the first epoch; {rate} from there"
    cores = f"{measured.cores} core{'' if measured.cores == 1 else 's'} busy"
    images = _together(measured.images)
    if measured.images and images < measured.unpack.samples_per_second:
        limit, ratio = "decode", _share(loader.samples_per_second, images)
        reached = f"{ratio:.2f} of what decoding the images alone gives; {cores}"
        change = "choose fewer pixels, simplejpeg and OpenCV, or more cores"
    elif _unpacking_costs(measured):
        limit, ratio = "decode", _share(loader.megabytes_per_second, measured.unpack.megabytes_per_second)
        reached = f"{ratio:.2f} of what fetching and unpacking chunks give; {cores}"
        change = "choose codec lz4 or none, or more cores"
    else:
        limit, ratio = "network", _share(loader.megabytes_per_second, measured.fetch.megabytes_per_second)
        flight = f"; {stats.requests_in_flight:.3g} requests in flight" if stats is not None else ""
        reached = f"{ratio:.2f} of what this endpoint gives{flight}"
        change = "a faster endpoint or line, or fewer bytes a sample, gives more"
    if ratio >= NEAR:
        return ratio, f"{limit}-bound: {reached}; {change}"
    inside = f"; what it waited for: {stats.verdict}" if stats is not None else ""
    return ratio, f"loader-bound: {reached}{inside}"


def _unpacking_costs(measured: Measured) -> bool:
    unpack = measured.unpack
    slower = unpack.megabytes_per_second < UNPACKING_COSTS * measured.fetch.megabytes_per_second
    return slower and unpack.cpu_seconds >= BUSY * measured.cores * unpack.seconds


def _together(images: Sequence[Ceiling]) -> float:
    """Return the samples/s at which all image fields of a sample are decoded."""
    return _share(1.0, sum(_share(1.0, image.samples_per_second) for image in images))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
