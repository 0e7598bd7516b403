"""What names samples: conditions on fields (`where=`), and files of sample numbers (`exclude=`).

A condition is text such as `label in (1, 2) and width >= 256`. It is parsed, and never run as Python. The grammar is a
subset of Python's: field names, numbers, `True`, `False`, `+ - * / // %`, comparisons (also chained), `in` and `not in`
with a list of numbers, `and`, `or`, `not`, parentheses. A text in quotes is a value of the field that it is compared
with: a class name or a text, by `==`, `!=`, `in` or `not in`, or a time. Where no field is compared with it, it is the
name of one: `'obs/cells' > 3`. Calls, attributes, indexes and powers are errors.
"""

from __future__ import annotations

import ast
import json
import operator
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import reduce
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import NotFoundError, SelectionError
from streamloader.format.deleted import Remaining
from streamloader.format.manifest import Manifest
from streamloader.format.reader import FieldReader, read_columns
from streamloader.storage import Store, open_beside

Ints = NDArray[np.int64]
Column = NDArray[Any]
Read = Callable[[str, bool], Column]  # from a field's name to its column: as bools for a condition, or as numbers

MAX_CHARACTERS = 10_000
GRAMMAR = "use fields, numbers, texts in quotes, comparisons, in (...), and, or, not, + - * / // %"

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True, eq=False)
class Condition:
    """A parsed condition. `fields`: the names of the fields that it uses; `_times`: those whose least int64 is NaT."""

    text: str
    fields: frozenset[str]
    _tree: ast.expr
    _times: Collection[str] = ()

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition. Raises `SelectionError`, which names the invalid part."""
        if len(text) > MAX_CHARACTERS:
            problem = f"where= has {len(text)} characters"
            raise SelectionError(problem, f"write at most {MAX_CHARACTERS}, or give a mask or sample numbers")
        try:
            tree = _parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = getattr(error, "msg", None) or str(error) or type(error).__name__
            raise SelectionError(f"where={text!r} cannot be read: {reason}", GRAMMAR) from error
        names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        condition = cls(text, names, tree)
        try:  # no rows, to check the types
            condition._evaluate(lambda _, as_condition: np.zeros(0, np.bool_ if as_condition else np.int64))
        except RecursionError as error:
            raise SelectionError(f"where={text[:80]!r}... is nested too deeply", GRAMMAR) from error
        if not names:
            raise SelectionError(f"where={text!r} names no field", "compare a field with a value")
        return condition

    def with_values(
        self,
        classes: Mapping[str, Sequence[str]],
        texts: Collection[str] = (),
        times: Mapping[str, Callable[[str], float]] = MappingProxyType({}),
    ) -> Condition:
        """Return the condition with class names and times replaced by numbers.

        `classes`: the class names of each field; `texts`: the fields of texts; `times`: for each field of times, the
        function from a text to its number, which raises `ValueError`. Raises `SelectionError` if a field is none of
        these, and for an unknown name, with similar names.
        """
        tree = _parse(self.text)
        for node in (child for child in ast.walk(tree) if isinstance(child, ast.Compare)):
            for value in _texts(node):
                field, ordered = _compared_field(node, self.text)
                problem = f"where={self.text!r} compares {field!r} with {value.value!r}"
                if ordered and field not in times:
                    raise SelectionError(f"{problem} by order", "compare texts by ==, !=, in or not in")
                if field in times:
                    try:
                        value.value = times[field](str(value.value))
                    except ValueError as error:
                        raise SelectionError(f"{problem}: {error}", "write times as 2001-12-31T06:00") from error
                elif field not in texts:
                    value.value = class_number(str(value.value), tuple(classes.get(field, ())), problem)
        return replace(self, _tree=tree, _times=tuple(times))

    def mask(self, columns: Mapping[str, Any]) -> NDArray[np.bool_]:
        """Return whether the condition is true for each sample; shape (samples,).

        `columns` has one number per sample, or one text as str or UTF-8, for each of `fields`. Integers are compared as
        int64 (uint64 with larger numbers stays), so that sums do not wrap at 255; floats as float64; times as float64
        with NaN if some are missing. Raises `SelectionError` for a number in place of a condition, a division by 0, and
        for integers that may exceed 64 bits.
        """
        wide = {name: _widen(column) if _numeric(column := columns[name]) else column for name in self.fields}
        for name in self.fields & set(self._times):
            missing = wide[name] == np.iinfo(np.int64).min
            wide[name] = np.where(missing, np.nan, wide[name]) if np.any(missing) else wide[name]
        return np.ascontiguousarray(self._evaluate(lambda name, _: wide[name]))

    def _evaluate(self, read: Read) -> Any:
        try:
            with np.errstate(divide="raise", invalid="ignore", over="ignore", under="ignore"):
                return self._condition(self._tree, read)
        except (FloatingPointError, ZeroDivisionError, OverflowError) as error:
            raise SelectionError(f"where={self.text!r} cannot be computed: {error}", "compare other values") from error

    def _condition(self, node: ast.expr, read: Read) -> Any:
        """Return a node's bools. Raises `SelectionError` for numbers."""
        value = read(node.id, True) if isinstance(node, ast.Name) else self._value(node, read)
        if np.asarray(value).dtype != np.bool_:
            raise self._error(node, "is a number, not a condition", "compare it with a value")
        return value

    def _number(self, node: ast.expr, read: Read) -> Any:
        """Return a node's numbers; bools of a field count as 0 and 1. Raises `SelectionError` for a condition."""
        value = read(node.id, False) if isinstance(node, ast.Name) else self._value(node, read)
        if isinstance(node, ast.Name) and not _numeric(value):
            raise self._error(node, "is a text", "compare it with texts in quotes by ==, !=, in or not in")
        if np.asarray(value).dtype != np.bool_:
            return value
        if not isinstance(node, ast.Name | ast.Constant):
            raise self._error(node, "is a condition, not a number", "join conditions with and, or, not")
        return value.astype(np.int64) if isinstance(value, np.ndarray) else value

    def _value(self, node: ast.expr, read: Read) -> Any:
        """Return the bools or numbers of a node other than a name."""
        result: Any
        match node:
            case ast.BoolOp(op=op, values=values):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                result = reduce(join, (self._condition(value, read) for value in values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                result = np.logical_not(self._condition(operand, read))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                result = _compute(ast.Sub(), 0, self._number(operand, read))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                result = +self._number(operand, read)
            case ast.BinOp(op=op, left=left, right=right) if type(op) in _ARITHMETIC:
                result = _compute(op, self._number(left, read), self._number(right, read))
            case ast.Compare() if wanted := {str(value.value) for value in _texts(node)}:
                column = read(_compared_field(node, self.text)[0], False)
                if _numeric(column):  # only while parsing, before `with_values`
                    return column == 0
                either = {*wanted, *(text.encode("utf-8", "surrogatepass") for text in wanted)}
                found = np.fromiter((item in either for item in column), np.bool_, len(column))
                result = ~found if isinstance(node.ops[0], ast.NotEq | ast.NotIn) else found
            case ast.Compare():
                result = self._compare(node, read)
            case ast.Constant(value=bool() | int() | float() as result):
                pass
            case _:
                raise self._error(node, "is not understood", GRAMMAR)
        return result

    def _compare(self, node: ast.Compare, read: Read) -> Any:
        """Return whether all comparisons of a chain are true."""
        result: Any = True
        left = self._number(node.left, read)
        for op, right in zip(node.ops, node.comparators, strict=True):
            if type(op) in _COMPARISONS:
                value = self._number(right, read)
                result = np.logical_and(result, _COMPARISONS[type(op)](left, value))
                left = value
                continue
            if not isinstance(op, ast.In | ast.NotIn) or not isinstance(right, ast.Tuple | ast.List | ast.Set):
                raise self._error(right, "is not a list of numbers", "write in (1, 2, 3)")
            if any(isinstance(part, ast.Name) for part in ast.walk(right)):
                raise self._error(right, "has a field inside a list", "compare the fields with ==")
            equal = [left == self._number(element, read) for element in right.elts]
            contained = reduce(np.logical_or, equal, np.zeros(np.shape(left), np.bool_))
            result = np.logical_and(result, np.logical_not(contained) if isinstance(op, ast.NotIn) else contained)
        return result

    def _error(self, node: ast.expr, problem: str, remedy: str) -> SelectionError:
        """Return an error that quotes a node."""
        return SelectionError(f"{_source(node, self.text)!r} in where= {problem}", remedy)


def _numeric(column: Any) -> bool:
    return isinstance(column, np.ndarray) and column.dtype.kind not in "OSTU"


def _name_texts(node: ast.AST) -> ast.AST:
    """Make names of the texts that are no values: those that no name is compared with, and outside comparisons."""
    if isinstance(node, ast.Constant):
        return ast.copy_location(ast.Name(node.value), node) if isinstance(node.value, str) else node
    values: list[object] = []
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        values += [side for side in sides if isinstance(side, ast.Constant) and isinstance(side.value, str)]
        if not any(isinstance(side, ast.Name) for side in sides):
            del values[:1]
    for name, child in () if isinstance(node, ast.Tuple | ast.List | ast.Set) else ast.iter_fields(node):
        if isinstance(child, list):
            child[:] = [
                _name_texts(each) if isinstance(each, ast.AST) and each not in values else each for each in child
            ]
        elif isinstance(child, ast.AST) and child not in values:
            setattr(node, name, _name_texts(child))
    return node


def _parse(text: str) -> ast.expr:
    tree = _name_texts(ast.parse(text.strip(), mode="eval").body)
    assert isinstance(tree, ast.expr)
    return tree


def _texts(node: ast.Compare) -> Iterator[ast.Constant]:
    """Yield the texts of a comparison."""
    for side in (node.left, *node.comparators):
        for part in side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else (side,):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part


def _compared_field(node: ast.Compare, text: str) -> tuple[str, bool]:
    """Return the field that is compared with texts, and whether that is by order."""
    sides = (node.left, *node.comparators)
    match node.left, node.ops, node.comparators:
        case (ast.Name(id=field), [ast.In() | ast.NotIn()], [ast.Tuple() | ast.List() | ast.Set() as listed]):
            if all(
                isinstance(value, ast.Constant) and isinstance(value.value, str | float | int) for value in listed.elts
            ):
                return field, False
        case _ if all(isinstance(side, ast.Name | ast.Constant) for side in sides):
            names = [side.id for side in sides if isinstance(side, ast.Name)]
            if len(names) == 1 and all(type(op) in _COMPARISONS for op in node.ops):
                return names[0], len(node.ops) > 1 or not isinstance(node.ops[0], ast.Eq | ast.NotEq)
    raise SelectionError(
        f"{_source(node, text)!r} in where= compares a text with something other than one field",
        "write label == 'cat', label != 'cat', label in ('cat', 'dog') or label not in ('cat', 'dog')",
    )


def class_number(name: str, names: Sequence[str], problem: str) -> int:
    """Return the number of a class. Raises `SelectionError`, which says the `problem` and similar names."""
    if name in names:
        return names.index(name)
    if not names:
        raise SelectionError(f"{problem}, and the dataset has no class names for it", "compare it with numbers")
    similar = get_close_matches(name, names, 5)
    listed = ", ".join(map(repr, similar or names[:5]))
    classes = f"its {len(names)} classes are {listed}{', ...' * (len(names) > 5)}"
    remedy = f"similar names are {listed}" if similar else classes
    raise SelectionError(f"{problem}, which is none of its classes", remedy)


def _compute(op: ast.operator, left: Any, right: Any) -> Any:
    """Apply an operator. Raises `OverflowError` if integers may exceed 64 bits, which numpy would wrap silently."""
    sizes = [_magnitude(left), _magnitude(right)]
    exact = isinstance(left, int) and isinstance(right, int)  # Python's own
    if isinstance(op, ast.Add | ast.Sub | ast.Mult) and None not in sizes and not exact:
        largest = operator.mul(*sizes) if isinstance(op, ast.Mult) else sum(sizes)
        if largest >= 2**63:
            raise OverflowError("its numbers may exceed 64 bits")
    return _ARITHMETIC[type(op)](left, right)


def _magnitude(value: Any) -> Any:
    """Return the largest absolute value of integers, None for other numbers."""
    if isinstance(value, int):
        return abs(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        return None
    return max(abs(int(value.min())), abs(int(value.max()))) if value.size else 0


def _widen(column: Column) -> Column:
    if column.dtype.kind in "iu" and (column.dtype != np.uint64 or column.max(initial=0) < 2**63):
        return column.astype(np.int64)
    return column.astype(np.float64) if column.dtype.kind == "f" else column


def _source(node: ast.expr, text: str) -> str:
    return ast.get_source_segment(text.strip(), node) or ast.unparse(node)


# A condition is evaluated in pieces of this many bytes of columns and intermediate results.
PIECE_BYTES = 32 << 20


def matching_samples(
    where: Condition,
    store: Store,
    manifest: Manifest,
    remaining: Remaining | None,
    *,
    times: Mapping[str, Callable[[str], float]],
    check: Callable[[int], object] = bool,
) -> Ints:
    """Return the numbers of the samples of a dataset for which a condition is true, ascending.

    It reads the fields of the condition, which have one number or text per sample, in pieces, and keeps one bit per
    sample until the number of samples that match is known, of which `check` is called. Class names are those of the
    manifest, `times` as in `Condition.with_values`. Raises `SelectionError` for an unknown or unsuitable field, before
    anything is read.
    """
    kinds = {name: layout.field for name, layout in manifest.fields.items()}
    texts = [name for name, field in kinds.items() if field.kind == "text"]
    usable = [name for name, field in kinds.items() if field.fixed and not field.shape] + texts
    for name in sorted(where.fields - set(usable)):
        description = f"is {kinds[name]}" if name in kinds else "is not a field"
        is_class = any(name in classes for classes in manifest.classes.values())
        remedy = f"fields with a number or text per sample are {', '.join(usable) or 'none'}; or give a mask or indexes"
        problem = f"where={where.text!r} uses {name!r}, which {description}"
        raise SelectionError(problem, f"write the class as '{name}' in quotes; {remedy}" if is_class else remedy)
    where, count = where.with_values(manifest.classes, texts, times), manifest.num_remaining
    readers = {name: FieldReader(store, manifest, name, remaining) for name in where.fields}
    # a column as stored, with 64 bits, and intermediate results
    sizes = {name: reader.layout.nbytes // max(1, count) + 8 for name, reader in readers.items()}
    sample_bytes = sum(size + (0 if readers[name].layout.field.fixed else 64) for name, size in sizes.items()) + 16
    piece = max(1, PIECE_BYTES // sample_bytes)
    bits, total = [], 0
    for start in range(0, count, piece):
        mask = where.mask(read_columns(readers, start, min(start + piece, count)))
        bits.append(np.packbits(mask))
        total += int(np.count_nonzero(mask))
    check(total)
    samples = np.empty(total, np.int64)
    total = 0
    for start, packed in zip(range(0, count, piece), bits, strict=True):
        matches = np.flatnonzero(np.unpackbits(packed, count=min(piece, count - start)))
        np.add(matches, start, out=samples[total : total + matches.size])
        total += matches.size
    return samples


def number_files(store: Store, choice: str | os.PathLike[str], option: str) -> Iterator[tuple[str, bytes]]:
    """Yield the URL and the content of a file of sample numbers, or of each file of a folder that ends in a slash.

    The options of `store` hold for the files if both have the same protocol. Raises `NotFoundError` without a file.
    """
    folder, name = open_beside(store, choice)
    names = [name] if name else sorted(info.path for info in folder.list() if info.path.endswith(".jsonl"))
    if not names:
        raise NotFoundError(f"{option}={folder.url}/ has no *.jsonl", "give a folder with such files, or a file")
    yield from ((f"{folder.url}/{path}", folder.get(path)) for path in names)


def parse_lines(data: bytes, name: str, num_samples: int, dataset: Mapping[str, Any], option: str = "exclude") -> Ints:
    """Return the sample numbers in the lines of a file named `name` that was given as `option`, in its order.

    A line is a whole number, or JSON with the number in "sample". Those that are of another dataset, as the keys of
    `dataset` tell ("split" and "source"), are left out. Raises `SelectionError`, which names the line, for any other
    line, and for a number that is out of range.
    """
    numbers = []
    for line_number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        record = value if isinstance(value, dict) else {"sample": value}
        if any(record.get(key, own) != own for key, own in dataset.items()):
            continue
        number = record.get("sample")
        problem = f"{option}={name}, line {line_number}: {line.decode(errors='replace'):.80}"
        if type(number) is not int:
            raise SelectionError(f"{problem} has no sample number", 'write a number, or JSON like {"sample": 7}')
        if not 0 <= number < num_samples:
            problem += f" is out of range: the dataset has {num_samples} samples"
            raise SelectionError(problem, "give the file of this dataset, or correct the line")
        numbers.append(number)
    return np.array(numbers, np.int64)
