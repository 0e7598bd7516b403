"""Storage: objects and byte ranges below any fsspec URL.

    store = open_store("s3://bucket/folder", {"endpoint_url": "http://127.0.0.1:9000"})
    store.put("a/b", b"abc")
    store.reader().read("a/b", 1, 3)

Importing this package starts no thread, loop or client; opening a store makes no request.
"""

import os

from streamloader.storage.objects import ObjectInfo
from streamloader.storage.store import RangeReader, Store, open_store
from streamloader.storage.url import REFERENCES, parse_location, url_text

__all__ = [
    "ObjectInfo",
    "RangeReader",
    "Store",
    "open_beside",
    "open_store",
    "references_store",
    "references_url",
    "split_url",
]
REFERENCE_FILES = (".json", ".parq", ".parquet")  # ends of URLs that are references to the arrays of other files


def split_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the folder of an object at a URL or a path, and its name there, "" if the URL ends in a slash."""
    text = url_text(url)
    name = text.replace(os.sep, "/").rpartition("/")[2]
    return text.removesuffix(name) or ".", name


def open_beside(store: Store, url: str | os.PathLike[str]) -> tuple[Store, str]:
    """Return the folder of an object at a URL, and its name there, "" if the URL ends in a slash.

    The storage options are those of `store` if both have the same protocol.
    """
    folder, name = split_url(url)
    shared = {**store.location.options, "retry": store.location.retry}
    same = parse_location(folder, None).protocol == store.location.protocol
    return open_store(folder, shared if same else None), name


def references_store(store: Store) -> Store:
    """Return the store of the references in a folder of Parquet, which `store` shows as a folder."""
    location = store.location.child(store.folder)
    if location.protocol in REFERENCES:
        return store
    return open_store(f"reference://::{location.target}", {**location.options, "retry": location.retry})


def references_url(url: str | os.PathLike[str]) -> str:
    """Return the URL of the store of a JSON file or a Parquet folder of references; other URLs unchanged."""
    text = url_text(url)
    references = text.rstrip("/").endswith(REFERENCE_FILES) and "::" not in text and "reference:" not in text
    return f"reference://::{text}" if references else text
