"""Where a dataset is about to be written: what is there, the job file, and removing what is ours."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import sys
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from streamloader.errors import DestinationError, FormatError, NotADatasetError, NotFoundError, ObjectExistsError
from streamloader.format.manifest import FORMAT, NAME
from streamloader.format.opening import JOB, RECEIPTS, ROOT, get_document, read_job
from streamloader.format.parse import parse_json
from streamloader.storage.protocol import Store

OURS = "_streamloader"
PARTS = f"{OURS}/parts"
BAD = f"{OURS}/bad"  # what shards with bad samples leave in place of a receipt
_ARRAY_OBJECT = re.compile(r"zarr\.json|c/[0-9]+(/0)*")


class Claim:
    """The right of one run to write at a destination: the key `run` of the job file names the run that has it.

    Whoever replaces the job file takes the right over; the run that had it stops at its next `check`. On Linux a run
    that is alive also holds a socket of its name, which the kernel closes with the process: so on one machine a run
    that is alive is told from one that was killed.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._run, self._data = store, uuid.uuid4().hex, b""
        self._checked = 0.0
        held = _hold(self._run)
        self._release = None if held is None else weakref.finalize(self, held.close)

    @classmethod
    def take(cls, store: Store, job: Mapping[str, Any], before: bytes | None) -> Claim:
        """Write the job file, in place of the bytes `before`, or where there must be none, and return the claim.

        Raises `DestinationError` where another run wrote it meanwhile.
        """
        claim = cls(store)
        try:
            claim._write(job, before)
        except BaseException:
            claim.close()
            raise
        return claim

    def renew(self, job: Mapping[str, Any]) -> None:
        """Write another job into the job file. Raises `DestinationError` where it is another run's now."""
        self._write(job, self._data)

    def check(self, seconds: float = 0.0) -> None:
        """Raise `DestinationError` where another run took over, unless that was checked in the last `seconds`."""
        if self._checked and time.monotonic() - self._checked < seconds:
            return
        if not self.held():
            problem = f"another run writes to {self._store.url} now, or removed what this one wrote: this one stops"
            raise DestinationError(problem, "wait for the other run, or run this command again when it has ended")
        self._checked = time.monotonic()

    def held(self) -> bool:
        """Return whether this run still has the right to write."""
        try:
            return get_document(self._store, JOB) == self._data
        except (NotFoundError, FormatError):
            return False

    def close(self) -> None:
        """End the run's life. The job file stays."""
        if self._release is not None:
            self._release()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, job: Mapping[str, Any], before: bytes | None) -> None:
        run = {"id": self._run, "host": socket.gethostname(), "pid": os.getpid()}
        data = json.dumps({**job, "run": run}, sort_keys=True, indent=1).encode()
        try:
            if before is None:
                self._store.create(JOB, data)
            else:
                self._store.replace(JOB, data, before)
        except (ObjectExistsError, NotFoundError) as error:
            problem = f"{self._store.url} is being written by another run, or holds an unfinished dataset"
            remedy = "wait for the other run, or run this command again when it has ended"
            raise DestinationError(problem, remedy) from error
        self._data = data


def check_not_running(store: Store, job: Mapping[str, Any] | None) -> None:
    """Raise `DestinationError` where the run that the job names is alive on this machine."""
    run = job.get("run") if job else None
    if not isinstance(run, dict) or not isinstance(run.get("id"), str) or not sys.platform.startswith("linux"):
        return
    held = _hold(run["id"])
    if held is not None:
        held.close()
        return
    problem = f"{store.url} is being written by another run, process {run.get('pid')} of this machine"
    raise DestinationError(problem, "wait until it ends, or end it; then run this command again")


def _hold(run: str) -> socket.socket | None:
    """Return a socket that only one holder has until it is closed; None where there is a holder, or no such sockets."""
    if not sys.platform.startswith("linux"):
        return None
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0streamloader-run-{run[:64]}")  # an abstract name, in no file system
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return held  # not to be known here: as if nobody had it
        held.close()
        return None
    return held


def prepare(
    store: Store, overwrite: bool = False, remedy: str = "choose another destination, or overwrite it"
) -> Claim | None:
    """Make sure that there is no dataset at the destination.

    `overwrite` removes one, finished or not, and returns the claim under which that was done. `remedy` is what the
    error for a finished dataset advises. Raises `DestinationError` for a dataset without `overwrite`, for one that
    another run is writing, and for a Zarr that is not ours in any case.
    """
    document = _root(store)
    attributes = document.get("attributes") if document else None
    if document is not None and not (isinstance(attributes, dict) and FORMAT in attributes):
        raise DestinationError(
            f"{store.url} holds a Zarr that streamloader did not write", "choose another destination"
        )
    if overwrite:
        return _clear(store, document)
    if document is not None:
        raise DestinationError(f"{store.url} holds a dataset", remedy)
    job = read_job(store)
    if job is not None:
        check_not_running(store, job)
        raise DestinationError(f"{store.url} holds an unfinished dataset", "finish it, or overwrite it")
    return None


