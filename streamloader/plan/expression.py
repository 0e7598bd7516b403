"""Conditions on fields, as text: `label in (1, 2) and width >= 256`. Parsed, never evaluated as Python. Pure.

The words are Python's: names of fields, numbers, `True`, `False`, `+ - * / // %`, comparisons also in chains, `in` and
`not in` with numbers in brackets, `and`, `or`, `not`, parentheses. A class name in quotes stands for its number where
it is compared with a field by `==`, `!=`, `in` or `not in`. Nothing else is understood: no call, no attribute, no
index, no power.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import SelectionError

__all__ = ["Condition"]

Column = NDArray[Any]

MOST_CHARACTERS = 10_000
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
    """A parsed condition; `fields` are the names that it asks for."""

    text: str
    fields: frozenset[str]
    _tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Return the condition. Raises `SelectionError` for what is no condition, and names the part."""
        if len(text) > MOST_CHARACTERS:
            raise SelectionError(
                f"where= has {len(text)} characters", f"write at most {MOST_CHARACTERS}, or give a mask or indexes"
            )
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = getattr(error, "msg", None) or str(error) or type(error).__name__
            raise SelectionError(f"where={text!r} cannot be read: {reason}", WORDS) from error
        names: set[str] = set()
        try:
            is_condition = _check(tree, text, names)
        except RecursionError as error:
            raise SelectionError(f"where={text[:80]!r}... is nested too deeply", WORDS) from error
        if not names:
            raise SelectionError(f"where={text!r} names no field", "compare a field with something")
        if not is_condition and not isinstance(tree, ast.Name):  # a field of bools is a condition by itself
            raise _no_condition(text)
        return cls(text, frozenset(names), tree)

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Condition:
        """Return the condition with the numbers of its class names, given the names by field.

        Raises `SelectionError` for a field without class names, and for an unknown one, with those that look like it.
        """
        tree = ast.parse(self.text.strip(), mode="eval").body
        for node in (one for one in ast.walk(tree) if isinstance(one, ast.Compare)):
            for name in _class_names(node):
                field = _compared_field(node, self.text)
                problem = f"where={self.text!r} compares {field!r} with {name.value!r}"
                name.value = _class_number(str(name.value), tuple(classes.get(field, ())), problem)
        return replace(self, _tree=tree)

    def mask(self, columns: Mapping[str, Column]) -> NDArray[np.bool_]:
        """Return where the condition holds, given each of `fields` as one array of one number a sample.

        Integers are compared as int64 (uint64 stays), so that sums do not wrap at 255; floats as float64. Raises
        `SelectionError` where a number stands for a condition, something is divided by 0, or may pass 64 bits.
        """
        wide = {name: _widened(columns[name]) for name in self.fields}
        try:
            with np.errstate(divide="raise", invalid="ignore", over="ignore", under="ignore"):
                found = _value(self._tree, wide)
        except (FloatingPointError, ZeroDivisionError, OverflowError) as error:
            raise SelectionError(f"where={self.text!r} cannot be computed: {error}", "compare other values") from error
        mask = np.asarray(found)
        if mask.dtype != np.bool_:
            raise _no_condition(self.text)
        return np.ascontiguousarray(mask)


def _check(node: ast.expr, text: str, names: set[str]) -> bool:
    """Collect the names below a node, and refuse what is not understood; return whether it is surely a condition."""
    condition = True
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                _check_condition(value, text, names)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            _check_condition(operand, text, names)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            _check_number(operand, text, names)
            condition = False
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _ARITHMETIC:
            _check_number(left, text, names)
            _check_number(right, text, names)
            condition = False
        case ast.Compare() if any(_class_names(node)):
            names.add(_compared_field(node, text))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            _check_number(left, text, names)
            for comparison, right in zip(ops, comparators, strict=True):
                _check_compared(comparison, right, text, names)
        case ast.Name(id=name):  # of bools, perhaps: `mask` knows
            names.add(name)
            condition = False
        case ast.Constant(value=bool() | int() | float() as value):
            condition = isinstance(value, bool)
        case _:
            raise SelectionError(f"{_shown(node, text)!r} in where= is not understood", WORDS)
    return condition


