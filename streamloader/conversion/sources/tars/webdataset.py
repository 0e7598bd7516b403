"""WebDataset tars: files that share a name up to its first dot are one sample. See formats/webdataset/MAPPING.md."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import base
from streamloader.conversion.sources.base import BadSample, Refuse, drop_rows
from streamloader.conversion.sources.files import Listing, field_names
from streamloader.conversion.sources.streams import Content, Span, holding, read_spans
from streamloader.conversion.sources.tars.tarindex import Member, member_name, members, open_tar
from streamloader.conversion.sources.tars.wdsfields import decode_column, field_of
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.threads import run_all
from streamloader.storage.protocol import ObjectInfo, Store

NAME = "webdataset"

# webdataset's own rules: folders belong to the key, names like __this__ are its metadata
_KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)\Z", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")


@dataclass(frozen=True)
class TarIndex:
    """The samples of one tar: `spans[n, s]` are the (start, stop) of sample n's member with the s-th suffix."""

    content: Content
    suffixes: tuple[str, ...]
    spans: NDArray[np.int64]
    first_key: str
    passed_over: int


def matches(listing: Listing) -> bool:
    """Return whether the listing holds a tar."""
    return bool(holding(listing, "tar"))


def open_source(listing: Listing, wish: Wish) -> WebDataset:
    """Return the source, with every tar's headers read once; samples keep the order of the sorted tars.

    Raises `SourceError` for a truncated tar, samples of different suffixes, or a key that stands twice in a tar.
    """
    tars = holding(listing, "tar")
    if not tars:
        raise SourceError(f"{listing.url} names no .tar", "give a tar, a folder of tars, a glob, or a brace range")
    indexes = run_all(lambda info: index_tar(listing.store, info), tars, base.READ_THREADS)
    filled = [index for index in indexes if len(index.spans)]
    if not filled:
        raise SourceError(f"the tars of {listing.url} hold no sample", "expected members such as 0001.jpg and 0001.cls")
    suffixes = filled[0].suffixes
    for index in filled:
        _check_same(set(index.suffixes), set(suffixes), index.first_key, index.content.where)
    names = field_names(list(suffixes), listing.url)
    tar = np.repeat(np.arange(len(filled)), [len(index.spans) for index in filled])
    members_at = np.concatenate([index.spans for index in filled])
    whole = WebDatasetPart(tuple(index.content for index in filled), {}, tar, members_at)
    raw = whole.cut(np.zeros(1, np.int64)).read_members()
    fields = {}
    for i, suffix in enumerate(suffixes):
        found = field_of(suffix, raw[i][0], f"{filled[0].content.where}: {filled[0].first_key}.{suffix}")
        wanted = wish.fields.get(names[suffix])
        # arrays of several lengths: the first sample alone does not tell
        fields[suffix] = (names[suffix], wanted if wanted and wanted.kind == "ragged" and found.fixed else found)
    return WebDataset(listing.url, tars, fields, whole, sum(index.passed_over for index in indexes))


def index_tar(store: Store, info: ObjectInfo) -> TarIndex:
    """Return where the samples of one tar lie. Raises `SourceError`, which names the key."""
    content, walk = open_tar(store, info)
    where = content.where
    suffixes: tuple[str, ...] = ()
    flat, keys, sample = array("q"), set[str](), dict[str, Member]()
    current = first = ""
    passed_over = 0

    def close() -> None:
        nonlocal suffixes
        if not sample:
            return
        suffixes = suffixes or tuple(sorted(sample))
        _check_same(set(sample), set(suffixes), current, where)
        for suffix in suffixes:
            flat.extend((sample[suffix].start, sample[suffix].stop))
        sample.clear()

    for member in members(walk, where):
        found = _KEY.match(member.name)
        if found is None or _META.match(member.name):
            passed_over += 1
            continue
        key, suffix = found[1], found[2].lower()
        if key != current:
            close()
            if key in keys:
                raise SourceError(
                    f"the key {key!r} stands twice in {where}, with other samples between",
                    "give each sample its own key",
                )
            keys.add(key)
            current, first = key, first or key
        if suffix in sample:
            raise SourceError(f"the key {key!r} has two members .{suffix} in {where}", "give each sample its own key")
        sample[suffix] = member
    close()
    spans = np.frombuffer(flat, np.int64).reshape(-1, max(len(suffixes), 1), 2)
    return TarIndex(content.sized(walk.finish()), suffixes, spans, first, passed_over)


