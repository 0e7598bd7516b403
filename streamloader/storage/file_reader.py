"""The data plane of local files: bytes go from the page cache straight to where they belong."""

from __future__ import annotations

import os

from streamloader.errors import UnsupportedError
from streamloader.storage.failures import client_errors, storage_error
from streamloader.storage.location import Location, object_path
from streamloader.storage.protocol import Room, room_for
from streamloader.storage.translate import local_target


class FileReader:
    """A `RangeReader` over a folder."""

    kind = "file"
    reason = "local files are read straight into place"

    def __init__(self, folder: str, shown: str) -> None:
        self._folder = folder
        self._shown = shown

    def below(self, path: str) -> FileReader:
        """Return the reader of the folder `path`."""
        return FileReader(f"{self._folder}/{path}", f"{self._shown}/{path}") if path else self

    def read(self, path: str, start: int, stop: int, room: Room | None = None) -> memoryview:
        """Return bytes [start, stop) of the file, fewer where it ends before; in `room` where given. Thread-safe."""
        came = 0
        try:
            file = os.open(f"{self._folder}/{object_path(path)}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                there = min(stop, os.fstat(file).st_size)  # what is asked for may be a lie
                body = (room or room_for)(max(0, there - start))
                while came < len(body) and (count := os.preadv(file, [body[came:]], start + came)):
                    came += count
            finally:
                os.close(file)
        except client_errors() as error:
            raise storage_error(error, f"{self._shown}/{path}") from error
        return body[:came]


def open_file_reader(location: Location) -> FileReader:
    """Return the reader of a local folder. Raises `UnsupportedError` for another protocol, or an unknown option."""
    if location.is_chain or location.protocol != "file":
        raise UnsupportedError("only local files are read by the operating system")
    return FileReader(f"/{local_target(location).prefix}", location.shown)
