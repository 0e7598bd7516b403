"""The limit: the bytes of a file as plain objects of 64 MiB, put by obstore from as many threads as there are cores."""

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
    """Put the file's bytes; the count is that of the objects."""
    (path,) = Path(spec.source).glob("*.npy")
    keys = {"access_key_id": spec.key, "secret_access_key": spec.secret, "region": "us-east-1"}
    store = S3Store(spec.bucket, endpoint=spec.endpoint, client_options={"allow_http": True}, **keys)

    def put(number: int) -> None:
        with path.open("rb") as file:
            file.seek(number * OBJECT_BYTES)
            obstore.put(store, f"{spec.prefix}/{number}", file.read(OBJECT_BYTES), use_multipart=False)

    count = -(-path.stat().st_size // OBJECT_BYTES)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(put, range(count)))
    return count


if __name__ == "__main__":
    main(write=write, read=lambda _: None)
