"""Pillow's images of every mode: as 8-bit pixels, and as files without loss; the EXIF orientation of all images."""

import io
import re
import struct
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_PNG_MODES = frozenset(["1", "L", "LA", "I;16", "I;16B", "P", "RGB", "RGBA"])
_ALPHA = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}
_PROGRAMS = {"EPS": "Ghostscript", "WMF": "Windows"}  # formats that Pillow has another program draw


def open_image(data: bytes | memoryview) -> Image.Image:
    """Open an encoded image without reading its pixels. Raises Pillow's errors.

    Raises `ValueError` for the formats whose data are programs that another program runs: a dataset must not.
    """
    image = Image.open(io.BytesIO(data))
    if image.format in _PROGRAMS:
        image.close()
        raise ValueError(f"{image.format} is not decoded, since {_PROGRAMS[image.format]} would run it")
    return image


def eight_bits(image: Image.Image, mode: str = "") -> Image.Image:
    """Return an image as `mode`, "RGB" or "L"; by default "L" for an image with one channel of grey.

    Of 16 bits the upper 8 are kept, as Pillow does for RGB; floats are multiplied by 255. Raises `ValueError` for
    32-bit numbers beyond 255 and floats outside 0 to 1, since it is unknown which of them is white.
    """
    image = sixteen_bits(image)
    mode = mode or ("L" if Image.getmodebase(image.mode) == "L" else "RGB")
    if image.mode[0] in "IF":
        values = np.asarray(image)
        low, high, white = values.min(), values.max(), {"F": 1, "I": 255}.get(image.mode, 65535)
        if not 0 <= low <= high <= white:  # nor with NaN
            raise ValueError(f"its values are from {low} to {high}, expected 0 to {white}")
        if white == 1:
            values = values * np.float32(255)
            np.rint(values, out=values)
        elif white == 65535:
            values = values >> 8
        image = Image.fromarray(values.astype(np.uint8))
    elif image.mode == "LAB":
        from PIL import ImageCms

        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB") or image
    return image.convert(mode)


def sixteen_bits(image: Image.Image) -> Image.Image:
    """Return an image of 16 bits that Pillow has opened with 32, or in another byte order than PNG's, as "I;16"."""
    if image.mode == "I" and image.format in ("PNG", "PPM"):
        return image.convert("I;16")
    if image.mode in ("I;16L", "I;16N"):
        return Image.fromarray(np.asarray(image).astype(np.uint16))
    return image


def class_numbers(image: Image.Image) -> NDArray[np.uint8]:
    """Return the pixels of a mask as they are stored: for a palette their numbers in it. Raises `ValueError`."""
    greatest = _greatest(image)
    values = np.asarray(image)
    if greatest and values.ndim == 2:  # Pillow has scaled them
        values = np.rint(values * (greatest / (65535 if image.mode == "I" else 255))).astype(np.int32)
    if values.ndim != 2 or values.dtype.kind not in "bui" or not 0 <= values.min() <= values.max() <= 255:
        raise ValueError(f"a mask has one channel with numbers of classes from 0 to 255, not the mode {image.mode}")
    return values.astype(np.uint8)


def _greatest(image: Image.Image) -> int:
    """Return the number in a file of grey that Pillow makes white when it loads the image; 0 if it keeps the numbers.

    That are files of 2 and 4 bits, and PGM with another number than that of 8 or 16 bits.
    """
    codec, _, _, args = (getattr(image, "tile", None) or [("", (), 0, "")])[0]
    if codec.startswith("ppm"):
        return int(args[1])
    raw_mode = args if isinstance(args, str) else str((args or [""])[0])
    return {"L;2": 3, "L;4": 15}.get(raw_mode[:3], 0)


def png_mode(image: Image.Image) -> Image.Image:
    """Return the image itself if PNG has its mode, else the image as RGB, with transparency if it has any."""
    if image.mode in _PNG_MODES:
        return image
    return image.convert(_ALPHA[image.mode]) if image.mode in _ALPHA else eight_bits(image)


def encode(image: Image.Image) -> bytes:
    """Return the image as a PNG; of 32-bit numbers and floats, which PNG lacks, as a TIFF.

    Raises what Pillow raises for images that it cannot load or encode.
    """
    out, image = io.BytesIO(), sixteen_bits(image)
    if image.mode in ("I", "F"):
        image.save(out, "TIFF", compression="tiff_adobe_deflate")
    else:
        png_mode(image).save(out, "PNG")
    return out.getvalue()


_ORIENTATION = 0x0112
_NUMBERS = {1: "B", 4: "I"}  # types of EXIF; the orientation should have that of "H"
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
_PNG_XMP, _RAW_PROFILE = "XML:com.adobe.xmp", "Raw profile type exif"
_PNG_METADATA = {"exif": b"eXIf", _PNG_XMP: _PNG_XMP.encode(), _RAW_PROFILE: _RAW_PROFILE.encode()}
_TRANSPOSES = (0, 3, 1, 5, 4, 6, 2)  # the numbers of Pillow's `Transpose` for the orientations 2 to 8


def orientation(exif: bytes, xmp: bytes = b"") -> int:
    """Return the orientation in EXIF data, or else in XMP: 1 as stored, which is also the answer without one, to 8.

    Pillow's parser takes longer, and raises for data that are damaged elsewhere.
    """
    data = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(data[:2])
    with suppress(struct.error):  # damaged
        (first,) = struct.unpack_from(f"{order}I", data, 4) if order else (0,)
        (count,) = struct.unpack_from(f"{order}H", data, first) if order else (0,)
        for at in range(first + 2, first + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(f"{order}HH", data, at)
            (value,) = struct.unpack_from(f"{order}{_NUMBERS.get(kind, 'H')}", data, at + 8)
            if tag == _ORIENTATION and 1 <= value <= 8:
                return int(value)
    found = _XMP_ORIENTATION.search(xmp)
    return int(found[1]) if found else 1


def image_orientation(image: Image.Image, data: bytes | memoryview) -> int:
    """Return the EXIF orientation of an image opened from `data`, wherever Pillow's `exif_transpose` finds it.

    It is 1 for TIFF, which Pillow turns itself. A PNG that has it after its pixels is loaded.
    """
    if image.format == "TIFF":
        return 1
    if image.format == "PNG":
        content = bytes(data)
        if any(key not in image.info and chunk in content for key, chunk in _PNG_METADATA.items()):
            image.load()
    exif, raw = image.info.get("exif", b""), image.info.get(_RAW_PROFILE)
    if raw and not exif:
        with suppress(ValueError):  # damaged
            exif = bytes.fromhex("".join(raw.split("\n")[3:]))
    xmp = image.info.get(_PNG_XMP) or image.info.get("xmp", b"")
    return orientation(exif, xmp.encode() if isinstance(xmp, str) else xmp)


def transpose(image: Image.Image, turn: int) -> Image.Image:
    """Return the image turned by an EXIF orientation. Pillow turns TIFF itself when it loads it."""
    return image.transpose(Image.Transpose(_TRANSPOSES[turn - 2])) if turn > 1 else image
