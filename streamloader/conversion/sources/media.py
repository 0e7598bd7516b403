"""Folders of images, audio clips or videos, each of which is a sample: `root/[split/]<class>/**/x.jpg`, or one folder.

See formats/imagefolder/MAPPING.md, formats/audiofolder/MAPPING.md and formats/videofolder/MAPPING.md. Files stay
encoded; a cheap test finds files that cannot be decoded.
"""

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

from streamloader.conversion.sources.base import Bad, BadSample, Fragment, OnBad, RowSource, drop_rows, take_rows
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat
from streamloader.conversion.sources.files import Listing, extension, hidden
from streamloader.conversion.sources.ranged_io import Range, read_ranges
from streamloader.errors import SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import MAX_CHUNK_BYTES, Field
from streamloader.storage import ObjectInfo, Store

# by lower-case extension
_SHORT = {"jpg": "jpeg", "tif": "tiff", "oga": "ogg", "aif": "aiff"}
_IMAGES = ("jpeg", "jpg", "png", "webp", "gif", "bmp", "tiff", "tif", "ppm", "pgm", "jp2")
_CLIPS = ("wav", "flac", "mp3", "ogg", "oga", "opus", "m4a", "aiff", "aif")
IMAGE_ENCODINGS, AUDIO_ENCODINGS = ({name: _SHORT.get(name, name) for name in names} for names in (_IMAGES, _CLIPS))


def image_problem(data: bytes) -> str:
    """Return the reason why an image cannot be decoded, "" if there is none.

    Only headers and PNG checksums are read, not pixels, which takes some 10 microseconds. The extension is ignored, as
    by decoders: ImageNet has files with the extension of another encoding.
    """
    from PIL import Image, UnidentifiedImageError

    from streamloader.images.pillow import open_image

    try:
        with open_image(data) as image:
            image.verify()
    except UnidentifiedImageError:
        return f"its {len(data)} bytes have no known image header" if data else "the file is empty"
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        return str(error)
    if data[:2] == b"\xff\xd8" and data.rfind(b"\xff\xd9") < 0:  # Pillow's verify() does not check this
        return f"its {len(data)} bytes lack the end marker of a JPEG: it is truncated"
    return ""


def image_bytes(data: bytes) -> bytes:
    """Return an encoded image. Raises ValueError if it cannot be decoded."""
    problem = image_problem(data)
    if problem:
        raise ValueError(f"the image cannot be decoded: {problem}")
    return data


_AUDIO_HEADER = re.compile(
    rb"(?:RIFF|RIFX|RF64)....WAVE|FORM....AIF[FC]|....ftyp|fLaC|OggS|ID3|\0*\xff[\xe2\xe3\xf2\xf3\xfa\xfb]", re.DOTALL
)  # the last are MPEG frames of layer III
_UNSUPPORTED = (1, 4)  # libsndfile's codes for an unsupported format and an unsupported encoding
_FRAMES = 1 << 16  # decoded at a time


def audio_problem(data: bytes) -> str:
    """Return the reason why an audio clip cannot be decoded, "" if there is none.

    Only the first bytes are checked, so truncated clips are not found. If the package soundfile is installed, FLAC and
    Ogg are decoded to their end; it reads truncated clips of other kinds without an error.
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
        return "" if error.code in _UNSUPPORTED else str(error)
    except RuntimeError as error:
        return str(error)


VIDEO_ENCODINGS = dict.fromkeys(("mp4", "m4v", "mov", "webm", "mkv"), "video")


def video_problem(data: bytes) -> str:
    """Return the reason why a file is no video, "" if there is none: its index, made later, needs all of it."""
    # MP4 and QuickTime, of which early files have no `ftyp`; Matroska and WebM
    known = data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip") or data[:4] == b"\x1a\x45\xdf\xa3"
    return "" if known else f"its {len(data)} bytes have no known video header"


MAX_TEXT = 1 << 20  # bytes of a transcript
SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing"})


def text_problem(data: bytes) -> str:
    """Return the reason why `data` is not text, "" if there is none."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"it is not UTF-8: {error.reason} at byte {error.start}"
    return ""


