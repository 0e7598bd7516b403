"""The web server: who may ask, and which page an address is.

The process that reads the dataset serves pages on this machine. A request needs the token of the link that was printed,
or the cookie that this link sets; the address that it was sent to must be this server's; and pages of other origins may
neither read from it nor show it in a frame.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property, partial
from importlib import resources
from ipaddress import ip_address
from traceback import format_exc
from typing import Any, TypeVar
from urllib.parse import urlencode

from aiohttp import web

from streamloader.errors import SelectionError, StreamloaderError, UsageError
from streamloader.metrics import read_stats
from streamloader.show.media import Media
from streamloader.show.render import render
from streamloader.storage.buffers import LRUCache
from streamloader.storage.process import Quota, in_thread
from streamloader.storage.url import redact
from streamloader.view.run import Place
from streamloader.view.viewer import PAGE, Viewer

MEDIA_BYTES = 1 << 30  # of images and sounds that pages refer to; a page that is older gets 404 for them
DECODING_BYTES = 1 << 30  # of large images that are made smaller at the same time
LEAST_MEDIA = 256  # that are kept however large they are
HEADERS = {
    # what a page may load: its own files, and nothing from anywhere else
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "media-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATIC = {"page.js": "text/javascript", "style.css": "text/css", "icon.svg": "image/svg+xml"}
CROP = re.compile(r"\d{1,6}(,\d{1,6}){3}")  # top, left, height, width; after "field:" if there are several
logger = logging.getLogger(__name__)
LOCAL = ("localhost", "127.0.0.1", "::1")
LOSSES_SHOWN = 60
LIVE_SECONDS = 2.0  # between two looks at a running training, in the page

Result = TypeVar("Result")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Guard:
    """Decides which requests are answered: see the module. `host`: the address that the server listens on."""

    def __init__(self, host: str, token: str) -> None:
        self.token, self._any = token, _is_any(host)
        names = {*LOCAL, host} | ({socket.gethostname(), socket.getfqdn()} if self._any else set())
        self._hosts = {name.lower() for name in names}  # as browsers send them

    def problem(self, request: web.Request, cookie: str) -> str:
        """Return why a request is refused, "" if it is not."""
        try:
            host, own = request.url.host or "", str(request.url.origin())
        except ValueError:  # of a port or a name that cannot be
            return "the host name cannot be read"
        # an IP address cannot be rebound to another server by DNS
        if host not in self._hosts and not (self._any and _is_address(host)):
            return f"the host name {host!r} is not this server's"
        origin = request.headers.get("Origin")
        if origin is not None and origin != own:
            return "requests of other origins are refused"
        site = request.headers.get("Sec-Fetch-Site", "none")
        opens = (request.headers.get("Sec-Fetch-Mode"), request.headers.get("Sec-Fetch-Dest")) == (
            "navigate",
            "document",
        )
        if site not in ("none", "same-origin") and not opens:
            return "requests of other sites are refused"
        given = request.query.get("token") or request.cookies.get(cookie, "")
        known = hmac.compare_digest(given.encode(errors="surrogatepass"), self.token.encode())
        return "" if known else "open the link that was printed"


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_any(host: str) -> bool:
    return _is_address(host) and ip_address(host).is_unspecified


class Server:
    """The pages of a viewer, as an aiohttp application."""

    def __init__(self, viewer: Viewer, host: str, port: int, token: str | None = None) -> None:
        self.viewer, self.host, self.port = viewer, host, port
        self.guard = Guard(host, token or secrets.token_urlsafe(24))
        self._media = LRUCache[str, Media](MEDIA_BYTES, LEAST_MEDIA)
        self._decoding = Quota(DECODING_BYTES)
        self._cookie = f"streamloader-{port}"  # browsers send cookies of one port to others too

    def address(self, path: str = "/", **query: Any) -> str:
        """Return the link that opens a page."""
        host = socket.gethostname() if _is_any(self.host) else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}{path}?{urlencode({**query, 'token': self.guard.token})}"

    def application(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[self._guarded])
        pages: Mapping[str, Callable[[web.Request], str]] = {
            "/step": self._step,
            "/samples": self._samples,
            "/sample": self._sample,
            "/fields": self._fields,
            "/statistics": self._statistics,
            "/order": self._order,
            "/plan": self._plan,
            "/losses": self._losses,
            "/live": self._live,
        }
        app.router.add_get("/", self._first)
        app.router.add_get("/media/{key}", self._send_media)
        app.router.add_get("/static/{name}", self._send_static)
        for path, page in pages.items():
            app.router.add_get(path, _in_thread(page))
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            problem = self.guard.problem(request, self._cookie)
        except ValueError as error:  # of a Host that is no address, or a cookie that is no text
            problem = f"{type(error).__name__} in the headers"
        response: web.StreamResponse
        if problem:
            response = web.Response(status=403, text=f"{problem}\n")
        elif "token" in request.query:
            query = [(name, value) for name, value in request.query.items() if name != "token"]
            # two slashes, which may be backslashes, would begin the address of another server
            response = _redirect("/" + str(request.rel_url.with_query(query)).lstrip("/\\"))
            response.set_cookie(self._cookie, self.guard.token, httponly=True, samesite="Lax", path="/")
        else:
            response = await self._answered(request, handler)
        response.headers.update(HEADERS)
        return response

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.Response(status=error.status, text=f"{error.reason}\n")
        except (StreamloaderError, IndexError) as error:
            return self._failed(400 if isinstance(error, UsageError | IndexError) else 502, str(error))
        except Exception as error:  # noqa: BLE001 - the border of a request: the page says it, and the log has the rest
            logger.error("the page %s failed\n%s", request.path, format_exc())
            return self._failed(500, f"{type(error).__name__}: {error}")

    def _failed(self, status: int, problem: str) -> web.Response:
        page = self._page("error", "Error", problem=redact(problem))
        return web.Response(status=status, text=page, content_type="text/html")

    def _page(self, template: str, title: str, **values: Any) -> str:
        viewer = self.viewer
        tabs = ["step", "samples", "fields", "statistics", "order"]
        tabs += ["losses"] * (viewer.losses is not None) + ["live"] * (viewer.options.live is not None)
        shared = {"title": title, "url": redact(viewer.url), "run": viewer.run, "tabs": tabs, "tab": template}
        return render(f"view/{template}.html", **shared, **values, src=self._source, link=_link)

    def _source(self, media: Media) -> str:
        key = secrets.token_urlsafe(12)
        self._media.add(key, media, media.nbytes)
        return f"/media/{key}"

    async def _first(self, request: web.Request) -> web.StreamResponse:
        return _redirect(_link("/step", **dict(request.query)))

    async def _send_media(self, request: web.Request) -> web.StreamResponse:
        media = self._media.get(request.match_info["key"])
        if media is None:
            raise web.HTTPNotFound(reason="reload the page")
        body = await _thread(partial(self._read, media))
        return _ranged(request, body, media.type)

    def _read(self, media: Media) -> bytes:
        with self._decoding.reserved(media.memory):
            return media.read()

    async def _send_static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in STATIC:  # a name may have encoded slashes
            raise web.HTTPNotFound
        file = resources.files("streamloader.view") / "static" / name
        return web.Response(body=file.read_bytes(), content_type=STATIC[name])

    def _place(self, request: web.Request) -> Place:
        epoch, step, rank = (_number(request, name) for name in ("epoch", "step", "rank"))
        if step is None and epoch is None:
            epoch, step = self.viewer.run.begin
            step = max(0, min(step, self.viewer.run.steps(epoch) - 1))  # of a state at the end of its epoch
        return self.viewer.run.place(step or 0, epoch, rank or 0)

    def _step(self, request: web.Request) -> str:
        place = self._place(request)
        title = f"Epoch {place.epoch}, step {place.step}, rank {place.rank}"
        shown = {"marked": _number(request, "row"), "first": PAGE, "linked": self.viewer.has_numbers}
        return self._page("step", title, place=place, **shown, **self.viewer.step(place))

    def _samples(self, request: web.Request) -> str:
        split, where = request.query.get("split") or self.viewer.source.split, request.query.get("where") or None
        number = _number(request, "page") or 0
        stored = self.viewer.stored(split, where)
        pages = -(-len(stored) // PAGE)
        rows = stored.page(number) if pages else []
        values: dict[str, Any] = {
            "split": split,
            "where": where,
            "number": number,
            "pages": pages,
            "count": len(stored),
        }
        dataset = self.viewer.dataset
        values |= {"splits": () if dataset is None else dataset.splits, "linked": dataset is not None}
        return self._page("samples", "Samples", rows=rows, **values)

    def _sample(self, request: web.Request) -> str:
        number = _number(request, "number") or 0
        split = request.query.get("split") or self.viewer.source.split
        stored = self.viewer.stored(split, None)
        if stored.dataset is None:
            raise UsageError("samples by number of arrays in place", "open a page of samples, or a step")
        found, count = stored.samples([number]), len(stored.dataset)
        if not found:
            raise SelectionError(f"sample {number} of {count:,} samples", "give a smaller number")
        parts = (part.rpartition(":") for part in request.query.get("crop", "").split(";"))
        crops = {name: box.split(",") for name, _, box in parts if CROP.fullmatch(box)}
        title = f"Sample {number}" + (f" of {split}" if split else "")
        return self._page("sample", title, row=found[number], number=number, count=count, split=split, crops=crops)

    def _fields(self, _: web.Request) -> str:
        return self._page("fields", "Fields", **self.viewer.fields())

    def _statistics(self, request: web.Request) -> str:
        name = request.query.get("field")
        if name is None:
            return self._page("statistics", "Statistics", names=list(self.viewer.run.loader.fields))
        return self._page("histogram", name, histogram=self.viewer.statistics(name))

    def _order(self, request: web.Request) -> str:
        place = self._place(request)
        problem = ""
        try:
            options: Any = self.viewer.forecast_options()
        except UsageError as error:
            options, problem = None, str(error)
        order = self.viewer.order(place)
        return self._page("order", "Order", place=place, drawn=order, options=options, problem=problem)

    def _plan(self, request: web.Request) -> str:
        names = "lanes", "window", "block", "world_size", "batch_size", "memory"
        changes = {name: number for name in names if (number := _number(request, name))}
        return self._page("plan", "Plan", **self.viewer.plan(changes))

    def _losses(self, request: web.Request) -> str:
        viewer, number = self.viewer, _number(request, "page") or 0
        losses = viewer.losses
        if losses is None:
            raise UsageError("no losses", "give --losses FILE, which sl.LossLog writes")
        largest = losses.largest[number * LOSSES_SHOWN : (number + 1) * LOSSES_SHOWN]
        rows = viewer.stored(None, None).samples(each.sample for each in largest) if viewer.has_numbers else {}
        values = {"number": number, "pages": -(-len(losses.largest) // LOSSES_SHOWN)}
        return self._page("losses", "Losses", largest=largest, rows=rows, losses=losses, **values)

    def _live(self, _: web.Request) -> str:
        where = self.viewer.options.live
        if where is None:
            raise UsageError("no running training", "give --live with its folder of StatsFile, or its metrics address")
        found = read_stats(where, storage_options=self.viewer.options.run.storage_options)
        return self._page("live", "Live", ranks=found, where=redact(where), seconds=LIVE_SECONDS)

    @cached_property
    def runner(self) -> web.AppRunner:
        """What runs the application."""
        # pages that wait for a store are given up, so that Ctrl-C ends the server at once
        return web.AppRunner(self.application(), access_log=None, shutdown_timeout=0.1)

    async def start(self) -> None:
        """Listen. Sets `port` to the one that the system chose if it was 0. Raises `UsageError` if it is taken."""
        await self.runner.setup()
        site = web.TCPSite(self.runner, self.host, self.port)
        try:
            await site.start()
        except OSError as error:
            await self.runner.cleanup()
            raise UsageError(
                f"cannot listen on {self.host} port {self.port}: {error}", "give another --port"
            ) from error
        self.port = self.runner.addresses[0][1]
        self._cookie = f"streamloader-{self.port}"

    async def stop(self) -> None:
        """End the server."""
        await self.runner.cleanup()
        self.viewer.close()


def _thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """Do work in a thread of its own, which the end of the process does not wait for, as it does for the loop's."""
    return asyncio.wrap_future(in_thread(work))


