"""What happens to samples between the source and the dataset: the user's map function, and images encoded again.

A map function is known by a digest of everything that its results depend on, as far as that is known: for a function
of the user's own its compiled code, its defaults, the values of its closure, the globals that the code reads, and what
it imports; other functions and classes among these count in the same way, and of a user's module what the code names.
What an installed package defines counts by its name and the package's version. Other objects count by their class and
state, as they are copied. What gives no state, such as a lock or an open file, leaves the digest unknown.
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Fragment, OnBad, Source, read_kept
from streamloader.conversion.sources.fields import FieldSelection, flatten, from_dlpack, settle, transform_source
from streamloader.conversion.sources.media import IMAGE_ENCODINGS
from streamloader.conversion.sources.records import Sample, open_records
from streamloader.errors import UsageError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.values import from_bytes

_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None), type(...), type(NotImplemented))
# what the interpreter and copyreg add to a class, some of it late; what a dataclass generates are members of their own
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
    """A SHA-256 in hex; empty where it is unknown, and `unknown` says why."""

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
    """A value gives no state."""


def _digest(value: Any, where: str) -> str:
    found = _Digest()
    found.add(value, where)
    return found.hash.hexdigest()


class _Digest:
    """A hash of Python values, each with its type and its length, so that no two sequences of values read alike."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self._seen: dict[int, tuple[int, Any]] = {}  # by id, which is unique only while its object lives

    def add(self, value: Any, where: str) -> None:
        """Add a value; `where` names it in the reason for which something is unknown."""
        kind = type(value)
        if kind in _PLAIN:
            self._write(kind.__name__, repr(value).encode(errors="surrogatepass"))
        elif kind in (set, frozenset):  # their order differs from process to process
            self._write(kind.__name__, "".join(sorted(_digest(item, where) for item in value)).encode())
        elif kind is np.ndarray and not value.dtype.hasobject:
            self._write(f"array {value.dtype.str} {value.shape}", value.tobytes())
        elif kind in (tuple, types.CodeType) or not self._again(value):
            parts = list(_parts(value, where))
            self._write(kind.__name__, str(len(parts)).encode())
            for name, part in parts:
                self.add(part, name)

    def _write(self, tag: str, data: bytes) -> None:
        self.hash.update(f"{tag} {len(data)} ".encode() + data)

    def _again(self, value: Any) -> bool:
        """Return whether the value was added before; then a reference to it is."""
        count = len(self._seen)
        number, _ = self._seen.setdefault(id(value), (count, value))
        if number < count:
            self._write("again", str(number).encode())
        return number < count


def _parts(value: Any, where: str) -> Iterable[tuple[str, Any]]:
    """Return what a value consists of, each part with its `where`."""
    kind = type(value)
    if kind in _PARTS:
        return ((where, part) for part in _PARTS[kind](value))
    if kind in (dict, types.MappingProxyType):
        return (pair for key, one in value.items() for pair in ((where, key), (f"{where}[{key!r}]", one)))
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
    """Return the class of an object, and what it is copied from. Raises `_UnknownStateError`."""
    kind = type(value)
    if isinstance(value, types.ModuleType) and _installed(value.__name__):
        return [value.__name__, getattr(value, "__version__", "")]
    if isinstance(value, types.ModuleType):
        raise _UnknownStateError(f"{where} is the module {value.__name__}, of which anything may be used")
    if hasattr(kind, "__dlpack__") and (array := from_dlpack(value)) is not None:
        return [kind, array]  # a tensor is copied by way of addresses
    wrapped = getattr(value, "__wrapped__", None)
    if callable(wrapped):  # functools.cache and its like are copied by name
        return [kind, wrapped]
    try:
        reduced = copyreg.dispatch_table.get(kind, lambda one: one.__reduce_ex__(4))(value)  # type: ignore[no-untyped-call]
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
    property: lambda found: [found.fget, found.fset, found.fdel],
    types.CodeType: lambda code: [getattr(code, name, b"") for name in _CODE],
}


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    name, codes, defaults = f"the function {function.__qualname__}", _codes(function.__code__), function.__kwdefaults__
    yield name, (function.__qualname__, function.__code__, list(defaults or ()))
    yield f"an attribute of {name}", function.__dict__
    names = {named for code in codes for named in code.co_names}
    for value in (*(function.__defaults__ or ()), *(defaults or {}).values()):
        yield from _used_parts(f"a default of {name}", value, names)
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # it is not empty
            yield name, variable
            yield from _used_parts(f"{variable!r} in the closure of {name}", cell.cell_contents, names)
    for read, value in sorted(_globals_read(function, codes).items()):
        yield from _used_parts(f"the global {read!r} of {name}", value, names)
    for module in _imported(function, codes):
        yield from _used_parts(f"the module {module.__name__} in {name}", module, names)