@dataclass(frozen=True)
class Medium:
    """A kind of file: its field, its noun for messages, and its encodings by lower-case extension.

    `problem(data)` returns the reason why a file cannot be decoded, "" if there is none. `limit` is the largest size
    of a file in bytes.
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
        """Return the field of the files at `paths`: its encoding is "mixed" unless all extensions have the same one."""
        encodings = {self.encodings.get(extension(path), "mixed") for path in paths}
        return Field("bytes", encoding=encodings.pop() if len(encodings) == 1 else "mixed")

    def read(self, store: Store, files: Sequence[tuple[int, ObjectInfo]], on_bad: OnBad) -> Iterator[tuple[int, bytes]]:
        """Yield position and bytes of each file; one that cannot be decoded is bad. Raises `SourceChangedError`."""
        small = [(position, info) for position, info in files if info.size <= self.limit]
        for position, info in files:
            if info.size > self.limit:
                problem = f"the {self.noun} has {info.size} bytes, a sample holds up to {self.limit}"
                on_bad(BadSample(position, f"{store.url}/{info.path}", problem, "cut it in several"))
        ranges = [Range(info.path, 0, info.size) for _, info in small]
        for (position, info), view in zip(small, read_ranges(store, ranges), strict=True):
            data = bytes(view)
            if problem := self.problem(data):
                problem = f"the {self.noun} cannot be decoded: {problem}"
                on_bad(BadSample(position, f"{store.url}/{info.path}", problem, data=data))
            else:
                yield position, data


IMAGES = Medium("image", "image", IMAGE_ENCODINGS, image_problem)
AUDIO = Medium("audio", "clip", AUDIO_ENCODINGS, audio_problem)
VIDEOS = Medium("video", "video", VIDEO_ENCODINGS, video_problem)
TRANSCRIPTS = Medium("text", "transcript", {"txt": "text"}, text_problem, MAX_TEXT)
Columns = dict[str, Column]
Files = tuple[Medium, Sequence[ObjectInfo | None]]  # the file of each row, None for a bad sample


def cut_media(store: Store, media: list[Files], columns: Columns, bad: Bad, rows: NDArray[np.int64]) -> Fragment:
    """Return a fragment of the `media`, which are read later, and the `columns`, without the `bad` samples, by row."""
    numbers = rows.tolist()
    bad_here = {position: replace(bad[row], position=position) for position, row in enumerate(numbers) if row in bad}
    chosen: list[Files] = [(medium, [infos[row] for row in numbers]) for medium, infos in media]
    return partial(_read_media, store, chosen, take_rows(columns, numbers), bad_here)


def _read_media(store: Store, media: list[Files], columns: Columns, bad: Bad, on_bad: OnBad) -> Columns:
    """Return the columns of the files and the given columns; a file that cannot be decoded is bad.

    Raises `SourceChangedError`.
    """
    for sample in bad.values():
        on_bad(sample)
    rows = range(len(next(iter(columns.values()))))
    good = [row for row in rows if row not in bad]
    data: dict[str, dict[int, bytes]] = {}
    for medium, infos in media:
        files = [(row, info) for row in good if (info := infos[row]) is not None]
        data[medium.field] = dict(medium.read(store, files, on_bad))
        good = list(data[medium.field])
    encoded: dict[str, Column] = {name: [by_row[row] for row in good] for name, by_row in data.items()}
    return encoded | drop_rows(columns, set(rows).difference(good))


def _class_folders(listing: Listing, medium: Medium) -> tuple[list[ObjectInfo], NDArray[np.int64], dict[str, Any]]:
    """Return the files of class folders, the label of each, and the notes: names of classes, sizes of splits.

    Rows are sorted by split, class and path. If all top folders have names of splits and contain class folders, they
    are splits, with the classes of all of them. A file outside of class folders has a label after the last class.
    Raises `SourceError` for a class folder or a split without files, or if there is none.
    """
    noun, files = medium.noun, medium.files(listing)
    top = [name for name in listing.top_folders() if not hidden(name)]
    splits = _splits(listing.url, medium, files, top)
    depth = 1 if splits else 0
    inside = [info.path.split("/") for info in files if info.path.count("/") > depth]
    empty = sorted(set(top).difference(parts[0] for parts in inside))
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        problem = f"the class folder {listing.url}/{empty[0]}{more} holds no {noun}"
        raise SourceError(problem, f"add {noun}s to it, or remove it")
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
    """Return the split of each top folder by its name; empty if the top folders are classes."""
    splits = {name: name.lower() for name in top}
    deep = {info.path.split("/", 1)[0] for info in files if info.path.count("/") > 1}
    if not deep or not SPLIT_NAMES.issuperset(splits.values()) or len(set(splits.values())) < len(splits):
        return {}
    flat = next((name for name in top if name not in deep), None)
    if flat is not None:
        problem = f"{url} looks like splits, {', '.join(top)}, but {flat} has no class folder with {medium.noun}s"
        raise SourceError(problem, f"convert the others one by one, or remove {flat}")
    return splits


def _source(listing: Listing, selection: FieldSelection, medium: Medium) -> RowSource:
    """Return the source; its rows are sorted by class and path. Clips and videos in a flat folder have no classes.

    Fields are the medium's, `label` (`path` without classes, or beside it if the selection names it), and `text` if a
    clip has a transcript: a .txt with its name beside it, which all clips then need. Raises `SourceError` for a class
    folder or a split without files, or if there is none.
    """
    bad: dict[int, BadSample] = {}

    def on_bad(row: int, problem: str, remedy: str) -> None:
        bad.setdefault(row, BadSample(row, f"{listing.store.url}/{files[row].path}", problem, remedy))

    columns: dict[str, Column] = {}
    notes: dict[str, Any] = {}
    files = list(medium.files(listing))
    flat = medium is not IMAGES and bool(files) and all("/" not in info.path for info in files)
    if not flat:
        files, labels, notes = _class_folders(listing, medium)
        columns["label"] = labels
        for row in np.flatnonzero(labels == len(notes["classes"]["label"])).tolist():
            on_bad(row, "it is in no class folder", f"put every {medium.noun} into a folder named after its class")
    fields = {medium.field: medium.field_of(info.path for row, info in enumerate(files) if row not in bad)}
    fields |= {} if flat else {"label": Field("tensor", "int64")}
    unknown = not selection.mapped and not selection.fields.keys() <= fields.keys()  # the error lists the path too
    if flat or unknown or "path" in {**selection.fields, **selection.columns}:
        columns["path"] = [info.path.encode(errors="backslashreplace") for info in files]  # may not be UTF-8
        fields["path"] = Field("text")
    media: list[Files] = [(medium, files)]
    transcripts = listing.of("txt") if medium is AUDIO and selection.includes("text") else ()
    beside = {info.path[:-4]: info for info in transcripts}
    texts = [beside.get(info.path.rpartition(".")[0]) for info in files]
    if any(texts):
        media.append((TRANSCRIPTS, texts))
        remedy = f'add it, or keep the other fields only: fields="{",".join(fields)}"'
        fields["text"] = Field("text")
        for row in [row for row, text in enumerate(texts) if text is None]:
            on_bad(row, "it has no transcript, a .txt of its name, as others have", remedy)
    used = (*files, *dict.fromkeys(info for info in texts if info is not None))
    notes["passed_over"] = len(listing.files) - len(used)
    return RowSource(
        listing.url, used, fields, len(files), notes, partial(cut_media, listing.store, media, columns, bad)
    )


def _matches_images(listing: Listing) -> bool:
    return listing.folder and any("/" in info.path for info in IMAGES.files(listing))


FORMATS = (
    SourceFormat("imagefolder", _matches_images, partial(_source, medium=IMAGES)),
    SourceFormat("audiofolder", lambda src: src.folder and bool(AUDIO.files(src)), partial(_source, medium=AUDIO)),
    SourceFormat("videofolder", lambda src: src.folder and bool(VIDEOS.files(src)), partial(_source, medium=VIDEOS)),
)
