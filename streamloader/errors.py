"""The errors that streamloader raises on purpose, in one tree; each has a stable code.

StreamloaderError
|-- UsageError                SL100  an argument is wrong (also a ValueError)
|   |-- FieldError            SL101  an unknown field, values that do not fit the field, or an unknown split
|   |-- BatchError            SL102  the batch size is invalid, or larger than the dataset
|   |-- MemoryBudgetError     SL103  the shuffle window does not fit `memory`
|   |-- StateError            SL104  a saved state belongs to another dataset, order or split
|   |-- WorldError            SL105  the rank or world size is invalid
|   |-- SelectionError        SL106  the selection of samples cannot be parsed, does not fit the dataset, or is empty
|   `-- MixtureError          SL107  the sources or weights cannot be mixed
|-- StorageError              SL200  the store returned an error
|   |-- NotFoundError         SL201  no such object, bucket or folder
|   |-- AccessError           SL202  credentials are missing, wrong, or lack permission
|   |-- EndpointError         SL203  the endpoint cannot be reached
|   |-- TransientError        SL204  a temporary failure that lasted longer than its retries
|   |-- ThrottledError        SL205  the store still asked to slow down (503, 429) after retries
|   |-- ObjectExistsError     SL206  a create-only write found an existing object
|   `-- UnsupportedError      SL207  the protocol or option is not supported
|-- FormatError               SL300  the bytes do not match the format
|   |-- NotADatasetError      SL301  there is no streamloader dataset at this URL
|   |-- IncompleteError       SL302  the conversion has not finished
|   |-- VersionError          SL303  written by a later version, or requires a feature that this version lacks
|   |-- MissingObjectError    SL304  a shard, chunk or table that the manifest lists is missing
|   |-- CorruptError          SL305  truncated, or a checksum does not match
|   `-- ModifiedError         SL306  the bytes are intact, but belong to another dataset or version than the manifest
|-- SampleError               SL400  one sample cannot be used
|   |-- DecodeError           SL401  an encoded sample does not decode
|   |-- TransformError        SL402  your transform raised, or returned values that cannot be batched
|   `-- BadSamplesError       SL403  more samples are bad than `max_bad` allows
|-- ConvertError              SL500  a conversion cannot continue
|   |-- SourceError           SL501  the source is empty or unreadable, or its schema is not uniform
|   |-- SourceChangedError    SL502  the source changed since the conversion began
|   `-- DestinationError      SL503  the destination contains something else
`-- EngineError               SL600  an internal thread, process or protocol failed
    |-- ForkError             SL601  a client of the parent process was used after a fork
    `-- PassEndedError        SL602  the pass was ended by a later iter(), load_state_dict() or close()
"""

from typing import Any, ClassVar

MOST_CHARACTERS = 2000  # that `str` shows of a problem, and of a remedy
# Characters that a terminal obeys, or that nobody sees: controls, and those without a width or that change the
# direction of text, by which a name can imitate another one
_CONTROLS = (*range(32), *range(127, 160), 0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x2028, 0x202F))
_UNSEEN = (*_CONTROLS, *range(0x2060, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0080))
UNSEEN = {code: f"\\x{code:02x}" if code < 256 else ascii(chr(code))[1:-1] for code in _UNSEEN}


