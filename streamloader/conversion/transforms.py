"""Transforms samples between the source and the dataset: the user's map function, and re-encoding of images.

A map function is identified by a digest of everything that its results depend on, as far as that can be found: for a
user's function its compiled code, defaults, closure, the globals that the code reads, and the modules that it imports.
Functions and classes among these are included in the same way, and attributes of a user's module if the code names
them. Objects of installed packages are identified by name and version of the package, other objects by their class and
the state from which they are copied. The digest is unknown if an object has no such state, such as a lock or an open
file.
"""

from __future__ import annotations

import copyreg
import dis
import hashlib
import importlib.util
import io
import pkgutil
import re
import sys
import sysconfig
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Fragment, OnBad, Source, read_kept
from streamloader.conversion.sources.fields import (
    FieldSelection,
    FieldsOption,
    flatten,
    from_dlpack,
    settle,
    transform_source,
)
from streamloader.conversion.sources.media import IMAGE_ENCODINGS
from streamloader.conversion.sources.records import Sample, open_records
from streamloader.errors import UsageError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.values import AUDIO, from_bytes, sniff
from streamloader.options import is_whole, plain_integers

_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None), type(...), type(NotImplemented))
# attributes that the interpreter and copyreg add to a class, some of them late; methods of dataclasses are included
_CLASS_EXTRAS = (
    *("__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl", "__firstlineno__"),
    *("__dataclass_fields__", "__dataclass_params__", "__static_attributes__"),
    *("__slotnames__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
)
_CODE = (
    *("co_code", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_names", "co_varnames"),
    *("co_freevars", "co_cellvars", "co_exceptiontable", "co_consts"),
)


class FunctionDigest(NamedTuple):
    """A SHA-256 in hex; if it cannot be computed, it is empty and `unknown` is the reason."""

    digest: str
    unknown: str = ""


def function_digest(function: Callable[..., Any]) -> FunctionDigest:
    """Return the digest of a callable. It is the same in every process that runs the same version of Python."""
    try:
        return FunctionDigest(_digest(function, "it"))
    except RecursionError:
        return FunctionDigest("", "its state is nested too deeply")
    except _UnknownStateError as error:
        return FunctionDigest("", str(error))


class _UnknownStateError(Exception):
    """The state of a value is unknown."""


def _digest(value: Any, where: str) -> str:
    digest = _Digest()
    digest.add(value, where)
    return digest.hash.hexdigest()


class _Digest:
    """A hash of Python values, each with its type and length, so that different sequences of values differ."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self._seen: dict[int, tuple[int, Any]] = {}  # by id, which is unique only while its object lives

    def add(self, value: Any, where: str) -> None:
        """Add a value; `where` names it in the message of `_UnknownStateError`."""
        kind = type(value)
        if kind in _PLAIN:
            self._write(kind.__name__, repr(value).encode(errors="surrogatepass"))
        elif kind in (set, frozenset):  # their order differs between processes
            self._write(kind.__name__, "".join(sorted(_digest(item, where) for item in value)).encode())
        elif kind is np.ndarray and not value.dtype.hasobject:
            self._write(f"array {value.dtype.str} {value.shape}", value.tobytes())
        elif kind in (tuple, types.CodeType) or not self._add_reference(value):
            parts = list(_parts(value, where))
            self._write(kind.__name__, str(len(parts)).encode())
            for name, part in parts:
                self.add(part, name)

    def _write(self, tag: str, data: bytes) -> None:
        self.hash.update(f"{tag} {len(data)} ".encode() + data)

    def _add_reference(self, value: Any) -> bool:
        """Add a reference if the value was added before; return whether it was."""
        count = len(self._seen)
        number, _ = self._seen.setdefault(id(value), (count, value))
        if number < count:
            self._write("again", str(number).encode())
        return number < count


def _parts(value: Any, where: str) -> Iterable[tuple[str, Any]]:
    """Return the parts of a value, each with its `where`."""
    kind = type(value)
    if kind in _PARTS:
        return ((where, part) for part in _PARTS[kind](value))
    if kind in (dict, types.MappingProxyType):
        return (pair for key, item in value.items() for pair in ((where, key), (f"{where}[{key!r}]", item)))
    if kind is types.BuiltinFunctionType and not isinstance(value.__self__, types.ModuleType | None):
        return (where, value.__name__), (where, value.__self__)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type) and _installed(value.__module__):
        package = sys.modules.get(str(value.__module__).partition(".")[0])
        name = f"{value.__module__}:{value.__qualname__} {getattr(package, '__version__', '')}"
        return ((where, name),)
    if kind is types.FunctionType:
        return _function_parts(value)
    return _class_parts(value) if isinstance(value, type) else ((where, part) for part in _state(value, where))


def _state(value: Any, where: str) -> Sequence[Any]:
    """Return the class of an object, and the state from which it is copied. Raises `_UnknownStateError`."""
    kind = type(value)
    if isinstance(value, types.ModuleType) and _installed(value.__name__):
        return [value.__name__, getattr(value, "__version__", "")]
    if isinstance(value, types.ModuleType):
        raise _UnknownStateError(f"{where} is the module {value.__name__}, of which any attribute may be used")
    exported = from_dlpack(value) if hasattr(kind, "__dlpack__") and not isinstance(value, np.ndarray) else None
    if exported is not None:
        return [kind, exported]  # the state of a tensor has addresses
    wrapped = getattr(value, "__wrapped__", None)
    if callable(wrapped):  # functools.cache and similar objects are copied by name
        return [kind, wrapped]
    try:
        reduced = copyreg.dispatch_table.get(kind, lambda copied: copied.__reduce_ex__(4))(value)  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001 - the object's own code may raise anything
        reduced = None
    if isinstance(reduced, tuple):
        items = (part and list(part) for part in reduced[3:5])  # of a list and of a dict, as iterators
        return [kind, *reduced[:3], *items]
    if isinstance(reduced, str) and _installed(getattr(value, "__module__", None) or kind.__module__):
        return [kind, reduced]
    raise _UnknownStateError(f"{where} is a {kind.__module__}.{kind.__qualname__}, whose state is unknown")


_PARTS: Mapping[type, Callable[[Any], Iterable[Any]]] = {
    list: list,
    tuple: list,
    types.MethodType: lambda method: [method.__func__, method.__self__],
    staticmethod: lambda method: [method.__func__],
    classmethod: lambda method: [method.__func__],
    property: lambda member: [member.fget, member.fset, member.fdel],
    types.CodeType: lambda code: [getattr(code, name, b"") for name in _CODE],
}


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    name, codes, defaults = f"the function {function.__qualname__}", _codes(function.__code__), function.__kwdefaults__
    yield name, (function.__qualname__, function.__code__, list(defaults or ()))
    yield f"an attribute of {name}", function.__dict__
    names = {used for code in codes for used in code.co_names}
    for value in (*(function.__defaults__ or ()), *(defaults or {}).values()):
        yield from _used_parts(f"a default of {name}", value, names)
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # not empty
            yield name, variable
            yield from _used_parts(f"{variable!r} in the closure of {name}", cell.cell_contents, names)
    for read, value in sorted(_globals_read(function, codes).items()):
        yield from _used_parts(f"the global {read!r} of {name}", value, names)
    for module in _imported(function, codes):
        yield from _used_parts(f"the module {module.__name__} in {name}", module, names)


def _used_parts(
    where: str, value: Any, names: set[str], within: tuple[types.ModuleType, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield a value that a function uses; for a user's module the attributes with names in the function's code."""
    if not isinstance(value, types.ModuleType) or _installed(value.__name__):
        yield where, value
    elif value not in within:  # modules may refer to each other
        yield where, value.__name__
        for attribute in sorted(names & vars(value).keys()):
            yield from _used_parts(f"{where}, {attribute!r}", vars(value)[attribute], names, (*within, value))


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """Return the code object, and all code objects within it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return [code, *chain.from_iterable(map(_codes, inner))]


def _globals_read(function: types.FunctionType, codes: Iterable[types.CodeType]) -> dict[str, Any]:
    """Return the globals that the code reads, without builtins."""
    steps = chain.from_iterable(map(dis.get_instructions, codes))
    reads = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return {name: function.__globals__[name] for name in reads & function.__globals__.keys()}


def _imported(function: types.FunctionType, codes: Iterable[types.CodeType]) -> Iterator[types.ModuleType]:
    """Yield the user's modules that the code imports when it runs, unless they cannot be imported."""
    for code in codes:
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for level, fromlist, instruction in zip(steps, steps[1:], steps[2:], strict=False):
            name = instruction.argval
            if instruction.opname != "IMPORT_NAME" or (not level.argval and _installed(name)):
                continue
            with suppress(Exception):  # the module's own code may raise anything
                yield __import__(name, function.__globals__, None, fromlist.argval, level.argval)


def _class_parts(kind: type) -> Iterator[tuple[str, Any]]:
    name = f"the class {kind.__qualname__}"
    yield name, (kind.__qualname__, type(kind), kind.__bases__)
    for member, value in sorted(vars(kind).items()):
        slot = isinstance(value, types.GetSetDescriptorType | types.MemberDescriptorType)
        if member not in _CLASS_EXTRAS and not slot:
            yield f"{member!r} of {name}", (member, value)


def _installed(module: str | None) -> bool:
    """Return whether a module belongs to the interpreter or an installed package, which its version identifies."""
    top = str(module or "builtins").partition(".")[0]
    if top == "__main__":
        return False
    if top in sys.stdlib_module_names or top == __name__.partition(".")[0]:
        return True
    module_or_spec = sys.modules.get(top) or importlib.util.find_spec(top)  # which imports nothing
    file = getattr(module_or_spec, "__file__", None) or getattr(module_or_spec, "origin", None)
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    return file is not None and any(Path(file).is_relative_to(folder) for folder in folders)


Function = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Mapper:
    """A function from samples to samples.

    If `batch` is None, the function gets one sample, as a mapping of values. Otherwise it gets that many samples, as a
    mapping of columns, and returns as many. `identity` is computed before the first call, which may change the
    function's state.
    """

    function: Function
    name: str
    batch: int | None
    identity: FunctionDigest

    def options(self) -> dict[str, Any]:
        """Return JSON values that identify the function; they differ at each call if its digest is unknown."""
        options = {"function": self.name, "source": self.identity.digest, "batch": self.batch}
        if self.identity.unknown:
            options |= {"unknown": self.identity.unknown, "call": uuid.uuid4().hex}
        return options


def parse_map(given: str | Function | None, batch: int | None, columns: FieldsOption = None) -> Mapper | None:
    """Return the given function, or the one that `module:function` names; also searches the working directory.

    Raises `UsageError` if it cannot be imported or called, for an invalid `batch`, and for `columns` without function.
    """
    if columns is not None and given is None:
        raise UsageError("columns without map", "give a map function of them, or choose with --fields")
    if batch is not None and (not is_whole(batch) or given is None):
        raise UsageError(f"map_batch={batch!r} with map={given!r}", "give a function and at least 1 sample")
    batch = plain_integers(batch)
    if given is None:
        return None
    if callable(given):
        name = f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', type(given).__qualname__)}"
        return Mapper(given, name, batch, function_digest(given))
    if not all(given.partition(":")):
        raise UsageError(f"map={given!r} names no function", "write it as module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as for `python -m`, but not for a console script
    try:
        function: Any = pkgutil.resolve_name(given)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"map={given!r} cannot be imported: {error}", "run in its folder, or install it") from error
    if not callable(function):
        raise UsageError(f"map={given!r} is a {type(function).__name__}", "name a function")
    return Mapper(function, given, batch, function_digest(function))


def map_source(source: Source, mapper: Mapper, selection: FieldSelection) -> Source:
    """Return a source of the samples that the function returns. Raises as `open_records`."""

    def cut(rows: NDArray[np.int64]) -> MappedFragment:
        return MappedFragment(source.fragment(rows), dict(source.fields), mapper)

    notes = {key: value for key, value in source.notes.items() if key != "beside"} | {"map": mapper.name}
    return open_records(source.url, source.files, source.num_samples, cut, selection, notes=notes)


@dataclass(frozen=True)
class MappedFragment:
    """The fragment of a mapped source."""

    fragment: Fragment
    fields: Mapping[str, Field]
    mapper: Mapper

    def __call__(self, on_bad: OnBad) -> Iterator[Sample]:
        """Yield the samples that the function returns; a sample is bad if the function raises for it alone."""
        columns, kept = read_kept(self.fragment, on_bad)
        count, size = len(kept), self.mapper.batch or 1
        pending = [range(first, min(first + size, count)) for first in range(0, count, size)][::-1]
        while pending:
            rows = pending.pop()
            try:
                samples = self._call(columns, rows)
            except Exception as error:  # noqa: BLE001 - the user's code
                if len(rows) > 1:  # one by one, to find the bad samples
                    pending += [range(row, row + 1) for row in reversed(rows)]
                    continue
                problem = f"the map function failed: {type(error).__name__}: {error}"
                on_bad(BadSample(kept[rows[0]], "", problem, "fix the function"))
            else:
                yield from ((kept[row], "", sample) for row, sample in zip(rows, samples, strict=True))

    def _call(self, columns: Mapping[str, Column], rows: range) -> list[dict[str, Any]]:
        """Return the samples that the function returns for these rows."""
        batch = {name: _values(name, kind, columns[name], rows) for name, kind in self.fields.items()}
        if self.mapper.batch is None:
            return [flatten(self.mapper.function({name: values[0] for name, values in batch.items()}))]
        out = self.mapper.function(batch)
        if not isinstance(out, Mapping) or {len(column) for column in out.values()} != {len(rows)}:
            lengths = {name: len(column) for name, column in out.items()} if isinstance(out, Mapping) else type(out)
            raise UsageError(f"it returned {lengths} for {len(rows)} samples", "return a column of as many values")
        # arrays of other libraries, which may be on a device, become numpy arrays
        out = {
            name: settle(c, f"the column {name!r}") if hasattr(c, "__dlpack__") and not isinstance(c, np.ndarray) else c
            for name, c in out.items()
        }
        return [flatten({name: column[i] for name, column in out.items()}) for i in range(len(rows))]


def _values(name: str, kind: Field, column: Column, rows: range) -> Any:
    """Return values for a map function: an array if they have the shape of the field, else a list."""
    values = column[rows.start : rows.stop]
    if isinstance(values, np.ndarray):
        return values
    if kind.fixed and all(isinstance(v, np.ndarray | np.generic) and v.shape == kind.shape for v in values):
        return np.array(values)
    return [from_bytes(name, kind, memoryview(v), 0) if isinstance(v, bytes) else v for v in values]


QUALITY = 95  # of resized JPEGs: with a higher quality, files grow without a visible difference
_SIZE = re.compile(r"(\d{1,5})(?:x(\d{1,5}))?\Z")
_IMAGES = frozenset({*IMAGE_ENCODINGS.values(), "mixed"})


@dataclass(frozen=True)
class Recode:
    """How images are re-encoded.

    `size` is the shorter side in pixels, which is never enlarged, or (height, width). `quality` from 1 to 100 makes
    every image a JPEG; None keeps JPEGs, and makes other images PNGs.
    """

    size: int | tuple[int, int] | None = None
    quality: int | None = None

    def options(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        size = list(self.size) if isinstance(self.size, tuple) else self.size
        return {"resize": size, "quality": self.quality}

    def field(self, field: Field) -> Field:
        """Return the re-encoded field of a field of images, and any other field unchanged."""
        if field.kind != "bytes" or field.encoding not in _IMAGES:
            return field
        if self.quality is not None:
            return replace(field, encoding="jpeg")
        return field if field.encoding in ("jpeg", "mixed") else replace(field, encoding="png")

    def image(self, data: bytes) -> bytes:
        """Return the re-encoded image. Raises Pillow's error if it does not decode.

        The EXIF orientation is applied, because EXIF data are not kept. JPEGs are 8-bit RGB or grey, also of 16-bit and
        palette images.
        """
        from PIL import Image

        from streamloader.images.pillow import eight_bits, image_orientation, png_mode, sixteen_bits, transpose

        with Image.open(io.BytesIO(data)) as opened:
            was_jpeg = opened.format == "JPEG"
            turn = image_orientation(opened, data)
            # libjpeg fills up the last pixel of a side that is no multiple of 8; the image must not begin with it
            if self.size is not None and (turn == 1 or not any(side % 8 for side in opened.size)):
                width, height = self._target(opened.size if turn < 5 else (opened.height, opened.width))
                opened.draft(None, (width, height) if turn < 5 else (height, width))
            image = transpose(sixteen_bits(opened), turn)
            image.load()
        target = self._target(image.size)
        if target != image.size:
            image = image.convert("RGB") if image.mode in ("P", "PA") else image
            image = eight_bits(image) if image.mode in ("I", "F") else image  # the resized values may overshoot
            gap = None if image.mode.startswith("I;16") else 3.0  # Pillow cannot reduce 16 bits
            image = image.resize(target, Image.Resampling.LANCZOS, reducing_gap=gap)
        out = io.BytesIO()
        if was_jpeg or self.quality is not None:
            image = image if image.mode in ("L", "RGB") else eight_bits(image)
            image.save(out, "JPEG", quality=self.quality or QUALITY)
        else:
            png_mode(image).save(out, "PNG")
        return out.getvalue()

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the new (width, height) of an image of this (width, height)."""
        if self.size is None:
            return size
        if isinstance(self.size, tuple):
            return self.size[1], self.size[0]
        scale = min(1.0, self.size / min(size))
        return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def parse_recode(resize: str | int | tuple[int, int] | None, quality: int | None) -> Recode | None:
    """Return how to re-encode images for `resize="256"` (shorter side) or `"256x384"` (height, width), and a quality.

    Returns None if both are None. Raises `UsageError`.
    """
    quality = plain_integers(quality)
    if quality is not None and not (is_whole(quality) and quality <= 100):
        raise UsageError(f"quality={quality!r} is invalid", "give the quality of JPEGs from 1 to 100")
    if resize is None:
        return None if quality is None else Recode(None, quality)
    match = _SIZE.match("x".join(map(str, resize)) if isinstance(resize, tuple) else str(resize))
    sides = [int(side) for side in match.groups() if side] if match else [0]
    if min(sides) < 1:
        remedy = "give the shorter side in pixels, like 256, or height x width, 256x384"
        raise UsageError(f"resize={resize!r} is invalid", remedy)
    return Recode(sides[0] if len(sides) == 1 else (sides[0], sides[1]), quality)


def recode_source(source: Source, recode: Recode) -> Source:
    """Return the source with its images re-encoded. Raises `UsageError` if it has no field of images."""
    images = tuple(name for name, f in source.fields.items() if f.kind == "bytes" and f.encoding in _IMAGES)
    if not images:
        fields = ", ".join(f"{name}: {field}" for name, field in source.fields.items())
        raise UsageError(f"{source.url} has no images to re-encode ({fields})", "leave --resize and --quality out")
    boxes = source.fields.get("boxes", Field("text"))
    if recode.size is not None and (boxes.kind, boxes.shape) == ("ragged", (4,)):
        problem = f"resize would move the pixels of {source.url}, and its field 'boxes' would keep its coordinates"
        remedy = "resize when you read, Decode(size=, boxes='boxes'), or leave boxes out with --fields"
        raise UsageError(problem, remedy)
    recoded = {name: recode.field(field) for name, field in source.fields.items()}
    notes, change = {**source.notes, "images": recode.options()}, partial(_recode, recode, images)
    return transform_source(source, change, fields=recoded, notes=notes)


def _recode(
    recode: Recode, images: Sequence[str], columns: dict[str, Column], bad: dict[int, BadSample]
) -> dict[str, Column]:
    """Return the columns with the images of the fields `images` re-encoded; an image that does not decode is bad."""
    from PIL import Image

    problems = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)
    for name in images:
        recoded: list[bytes] = []
        for position, data in enumerate(columns[name]):
            try:
                recoded.append(recode.image(data) if isinstance(data, bytes) else data)
            except problems as error:
                recoded.append(b"")
                problem = f"the image of field {name!r} cannot be decoded: {error}"
                audio = sniff(data) in AUDIO
                remedy = "it is audio: leave --resize and --quality out" if audio else "repair or remove it"
                bad.setdefault(position, BadSample(position, "", problem, remedy, data))
        columns[name] = recoded
    return columns