def _check_same(here: set[str], first: set[str], key: str, where: str) -> None:
    for missing, what in ((first - here, "lacks"), (here - first, "alone has")):
        if missing:
            named, expected = (", ".join(f".{suffix}" for suffix in sorted(some)) for some in (missing, first))
            problem = f"the sample {key!r} of {where} {what} {named}; the first sample has {expected}"
            raise SourceError(problem, "give every sample the same members")


@dataclass(frozen=True)
class WebDataset:
    """The samples of all tars; `members` gives each suffix its field's name and kind."""

    url: str
    files: Sequence[ObjectInfo]
    members: Mapping[str, tuple[str, Field]]
    whole: WebDatasetPart
    passed_over: int

    @property
    def fields(self) -> Mapping[str, Field]:
        """One field for each suffix."""
        return dict(self.members.values())

    @property
    def num_samples(self) -> int:
        """The samples of all tars."""
        return len(self.whole.tar)

    @property
    def notes(self) -> Mapping[str, Any]:
        """The suffix of each field, and how many members had no key or were webdataset's metadata."""
        suffixes = {name: suffix for suffix, (name, _) in self.members.items()}
        return {"members": suffixes, "passed_over": self.passed_over}

    def part(self, rows: NDArray[np.int64]) -> WebDatasetPart:
        """Return the samples of these rows."""
        part = self.whole.cut(rows)
        return WebDatasetPart(part.tars, self.members, part.tar, part.spans)


@dataclass(frozen=True, eq=False)
class WebDatasetPart:
    """Some samples: `tar[n]` numbers sample n's tar in `tars`, `spans[n, s]` its members' (start, stop)."""

    tars: tuple[Content, ...]
    members: Mapping[str, tuple[str, Field]]
    tar: NDArray[np.int64]
    spans: NDArray[np.int64]

    def cut(self, rows: NDArray[np.int64]) -> WebDatasetPart:
        """Return the part of these rows, with the tars that they need only."""
        used, tar = np.unique(self.tar[rows], return_inverse=True)
        tars = tuple(self.tars[number] for number in used.tolist())
        return WebDatasetPart(tars, self.members, tar, self.spans[rows])

    def name(self, row: int, member: int) -> str:
        """Return the name of a member and its tar, read from the tar: for messages."""
        tar = self.tars[int(self.tar[row])]
        return f"{tar.where}: {member_name(tar, int(self.spans[row, member, 0]))}"

    def read(self, refuse: Refuse) -> dict[str, Column]:
        """Return one column a field; a sample with a member that is not what its suffix says is refused."""
        raw = self.read_members()
        bad: dict[int, tuple[int, str, str]] = {}

        def note(member: int, row: int, problem: str, remedy: str) -> None:
            bad.setdefault(row, (member, problem, remedy))

        columns = {
            name: decode_column(suffix, field, raw[i], partial(note, i))
            for i, (suffix, (name, field)) in enumerate(self.members.items())
        }
        if not bad:
            return columns
        for row, (member, problem, remedy) in sorted(
            bad.items()
        ):  # ascending: names of a compressed tar are read again
            refuse(BadSample(row, self.name(row, member), problem, remedy, raw[member][row]))
        return drop_rows(columns, bad)

    def read_members(self) -> list[list[bytes]]:
        """Return the bytes of each suffix's members, by row."""
        samples, suffixes = self.spans.shape[:2]
        starts, stops = self.spans[:, :, 0].ravel(), self.spans[:, :, 1].ravel()
        tars = np.repeat(self.tar, suffixes)
        order = np.lexsort((starts, tars))
        found: list[bytes] = [b""] * (samples * suffixes)
        for number, tar in enumerate(self.tars):
            here = order[tars[order] == number]
            runs = base.cut_runs(starts[here], stops[here], base.GAP_BYTES, base.REQUEST_BYTES)
            spans = [Span(tar, int(starts[here[i]]), int(stops[here[j - 1]])) for i, j in runs]
            for (i, j), wanted, data in zip(runs, spans, read_spans(spans), strict=True):
                for one in here[i:j].tolist():
                    found[one] = bytes(data[int(starts[one]) - wanted.start : int(stops[one]) - wanted.start])
        return [found[i::suffixes] for i in range(suffixes)]
