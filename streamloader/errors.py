"""Every error that streamloader raises on purpose: one tree, each with a stable code.

StreamloaderError
|-- UsageError                SL100  an argument is wrong (also a ValueError)
|   |-- FieldError            SL101  unknown field, or values that do not fit the field
|   |-- BatchError            SL102  a batch that the dataset cannot fill
|   |-- MemoryBudgetError     SL103  the shuffle window does not fit `memory`
|   |-- StateError            SL104  a saved state of another dataset, order or split
|   |-- WorldError            SL105  a rank or world size that cannot be
|   |-- SelectionError        SL106  a selection of samples that cannot be read, or that is empty
|   `-- MixtureError          SL107  sources or weights that cannot be mixed
|-- StorageError              SL200  the store said no
|   |-- NotFoundError         SL201  no such object, bucket or folder
|   |-- AccessError           SL202  credentials are missing, wrong, or not allowed to
|   |-- EndpointError         SL203  the endpoint cannot be reached
|   |-- TransientError        SL204  a passing failure that outlived its retries
|   |-- ThrottledError        SL205  the store asked to slow down (503, 429), also after retries
|   |-- ObjectExistsError     SL206  a create-only write met an object
|   `-- UnsupportedError      SL207  this protocol or option cannot do that
|-- FormatError               SL300  the bytes are not what the format says
|   |-- NotADatasetError      SL301  nothing of ours is at this URL
|   |-- IncompleteError       SL302  a conversion that has not finished
|   |-- VersionError          SL303  written by a later version, or requires what we do not know
|   |-- MissingObjectError    SL304  a shard, chunk or table that the manifest promises is not there
|   |-- CorruptError          SL305  truncated, or a checksum does not match
|   `-- ModifiedError         SL306  intact bytes, but not those the manifest was written for
|-- SampleError               SL400  one sample cannot be used
|   |-- DecodeError           SL401  an encoded sample does not decode
|   `-- TransformError        SL402  the caller's transform raised, or returned what cannot be batched
|-- ConvertError              SL500  a conversion cannot go on
|   |-- SourceError           SL501  the source is empty, unreadable, or not of one schema
|   |-- SourceChangedError    SL502  the source changed since the conversion began
|   `-- DestinationError      SL503  the destination holds something else
`-- EngineError               SL600  a thread, process or protocol of ours failed
    `-- ForkError             SL601  a used client would be touched after a fork
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AccessError",
    "BatchError",
    "ConvertError",
    "CorruptError",
    "DecodeError",
    "DestinationError",
    "EndpointError",
    "EngineError",
    "FieldError",
    "ForkError",
    "FormatError",
    "IncompleteError",
    "MemoryBudgetError",
    "MissingObjectError",
    "MixtureError",
    "ModifiedError",
    "NotADatasetError",
    "NotFoundError",
    "ObjectExistsError",
    "SampleError",
    "SelectionError",
    "SourceChangedError",
    "SourceError",
    "StateError",
    "StorageError",
    "StreamloaderError",
    "ThrottledError",
    "TransformError",
    "TransientError",
    "UnsupportedError",
    "UsageError",
    "VersionError",
    "WorldError",
]


class StreamloaderError(Exception):
    """The root of the tree.

    `problem` says what is wrong and names the values; `remedy` says what to do. `str()` gives both and
    the code, on one line: what the command line prints.
    """

    code: ClassVar[str] = "SL000"

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        if not self.remedy and f"[{self.code}]" in self.problem:
            return self.problem  # a DataLoader worker's error, which torch makes anew from its text and traceback
        text = f"{self.problem}; {self.remedy}" if self.remedy else self.problem
        return f"{' '.join(text.split())} [{self.code}]"

    def __reduce__(self) -> tuple[Any, ...]:  # errors cross process borders
        return (type(self), (self.problem, self.remedy))


class UsageError(StreamloaderError, ValueError):
    """An argument is wrong."""

    code = "SL100"


class FieldError(UsageError):
    """An unknown field, or values that do not fit the field."""

    code = "SL101"


class BatchError(UsageError):
    """A batch that the dataset cannot fill."""

    code = "SL102"


class MemoryBudgetError(UsageError):
    """The shuffle window does not fit `memory`."""

    code = "SL103"


class StateError(UsageError):
    """A saved state belongs to another dataset, order or split."""

    code = "SL104"


class WorldError(UsageError):
    """A rank or world size that cannot be."""

    code = "SL105"


class SelectionError(UsageError):
    """A selection of samples that cannot be read, does not fit the dataset, or is empty."""

    code = "SL106"


class MixtureError(UsageError):
    """Sources or weights that cannot be mixed."""

    code = "SL107"


class StorageError(StreamloaderError):
    """The store said no.

    `retry_after`: the seconds that it asked to wait (Retry-After); 0 where it did not. `attempts`: how often the
    request is sent at most; None leaves that to the retry policy.
    """

    code = "SL200"
    retry_after = 0.0
    attempts: int | None = 1


class NotFoundError(StorageError, FileNotFoundError):
    """No such object, bucket or folder."""

    code = "SL201"


class AccessError(StorageError, PermissionError):
    """Credentials are missing, wrong, or not allowed to."""

    code = "SL202"


class EndpointError(StorageError, ConnectionError):
    """The endpoint cannot be reached."""

    code = "SL203"
    attempts = None


class TransientError(StorageError):
    """A passing failure that outlived its retries."""

    code = "SL204"
    attempts = None


class ThrottledError(TransientError):
    """The store asked to slow down, also after retries."""

    code = "SL205"


class ObjectExistsError(StorageError, FileExistsError):
    """A create-only write met an object."""

    code = "SL206"


class UnsupportedError(StorageError):
    """This protocol or option cannot do that."""

    code = "SL207"


class FormatError(StreamloaderError):
    """The bytes are not what the format says."""

    code = "SL300"


class NotADatasetError(FormatError):
    """Nothing of ours is at this URL."""

    code = "SL301"


class IncompleteError(FormatError):
    """A conversion that has not finished."""

    code = "SL302"


class VersionError(FormatError):
    """Written by a later version, or requires what this version does not know."""

    code = "SL303"


class MissingObjectError(FormatError):
    """A shard, chunk or table that the manifest promises is not there."""

    code = "SL304"


class CorruptError(FormatError):
    """Truncated, or a checksum does not match."""

    code = "SL305"


class ModifiedError(FormatError):
    """Intact bytes, but not those the manifest was written for."""

    code = "SL306"


class SampleError(StreamloaderError):
    """One sample cannot be used."""

    code = "SL400"


class DecodeError(SampleError):
    """An encoded sample does not decode."""

    code = "SL401"


class TransformError(SampleError):
    """The caller's transform raised, or returned what cannot be batched."""

    code = "SL402"


class ConvertError(StreamloaderError):
    """A conversion cannot go on."""

    code = "SL500"


class SourceError(ConvertError):
    """The source is empty, unreadable, or not of one schema."""

    code = "SL501"


class SourceChangedError(ConvertError):
    """The source changed since the conversion began."""

    code = "SL502"


class DestinationError(ConvertError):
    """The destination holds something else."""

    code = "SL503"


class EngineError(StreamloaderError):
    """A thread, process or protocol of ours failed."""

    code = "SL600"


class ForkError(EngineError):
    """A used client would be touched after a fork."""

    code = "SL601"


def wrapped(error: BaseException, what: str) -> StreamloaderError:
    """Return `error` if it is a `StreamloaderError`, else an `EngineError` with `error` as its cause.

    `what` names the operation that failed.
    """
    if isinstance(error, StreamloaderError):
        return error
    remedy = (
        "lower memory= or batch_size, or free memory elsewhere"
        if isinstance(error, MemoryError)
        else "the original error is this one's __cause__: fix what raised it, or report it"
    )
    ours = EngineError(f"{what} failed with {type(error).__name__}: {error}", remedy)
    ours.__cause__ = error
    return ours