def _used_parts(
    where: str, value: Any, names: set[str], within: tuple[types.ModuleType, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield a value that a function uses; of a user's module what has one of the names in the function's code."""
    if not isinstance(value, types.ModuleType) or _installed(value.__name__):
        yield where, value
    elif value not in within:  # modules may hold each other
        yield where, value.__name__
        for attribute in sorted(names & vars(value).keys()):
            yield from _used_parts(f"{where}, {attribute!r}", vars(value)[attribute], names, (*within, value))


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """Return the code, and all code within it."""
    return [code, *(one for inner in code.co_consts if isinstance(inner, types.CodeType) for one in _codes(inner))]


def _globals_read(function: types.FunctionType, codes: Iterable[types.CodeType]) -> dict[str, Any]:
    """Return the globals that the code reads; builtins are none."""
    reads = {
        instruction.argval
        for code in codes
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return {name: function.__globals__[name] for name in reads & function.__globals__.keys()}


def _imported(function: types.FunctionType, codes: Iterable[types.CodeType]) -> Iterator[types.ModuleType]:
    """Yield the user's modules that the code imports when it runs; one that cannot be imported here is left out."""
    for code in codes:
        found = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
        for level, fromlist, instruction in zip(found, found[1:], found[2:], strict=False):
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
    """Return whether a module is the interpreter's or lies where packages are installed: then its version tells it."""
    top = str(module or "builtins").partition(".")[0]
    if top == "__main__":
        return False
    if top in sys.stdlib_module_names or top == __name__.partition(".")[0]:
        return True
    found = sys.modules.get(top) or importlib.util.find_spec(top)  # which imports nothing
    file = getattr(found, "__file__", None) or getattr(found, "origin", None)
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    return file is not None and any(Path(file).is_relative_to(folder) for folder in folders)


Function = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Mapper:
    """A function from samples to samples. `batch` None gives it one sample at a time, as a mapping of values; a number
    gives it so many at once, as a mapping of columns, and as many must come back. `identity` is made before the
    function is first called, which may change its state.
    """

    function: Function
    name: str
    batch: int | None
    identity: FunctionDigest

    def options(self) -> dict[str, Any]:
        """Return what tells this function from another. Where that is not known, no two calls return the same."""
        options = {"function": self.name, "source": self.identity.digest, "batch": self.batch}
        if self.identity.unknown:
            options |= {"unknown": self.identity.unknown, "call": uuid.uuid4().hex}
        return options


def parse_map(given: str | Function | None, batch: int | None) -> Mapper | None:
    """Return the function that `module:function` names, or that is given. The working directory is searched too.

    Raises `UsageError` where there is none.
    """
    if batch is not None and (batch < 1 or given is None):
        raise UsageError(f"map_batch={batch} with map={given!r}", "give a function and at least 1 sample")
    if given is None:
        return None
    if callable(given):
        name = f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', type(given).__qualname__)}"
        return Mapper(given, name, batch, function_digest(given))
    if not all(given.partition(":")):
        raise UsageError(f"map={given!r}", "write it as module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # where `python -m` looks, and a console script does not
    try:
        function: Any = pkgutil.resolve_name(given)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"map={given!r} cannot be imported: {error}", "run in its folder, or install it") from error
    if not callable(function):
        raise UsageError(f"map={given!r} is a {type(function).__name__}", "name a function")
    return Mapper(function, given, batch, function_digest(function))


def map_source(source: Source, mapper: Mapper, selection: FieldSelection) -> Source:
    """Return the source of what the function makes of each sample. Raises what `open_records` raises."""

    def cut(rows: NDArray[np.int64]) -> MappedFragment:
        return MappedFragment(source.fragment(rows), dict(source.fields), mapper)

    notes = {**source.notes, "map": mapper.name}
    return open_records(source.url, source.files, source.num_samples, cut, selection, notes=notes)


@dataclass(frozen=True)
class MappedFragment:
    """Some samples, each as the function makes it."""

    fragment: Fragment
    fields: Mapping[str, Field]
    mapper: Mapper

    def __call__(self, on_bad: OnBad) -> Iterator[Sample]:
        """Yield what the function returns; a sample for which it raises is refused, alone of its batch."""
        columns, kept = read_kept(self.fragment, on_bad)
        count, size = len(kept), self.mapper.batch or 1
        todo = [range(first, min(first + size, count)) for first in range(0, count, size)][::-1]
        while todo:
            rows = todo.pop()
            try:
                samples = self._call(columns, rows)
            except Exception as error:  # noqa: BLE001 - the caller's code
                if len(rows) > 1:  # one by one, to find out which
                    todo += [range(row, row + 1) for row in reversed(rows)]
                    continue
                problem = f"the map function failed: {type(error).__name__}: {error}"
                on_bad(BadSample(kept[rows[0]], "", problem, "fix the function"))
            else:
                yield from ((kept[row], "", sample) for row, sample in zip(rows, samples, strict=True))

    def _call(self, columns: Mapping[str, Column], rows: range) -> list[dict[str, Any]]:
        """Return the samples that the function makes of those of these rows."""
        batch = {name: _values(name, kind, columns[name], rows) for name, kind in self.fields.items()}
        if self.mapper.batch is None:
            return [flatten(self.mapper.function({name: values[0] for name, values in batch.items()}))]
        made = self.mapper.function(batch)
        if not isinstance(made, Mapping) or {len(column) for column in made.values()} != {len(rows)}:
            found = {name: len(column) for name, column in made.items()} if isinstance(made, Mapping) else type(made)
            raise UsageError(f"it returned {found} for {len(rows)} samples", "return a column of as many values")
        here = {  # columns of another array library, which may be on a device, become numpy's
            name: settle(column, f"the column {name!r}") if hasattr(column, "__dlpack__") else column
            for name, column in made.items()
        }
        return [flatten({name: column[i] for name, column in here.items()}) for i in range(len(rows))]


def _values(name: str, kind: Field, column: Column, rows: range) -> Any:
    if kind.fixed:
        return column[rows.start : rows.stop]
    return [from_bytes(name, kind, memoryview(column[row]), row) for row in rows]


QUALITY = 95  # of a JPEG that is resized only: above it files grow without a visible difference
_SIZE = re.compile(r"(\d{1,5})(?:x(\d{1,5}))?\Z")
_IMAGES = frozenset({*IMAGE_ENCODINGS.values(), "mixed"})


@dataclass(frozen=True)
class Recode:
    """How images are re-encoded. `size` is the shorter side in pixels, or (height, width); a shorter side is never
    enlarged. `quality` from 1 to 100 makes every image a JPEG; None keeps JPEGs, and others become PNGs.
    """

    size: int | tuple[int, int] | None = None
    quality: int | None = None

    def options(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        size = list(self.size) if isinstance(self.size, tuple) else self.size
        return {"resize": size, "quality": self.quality}

    def field(self, field: Field) -> Field:
        """Return what a field of images becomes; any other stays as it is."""
        if field.kind != "bytes" or field.encoding not in _IMAGES:
            return field
        if self.quality is not None:
            return replace(field, encoding="jpeg")
        return field if field.encoding in ("jpeg", "mixed") else replace(field, encoding="png")

    def image(self, data: bytes) -> bytes:
        """Return the re-encoded image. Raises what Pillow raises for one that does not decode.

        The EXIF orientation is applied, since nothing else of the EXIF data is kept; 16-bit and palette images become
        8-bit RGB or grey where they become a JPEG.
        """
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(data)) as opened:
            was_jpeg = opened.format == "JPEG"
            if self.size is not None:
                opened.draft(None, self._target(opened.size))
            image = ImageOps.exif_transpose(opened)
            image.load()
        target = self._target(image.size)
        if target != image.size:
            image = image.convert("RGB") if image.mode == "P" else image
            image = image.resize(target, Image.Resampling.LANCZOS, reducing_gap=3.0)
        out = io.BytesIO()
        if was_jpeg or self.quality is not None:
            image = image if image.mode in ("L", "RGB") else image.convert("RGB")
            image.save(out, "JPEG", quality=self.quality or QUALITY)
        else:
            image.save(out, "PNG")
        return out.getvalue()

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (width, height) that an image of this (width, height) gets."""
        if self.size is None:
            return size
        if isinstance(self.size, tuple):
            return self.size[1], self.size[0]
        scale = min(1.0, self.size / min(size))
        return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def parse_recode(resize: str | int | tuple[int, int] | None, quality: int | None) -> Recode | None:
    """Return the recoding of `resize="256"` (shorter side), `"256x384"` (height, width) and a quality; None for none.

    Raises `UsageError`.
    """
    if quality is not None and not 1 <= quality <= 100:
        raise UsageError(f"quality={quality}", "give the quality of JPEGs from 1 to 100")
    if resize is None:
        return None if quality is None else Recode(None, quality)
    found = _SIZE.match("x".join(map(str, resize)) if isinstance(resize, tuple) else str(resize))
    sides = [int(side) for side in found.groups() if side] if found else [0]
    if min(sides) < 1:
        raise UsageError(f"resize={resize!r}", "give the shorter side in pixels, like 256, or height x width, 256x384")
    return Recode(sides[0] if len(sides) == 1 else (sides[0], sides[1]), quality)


def recode_source(source: Source, recode: Recode) -> Source:
    """Return the source with its images re-encoded. Raises `UsageError` where it has no field of images."""
    images = tuple(name for name, f in source.fields.items() if f.kind == "bytes" and f.encoding in _IMAGES)
    if not images:
        found = ", ".join(f"{name}: {field}" for name, field in source.fields.items())
        raise UsageError(f"{source.url} has no images to re-encode ({found})", "leave --resize and --quality out")
    fields = {name: recode.field(field) for name, field in source.fields.items()}
    notes, change = {**source.notes, "images": recode.options()}, partial(_recode, recode, images)
    return transform_source(source, change, fields=fields, notes=notes)


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
                recoded.append(recode.image(data))
            except problems as error:
                recoded.append(b"")
                problem = f"the image of field {name!r} cannot be decoded: {error}"
                bad.setdefault(position, BadSample(position, "", problem, data=data))
        columns[name] = recoded
    return columns
