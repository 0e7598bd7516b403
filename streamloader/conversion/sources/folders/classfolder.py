"""Folders in which every file of one medium is a sample: `root/<class>/**/x.jpg`, or all of them in one folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Range, Refuse, read_ranges
from streamloader.conversion.sources.files import Listing, extension, hidden
from streamloader.errors import SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import MAX_CHUNK_BYTES, Field
from streamloader.storage.protocol import ObjectInfo, Store

MAX_TEXT = 1 << 20  # bytes of a transcript: what is longer is something else
SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing"})
_STRAY = -1  # the label of a file that is in no class folder


@dataclass(frozen=True)
class Medium:
    """A kind of file. `field` holds its bytes, messages call it `noun`; `encodings` go by lower-case extension.

    `problem(data)` says why the bytes of a file cannot be decoded, or nothing.
    """

    field: str
    noun: str
    encodings: Mapping[str, str]
    problem: Callable[[bytes], str]

    def files(self, listing: Listing) -> tuple[ObjectInfo, ...]:
        """Return the visible files of the medium."""
        return listing.of(*self.encodings)

    def field_of(self, paths: Iterable[str]) -> Field:
        """Return the field of these files: its encoding is "mixed" where the extensions do not name one."""
        encodings = {self.encodings.get(extension(path), "mixed") for path in paths}
        return Field("bytes", encoding=encodings.pop() if len(encodings) == 1 else "mixed")

    def read(
        self, store: Store, files: Sequence[tuple[int, ObjectInfo]], refuse: Refuse
    ) -> Iterator[tuple[int, bytes]]:
        """Yield position and bytes of each file, byte for byte; one that cannot be decoded is refused.

        Raises `SourceChangedError`.
        """
        small = [(position, info) for position, info in files if info.size <= MAX_CHUNK_BYTES]
        for position, info in files:
            if info.size > MAX_CHUNK_BYTES:
                problem = f"it has {info.size} bytes, a sample holds up to {MAX_CHUNK_BYTES}"
                refuse(BadSample(position, f"{store.url}/{info.path}", problem, "cut it in several"))
        ranges = [Range(info.path, 0, info.size) for _, info in small]
        for (position, info), view in zip(small, read_ranges(store, ranges), strict=True):
            data = bytes(view)
            problem = self.problem(data)
            if problem:
                told = f"the {self.noun} cannot be decoded: {problem}"
                refuse(BadSample(position, f"{store.url}/{info.path}", told, data=data))
                continue
            yield position, data


def open_classes(listing: Listing, medium: Medium) -> MediaFolder:
    """Return the source of class folders; its rows are sorted by split, then by class, then by path.

    Where all top folders have names of splits and hold class folders, they are splits, and the classes are those of all
    of them. A file in no class folder is a bad sample, behind the others. Raises `SourceError` for a class folder or a
    split without such files, or where there is none.
    """
    noun = medium.noun
    files = medium.files(listing)
    top = tuple(name for name in listing.top_folders() if not hidden(name))
    splits = _splits(listing.url, medium, files, top)
    depth = 1 if splits else 0
    inside = [info for info in files if info.path.count("/") > depth]
    classes = tuple(sorted({info.path.split("/", depth + 1)[depth] for info in inside}) if splits else top)
    filled = {info.path.split("/", 1)[0] for info in inside}
    empty = [name for name in top if name not in filled]
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise SourceError(
            f"the class folder {listing.url}/{empty[0]}{more} holds no {noun}", f"add {noun}s to it, or remove it"
        )
    if not classes:
        problem = f"{listing.url} holds no class folder with {noun}s"
        raise SourceError(problem, f"put every {noun} into a folder named after its class: root/<class>/<{noun}>")
    names = list(splits.values())
    source = MediaFolder(listing.store, listing.url, medium, (), len(listing.files) - len(files), classes, depth=depth)

    def key(info: ObjectInfo) -> tuple[str, bool, int, str]:
        split = splits.get(info.path.split("/", 1)[0], names[-1]) if splits else ""
        label = source.label(info)
        return split, label == _STRAY, label, info.path

    keyed = sorted((key(info), info) for info in files)
    counts = Counter(split for (split, *_), _ in keyed)
    rows = {name: counts[name] for name in sorted(names)}
    return replace(source, media=tuple(info for _, info in keyed), splits=rows)


def _splits(url: str, medium: Medium, files: Sequence[ObjectInfo], top: Sequence[str]) -> dict[str, str]:
    """Return the split of each top folder, by its name; nothing where the top folders are classes."""
    splits = {name: name.lower() for name in top}
    deep = {info.path.split("/", 1)[0] for info in files if info.path.count("/") > 1}
    if not deep or not SPLIT_NAMES.issuperset(splits.values()) or len(set(splits.values())) < len(splits):
        return {}
    flat = next((name for name in top if name not in deep), None)
    if flat is not None:
        problem = f"{url} looks like splits, {', '.join(top)}, but {flat} has no class folder with {medium.noun}s"
        raise SourceError(problem, f"convert the others one by one, or remove {flat}")
    return splits


@dataclass(frozen=True)
class MediaFolder:
    """The files of one medium. With `classes` their field `label` is the class's rank (int64), else `path` is text.

    `texts`, where there are some, has the transcript of each file, the field `text`; None where it has none. `depth` is
    the number of folders above the class folders. `splits` has the number of rows of each split, in their order.
    """

    store: Store
    url: str
    medium: Medium
    media: tuple[ObjectInfo, ...]
    passed_over: int
    classes: tuple[str, ...] = ()
    texts: tuple[ObjectInfo | None, ...] = ()
    depth: int = 0
    splits: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def _labels(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.classes)}

    def label(self, info: ObjectInfo) -> int:
        """Return the class of a file by its number; -1 for one in no class folder."""
        parts = info.path.split("/", self.depth + 1)
        return self._labels[parts[self.depth]] if len(parts) > self.depth + 1 else _STRAY

    @property
    def files(self) -> Sequence[ObjectInfo]:
        """The files of the medium, then the transcripts."""
        return (*self.media, *dict.fromkeys(info for info in self.texts if info is not None))

    @property
    def num_samples(self) -> int:
        """One for each file of the medium."""
        return len(self.media)

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """The medium's own field, `label` or `path`, and `text` where there are transcripts."""
        inside = (info.path for info in self.media if not self.classes or self.label(info) != _STRAY)
        fields = {self.medium.field: self.medium.field_of(inside)}
        fields |= {"label": Field("tensor", "int64")} if self.classes else {"path": Field("text")}
        return fields | ({"text": Field("text")} if self.texts else {})

    @property
    def notes(self) -> Mapping[str, Any]:
        """The class names by label, the rows of each split, and how many files were hidden or of another kind."""
        classes = {"classes": {"label": list(self.classes)}} if self.classes else {}
        splits = {"splits": dict(self.splits)} if self.splits else {}
        return {**classes, **splits, "passed_over": self.passed_over}

    def part(self, rows: NDArray[np.int64]) -> MediaPart:
        """Return the files of these rows."""
        media = tuple(self.media[row] for row in rows.tolist())
        labels = tuple(map(self.label, media)) if self.classes else None
        texts = tuple(self.texts[row] for row in rows.tolist()) if self.texts else None
        return MediaPart(self.store, self.medium, media, labels, texts)