def _in_thread(page: Callable[[web.Request], str]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(text=await _thread(partial(page, request)), content_type="text/html")

    return handle


def _redirect(location: str) -> web.Response:
    return web.Response(status=303, headers={"Location": location})


def _link(path: str, /, **query: Any) -> str:
    given = {name: value for name, value in query.items() if value is not None and value != ""}
    return f"{path}?{urlencode(given)}" if given else path


def _number(request: web.Request, name: str) -> int | None:
    """Return a number of the query, None if it is missing. Raises `UsageError` for another text."""
    text = request.query.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise UsageError(f"{name}={text!r:.40}", "give a whole number")
    return int(text)


def _ranged(request: web.Request, body: bytes, kind: str) -> web.Response:
    """Return a body, or the range that a player asks for."""
    headers = {"Accept-Ranges": "bytes"}
    try:
        wanted = request.http_range
    except ValueError:
        return web.Response(status=416, headers={"Content-Range": f"bytes */{len(body)}"})
    if wanted.start is None and wanted.stop is None:
        return web.Response(body=body, content_type=kind, headers=headers)
    start, stop, _ = wanted.indices(len(body))
    if start >= stop:
        return web.Response(status=416, headers={"Content-Range": f"bytes */{len(body)}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
    return web.Response(status=206, body=body[start:stop], content_type=kind, headers=headers)
