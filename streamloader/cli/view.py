"""`streamloader view` shows the samples of a dataset and of a run in a browser."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
from click import IntRange

from streamloader.cli import arrays
from streamloader.cli import options as shared
from streamloader.cli.measure import packs, parse_clips, parse_image_size, parse_packs
from streamloader.cli.options import option
from streamloader.cli.show import say
from streamloader.errors import UsageError

if TYPE_CHECKING:
    from streamloader.view.server import Server
    from streamloader.view.viewer import ViewOptions

LOOPBACK = "127.0.0.1"


@click.command()
@click.argument("url", required=False)
@shared.split_option
@option("--step", type=IntRange(min=0), help="The step to open; without --epoch, counted from the start of epoch 0.")
@option("--epoch", type=IntRange(min=0), help="The epoch of --step; default: the state's, or 0.")
@option("--rank", type=IntRange(min=0), default=0, help="The rank whose batches are shown first.")
@option("--run", "run_file", metavar="FILE", help="What describe() of the run's dataset returned, as JSON.")
@option("--state", metavar="FILE", help="A saved state_dict() of the run, as JSON.")
@option("--losses", metavar="FILE", help="What sl.LossLog wrote: ranks samples by loss, and describes the run.")
@option("--live", metavar="WHERE", help="A running training: the folder of its StatsFile, or its metrics address.")
@option("--batch-size", type=IntRange(min=1), help="Samples per batch of a rank of the run; default: 32.")
@option("--world-size", type=IntRange(min=1), help="Ranks of the run; default: that of --run, or 1.")
@option("--seed", type=IntRange(min=0), help="The seed of the run.")
@option("--no-shuffle", is_flag=True, help="The run reads samples in stored order.")
@shared.where_option
@option("--image-size", parse=parse_image_size, metavar="SIZE|HxW", help="Size of decoded images, 224 or 192x256.")
@option("--crop", type=click.Choice(["random", "center"]), help="How the run crops images, with --image-size.")
@shared.fields_option
@option("--pack", parse=parse_packs, help='Documents are packed into rows, with fit="best": tokens=2049.')
@option("--clips", parse=parse_clips, help="The field of videos, and its clips: video=16,stride=2,step=8.")
@option("--transform", metavar="MODULE:NAME", help="The transform of the run, a function of a module here. It is run.")
@option("--tokenizer", metavar="FILE", help="A tokenizer.json (needs tokenizers), or bytes: shows tokens as text.")
@arrays.window_step_options
@shared.storage_option
@option("--host", default=LOOPBACK, help="The address to listen on; any other than the default lets the network ask.")
@option("--port", type=IntRange(0, 65535), default=0, help="The port to listen on; 0: a free one.")
@option("--no-browser", is_flag=True, help="Only print the link.")
@shared.json_option
def view(*, host: str, port: int, no_browser: bool, as_json: bool, **options: Any) -> None:
    """Show a dataset and the steps of a run in a browser.

    Samples, statistics, the order, losses. Opens on the batch of a step of a rank, with the crops, packing and masks
    that training had. This process reads the data, with your credentials, and serves the pages on this machine; the
    printed link has the token that they need.
    """
    from streamloader.storage.optional import need  # takes 0.25 s to import, which --help does not need

    need("aiohttp", "'streamloader[view]'")
    from streamloader.view.server import Server
    from streamloader.view.viewer import Viewer

    if not host:  # a server would listen on all addresses
        raise UsageError("--host is empty", "give an address, or 0.0.0.0 to listen on all of them")
    place = {name: value for name in ("step", "epoch") if (value := options.pop(name)) is not None}
    options["step"] = options.pop("window_step")
    place |= {"rank": rank} if (rank := options.pop("rank")) else {}
    viewer = Viewer(view_options(options))
    if place:  # a wrong step is an error of the command, before a page is opened
        viewer.run.place(place.get("step", 0), place.get("epoch"), place.get("rank", 0))
    server = Server(viewer, host, port)
    serve(server, place, no_browser=no_browser, as_json=as_json)


def view_options(options: dict[str, Any]) -> ViewOptions:
    """Return what the options of the command ask for. Raises `UsageError` and the errors of reading their files."""
    from streamloader.options import Decode
    from streamloader.view.run import RunOptions, read_json
    from streamloader.view.viewer import ViewOptions, load_tokenizer

    url, stored = options.pop("url"), options.pop("storage_options")
    run_file, state = (options.pop(name) for name in ("run_file", "state"))
    losses, live, tokenizer = (options.pop(name) for name in ("losses", "live", "tokenizer"))
    if url is None and run_file is None and losses is None:
        raise UsageError("no dataset", "give its URL, or --run or --losses of a run")
    size, crop = options.pop("image_size"), options.pop("crop")
    if crop and not size:
        raise UsageError(f"--crop {crop} without --image-size", "give both")
    sampling, no_shuffle = arrays.take_sampling(options), options.pop("no_shuffle")
    transform, world_size = options.pop("transform"), options.pop("world_size")
    options["pack"] = packs(options["pack"])
    given = {name: value for name, value in options.items() if value is not None}
    given |= {"decode": Decode(size=size, crop=crop)} if size else {}
    given |= {"shuffle": False} if no_shuffle else {}
    run = RunOptions(
        url=url,
        storage_options=stored,
        description=None if run_file is None else read_json(run_file, stored),
        state=None if state is None else read_json(state, stored),
        given=given,
        world_size=world_size,
        transform=transform,
        sampling=sampling,
    )
    return ViewOptions(run, losses, live, None if tokenizer is None else load_tokenizer(tokenizer))


def serve(server: Server, place: dict[str, int], *, no_browser: bool, as_json: bool) -> None:
    """Serve pages until Ctrl-C."""
    import asyncio
    import webbrowser

    from streamloader.storage.url import redact

    async def run() -> None:
        await server.start()
        link = server.address("/step" if place or server.viewer.losses is None else "/losses", **place)
        url = redact(server.viewer.url)
        local = server.host in ("localhost", LOOPBACK, "::1")
        about = url if local else f"{url}: whoever reaches {server.host} and has this link can see it"
        say(json.dumps({"url": url, "link": link}) if as_json else f"{about}\n{link}\nCtrl-C ends it")
        if not no_browser:
            await asyncio.to_thread(webbrowser.open, link)
        try:
            await asyncio.Event().wait()
        finally:
            await server.stop()

    with suppress(KeyboardInterrupt):
        asyncio.run(run())
