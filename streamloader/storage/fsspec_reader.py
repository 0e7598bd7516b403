"""The data plane over fsspec: for every protocol and option that obstore does not know, and after a fork."""

from __future__ import annotations

from streamloader.storage.calls import Calls, with_fresh_credentials
from streamloader.storage.failures import cause_of, client_errors, storage_error
from streamloader.storage.location import NO_SECRETS, Secrets, object_path
from streamloader.storage.protocol import Room


class FsspecReader:
    """A `RangeReader` over one fsspec filesystem. `root` is the filesystem's own path, `shown` its URL."""

    kind = "fsspec"

    def __init__(self, calls: Calls, root: str, shown: str, reason: str, secrets: Secrets = NO_SECRETS) -> None:
        self._calls = calls
        self._root = root.rstrip("/")
        self._shown = shown
        self.reason = reason
        self._secrets = secrets

    def below(self, path: str) -> FsspecReader:
        """Return the reader of the folder `path`, with the same filesystem."""
        if not path:
            return self
        return FsspecReader(self._calls, f"{self._root}/{path}", f"{self._shown}/{path}", self.reason, self._secrets)

    def read(self, path: str, start: int, stop: int, room: Room | None = None) -> memoryview:  # noqa: ARG002 - the client makes bodies of its own
        """Return bytes [start, stop) of the object, fewer where it ends before. One request; thread-safe."""
        if stop <= start:
            return memoryview(b"")
        try:
            full = f"{self._root}/{object_path(path)}"
            return memoryview(with_fresh_credentials(self._calls, lambda: self._calls.get_range(full, start, stop)))
        except client_errors() as error:
            raise storage_error(error, f"{self._shown}/{path}", self._secrets) from cause_of(error, self._secrets)
