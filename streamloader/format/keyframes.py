"""Pictures at which decoding can begin, found by the bytes of their packets.

The flags of containers are not enough: encoders flag the start of an intra refresh, and a file without a table of key
frames (`stss`) flags every picture. What is not known to be such a picture is none: then decoding begins before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from streamloader.storage.optional import need

# whether decoding can begin at a packet, if it begins with all parameters of the packets before, and its parameters
Picture = tuple[bool, list[bytes]]
Parser = Callable[[bytes, bytes], Picture]  # of a packet and the extradata


def find_entries(codec: str, extradata: bytes, packets: Iterable[tuple[bytes, bool]]) -> Iterator[bool]:
    """Yield for each packet of a video, in the order of storage, whether decoding can begin at it.

    `codec`: FFmpeg's name. `packets`: their bytes, and whether the container calls them key frames. That is the answer
    for the first one, and for all of intra-only codecs; of other codecs that are not known here it is the only one.
    Packets of H.264 and HEVC have lengths or start codes before their units, as `extradata` tells.
    """
    intra_only = codec == "png" or need("av").Codec(codec, "r").intra_only
    parse, earlier = _PARSERS.get(codec), set[bytes]()
    for number, (data, key) in enumerate(packets):
        entry, parameters = (False, []) if parse is None else _parsed(parse, data, extradata)
        # a decoder that begins here has the parameters of the container, and those of this packet
        earlier |= {each for each in parameters if each not in extradata}
        yield key if intra_only or number == 0 else entry and earlier <= {*parameters}


def _parsed(parse: Parser, data: bytes, extradata: bytes) -> Picture:
    try:
        return parse(data, extradata)
    except (ValueError, IndexError):  # a damaged packet
        return False, []


def _units(packet: bytes, extradata: bytes, length_at: int) -> list[bytes]:
    """Return the units of a packet of H.264 or HEVC; `length_at`: where `extradata` has the size of their lengths."""
    if len(extradata) > length_at and extradata[0] == 1:
        return _after_lengths(packet, 1 + (extradata[length_at] & 3))
    return _after_start_codes(packet)


def _after_lengths(packet: bytes, length_size: int) -> list[bytes]:
    """Return the units of a packet, each after its length in so many bytes. Raises `ValueError` if it is cut."""
    units, at = [], 0
    while at < len(packet):
        begin = at + length_size
        at = begin + int.from_bytes(packet[at:begin], "big")
        units.append(packet[begin:at])
    if at != len(packet):
        raise ValueError(f"a unit ends at {at} of {len(packet)} bytes")
    return [unit for unit in units if unit]


def _after_start_codes(packet: bytes) -> list[bytes]:
    """Return the units of a packet, each after a start code."""
    units = (unit.rstrip(b"\0") for unit in packet.split(b"\0\0\1")[1:])
    return [unit for unit in units if unit]


def _h264(packet: bytes, extradata: bytes) -> Picture:
    """An IDR picture, or one of I slices from which decoding is exact, as a message with it says."""
    units = _units(packet, extradata, 4)
    slices = [unit for unit in units if 1 <= unit[0] & 31 <= 5]
    entry = bool(slices) and slices[0][0] & 31 == 5
    if slices and not entry and any(_is_exact_recovery_point(unit) for unit in units if unit[0] & 31 == 6):
        entry = all(_is_intra_slice(unit) for unit in slices)
    return entry, [unit for unit in units if unit[0] & 31 in (7, 8)]


def _is_exact_recovery_point(unit: bytes) -> bool:
    """Return whether decoding from the picture of an SEI message on is exact, by H.264 D.2.8, in the order of showing.

    It is by `recovery_frame_cnt` 0, `exact_match_flag` 1 and `broken_link_flag` 0.
    """
    data, at = unit[1:].replace(b"\0\0\3", b"\0\0"), 0
    while at + 2 < len(data):  # the last byte ends the unit
        numbers = []
        for _ in range(2):
            first = at
            while data[at] == 255:
                at += 1
            numbers.append(255 * (at - first) + data[at])
            at += 1
        kind, size = numbers
        if kind == 6:
            return data[at] >> 5 == 0b110
        at += size
    return False


def _is_intra_slice(unit: bytes) -> bool:
    """Return whether the second number of a slice's header, `slice_type`, is that of an I slice."""
    bits = "".join(f"{byte:08b}" for byte in unit[1:13])
    zeros = bits.index("1")  # of `first_mb_in_slice`, which has one more bit after them
    bits = bits[2 * zeros + 1 :]
    zeros = bits.index("1")
    return int(bits[zeros : 2 * zeros + 1], 2) - 1 in (2, 7)


