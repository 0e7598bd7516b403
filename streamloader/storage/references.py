"""Read-only client of a file of references, as kerchunk and VirtualiZarr write them: JSON, or a folder of Parquet.

`reference://::URL` is the store of such a file, whose objects are ranges of other objects. A URL in it may be relative
to the file. Anybody may have written it, so nothing in it is evaluated but names and arithmetic of whole numbers, and
it cannot make this process read whatever it names.
"""

from __future__ import annotations

import ast
import base64
import itertools
import json
import operator
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

import numpy as np

from streamloader import errors
from streamloader.storage.buffers import RECEIVER, Buffer, Receiver
from streamloader.storage.generic import checked_redirects, is_cloud_service
from streamloader.storage.objects import ObjectInfo, ReadOnlyClient
from streamloader.storage.optional import pa, pq
from streamloader.storage.process import finished_before_exit
from streamloader.storage.url import CHAIN, REFERENCES, Location, parse_location, redact

if TYPE_CHECKING:  # a store may be one of references, which opens those of their targets
    from streamloader.storage.store import Store

OpenStore: TypeAlias = "Callable[[str, Mapping[str, Any] | None], Store]"
MAX_GENERATED = 1 << 20  # references of the `gen` of a file: 20 s
MAX_TEXT = 1 << 12  # characters of a URL that has expressions
MAX_PAGE_BYTES = 1 << 28  # of a page of Parquet, decompressed
MAX_PAGE_ROWS = 1 << 20
DOCUMENT = ".zmetadata"  # of a folder of Parquet
COLUMNS = ("path", "offset", "size", "raw")  # of its pages
PAGE_REFERENCES = 1 << 19  # of the pages of Parquet that are kept, but at least eight pages: about 90 bytes each
_EXPRESSION = re.compile(r"\{\{(.*?)\}\}|\{[%#]", re.DOTALL)
_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}
BUCKETS = ("s3", "gs", "az", "hf", "memory")  # protocols whose URLs name no host
# a host or bucket, and a path that is the same in all encodings
_FOLDER = re.compile(r"((?:s3a?|gs|gcs|https?)://[\w.-]+(?::\d+)?)((?:/[\w=~-][\w.=~-]*)*)", re.ASCII)
_INVALID = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)


class Range(NamedTuple):
    """A range of the object at a URL, relative to the file; the whole object if `size` is None."""

    url: str
    offset: int = 0
    size: int | None = None


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Raise what goes wrong with values of a file in the block as `FormatError`s that name it."""
    try:
        yield
    except _INVALID as error:
        problem = f"{where} cannot be used ({type(error).__name__}: {error})"
        raise errors.FormatError(problem, "restore the file, or write the references again") from error


class JsonReferences:
    """The references of a JSON document, of version 0 or 1 of kerchunk's specification. Raises `FormatError`."""

    def __init__(self, data: bytes, url: str) -> None:
        self._url = url
        with _naming(f"the file of references {url}"):
            document = json.loads(data)
            version = document.get("version")
            if version not in (None, 1):
                raise ValueError(f"version {version!r:.20} is not supported")
            if version is None:
                document = {"refs": document}
            self._templates = dict(document.get("templates") or {})
            self.values = dict(document.get("refs") or {})
            for generator in document.get("gen") or ():
                self.values |= self._generated(generator)

    def find(self, key: str) -> Range | bytes:
        """Return the object, or the range that it is. Raises `FileNotFoundError`, and `FormatError`."""
        if key not in self.values:
            raise FileNotFoundError(key)
        value = self.values[key]
        with _naming(f"the reference {key!r} in {self._url}, {value!r:.80},"):
            if isinstance(value, Mapping):
                return json.dumps(value).encode()
            if isinstance(value, str):
                return base64.b64decode(value[7:], validate=True) if value.startswith("base64:") else value.encode()
            url, *span = value
            return _range(expand(url, self._templates) if "{{" in url else url, *span)

    def _generated(self, generator: Mapping[str, Any]) -> dict[str, Any]:
        """Return the references that an item of `gen` describes, one for each combination of its dimensions."""
        dimensions = {
            name: of if isinstance(of, list) else range(of.get("start", 0), of["stop"], of.get("step", 1))
            for name, of in generator["dimensions"].items()
        }
        count = prod(map(len, dimensions.values()))
        if count > MAX_GENERATED:
            raise ValueError(f"gen makes {count} references, at most {MAX_GENERATED} are supported")
        span = [generator[name] for name in ("offset", "length") if name in generator]
        found = {}
        for values in itertools.product(*dimensions.values()):
            names = {**self._templates, **dict(zip(dimensions, values, strict=True))}
            key, url = (expand(generator[name], names) for name in ("key", "url"))
            found[key] = [url, *(int(expand(str(number), names)) for number in span)]
        return found


