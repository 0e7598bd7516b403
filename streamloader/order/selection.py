"""Sample selection (`where=`): the order runs over the selected samples as if they were the dataset. Pure.

A condition is text such as `label in (1, 2) and width >= 256`. It is parsed, never run as Python. The grammar is a part
of Python's: field names, numbers, `True`, `False`, `+ - * / // %`, comparisons (also chained), `in` and `not in` with
numbers in brackets, `and`, `or`, `not`, parentheses. A class name in quotes means its number where it is compared with
a field by `==`, `!=`, `in` or `not in`. Calls, attributes, indexes and powers are errors.
"""

from __future__ import annotations

import ast
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import SelectionError


@dataclass(frozen=True, eq=False)
class Selection:
    """The selected `samples` of a dataset of `num_samples`: their numbers, ascending, each once; never empty.

    An order, the blocks of a plan and a state's position count the selected samples: the i-th of them is number i.
    """

    samples: NDArray[np.int64]
    num_samples: int

    @classmethod
    def of(cls, choice: Any, num_samples: int) -> Selection:
        """Return what a slice, a mask (num_samples,) of bools, or an array of sample numbers selects.

        Numbers may come in any order: they say which samples, not when. Raises `SelectionError` for anything else, a
        number out of range or given twice, and an empty selection.
        """
        if isinstance(choice, slice):
            try:
                found = np.sort(np.arange(*choice.indices(num_samples), dtype=np.int64))
            except (TypeError, ValueError) as error:
                raise SelectionError(f"where={choice} is invalid: {error}", "give slice(start, stop, step)") from error
            return cls(found, num_samples)
        try:
            values = np.asarray(choice)
        except (TypeError, ValueError) as error:  # rows of different lengths, a tensor of a GPU
            raise SelectionError(
                f"where= is not an array: {error}", "give a slice, bools, or sample numbers"
            ) from error
        if values.ndim != 1:
            problem = f"where= has the shape {values.shape}"
            raise SelectionError(problem, "give one bool for each sample, or the samples' numbers")
        if values.dtype.kind not in "biu" and values.size:
            problem = f"where= has the dtype {values.dtype}"
            raise SelectionError(problem, "give a condition as text, a slice, bools, or whole numbers")
        if values.dtype == np.bool_ and values.size != num_samples:
            problem = f"where= is a mask of {values.size} bools, the dataset has {num_samples} samples"
            raise SelectionError(problem, "give one for each sample")
        return cls(
            np.flatnonzero(values) if values.dtype == np.bool_ else _of_numbers(values, num_samples), num_samples
        )

    def __post_init__(self) -> None:
        if not self.samples.size:
            raise SelectionError(f"where= selects none of {self.num_samples} samples", "select at least one")

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 that a saved state is checked against: the same for the same samples, however chosen."""
        return hashlib.sha256(self.samples.astype("<i8", copy=False).data).hexdigest()


def _of_numbers(numbers: NDArray[Any], num_samples: int) -> NDArray[np.int64]:
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < num_samples:
        problem = f"where= names the samples {numbers.min()} to {numbers.max()}, the dataset has {num_samples}"
        raise SelectionError(problem, f"give numbers of [0, {num_samples})")
    found = np.sort(numbers.astype(np.int64))
    twice = np.flatnonzero(found[1:] == found[:-1])
    if twice.size:
        raise SelectionError(f"where= names sample {found[twice[0]]} more than once", "name each sample once")
    return found


Column = NDArray[Any]

MAX_CHARACTERS = 10_000
WORDS = "use fields, numbers, class names in quotes, comparisons, in (...), and, or, not, + - * / // %"

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
    """A parsed condition; `fields` are the names that it uses."""

    text: str
    fields: frozenset[str]
    _tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Return the condition. Raises `SelectionError`, which names the part that is invalid."""
        if len(text) > MAX_CHARACTERS:
            problem = f"where= has {len(text)} characters"
            raise SelectionError(problem, f"write at most {MAX_CHARACTERS}, or give a mask or indexes")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = getattr(error, "msg", None) or str(error) or type(error).__name__
            raise SelectionError(f"where={text!r} cannot be read: {reason}", WORDS) from error
        names: set[str] = set()

        def empty(name: str, condition: bool) -> Column:
            names.add(name)
            return np.zeros(0, np.bool_ if condition else np.int64)

        try:
            _evaluate(text, tree, empty)  # of no rows: what is checked are the types
        except RecursionError as error:
            raise SelectionError(f"where={text[:80]!r}... is nested too deeply", WORDS) from error
        if not names:
            raise SelectionError(f"where={text!r} names no field", "compare a field with something")
        return cls(text, frozenset(names), tree)

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Condition:
        """Return the condition with the numbers of its class names, given the names by field.

        Raises `SelectionError` for a field without class names, and for an unknown one, with similar names.
        """
        tree = ast.parse(self.text.strip(), mode="eval").body
        for node in (one for one in ast.walk(tree) if isinstance(one, ast.Compare)):
            for name in _class_names(node):
                field = _compared_field(node, self.text)
                problem = f"where={self.text!r} compares {field!r} with {name.value!r}"
                name.value = _class_number(str(name.value), tuple(classes.get(field, ())), problem)
        return replace(self, _tree=tree)

    def mask(self, columns: Mapping[str, Column]) -> NDArray[np.bool_]:
        """Return where the condition holds, given each of `fields` as an array of one number per sample.

        Integers are compared as int64 (uint64 stays), so that sums do not wrap at 255; floats as float64. Raises
        `SelectionError` for a number in place of a condition, a division by 0, and for what may exceed 64 bits.
        """
        wide = {name: _widened(columns[name]) for name in self.fields}
        return np.ascontiguousarray(_evaluate(self.text, self._tree, lambda name, _: wide[name]))