def write_job(
    store: Store,
    by: str,
    fields: Iterable[str],
    *,
    splits: Iterable[str] = (),
    shards: int | None = None,
    extra: Mapping[str, Any] | None = None,
    claim: Claim | None = None,
) -> Claim:
    """Write `_streamloader/job.json`: there is an unfinished dataset. `extra` is the writer's own.

    `by` "convert" can be resumed, "writer" cannot; `shards` is the total over all splits, where it is known.
    Returns the claim, which is `claim` where one is held already. Raises `DestinationError` where there is another job.
    """
    job = {**(extra or {}), "by": by, "fields": sorted(fields), "splits": sorted(splits), "shards": shards}
    if claim is None:
        return Claim.take(store, job, None)
    claim.renew(job)
    return claim


def take_over(store: Store, job: Mapping[str, Any]) -> Claim:
    """Go on with the job that is here, which another run began. Raises `DestinationError` where that is alive."""
    before = get_document(store, JOB)
    next(iter(store.list(RECEIPTS)), None)  # who may not list cannot go on: that raises before anything is changed
    check_not_running(store, parse_json(before))
    return Claim.take(store, {key: value for key, value in job.items() if key != "run"}, before)


def _clear(store: Store, document: Mapping[str, Any] | None) -> Claim:
    """Take the destination, then delete the dataset that is here; the job file stays, as that of a writer."""
    try:
        before: bytes | None = get_document(store, JOB)
    except NotFoundError:
        before = None
    job = _job(store)
    check_not_running(store, job)
    fields, splits = _contents(document, job)
    unfinished = {"by": "writer", "fields": fields, "splits": splits, "shards": None}
    claim = Claim.take(store, unfinished, before)
    try:
        _delete_contents(store, fields, splits)
    except BaseException:
        claim.close()
        raise
    return claim


def erase(store: Store) -> None:
    """Delete the dataset that is here, finished or not, and nothing else: its manifest first, its job last.

    What belongs to it stands in its manifest or its job, so that other things below the same URL stay. A crash
    in the middle leaves a job, from which the next call goes on.
    """
    document, job = _root(store), _job(store)
    fields, splits = _contents(document, job)
    if document is not None:
        store.put(JOB, json.dumps({"by": "writer", "fields": fields, "splits": splits, "shards": None}).encode())
    _delete_contents(store, fields, splits)
    store.delete([JOB])


def _delete_contents(store: Store, fields: Iterable[str], splits: Iterable[str]) -> None:
    """Delete the objects of these fields and splits, the manifest first, and all of ours but the job file."""
    store.delete([ROOT])
    groups = ["", *(f"{split}/" for split in splits)]
    store.delete([f"{group}{ROOT}" for group in groups])
    for group in groups:
        for field in fields:
            below = f"{group}{field}"
            found = [info.path for info in store.list(below)]
            store.delete([path for path in found if _ARRAY_OBJECT.fullmatch(path, len(below) + 1)])
        store.delete([info.path for info in store.list(f"{group}{OURS}") if info.path != JOB])


def clean(store: Store, claim: Claim | None = None) -> None:
    """Remove what only an unfinished dataset needs. Safe to repeat: a crash in it is healed by the next call.

    Raises `DestinationError` where the `claim` is lost: what is there is another run's.
    """
    if claim is not None:
        claim.check()
    store.delete([info.path for folder in (PARTS, RECEIPTS, BAD) for info in store.list(folder)])
    store.delete([JOB])


def _root(store: Store) -> dict[str, Any] | None:
    try:
        data = get_document(store, ROOT)
    except NotFoundError:
        return None
    except FormatError:
        data = b""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise DestinationError(f"{store.url}/{ROOT} is damaged, nobody knows what belongs to it", "delete it yourself")
    return document


def _job(store: Store) -> dict[str, Any]:
    try:
        return read_job(store) or {}
    except FormatError:
        return {}


def _contents(document: Mapping[str, Any] | None, job: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of fields and splits that the manifest or the job tells of."""
    fields, splits = set(job.get("fields") or ()), set(job.get("splits") or ())
    if document is not None:
        try:
            nodes = document["consolidated_metadata"]["metadata"]
            splits |= set(document["attributes"][FORMAT].get("splits") or ())
            fields |= {path.rpartition("/")[2] for path, node in nodes.items() if node["node_type"] == "array"}
        except (KeyError, TypeError, AttributeError) as error:
            raise NotADatasetError("the manifest here does not say what belongs to it", "delete it yourself") from error
    return _names(fields), _names(splits)


def _names(raw: Iterable[Any]) -> list[str]:
    return sorted(name for name in raw if isinstance(name, str) and NAME.match(name))
