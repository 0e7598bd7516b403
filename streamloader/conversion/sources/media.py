"""Folders in which every file of one medium is a sample: `root/[split/]<class>/**/x.jpg`, or all files in one folder.

See formats/imagefolder/MAPPING.md and formats/audiofolder/MAPPING.md. Files stay encoded; a cheap test finds those
that do not decode.
"""

from __future__ import annotations

import io
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, OnBad, Part, Source, drop_rows, take_rows
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat
from streamloader.conversion.sources.files import Listing, extension, hidden
from streamloader.conversion.sources.ranged_io import Range, read_ranges
from streamloader.errors import SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import MAX_CHUNK_BYTES, Field
from streamloader.storage.store import ObjectInfo, Store

# by lower-case extension
IMAGE_ENCODINGS = {
    **{name: name for name in ("jpeg", "png", "webp", "gif", "bmp", "tiff", "ppm", "pgm", "jp2")},
    **{"jpg": "jpeg", "tif": "tiff"},
}
AUDIO_ENCODINGS = {
    **{name: name for name in ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aiff")},
    **{"oga": "ogg", "aif": "aiff"},
}


def image_problem(data: bytes) -> str:
    """Return why `data` cannot be an image that decodes, or nothing.

    Headers and PNG checksums are read, pixels are not: some ten microseconds an image. The extension may lie
    about the encoding: ImageNet has such files, and decoders look at the bytes.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            image.verify()
    except UnidentifiedImageError:
        return f"its {len(data)} bytes have no known image header"
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        return str(error)
    if data[:2] == b"\xff\xd8" and data.rfind(b"\xff\xd9") < 0:  # Pillow's verify() does not look so far
        return f"its {len(data)} bytes lack the end marker of a JPEG: it is truncated"
    return ""


def image_bytes(data: bytes) -> bytes:
    """Return an encoded image. Raises ValueError for one that cannot be decoded."""
    problem = image_problem(data)
    if problem:
        raise ValueError(f"the image cannot be decoded: {problem}")
    return data


_AUDIO_HEADER = re.compile(
    rb"(?:RIFF|RIFX|RF64)....WAVE|FORM....AIF[FC]|....ftyp|fLaC|OggS|ID3|\0*\xff[\xe2\xe3\xf2\xf3\xfa\xfb]", re.DOTALL
)  # the last are MPEG frames of layer III
_UNKNOWN = (1, 4)  # libsndfile's codes for a format, or an encoding, that it does not read
_FRAMES = 1 << 16  # decoded at a time


def audio_problem(data: bytes) -> str:
    """Return why `data` is not an audio clip, or nothing.

    Only the first bytes are looked at: a truncated clip is not found. Where the package soundfile is installed, FLAC
    and Ogg are decoded to their end: of other kinds it reads a truncated clip without an error.
    """
    if not _AUDIO_HEADER.match(data):
        return f"its {len(data)} bytes have no known audio header"
    if data[:4] not in (b"fLaC", b"OggS"):
        return ""
    try:
        import soundfile
    except (ImportError, OSError):  # not installed, or without libsndfile
        return ""
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            frames = sum(len(block) for block in file.blocks(_FRAMES, dtype="int16"))
            return f"it ends after {frames} of {file.frames} frames: it is truncated" if frames < file.frames else ""
    except soundfile.LibsndfileError as error:
        return "" if error.code in _UNKNOWN else str(error)
    except RuntimeError as error:
        return str(error)


MAX_TEXT = 1 << 20  # bytes of a transcript: what is longer is something else
SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing"})


def text_problem(data: bytes) -> str:
    """Return why `data` is not a text, or nothing."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"it is not UTF-8: {error.reason} at byte {error.start}"
    return ""


@dataclass(frozen=True)
class Medium:
    """A kind of file. `field` holds its bytes, messages call it `noun`; `encodings` go by lower-case extension.

    `problem(data)` says why the bytes of a file cannot be decoded, or nothing; there may be up to `limit` of them.
    """

    field: str
    noun: str
    encodings: Mapping[str, str]
    problem: Callable[[bytes], str]
    limit: int = MAX_CHUNK_BYTES

    def files(self, listing: Listing) -> tuple[ObjectInfo, ...]:
        """Return the visible files of the medium."""
        return listing.of(*self.encodings)

    def field_of(self, paths: Iterable[str]) -> Field:
        """Return the field of these files: its encoding is "mixed" where the extensions do not name one."""
        encodings = {self.encodings.get(extension(path), "mixed") for path in paths}
        return Field("bytes", encoding=encodings.pop() if len(encodings) == 1 else "mixed")

    def read(self, store: Store, files: Sequence[tuple[int, ObjectInfo]], on_bad: OnBad) -> Iterator[tuple[int, bytes]]:
        """Yield position and bytes of each file, byte for byte; one that cannot be decoded is refused.

        Raises `SourceChangedError`.
        """
        small = [(position, info) for position, info in files if info.size <= self.limit]
        for position, info in files:
            if info.size > self.limit:
                problem = f"the {self.noun} has {info.size} bytes, a sample holds up to {self.limit}"
                on_bad(BadSample(position, f"{store.url}/{info.path}", problem, "cut it in several"))
        ranges = [Range(info.path, 0, info.size) for _, info in small]
        for (position, info), view in zip(small, read_ranges(store, ranges), strict=True):
            data = bytes(view)
            problem = self.problem(data)
            if problem:
                problem = f"the {self.noun} cannot be decoded: {problem}"
                on_bad(BadSample(position, f"{store.url}/{info.path}", problem, data=data))
                continue
            yield position, data


IMAGES = Medium("image", "image", IMAGE_ENCODINGS, image_problem)
AUDIO = Medium("audio", "clip", AUDIO_ENCODINGS, audio_problem)
TRANSCRIPTS = Medium("text", "transcript", {"txt": "text"}, text_problem, MAX_TEXT)
Columns = Mapping[str, Column]
Files = tuple[Medium, Sequence[ObjectInfo | None]]  # of each row, None where its sample is bad


def cut_media(
    store: Store, media: Sequence[Files], columns: Columns, bad: Mapping[int, BadSample], rows: NDArray[np.int64]
) -> Part:
    """Return some rows of `media`, read when needed, and of `columns`, which are there; `bad` samples are by row."""
    some = rows.tolist()
    here = {position: replace(bad[row], position=position) for position, row in enumerate(some) if row in bad}
    chosen = [(medium, [infos[row] for row in some]) for medium, infos in media]
    return partial(_read_media, store, chosen, take_rows(columns, some), here)


def _read_media(
    store: Store, media: Sequence[Files], there: Columns, bad: Mapping[int, BadSample], on_bad: OnBad
) -> dict[str, Column]:
    """Return the columns that are `there` and those of the files; what cannot be decoded is bad.

    Raises `SourceChangedError`.
    """
    for one in bad.values():
        on_bad(one)
    rows = range(len(next(iter(there.values()))))
    good = [row for row in rows if row not in bad]
    found: dict[str, dict[int, bytes]] = {}
    for medium, infos in media:
        wanted = [(row, info) for row in good if (info := infos[row]) is not None]
        found[medium.field] = dict(medium.read(store, wanted, on_bad))
        good = list(found[medium.field])
    columns: dict[str, Column] = {name: [read[row] for row in good] for name, read in found.items()}
    return columns | drop_rows(there, set(rows).difference(good))


def _class_folders(listing: Listing, medium: Medium) -> tuple[list[ObjectInfo], NDArray[np.int64], dict[str, Any]]:
    """Return the files of class folders, the label of each, and the notes: names of classes, sizes of splits.

    Rows are sorted by split, then by class, then by path. Where all top folders have names of splits and hold class
    folders, they are splits, and the classes are those of all of them. A file in no class folder has the label behind
    the last. Raises `SourceError` for a class folder or a split without such files, or where there is none.
    """
    noun, files = medium.noun, medium.files(listing)
    top = [name for name in listing.top_folders() if not hidden(name)]
    splits = _splits(listing.url, medium, files, top)
    depth = 1 if splits else 0
    inside = [info.path.split("/") for info in files if info.path.count("/") > depth]
    empty = sorted(set(top).difference(parts[0] for parts in inside))
    if empty:
        named = f"{empty[0]} and {len(empty) - 1} more" if len(empty) > 1 else empty[0]
        raise SourceError(f"the class folder {listing.url}/{named} holds no {noun}", f"add {noun}s to it, or remove it")
    if not inside:
        problem = f"{listing.url} holds no class folder with {noun}s"
        raise SourceError(problem, f"put every {noun} into a folder named after its class: root/<class>/<{noun}>")
    labels = {name: label for label, name in enumerate(sorted({parts[depth] for parts in inside}))}
    last = [*splits.values(), ""][max(len(splits) - 1, 0)]

    def key(info: ObjectInfo) -> tuple[str, int, str]:
        parts = info.path.split("/")
        label = labels[parts[depth]] if len(parts) > depth + 1 else len(labels)
        return splits.get(parts[0], last), label, info.path

    keyed = sorted((key(info), info) for info in files)
    counts = Counter(split for (split, _, _), _ in keyed)
    notes: dict[str, Any] = {"classes": {"label": list(labels)}}
    notes |= {"splits": {name: counts[name] for name in sorted(splits.values())}} if splits else {}
    return [info for _, info in keyed], np.array([label for (_, label, _), _ in keyed], np.int64), notes


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


def _source(listing: Listing, selection: FieldSelection, medium: Medium) -> Source:
    """Return the source; its rows are sorted by class, then by path. Clips right in the folder have no classes.

    Fields are the medium's own, `label` (`path` where there are no classes), and `text` where clips have transcripts:
    a .txt of its name beside one, which then all must have. Raises `SourceError` for a class folder or a split without
    such files, or where there is none.
    """
    bad: dict[int, BadSample] = {}

    def on_bad(row: int, problem: str, remedy: str) -> None:
        bad.setdefault(row, BadSample(row, f"{listing.store.url}/{files[row].path}", problem, remedy))

    columns: dict[str, Column] = {}
    notes: dict[str, Any] = {}
    files = list(medium.files(listing))
    flat = medium is AUDIO and bool(files) and all("/" not in info.path for info in files)
    if flat:
        columns["path"] = [info.path.encode(errors="backslashreplace") for info in files]  # need not be UTF-8
    else:
        files, labels, notes = _class_folders(listing, medium)
        columns["label"] = labels
        for row in np.flatnonzero(labels == len(notes["classes"]["label"])).tolist():
            on_bad(row, "it is in no class folder", f"put every {medium.noun} into a folder named after its class")
    fields = {medium.field: medium.field_of(info.path for row, info in enumerate(files) if row not in bad)}
    fields |= {"path": Field("text")} if flat else {"label": Field("tensor", "int64")}
    media: list[Files] = [(medium, files)]
    transcripts = listing.of("txt") if medium is AUDIO and selection.wanted("text") else ()
    beside = {info.path[:-4]: info for info in transcripts}
    texts = [beside.get(info.path.rpartition(".")[0]) for info in files]
    if any(texts):
        media.append((TRANSCRIPTS, texts))
        remedy = f"add it, or keep the other fields only: --fields {','.join(fields)}"
        fields["text"] = Field("text")
        for row in [row for row, text in enumerate(texts) if text is None]:
            on_bad(row, "it has no transcript, a .txt of its name, as others have", remedy)
    used = (*files, *dict.fromkeys(info for info in texts if info is not None))
    notes["passed_over"] = len(listing.files) - len(used)
    cut = partial(cut_media, listing.store, media, columns, bad)
    return Source(listing.url, used, fields, len(files), notes, cut)


def _matches_images(listing: Listing) -> bool:
    return listing.folder and any("/" in info.path for info in IMAGES.files(listing))


def _matches_audio(listing: Listing) -> bool:
    return listing.folder and bool(AUDIO.files(listing))


FORMATS = (
    SourceFormat("imagefolder", _matches_images, partial(_source, medium=IMAGES)),
    SourceFormat("audiofolder", _matches_audio, partial(_source, medium=AUDIO)),
)