@dataclass(frozen=True)
class MediaPart:
    """Some files, with their labels and transcripts where the source has them."""

    store: Store
    medium: Medium
    media: tuple[ObjectInfo, ...]
    labels: tuple[int, ...] | None
    texts: tuple[ObjectInfo | None, ...] | None

    def read(self, refuse: Refuse) -> dict[str, Column]:
        """Return one column a field; what cannot be decoded is refused. Raises `SourceChangedError`."""
        texts = dict(self._read_texts(self.texts, refuse)) if self.texts is not None else None
        strays = {i for i, label in enumerate(self.labels or ()) if label == _STRAY}
        for i in sorted(strays):
            remedy = f"put every {self.medium.noun} into a folder named after its class"
            refuse(BadSample(i, f"{self.store.url}/{self.media[i].path}", "it is in no class folder", remedy))
        wanted = [(i, info) for i, info in enumerate(self.media) if i not in strays and (texts is None or i in texts)]
        found = dict(self.medium.read(self.store, wanted, refuse))
        columns: dict[str, Column] = {self.medium.field: list(found.values())}
        if self.labels is not None:
            columns["label"] = np.array([self.labels[i] for i in found], np.int64)
        else:  # names of local files need not be UTF-8
            columns["path"] = [self.media[i].path.encode(errors="backslashreplace") for i in found]
        if texts is not None:
            columns["text"] = [texts[i] for i in found]
        return columns

    def _read_texts(self, texts: Sequence[ObjectInfo | None], refuse: Refuse) -> Iterator[tuple[int, bytes]]:
        """Yield position and UTF-8 of each transcript; a file without one that can be read is refused."""
        ranges: dict[int, Range] = {}
        for position, info in enumerate(texts):
            if self.labels is not None and self.labels[position] == _STRAY:
                continue
            if info is None or info.size > MAX_TEXT:
                which, problem = self.media[position], "it has no transcript, a .txt of its name, as others have"
                if info is not None:
                    which, problem = info, f"the transcript has {info.size} bytes, more than {MAX_TEXT}"
                others = f"{self.medium.field},{'path' if self.labels is None else 'label'}"
                remedy = f"repair that, or keep the other fields only: --fields {others}"
                refuse(BadSample(position, f"{self.store.url}/{which.path}", problem, remedy))
            else:
                ranges[position] = Range(info.path, 0, info.size)
        for position, view in zip(ranges, read_ranges(self.store, list(ranges.values())), strict=True):
            data = bytes(view)
            try:
                data.decode()
            except UnicodeDecodeError as error:
                name = f"{self.store.url}/{ranges[position].path}"
                refuse(BadSample(position, name, f"it is no UTF-8 text: {error.reason}", "save it as UTF-8", data))
                continue
            yield position, data
