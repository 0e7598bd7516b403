"""The head of a JPEG file, as far as it says where its rows are (ITU-T T.81, annex B)."""

from __future__ import annotations

_SOF = (0xC0, 0xC1)  # one pass over the image, Huffman coded; others may need the whole file for any row
_OTHER_SOF = frozenset({0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_SOS = 0xDA
_EOI = b"\xff\xd9"


def first_rows(data: memoryview, rows: int) -> bytearray | None:
    """Return a copy whose header says that the image ends after `rows` rows: a decoder then stops there.

    None where the rows are not stored one after another, or the file does not end as a whole one does. Of the result, a
    decoder says that bytes are left over. Pixels near the new end may differ: chroma is interpolated across it.
    """
    frame, at = 0, 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in _OTHER_SOF:
            return None
        if marker in _SOF:
            frame = at
        elif marker == _SOS:
            one_scan = frame and data[at + 4] == data[frame + 9]  # it holds all components
            if not one_scan or data[-2:] != _EOI:
                return None
            copy = bytearray(data)
            copy[frame + 5 : frame + 7] = rows.to_bytes(2, "big")
            return copy
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None