def _evaluate(text: str, tree: ast.expr, column: Callable[[str, bool], Column]) -> Any:
    try:
        with np.errstate(divide="raise", invalid="ignore", over="ignore", under="ignore"):
            return _Evaluation(text, column).condition(tree)
    except (FloatingPointError, ZeroDivisionError, OverflowError) as error:
        raise SelectionError(f"where={text!r} cannot be computed: {error}", "compare other values") from error


@dataclass(frozen=True)
class _Evaluation:
    """Computes the parts of a condition. `column(name, condition)` returns a field, as bools or as numbers."""

    text: str
    column: Callable[[str, bool], Column]

    def condition(self, node: ast.expr) -> Any:
        """Return bools. Raises `SelectionError` for numbers."""
        value = self.column(node.id, True) if isinstance(node, ast.Name) else self.value(node)
        if np.asarray(value).dtype != np.bool_:
            problem = f"{_shown(node, self.text)!r} in where= is a number, not a condition"
            raise SelectionError(problem, "compare it with something")
        return value

    def number(self, node: ast.expr) -> Any:
        """Return numbers: a field of bools counts as 0 and 1. Raises `SelectionError` for a condition."""
        value = self.column(node.id, False) if isinstance(node, ast.Name) else self.value(node)
        if np.asarray(value).dtype != np.bool_:
            return value
        if not isinstance(node, ast.Name | ast.Constant):
            problem = f"{_shown(node, self.text)!r} in where= is a condition, not a number"
            raise SelectionError(problem, "join conditions by and, or, not")
        return value.astype(np.int64) if isinstance(value, np.ndarray) else value

    def value(self, node: ast.expr) -> Any:
        """Return what a node other than a name is: bools or numbers."""
        found: Any
        match node:
            case ast.BoolOp(op=op, values=values):
                found = reduce(
                    np.logical_and if isinstance(op, ast.And) else np.logical_or, map(self.condition, values)
                )
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                found = np.logical_not(self.condition(operand))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                found = -self.number(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                found = +self.number(operand)
            case ast.BinOp(op=op, left=left, right=right) if type(op) in _ARITHMETIC:
                found = _computed(op, self.number(left), self.number(right))
            case ast.Compare() if any(_class_names(node)):  # only while parsing, before `with_classes`
                found = self.column(_compared_field(node, self.text), False) == 0
            case ast.Compare():
                found = self.compared(node)
            case ast.Constant(value=bool() | int() | float() as found):
                pass
            case _:
                raise SelectionError(f"{_shown(node, self.text)!r} in where= is not understood", WORDS)
        return found

    def compared(self, node: ast.Compare) -> Any:
        """Return where each comparison of a chain holds."""
        holds: Any = True
        value = self.number(node.left)
        for op, right in zip(node.ops, node.comparators, strict=True):
            if type(op) in _COMPARISONS:
                other = self.number(right)
                holds = np.logical_and(holds, _COMPARISONS[type(op)](value, other))
                value = other
                continue
            if not isinstance(op, ast.In | ast.NotIn) or not isinstance(right, ast.Tuple | ast.List | ast.Set):
                problem = f"{_shown(right, self.text)!r} in where= is not a list of numbers"
                raise SelectionError(problem, "write in (1, 2, 3)")
            if any(isinstance(part, ast.Name) for part in ast.walk(right)):
                problem = f"{_shown(right, self.text)!r} in where= has a field inside a list"
                raise SelectionError(problem, "compare the fields with ==")
            equal = [value == self.number(element) for element in right.elts]
            among = reduce(np.logical_or, equal, np.zeros(np.shape(value), np.bool_))
            holds = np.logical_and(holds, np.logical_not(among) if isinstance(op, ast.NotIn) else among)
        return holds


def _class_names(node: ast.Compare) -> Iterator[ast.Constant]:
    """Yield the texts that are compared."""
    for side in (node.left, *node.comparators):
        for part in side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else (side,):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part


def _compared_field(node: ast.Compare, text: str) -> str:
    """Return the field that is compared with class names."""
    match node.left, node.ops, node.comparators:
        case (ast.Name(id=field), [ast.Eq() | ast.NotEq()], [ast.Constant()]):
            return field
        case (ast.Constant(), [ast.Eq() | ast.NotEq()], [ast.Name(id=field)]):
            return field
        case (ast.Name(id=field), [ast.In() | ast.NotIn()], [ast.Tuple() | ast.List() | ast.Set() as among]):
            if all(isinstance(one, ast.Constant) and isinstance(one.value, str | int) for one in among.elts):
                return field
    raise SelectionError(
        f"{_shown(node, text)!r} in where= compares a class name otherwise than with one field",
        "write label == 'cat', label != 'cat', label in ('cat', 'dog') or label not in ('cat', 'dog')",
    )


def _class_number(name: str, names: Sequence[str], problem: str) -> int:
    if name in names:
        return names.index(name)
    if not names:
        raise SelectionError(f"{problem}, and the dataset has no class names for it", "compare it with numbers")
    close = get_close_matches(name, names, 5)
    shown = ", ".join(map(repr, close or names[:5]))
    classes = f"its {len(names)} classes are {shown}{', ...' * (len(names) > 5)}"
    raise SelectionError(f"{problem}, which is none of its classes", f"similar names are {shown}" if close else classes)


def _computed(op: ast.operator, left: Any, right: Any) -> Any:
    """Return the result. numpy lets sums and products of integers wrap silently, so what may wrap is an error."""
    sizes = [_magnitude(left), _magnitude(right)]
    if isinstance(op, ast.Add | ast.Sub | ast.Mult) and None not in sizes:
        most = operator.mul(*sizes) if isinstance(op, ast.Mult) else sum(sizes)
        if most >= 2**63:
            raise OverflowError("its numbers may exceed 64 bits")
    return _ARITHMETIC[type(op)](left, right)


def _magnitude(value: Any) -> Any:
    """Return the largest absolute value of integers; None of other numbers."""
    if isinstance(value, int):
        return abs(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        return None
    return max(abs(int(value.min())), abs(int(value.max()))) if value.size else 0


def _widened(column: Column) -> Column:
    if column.dtype.kind in "iu" and column.dtype != np.uint64:
        return column.astype(np.int64)
    return column.astype(np.float64) if column.dtype.kind == "f" else column


def _shown(node: ast.expr, text: str) -> str:
    return ast.get_source_segment(text.strip(), node) or ast.unparse(node)
