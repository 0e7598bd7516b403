"""Images made smaller on their way: resized, and encoded again."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Part, Refuse, Sieve, Source, drop_rows
from streamloader.conversion.sources.folders.images import ENCODINGS
from streamloader.errors import UsageError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.storage.protocol import ObjectInfo

QUALITY = 95  # of a JPEG that is resized only: above it files grow, and nobody sees a difference
_SIZE = re.compile(r"(\d{1,5})(?:x(\d{1,5}))?\Z")
_IMAGES = frozenset({*ENCODINGS.values(), "mixed"})


@dataclass(frozen=True)
class Recode:
    """How images are encoded anew. `size` is the shorter side in pixels, or (height, width); a shorter side is never
    enlarged. `quality` from 1 to 100 makes every image a JPEG; None keeps JPEGs, and others become PNGs.
    """

    size: int | tuple[int, int] | None = None
    quality: int | None = None

    def options(self) -> dict[str, Any]:
        """Return the wish as JSON values."""
        size = list(self.size) if isinstance(self.size, tuple) else self.size
        return {"resize": size, "quality": self.quality}

    def field(self, field: Field) -> Field:
        """Return what a field of images becomes; any other stays as it is."""
        if field.kind != "bytes" or field.encoding not in _IMAGES:
            return field
        if self.quality is not None:
            return replace(field, encoding="jpeg")
        return field if field.encoding in ("jpeg", "mixed") else replace(field, encoding="png")

    def image(self, data: bytes) -> bytes:
        """Return the image encoded anew. Raises what Pillow raises for one that does not decode.

        The EXIF orientation is applied, since nothing else of the EXIF data is kept; 16-bit and palette images become
        8-bit RGB or grey where they become a JPEG.
        """
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(data)) as opened:
            was_jpeg = opened.format == "JPEG"
            if self.size is not None:
                opened.draft(None, self._target(opened.size))
            image = ImageOps.exif_transpose(opened)
            image.load()
        target = self._target(image.size)
        if target != image.size:
            image = image.convert("RGB") if image.mode == "P" else image
            image = image.resize(target, Image.Resampling.LANCZOS, reducing_gap=3.0)
        out = io.BytesIO()
        if was_jpeg or self.quality is not None:
            image = image if image.mode in ("L", "RGB") else image.convert("RGB")
            image.save(out, "JPEG", quality=self.quality or QUALITY)
        else:
            image.save(out, "PNG")
        return out.getvalue()

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (width, height) that an image of this (width, height) gets."""
        if self.size is None:
            return size
        if isinstance(self.size, tuple):
            return self.size[1], self.size[0]
        scale = min(1.0, self.size / min(size))
        return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def parse_recode(resize: str | int | tuple[int, int] | None, quality: int | None) -> Recode | None:
    """Return the recoding of `resize="256"` (shorter side), `"256x384"` (height, width) and a quality; None for none.

    Raises `UsageError`.
    """
    if resize is None and quality is None:
        return None
    if quality is not None and not 1 <= quality <= 100:
        raise UsageError(f"quality={quality}", "give the quality of JPEGs from 1 to 100")
    if resize is None:
        return Recode(None, quality)
    text = "x".join(map(str, resize)) if isinstance(resize, tuple) else str(resize)
    found = _SIZE.match(text)
    sides = tuple(int(side) for side in found.groups() if side) if found else ()
    if not sides or min(sides) < 1:
        raise UsageError(f"resize={resize!r}", "give the shorter side in pixels, like 256, or height x width, 256x384")
    return Recode(sides[0] if len(sides) == 1 else (sides[0], sides[1]), quality)


@dataclass(frozen=True)
class RecodedSource:
    """A source whose images are encoded anew."""

    source: Source
    recode: Recode

    @property
    def url(self) -> str:
        """Where it is."""
        return self.source.url

    @property
    def files(self) -> Sequence[ObjectInfo]:
        """The source's files."""
        return self.source.files

    @property
    def fields(self) -> Mapping[str, Field]:
        """The source's fields; images as they become."""
        return {name: self.recode.field(field) for name, field in self.source.fields.items()}

    @property
    def num_samples(self) -> int:
        """The source's number of rows."""
        return self.source.num_samples

    @property
    def notes(self) -> Mapping[str, Any]:
        """What the source tells, and how its images were encoded anew."""
        return {**self.source.notes, "images": self.recode.options()}

    def part(self, rows: NDArray[np.int64]) -> RecodedPart:
        """Return the part that holds these rows."""
        images = [name for name, f in self.source.fields.items() if f.kind == "bytes" and f.encoding in _IMAGES]
        return RecodedPart(self.source.part(rows), self.recode, tuple(images))


def recode_source(source: Source, recode: Recode) -> RecodedSource:
    """Return the source with its images encoded anew. Raises `UsageError` where it has no field of images."""
    if not any(f.kind == "bytes" and f.encoding in _IMAGES for f in source.fields.values()):
        fields = ", ".join(f"{name}: {field}" for name, field in source.fields.items())
        raise UsageError(f"{source.url} has no images to encode anew ({fields})", "leave --resize and --quality out")
    return RecodedSource(source, recode)


@dataclass(frozen=True)
class RecodedPart:
    """Some rows; `images` are the fields that are encoded anew."""

    part: Part
    recode: Recode
    images: tuple[str, ...]

    def read(self, refuse: Refuse) -> dict[str, Column]:
        """Return the columns; an image that does not decode is refused."""
        from PIL import Image

        problems = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)
        sieve = Sieve(refuse)
        columns = self.part.read(sieve)
        bad: dict[int, tuple[str, bytes]] = {}
        for name in self.images:
            recoded: list[bytes] = []
            for position, data in enumerate(columns[name]):
                try:
                    recoded.append(self.recode.image(data))
                except problems as error:
                    recoded.append(b"")
                    bad.setdefault(position, (f"the image of field {name!r} cannot be decoded: {error}", data))
            columns[name] = recoded
        if not bad:
            return columns
        kept = sieve.kept(len(columns[self.images[0]])).tolist()
        for position, (problem, data) in sorted(bad.items()):
            refuse(BadSample(kept[position], "", problem, data=data))
        return drop_rows(columns, bad)
