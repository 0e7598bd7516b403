"""The limit: the bytes of the raw files as plain objects, put by obstore from a thread for each core it may use."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "peers"))

import obstore
from common import Spec, main
from obstore.store import S3Store

OBJECT_BYTES = 64 << 20


def write(spec: Spec) -> int:
    """Put the files' bytes; the count is that of the objects."""
    keys = {"access_key_id": spec.key, "secret_access_key": spec.secret, "region": "us-east-1"}
    store = S3Store(spec.bucket, endpoint=spec.endpoint, client_options={"allow_http": True}, **keys)

    def put(piece: tuple[Path, int]) -> None:
        path, start = piece
        with path.open("rb") as file:
            file.seek(start)
            obstore.put(store, f"{spec.prefix}/{path.name}-{start}", file.read(OBJECT_BYTES), use_multipart=False)

    files = sorted(path for path in Path(spec.source).iterdir() if path.is_file())
    pieces = [(path, start) for path in files for start in range(0, path.stat().st_size, OBJECT_BYTES)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(put, pieces))
    return len(pieces)


if __name__ == "__main__":
    main(write=write, read=lambda _: None)