def _hevc(packet: bytes, extradata: bytes) -> Picture:
    """An IRAP picture: of what needs one before it, leading pictures that a decoder skips, all is shown before it."""
    units = [(unit[0] >> 1 & 63, unit) for unit in _units(packet, extradata, 21)]
    slices = [kind for kind, unit in units if kind < 32 and not unit[0] & 1 and unit[1] < 8]  # of the base layer
    return bool(slices) and 16 <= slices[0] <= 21, [unit for kind, unit in units if kind in (32, 33, 34)]


# user data of MPEG-4 that FFmpeg's decoder reads, to decode as these encoders expect
_ENCODERS = (b"DivX", b"XviD", b"Lavc", b"FFmpe", b"ffmpeg")


def _mpeg4(packet: bytes, _: bytes) -> Picture:
    """An I-VOP."""
    parameters = list[bytes]()
    for unit in _after_start_codes(packet):
        if unit[0] == 0xB6:
            return unit[1] >> 6 == 0, parameters
        of_user = unit[0] == 0xB2 and not unit.startswith(_ENCODERS, 1)
        parameters += [unit] * (unit[0] != 0xB3 and not of_user)  # 0xB3: the time of a group
    return False, parameters


def _mpeg12(packet: bytes, _: bytes) -> Picture:
    """An I picture, also in its second field. Parameters are sequence headers and their extensions."""
    before, at, after = packet.partition(b"\0\0\1\0")
    pictures = _after_start_codes(at + after)
    kinds = [unit[2] >> 3 & 7 for unit in pictures if unit[0] == 0]
    return {*kinds} == {1}, [unit for unit in _after_start_codes(before) if unit[0] in (0xB3, 0xB5)]


def _vp8(packet: bytes, _: bytes) -> Picture:
    return packet[0] & 1 == 0, []


def _vp9(packet: bytes, _: bytes) -> Picture:
    """A key frame by `show_existing_frame` and `frame_type`, which have one bit before them in profile 3."""
    return packet[0] >> (1 if packet[0] & 0x30 == 0x30 else 2) & 3 == 0, []


def _av1(packet: bytes, _: bytes) -> Picture:
    """A key frame that is shown at once: `show_existing_frame` 0, `frame_type` 0, `show_frame` 1."""
    parameters, at = list[bytes](), 0
    while at < len(packet):
        header = packet[at]
        at += 1 + (header >> 2 & 1)
        size = len(packet) - at
        if header & 2:
            size = shift = 0
            while packet[at] & 128:
                size, shift, at = size | (packet[at] & 127) << shift, shift + 7, at + 1
                if shift > 49:
                    raise ValueError(f"a length that ends after byte {at} has more than 8 bytes")
            size, at = size | packet[at] << shift, at + 1
        kind, unit = header >> 3 & 15, packet[at : at + size]
        at += size
        if kind in (3, 6):
            return unit[0] >> 4 == 1, parameters
        parameters += [unit] * (kind == 1)  # a sequence header
    return False, parameters


def _ffv1(packet: bytes, _: bytes) -> Picture:
    """A key frame: the first bit of the range coder is 1."""
    return int.from_bytes(packet[:2], "big") >= 0x7F80, []


_PARSERS: dict[str, Parser] = {
    "h264": _h264,
    "hevc": _hevc,
    "mpeg4": _mpeg4,
    "mpeg1video": _mpeg12,
    "mpeg2video": _mpeg12,
    "vp8": _vp8,
    "vp9": _vp9,
    "av1": _av1,
    "ffv1": _ffv1,
}
