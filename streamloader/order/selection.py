"""Sample selection (`where=`, `exclude=`): the order covers the selected samples as if they were the dataset. No I/O.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import reduce
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import MemoryBudgetError, SelectionError
from streamloader.order.epoch_order import distinct

Ints = NDArray[np.int64]


class AllBut:
    """The numbers of all `num_samples` samples of a dataset but those in `excluded`, ascending and distinct.

    It is what an int64 array of the selected numbers is to its users: it has a length and `nbytes`, and returns the
    selected numbers at a slice, or at an array of indexes >= 0. It takes 8 bytes for each excluded sample.
    """

    def __init__(self, num_samples: int, excluded: Ints) -> None:
        self.num_samples = num_samples
        self._before = excluded - np.arange(excluded.size)  # the number of selected samples before each excluded one

    def __len__(self) -> int:
        return self.num_samples - self._before.size

    def __getitem__(self, key: slice | Ints) -> Ints:
        indexes = np.arange(*key.indices(len(self))) if isinstance(key, slice) else key
        return indexes + np.searchsorted(self._before, indexes, side="right")

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return self._before.nbytes

    @property
    def excluded(self) -> Ints:
        """The excluded samples."""
        return self._before + np.arange(self._before.size)

    def count_chunks(self, chunk: int) -> int:
        """Return the number of chunks of `chunk` samples with some selected ones."""
        chunks, counts = np.unique(self.excluded // chunk, return_counts=True)
        empty = counts == np.minimum(chunk, self.num_samples - chunks * chunk)
        return -(-self.num_samples // chunk) - int(np.count_nonzero(empty))


Selection = Ints | AllBut


def select(choice: Any, num_samples: int, memory: int | None = None) -> Ints:
    """Return the selected samples of a slice, a mask of bools with shape (num_samples,), or an array of sample numbers.

    They are ascending and distinct. Orders, plans and states count them: sample i of an order is the i-th of them.

    Numbers may be in any order, which does not change the order of the epoch. Raises `SelectionError` for other values,
    a number that is out of range or given twice, and an empty selection; and as `check_fits`.
    """
    if isinstance(choice, slice):
        try:
            numbers = range(*choice.indices(num_samples))
        except (TypeError, ValueError) as error:
            raise SelectionError(f"where={choice} is invalid: {error}", "give slice(start, stop, step)") from error
        check_fits(len(numbers), memory)
        ascending = numbers if numbers.step > 0 else numbers[::-1]
        samples = np.arange(ascending.start, ascending.stop, ascending.step, dtype=np.int64)
        return check_some(samples, num_samples)
    values = _as_array(choice, "where", "give a slice, one bool for each sample, or sample numbers")
    if values.dtype.kind not in "biu" and values.size:
        problem = f"where= has the dtype {values.dtype}"
        raise SelectionError(problem, "give a condition as text, a slice, bools, or whole numbers")
    check_fits(int(np.count_nonzero(values)) if values.dtype == np.bool_ else values.size, memory)
    if values.dtype != np.bool_:
        return check_some(_sort_numbers(values, num_samples), num_samples)
    if values.size != num_samples:
        problem = f"where= is a mask of {values.size} bools, the dataset has {num_samples} samples"
        raise SelectionError(problem, "give one bool for each sample")
    return check_some(np.flatnonzero(values), num_samples)


def exclude(selection: Ints | None, excluded: Ints, num_samples: int) -> Selection | None:
    """Return a selection (None: all samples) without the `excluded` samples, which are ascending and distinct.

    Raises `SelectionError` if no sample is left.
    """
    if not excluded.size:
        return selection
    left: Selection = AllBut(num_samples, excluded)
    if selection is not None:
        at = np.searchsorted(selection, excluded)
        at = at[np.append(selection, -1)[at] == excluded]
        left = np.delete(selection, at) if at.size else selection
    if not len(left):
        chosen = num_samples if selection is None else len(selection)
        raise SelectionError(f"exclude= leaves none of {chosen} samples", "exclude fewer")
    return left


def read_numbers(choice: Any, num_samples: int) -> Ints:
    """Return the sample numbers that `exclude=` has, ascending and distinct. Raises `SelectionError` for others."""
    values = _as_array(choice, "exclude", remedy := "give sample numbers, or the path or URL of a file of them")
    if values.dtype.kind not in "iu" and values.size:
        raise SelectionError(f"exclude= has the dtype {values.dtype}", remedy)
    _check_range(values, num_samples, "exclude")
    return distinct(values.astype(np.int64))


def parse_lines(data: bytes, name: str, num_samples: int, dataset: Mapping[str, Any]) -> Ints:
    """Return the sample numbers in the lines of a file named `name`, in its order.

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
        problem = f"exclude={name}, line {line_number}: {line.decode(errors='replace'):.80}"
        if type(number) is not int:
            raise SelectionError(f"{problem} has no sample number", 'write a number, or JSON like {"sample": 7}')
        if not 0 <= number < num_samples:
            problem += f" is out of range: the dataset has {num_samples} samples"
            raise SelectionError(problem, "give the file of this dataset, or correct the line")
        numbers.append(number)
    return np.array(numbers, np.int64)


def _as_array(choice: Any, name: str, remedy: str) -> NDArray[Any]:
    """Return an argument as an array of one axis. Raises `SelectionError`."""
    if np.ma.is_masked(choice):
        raise SelectionError(f"{name}= has masked elements", f"fill them: {name}.filled(False)")
    try:
        values = np.asarray(choice)
    except (TypeError, ValueError) as error:  # rows of different lengths, a tensor on a GPU
        raise SelectionError(f"{name}= is not an array: {error}", remedy) from error
    if values.ndim != 1:
        raise SelectionError(f"{name}= has the shape {values.shape}", remedy)
    return values


def _check_range(numbers: NDArray[Any], num_samples: int, name: str) -> None:
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < num_samples:
        problem = f"{name}= has sample numbers from {numbers.min()} to {numbers.max()}, the dataset has {num_samples}"
        raise SelectionError(problem, f"give numbers in [0, {num_samples})")


def check_some(samples: Ints, num_samples: int) -> Ints:
    """Return the selected samples. Raises `SelectionError` if there is none."""
    if not samples.size:
        raise SelectionError(f"where= selects none of {num_samples} samples", "select at least one")
    return samples


def check_fits(count: int, memory: int | None) -> None:
    """Raise `MemoryBudgetError` if the numbers of `count` selected samples take more than `memory` bytes."""
    size = count * np.dtype(np.int64).itemsize
    if memory is not None and size > memory:
        problem = f"where= selects {count} samples, whose numbers take {size} bytes, but memory={memory}"
        raise MemoryBudgetError(problem, f"give memory={size + size // 4} or more, or select fewer samples")


def _sort_numbers(numbers: NDArray[Any], num_samples: int) -> Ints:
    _check_range(numbers, num_samples, "where")
    samples = numbers.astype(np.int64)
    samples.sort()
    repeated = samples[1:][samples[1:] == samples[:-1]]
    if repeated.size:
        raise SelectionError(f"where= has sample {repeated[0]} more than once", "give each sample once")
    return samples


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
                    value.value = _class_number(str(value.value), tuple(classes.get(field, ())), problem)
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


def _class_number(name: str, names: Sequence[str], problem: str) -> int:
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
