"""Doubles of S3 stores that cannot run here: a moto server, behind a line that does what the store does otherwise.

Each difference is one rule; docs/stores.md has where it was found.
"""

import contextlib
import re
import threading
from urllib.parse import parse_qs, urlsplit

from faulty import QuietHandler, QuietServer

# what each store does otherwise
DIFFERENCES = {
    "Cloudflare R2": {"rejects checksums", "needs equal parts"},
    "Google XML": {"ignores conditions", "rejects checksums", "deletes no several", "misses deletions"},
    "Ceph RGW": {"ignores conditions", "ignores checksums"},
    "MinIO": {"needs MD5", "lists nothing below objects"},
    "conditions unsupported": {"rejects conditions", "ignores checksums"},  # S3 Express and others before 2024
    "no multipart listing": {"lists no uploads", "lists backwards"},
}
# laws that need stores that compare and write in one step
AT_ONCE = {"of many creates at once exactly one wins", "of many replaces at once exactly one wins"}


class Double(QuietServer):
    """Passes requests on to the server at `behind`, with the differences of a store."""

    def __init__(self, behind: str, differences: set[str]) -> None:
        super().__init__(_Handler)
        self.behind, self.differences = behind, differences
        self.parts: dict[str, dict[int, int]] = {}  # sizes by upload and number
        self.requests: list[str] = []
        self.turn = threading.Lock()  # moto compares and writes in two steps


def error(status: int, code: str, message: str = "") -> tuple[int, bytes]:
    return status, f"<Error><Code>{code}</Code><Message>{message or code}</Message></Error>".encode()


class _Handler(QuietHandler):
    server: Double

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        differences = self.server.differences
        self.server.requests.append(f"{self.command} {'?'.join(query)}")
        refused = self.refusal(body, query, differences)
        if refused:
            self.respond(*refused, {"Content-Type": "application/xml"})
            return
        if self.command == "DELETE" and not query and "misses deletions" in differences:
            status, _, _ = self.understood("HEAD", b"")
            if status == 404:
                self.respond(*error(404, "NoSuchKey"))
                return
        one_by_one = self.conditions() and "ignores conditions" not in differences
        with self.server.turn if one_by_one else contextlib.nullcontext():
            status, content, headers = self.understood(self.command, body)
        if "list-type" in query and status == 200:
            content = self.listing(content, differences)
        self.respond(status, content, headers)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def refusal(self, body: bytes, query: dict, differences: set[str]) -> tuple[int, bytes] | None:
        """The error that the store responds with, if any."""
        has_checksum = any(name.lower().startswith("x-amz-checksum-") for name in self.headers)
        if self.command == "PUT" and has_checksum and "rejects checksums" in differences:
            return error(501, "NotImplemented", "Header 'x-amz-checksum-crc32c' is not implemented")
        if self.command == "PUT" and self.conditions() and "rejects conditions" in differences:
            return error(501, "NotImplemented", "A header you provided implies functionality that is not implemented")
        if self.command == "POST" and "delete" in query:
            if "deletes no several" in differences:
                return error(501, "NotImplemented")
            if "needs MD5" in differences and "Content-MD5" not in self.headers:
                return error(400, "MissingContentMD5", "Missing required header for this request: Content-Md5.")
        if "uploads" in query and self.command == "GET" and "lists no uploads" in differences:
            return error(501, "NotImplemented")
        upload = query.get("uploadId", [""])[0]
        if self.command == "PUT" and upload:
            self.server.parts.setdefault(upload, {})[int(query["partNumber"][0])] = len(body)
        if self.command == "POST" and upload and "needs equal parts" in differences:
            sizes = [size for _, size in sorted(self.server.parts[upload].items())]
            if len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]:
                return error(400, "InvalidPart", "All non-trailing parts must have the same length.")
        return None

    def conditions(self) -> bool:
        return "If-None-Match" in self.headers or "If-Match" in self.headers

    def understood(self, command: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """The response of the server behind, which does not see what the store ignores."""
        dropped = {"ignores conditions": ("if-match", "if-none-match"), "ignores checksums": ("x-amz-checksum-crc32c",)}
        ignored = [name for rule, names in dropped.items() if rule in self.server.differences for name in names]
        seen = {k: v for k, v in self.headers.items() if self.command != "PUT" or k.lower() not in ignored}
        return self.passed(self.server.behind, body, seen, command)

    def listing(self, content: bytes, differences: set[str]) -> bytes:
        """A page of a listing as the store has it."""
        text = content.decode()
        entries = re.findall(r"<Contents>.*?</Contents>", text, re.DOTALL)
        keys = [re.search(r"<Key>(.*?)</Key>", entry)[1] for entry in entries]
        kept = entries
        if "lists nothing below objects" in differences:
            kept = [e for e, k in zip(entries, keys, strict=True) if not any(k.startswith(f"{o}/") for o in keys)]
        if "lists backwards" in differences:
            kept = kept[::-1]
        head, _, rest = text.partition("<Contents>")
        tail = rest.rpartition("</Contents>")[2]
        return (head + "".join(kept) + tail).encode() if entries else content
