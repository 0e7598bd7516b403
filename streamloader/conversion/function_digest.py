"""What tells one function from another: a digest of everything that its results depend on, as far as that is known.

A function of the user's own is its compiled code, its defaults, the values of its closure, and the globals that the
code reads; other functions and classes among these count in the same way. What an installed package defines counts by
its name and the package's version. Other objects count by their class and state, as they are copied. What gives no
state, such as a lock or an open file, leaves the digest unknown.
"""

from __future__ import annotations

import copyreg
import dis
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np

_GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME")
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None), type(...), type(NotImplemented))
# what the interpreter and copyreg add to a class, some of it late; what a dataclass generates are members of their own
_CLASS_EXTRAS = frozenset(
    {
        *("__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl", "__firstlineno__"),
        *("__dataclass_fields__", "__dataclass_params__", "__static_attributes__"),
        *("__slotnames__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
    }
)


@dataclass(frozen=True)
class FunctionDigest:
    """A SHA-256 in hex. Where `unknown` says why, two different functions may have the same one."""

    digest: str
    unknown: str = ""


def function_digest(function: Callable[..., Any]) -> FunctionDigest:
    """Return the digest of a callable. It is the same in every process that runs the same version of Python."""
    found = _Digest()
    try:
        found.add(function, "it")
    except RecursionError:
        found.unknown = found.unknown or "its state is nested too deeply"
    return FunctionDigest(found.hexdigest(), found.unknown)


class _Digest:
    """A hash of Python values, each with a tag and its length, so that no two sequences of values read alike."""

    def __init__(self) -> None:
        self.unknown = ""
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # an id is only unique while its object lives

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any, where: str) -> None:
        """Add a value; `where` names it in the reason for which something is unknown."""
        if isinstance(value, _PLAIN) and type(value).__module__ == "builtins":
            self._write(type(value).__name__, repr(value).encode(errors="surrogatepass"))
        elif type(value) in (tuple, frozenset, set):
            self._collection(value, where)
        elif isinstance(value, CodeType):
            self._code(value, where)
        elif not self._again(value):
            self._object(value, where)

    def _write(self, tag: str, data: bytes = b"") -> None:
        self._hash.update(f"{tag} {len(data)} ".encode())
        self._hash.update(data)

    def _again(self, value: Any) -> bool:
        """Return whether the value was added before; then a reference to it is."""
        number = self._seen.setdefault(id(value), len(self._seen))
        if number < len(self._kept):
            self._write("again", str(number).encode())
            return True
        self._kept.append(value)
        return False

    def _collection(self, values: Any, where: str) -> None:
        self._write(type(values).__name__, str(len(values)).encode())
        if isinstance(values, tuple):
            for value in values:
                self.add(value, where)
            return
        digests = []
        for value in values:  # their order differs from process to process
            one = _Digest()
            one.add(value, where)
            digests.append(one.hexdigest())
            self.unknown = self.unknown or one.unknown
        self._write("items", "".join(sorted(digests)).encode())

    def _code(self, code: CodeType, where: str) -> None:
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._write("code", code.co_code)
        table = getattr(code, "co_exceptiontable", b"")
        self.add((counts, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, table), where)
        self.add(code.co_consts, where)

    def _object(self, value: Any, where: str) -> None:
        if isinstance(value, ModuleType):
            self._write("module", f"{value.__name__} {getattr(value, '__version__', '')}".encode())
        elif isinstance(value, FunctionType | BuiltinFunctionType | type) and _installed(value.__module__):
            self._named(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, MethodType):
            self._write("method")
            self.add(value.__func__, where)
            self.add(value.__self__, where)
        elif isinstance(value, list):
            self._write("list", str(len(value)).encode())
            for item in value:
                self.add(item, where)
        elif type(value) is dict or isinstance(value, MappingProxyType):
            self._write("dict", str(len(value)).encode())
            for key, item in value.items():
                self.add(key, where)
                self.add(item, f"{where}[{key!r}]")
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._write("array", f"{value.dtype.str} {value.shape}".encode())
            self._write("values", value.tobytes())
        else:
            self._state(value, where)

    def _named(self, value: Any) -> None:
        package = sys.modules.get(str(value.__module__).partition(".")[0])
        version = getattr(package, "__version__", "")
        self._write("installed", f"{value.__module__}:{value.__qualname__} {version}".encode())

    def _function(self, function: FunctionType) -> None:
        name = f"the function {function.__qualname__}"
        self._write("function", function.__qualname__.encode())
        self.add(function.__code__, name)
        self.add(function.__defaults__, f"a default of {name}")
        self.add(function.__kwdefaults__, f"a default of {name}")
        self.add(function.__dict__, f"an attribute of {name}")
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                self._write("empty cell")
            else:
                self.add(content, f"{variable!r} in the closure of {name}")
        for read, attributes in sorted(_reads(function.__code__).items()):
            if read not in function.__globals__:
                continue  # a builtin, or nothing
            value = function.__globals__[read]
            self.add(value, f"the global {read!r} of {name}")
            if isinstance(value, ModuleType) and not _installed(value.__name__):
                for attribute in sorted(attributes & vars(value).keys()):
                    self.add(getattr(value, attribute), f"{read}.{attribute}")

    def _class(self, kind: type) -> None:
        name = f"the class {kind.__qualname__}"
        self._write("class", kind.__qualname__.encode())
        self.add(kind.__bases__, name)
        for member, value in sorted(vars(kind).items()):
            if member in _CLASS_EXTRAS or isinstance(value, GetSetDescriptorType | MemberDescriptorType):
                continue
            self._write("member", member.encode())
            where = f"{member!r} of {name}"
            if isinstance(value, staticmethod | classmethod):
                self._write(type(value).__name__)
                self.add(value.__func__, where)
            elif isinstance(value, property):
                self.add((value.fget, value.fset, value.fdel), where)
            else:
                self.add(value, where)

    def _state(self, value: Any, where: str) -> None:
        """Add an object by what it is copied from."""
        kind = type(value)
        self.add(kind, where)
        wrapped = getattr(value, "__wrapped__", None)
        if callable(wrapped) and not isinstance(value, type):
            self.add(wrapped, where)  # functools.cache and its like are copied by name
            return
        if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType | type(None)):
            self._write("method", value.__name__.encode())
            self.add(value.__self__, where)
            return
        reducer = copyreg.dispatch_table.get(kind)
        try:
            reduced = reducer(value) if reducer is not None else value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - the object's own code may raise anything
            reduced = None
        if isinstance(reduced, str) and _installed(getattr(value, "__module__", None) or kind.__module__):
            self._write("installed", f"{kind.__module__} {reduced}".encode())
        elif not isinstance(reduced, tuple):
            self.unknown = self.unknown or f"{where} is a {kind.__module__}.{kind.__qualname__}, whose state is unknown"
        else:
            for part in reduced:
                parts = part if part is None or isinstance(part, tuple | Mapping) or callable(part) else _items(part)
                self.add(parts, where)


def _items(part: Any) -> Any:
    """Return the items of a list or a dict that is copied, which come as an iterator, else the state itself."""
    return list(part) if hasattr(part, "__next__") else part


def _reads(code: CodeType) -> dict[str, set[str]]:
    """Return the globals that the code reads, each with all names of attributes in the code."""
    found: dict[str, set[str]] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_READS:
            found.setdefault(instruction.argval, set()).update(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for name, attributes in _reads(inner).items():
                found.setdefault(name, set()).update(attributes)
    return found


def _installed(module: str | None) -> bool:
    """Return whether a module is the interpreter's or lies where packages are installed: then its version tells it."""
    top = str(module or "builtins").partition(".")[0]
    if top == "__main__":
        return False
    if top in sys.stdlib_module_names or top == __name__.partition(".")[0]:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    return file is not None and any(Path(file).is_relative_to(folder) for folder in folders)