def _check_condition(node: ast.expr, text: str, names: set[str]) -> None:
    if not _check(node, text, names) and not isinstance(node, ast.Name):
        raise _no_condition(_shown(node, text))


def _check_number(node: ast.expr, text: str, names: set[str]) -> None:
    if _check(node, text, names) and not isinstance(node, ast.Constant):
        problem = f"{_shown(node, text)!r} in where= is a condition, not a number"
        raise SelectionError(problem, "join conditions by and, or, not")


def _check_compared(op: ast.cmpop, right: ast.expr, text: str, names: set[str]) -> None:
    if type(op) in _COMPARISONS:
        _check_number(right, text, names)
        return
    if not isinstance(op, ast.In | ast.NotIn) or not isinstance(right, ast.Tuple | ast.List | ast.Set):
        raise SelectionError(f"{_shown(right, text)!r} in where= is no list of numbers", "write in (1, 2, 3)")
    for element in right.elts:
        found: set[str] = set()
        _check_number(element, text, found)
        if found:
            raise SelectionError(
                f"{_shown(element, text)!r} in where= is a field inside a list", "compare the fields with =="
            )


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
    remedy = (
        f"similar names are {shown}" if close else f"its {len(names)} classes are {shown}{', ...' * (len(names) > 5)}"
    )
    raise SelectionError(f"{problem}, which is none of its classes", remedy)


def _value(node: ast.expr, columns: Mapping[str, Column]) -> Any:
    found: Any
    match node:
        case ast.BoolOp(op=op, values=values):
            parts = [_condition(value, columns) for value in values]
            found = reduce(np.logical_and if isinstance(op, ast.And) else np.logical_or, parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            found = np.logical_not(_condition(operand, columns))
        case ast.UnaryOp(op=op, operand=operand):
            found = _number(operand, columns)
            found = -found if isinstance(op, ast.USub) else found
        case ast.BinOp(op=op, left=left, right=right):
            found = _reckoned(op, _number(left, columns), _number(right, columns))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            found = _compared(left, ops, comparators, columns)
        case ast.Name(id=name):
            found = columns[name]
        case ast.Constant(value=value):
            found = value
        case _:
            raise AssertionError(node)  # `_check` let it pass
    return found


def _compared(left: ast.expr, ops: list[ast.cmpop], comparators: list[ast.expr], columns: Mapping[str, Column]) -> Any:
    holds: Any = True
    value = _value(left, columns)
    for op, right in zip(ops, comparators, strict=True):
        if isinstance(right, ast.Tuple | ast.List | ast.Set):
            among: Any = False
            for element in right.elts:
                among = np.logical_or(among, value == _value(element, columns))
            holds = np.logical_and(holds, np.logical_not(among) if isinstance(op, ast.NotIn) else among)
            continue
        other = _value(right, columns)
        holds = np.logical_and(holds, _COMPARISONS[type(op)](value, other))
        value = other
    return holds


def _condition(node: ast.expr, columns: Mapping[str, Column]) -> Any:
    value = _value(node, columns)
    if np.asarray(value).dtype != np.bool_:
        raise SelectionError(
            f"{ast.unparse(node)!r} in where= is a number, not a condition", "compare it with something"
        )
    return value


def _number(node: ast.expr, columns: Mapping[str, Column]) -> Any:
    """Return a value to reckon with: a bool counts as 0 or 1."""
    value = _value(node, columns)
    return value.astype(np.int64) if isinstance(value, np.ndarray) and value.dtype == np.bool_ else value


def _reckoned(op: ast.operator, left: Any, right: Any) -> Any:
    """Return the result; numpy would let sums and products of integers wrap silently, so what may wrap is refused."""
    sizes = [_magnitude(left), _magnitude(right)]
    if isinstance(op, ast.Add | ast.Sub | ast.Mult) and None not in sizes:
        most = operator.mul(*sizes) if isinstance(op, ast.Mult) else sum(sizes)
        if most >= 2**63:
            raise OverflowError("its numbers may pass 64 bits")
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


def _no_condition(part: str) -> SelectionError:
    return SelectionError(f"{part!r} in where= is a number, not a condition", "compare it with something")


def _shown(node: ast.expr, text: str) -> str:
    return ast.get_source_segment(text.strip(), node) or ast.unparse(node)