def expand(text: str, names: Mapping[str, Any]) -> str:
    """Return a text with the values of the expressions `{{...}}` in it.

    An expression is a name, a number, a text in quotes, arithmetic of whole numbers, or a template with its arguments,
    as in `{{f(c='x')}}`. Raises ValueError for anything else: no name has attributes here.
    """

    def value_of(match: re.Match[str]) -> str:
        name = (match[1] or "").strip()
        if name in names and "{{" not in str(names[name]):  # also a name that Python reserves
            return str(names[name])
        try:
            return str(_evaluate(_parsed(name), names))
        except _INVALID as error:
            supported = "names that the file defines, and whole numbers with + - * // %, are"
            raise ValueError(f"the expression {match[0]!r:.80} is not supported: {supported}") from error

    expanded = _EXPRESSION.sub(value_of, text[:MAX_TEXT])
    if max(len(text), len(expanded)) > MAX_TEXT:
        raise ValueError(f"it has more than {MAX_TEXT} characters")
    return expanded


@lru_cache(1 << 10)
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression. Raises one of `_INVALID` if it is not supported."""
    match node:
        case ast.Constant(value=int() | str() as value):
            return value
        case ast.Name(id=name) if "{{" not in str(names[name]):
            return names[name]
        case ast.BinOp(left=left, op=op, right=right):
            terms = _evaluate(left, names), _evaluate(right, names)
            if all(type(term) is int for term in terms):
                return _OPERATORS[type(op)](*terms)
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
            return expand(names[name], {str(given.arg): _evaluate(given.value, names) for given in keywords})
    raise ValueError("not supported")


def _range(url: Any, offset: Any = 0, size: Any = None) -> Range:
    """Return a range. Raises ValueError unless its values can be one."""
    numbers = (offset, 0 if size is None else size)
    if type(url) is not str or not url or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise ValueError("not a URL, an offset and a length")
    return Range(url, offset, size)


class ParquetReferences:
    """The references of a folder of Parquet pages, each with those of `record_size` chunks of an array, in their order.

    Pages are read when they are needed. Raises `FormatError`; `CorruptError` for a page that cannot be read, and
    `MissingObjectError` for one that does not exist.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._document = store.get(DOCUMENT)
        with _naming(f"the file of references {store.url}/{DOCUMENT}"):
            document = json.loads(self._document)
            self.values, self._record_size = dict(document["metadata"]), document["record_size"]
            if type(self._record_size) is not int or self._record_size < 1:
                raise ValueError(f"record_size {self._record_size!r:.20}")
        self._page = lru_cache(max(8, PAGE_REFERENCES // self._record_size))(self._read_page)
        self._loading: dict[tuple[str, int], threading.Lock] = {}

    def find(self, key: str) -> Range | bytes:
        """Return the object, or the range that it is. Raises `FileNotFoundError`, and as the class."""
        if key == DOCUMENT:
            return self._document
        if key in self.values:
            return json.dumps(self.values[key]).encode()
        array, number = self._chunk(key)
        page = array, number // self._record_size
        with self._loading.setdefault(page, threading.Lock()):  # many chunks of a page are asked for at once
            columns = self._page(*page)
        with _naming(f"the reference {key!r} in {self._store.url}/{_page_path(*page)}"):
            url, offset, size, data = (column[number % self._record_size].as_py() for column in columns)
            if data is None and url is None:
                raise FileNotFoundError(key)
            if data is None:
                return _range(url, *((offset, size) if offset or size else ()))
            if not isinstance(data, bytes):
                raise TypeError("raw is no binary column")
            return data

    def _chunk(self, key: str) -> tuple[str, int]:
        """Return the array and the number of the chunk with a key. Raises `FileNotFoundError` if there is none."""
        array = key
        while f"{array}/.zarray" not in self.values:
            array, slash, _ = array.rpartition("/")
            if not slash:
                raise FileNotFoundError(key)
        with _naming(f"{array}/.zarray in {self._store.url}/{DOCUMENT}"):
            document = self.values[f"{array}/.zarray"]
            grid = [-(-n // size) for n, size in zip(document["shape"], document["chunks"], strict=True)]
        try:
            place = [int(part) for part in re.split("[./]", key[len(array) + 1 :])]
            return array, int(np.ravel_multi_index(place, grid or [1]))
        except ValueError:
            raise FileNotFoundError(key) from None

    def _read_page(self, array: str, number: int) -> list[Any]:
        """Return the columns of a page, `COLUMNS`.

        Texts and bytes stay in dictionaries: a small page may repeat a large value.
        """
        path = _page_path(array, number)
        where, remedy = f"the page of references {self._store.url}/{path}", "restore it, or write the references again"
        try:
            body = self._store.get(path)
        except errors.NotFoundError as error:
            raise errors.MissingObjectError(
                f"{where} is missing", f"{remedy}; strict=False gives fill values"
            ) from error
        with finished_before_exit():  # pyarrow must not end with the interpreter
            try:
                metadata = pq.read_metadata(pa.BufferReader(body))
                _check_page(metadata, min(self._record_size, MAX_PAGE_ROWS))
                names = [name for name in COLUMNS if name in metadata.schema.to_arrow_schema().names]
                texts = [name for name in names if name in ("path", "raw")]
                table = pq.ParquetFile(pa.BufferReader(body), read_dictionary=texts).read(names, use_threads=False)
            except (pa.ArrowException, LookupError, OSError, ValueError) as error:
                raise errors.CorruptError(f"{where} cannot be read ({error})", remedy) from error
        return [table.column(name) if name in names else pa.nulls(table.num_rows) for name in COLUMNS]


def _check_page(metadata: Any, rows: int) -> None:
    """Raise ValueError for a page with more rows or too many bytes."""
    if metadata.num_rows > rows:
        raise ValueError(f"it has {metadata.num_rows} references, at most {rows} are expected")
    size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    if size > MAX_PAGE_BYTES:
        raise ValueError(f"it has {size} bytes when it is decompressed, at most {MAX_PAGE_BYTES} are supported")


class ReferenceClient(ReadOnlyClient):
    """A client of a file of references. Ranges are read by the clients of the URLs in it.

    The storage options are those of the file and of the objects that it refers to, unless there are `target_options`
    for the file and `remote_options` for the objects. They are used for objects of the file's host or bucket only; of a
    local file, for those in its folder. Others are read with `remote_options` alone, and only if these are given, or if
    `allow`, a list of URLs of hosts, buckets or folders, has them. A chain of URLs is never read, and local files and
    addresses that are link-local or of a cloud's metadata service only with `allow`: whoever wrote the file could make
    this process read them. A symbolic link is what it leads to. With any of these options, a web server of the objects
    may not redirect to another host.
    """

    def __init__(self, location: Location, open_store: OpenStore) -> None:
        # the caller retries, and waits as it likes
        self._policy = replace(location.retry, outage_seconds=0.0, request_seconds=0.0)
        options = dict(location.options)
        names = ("target_options", "remote_options", "allow")
        target, self._remote, allow = (options.pop(name, None) for name in names)
        folder, name = _split(location.target.split("::", 1)[1])
        store = open_store(folder, {"retry": self._policy, **(options if target is None else target)})
        self._location, self._open_store, self._shown = store.location, open_store, store.child(name).url
        self._options = options if target is not None else store.location.options  # with the user of the URL
        entries = [allow] if isinstance(allow, str) else allow
        self._allowed = None if entries is None else [_resolved(parse_location(entry, {})) for entry in entries]
        self._may_redirect = not location.options and not self._options
        self._references = _read_references(store, name)
        self._stores: dict[str, Store] = {}  # of folders that may be read
        self._hosts: dict[str, Store] = {}  # whose clients they share
        self._opening = threading.Lock()

    def get_range(self, path: str, start: int, stop: int, receiver: Receiver = RECEIVER) -> Buffer:
        """Return bytes [start, stop), fewer if the object ends before `stop`."""
        found = self._references.find(path)
        if isinstance(found, bytes):
            return found[start:stop]
        begin, end = found.offset + start, found.offset + (stop if found.size is None else min(stop, found.size))
        try:
            with self._opened(path, found.url) as (store, name):
                reader = replace(store.reader(), on_repeat=receiver.on_repeat)
                return reader.read(name, begin, end, receiver.allocate)
        except errors.NotFoundError as error:  # no missing chunk: that has no reference
            remedy = "restore it, or correct the URL in the references"
            where = f"{path!r} in {self._shown}"
            problem = f"{where} is a range of {redact(found.url)}, which cannot be found ({error.problem})"
            raise errors.StorageError(problem, remedy) from error

    def info(self, path: str) -> ObjectInfo | None:
        """Return the size of an object, or None if it does not exist."""
        try:
            found = self._references.find(path)
        except FileNotFoundError:
            return None
        if isinstance(found, Range) and found.size is None:
            with self._opened(path, found.url) as (store, name):
                return store.head(name)
        return ObjectInfo(path, len(found) if isinstance(found, bytes) else found.size or 0)

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders directly below a folder."""
        start = f"{folder}/" if folder else ""
        below = (key[len(start) :] for key in self._references.values if key.startswith(start))
        return list({key.partition("/")[0]: None for key in below if "/" in key})

    @contextmanager
    def _opened(self, key: str, url: str) -> Iterator[tuple[Store, str]]:
        """Yield the store with the object at a URL, and its path there; errors in the block name the reference."""
        with _naming(f"the reference {key!r} in {self._shown}, {redact(url)!r:.200},"):
            yield self._object(key, url)

    def _object(self, key: str, url: str) -> tuple[Store, str]:
        """Return the store with the object at a URL, and its path there. Raises `AccessError` unless it may be read."""
        is_relative = "://" not in url and "::" not in url and not url.startswith("/")
        target = self._location.child(url).target if is_relative else url
        if "::" not in target and target.partition("://")[0].lower() in (target.lower(), "file", "local"):
            target = _resolved(parse_location(target, {})).target
        folder, name = _split(target)
        with self._opening:
            if folder not in self._stores:
                elsewhere = f"the reference {key!r} in {self._shown} leads elsewhere, to"
                try:
                    location = parse_location(folder, {})
                except errors.UsageError as error:  # of no address
                    raise errors.AccessError(f"{elsewhere} {error.problem}", "restore the file") from error
                options = self._options_for(location, is_relative=is_relative)
                if options is None:
                    remedy = f"if you trust the file, give storage_options={{'allow': [{location.shown!r}]}}"
                    remedy = f"{remedy}, and remote_options if it needs credentials"
                    raise errors.AccessError(f"{elsewhere} {location.shown}", remedy)
                if location.protocol == "http" and not self._may_redirect:
                    options = checked_redirects(options, same_host=True)
                host, below = found.groups() if (found := _FOLDER.fullmatch(folder)) else (folder, "")
                if host not in self._hosts:
                    self._hosts[host] = self._open_store(host, {"retry": self._policy, **options})
                self._stores[folder] = self._hosts[host].child(below[1:])
            return self._stores[folder], name

    def _options_for(self, location: Location, *, is_relative: bool) -> Mapping[str, Any] | None:
        """Return the options to read the objects in a folder with, None if they may not be read."""
        own, remote = self._location, self._remote
        if own.protocol == CHAIN:
            is_own = is_relative and ".." not in unquote(location.target).split("/")
        else:
            is_own = _is_below(location, own, _origin(_resolved(own)))
        if is_own:
            return self._options if remote is None else remote
        if location.protocol in (CHAIN, *REFERENCES):
            return None
        if self._allowed is not None:
            is_allowed = any(_is_below(location, entry, entry.path) for entry in self._allowed)
        else:
            is_allowed = remote is not None and location.protocol != "file" and not _is_cloud_service(location)
        return (remote or {}) if is_allowed else None


def _read_references(store: Store, name: str) -> JsonReferences | ParquetReferences:
    """Return the references of a JSON file, or of a Parquet folder, whose pages are read when they are needed."""
    for is_json in (True, False) if name.endswith(".json") else (False, True):
        with suppress(errors.NotFoundError):
            if is_json:
                return JsonReferences(store.get(name), store.child(name).url)
            return ParquetReferences(store.child(name))
    problem = f"there are no references at {store.child(name).url}"
    raise errors.NotADatasetError(
        problem, "give the URL of a JSON file, or of a folder of Parquet, and its storage_options"
    )


def _split(url: str) -> tuple[str, str]:
    """Return the folder and the name of the object at a URL; in a chained one, of its first link with a path."""
    links = url.split("::")
    index = next((index for index, link in enumerate(links) if "://" in link), -1)
    folder, slash, name = links[index].rpartition("/")
    links[index] = f"{folder}/" if folder.endswith(":/") or (slash and not folder) else folder or "."
    return "::".join(links), name


def _resolved(location: Location) -> Location:
    """Return a local location without symbolic links, another one as it is."""
    return replace(location, target=os.path.realpath(location.path)) if location.protocol == "file" else location


def _origin(location: Location) -> str:
    """Return the host or bucket of a URL; of a local one its path."""
    if location.protocol in ("file", "memory"):
        return location.path if location.protocol == "file" else ""
    return re.split(r"[/?#\\]", location.path, maxsplit=1)[0]


def _is_below(location: Location, root: Location, path: str) -> bool:
    """Return whether a location is that of `path`, a part of the path of `root`, or below it."""
    schemes = [each.target.partition("://")[0].lower() for each in (location, root) if each.protocol == "http"]
    same = location.protocol == root.protocol and len(set(schemes)) < 2  # https is not http
    escapes = "/" in path and ".." in unquote(location.path).split("/")
    return same and not escapes and f"{location.path}/".startswith(f"{path.rstrip('/')}/" if path else "")


def _is_cloud_service(location: Location) -> bool:
    """Return whether a URL's host may be a cloud's metadata service, or has a link-local address."""
    if location.protocol in BUCKETS:
        return False
    try:
        return is_cloud_service(urlsplit(location.target).hostname or "")
    except ValueError:
        return True


def _page_path(array: str, number: int) -> str:
    return f"{array}/refs.{number}.parq"