class StreamloaderError(Exception):
    """The base class.

    `problem` says what is wrong and names the values; `remedy` says what to do. `str()` returns both and the code in
    one line, as the commands print it.
    """

    code: ClassVar[str] = "SL000"

    def __init_subclass__(cls, code: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.code = code or cls.code

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        if not self.remedy and f"[{self.code}]" in self.problem:
            return self.problem  # an error of a DataLoader worker, which torch recreates from its text and traceback
        text = "; ".join(_shortened(part) for part in (self.problem, self.remedy) if part)
        return f"{text} [{self.code}]"


def _shortened(text: str) -> str:
    """Return a text on one line, of limited length, with escapes for `UNSEEN`: it may quote what others wrote."""
    text = " ".join(text.split()).translate(UNSEEN)
    if len(text) <= MOST_CHARACTERS:
        return text
    left_out = len(text) - MOST_CHARACTERS
    return f"{text[: MOST_CHARACTERS // 2]} ... ({left_out} characters) ... {text[-MOST_CHARACTERS // 2 :]}"


class UsageError(StreamloaderError, ValueError, code="SL100"):
    """An argument is wrong."""


class FieldError(UsageError, code="SL101"):
    """An unknown field, values that do not fit the field, or an unknown split."""


class BatchError(UsageError, code="SL102"):
    """The batch size is invalid, or larger than the dataset."""


class MemoryBudgetError(UsageError, code="SL103"):
    """The shuffle window does not fit `memory`."""


class StateError(UsageError, code="SL104"):
    """A saved state belongs to another dataset, order or split."""


class WorldError(UsageError, code="SL105"):
    """The rank or world size is invalid."""


class SelectionError(UsageError, code="SL106"):
    """The selection of samples cannot be parsed, does not fit the dataset, or is empty."""


class MixtureError(UsageError, code="SL107"):
    """The sources or weights cannot be mixed."""


class StorageError(StreamloaderError, code="SL200"):
    """The store returned an error.

    `retry_after`: the seconds to wait that the store asked for (Retry-After), or 0. `attempts`: the maximum number of
    times that the request is sent; None: as the retry policy says.
    """

    retry_after: float = 0.0
    attempts: int | None = 1


class NotFoundError(StorageError, FileNotFoundError, code="SL201"):
    """No such object, bucket or folder."""


class AccessError(StorageError, PermissionError, code="SL202"):
    """Credentials are missing, wrong, or lack permission.

    `may_be_missing`: a 403 without a reason, which S3 also answers for an object that does not exist if the credentials
    do not allow to list its bucket.
    """

    may_be_missing = False


class EndpointError(StorageError, ConnectionError, code="SL203"):
    """The endpoint cannot be reached."""

    attempts: int | None = None


class TransientError(StorageError, code="SL204"):
    """A temporary failure that lasted longer than its retries."""

    attempts: int | None = None


class ThrottledError(TransientError, code="SL205"):
    """The store still asked to slow down after retries."""


class ObjectExistsError(StorageError, FileExistsError, code="SL206"):
    """A create-only write found an existing object."""


class UnsupportedError(StorageError, code="SL207"):
    """The protocol or option is not supported."""


class FormatError(StreamloaderError, code="SL300"):
    """The bytes do not match the format."""


class NotADatasetError(FormatError, code="SL301"):
    """There is no streamloader dataset at this URL."""


class IncompleteError(FormatError, code="SL302"):
    """The conversion has not finished."""


class VersionError(FormatError, code="SL303"):
    """Written by a later version, or requires a feature that this version lacks."""


class MissingObjectError(FormatError, code="SL304"):
    """A shard, chunk or table that the manifest lists is missing."""


class CorruptError(FormatError, code="SL305"):
    """Truncated, or a checksum does not match."""


class ModifiedError(FormatError, code="SL306"):
    """The bytes are intact, but belong to another dataset or version than the manifest."""


class SampleError(StreamloaderError, code="SL400"):
    """One sample cannot be used."""


class DecodeError(SampleError, code="SL401"):
    """An encoded sample does not decode."""


class TransformError(SampleError, code="SL402"):
    """Your transform raised, or returned values that cannot be batched."""


class BadSamplesError(SampleError, code="SL403"):
    """More samples are bad than `max_bad` allows."""


class ConvertError(StreamloaderError, code="SL500"):
    """A conversion cannot continue."""


class SourceError(ConvertError, code="SL501"):
    """The source is empty or unreadable, or its schema is not uniform."""


class SourceChangedError(ConvertError, code="SL502"):
    """The source changed since the conversion began."""


class DestinationError(ConvertError, code="SL503"):
    """The destination contains something else."""


class EngineError(StreamloaderError, code="SL600"):
    """An internal thread, process or protocol failed."""


class ForkError(EngineError, code="SL601"):
    """A client of the parent process was used after a fork."""


class PassEndedError(EngineError, code="SL602"):
    """The pass was ended by a later iter(), load_state_dict() or close()."""

    def __init__(self) -> None:
        super().__init__(
            "this pass was ended by a later iter(), load_state_dict() or close()", "iterate one pass at a time"
        )


def message(error: BaseException | None) -> str:
    """Return `str(error)`, or say that it raises: an error without a message is reported all the same."""
    try:
        return str(error)
    except BaseException as problem:  # noqa: BLE001 - a class of the user's may raise anything
        return f"its message raises {type(problem).__name__}"


def wrapped(error: BaseException, operation: str) -> StreamloaderError:
    """Return `error` if it is a `StreamloaderError`, else an `EngineError` whose cause is `error`.

    `operation` names the operation that failed.
    """
    if isinstance(error, StreamloaderError):
        return error
    remedy = "its __cause__ is the original error: fix the code that raised it, or report it"
    if isinstance(error, MemoryError):
        remedy = "lower memory= or batch_size, or free memory elsewhere"
    wrapper = EngineError(f"{operation} failed with {type(error).__name__}: {message(error)}", remedy)
    wrapper.__cause__ = error
    return wrapper


__all__ = [name for name, value in vars().items() if isinstance(value, type) and issubclass(value, StreamloaderError)]
