"""Conditionals: each part is evaluated on the rows that need it and on no other, as in SQL's CASE.

``if_else(b > 0, a // b, None)`` divides where ``b > 0``; ``coalesce`` looks further only where all before
are null; ``&`` and ``|`` ask their right side only where the left one does not decide. What another row
would have made fail does not happen.

Evaluating everything on all rows is cheaper where nothing fails, and gives the same values, so that is
tried first; once a part has failed, the node selects rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Kernel = Callable[[list[Any]], Any]
"""Arrow arrays or scalars in, an array or scalar out."""


class ReadColumns(Protocol):
    """What expressions read: columns by position, all of one length."""

    @property
    def num_rows(self) -> int:
        """How many rows there are."""

    def column(self, position: int) -> pa.Array:
        """The values of a column."""


class Part(Protocol):
    """An argument of a conditional: what it would be, and what it is made of."""

    @property
    def type(self) -> pa.DataType:
        """Type of its values."""

    @property
    def evaluate(self) -> Callable[[ReadColumns], Any]:
        """Its values for rows: an array of their length, or a scalar."""

    @property
    def constant(self) -> pa.Scalar | None:
        """The value, where it depends on no column."""

    @property
    def parts(self) -> Sequence[Part]:
        """The arguments it computes its values from."""

    @property
    def kernel(self) -> Kernel | None:
        """How it computes them."""


NeededParts = Callable[[Sequence[Part], ReadColumns], list[Any]]
"""Arguments of a conditional in, their values out: null on rows that do not need them."""


def needed_parts(function: str, types: Sequence[pa.DataType]) -> NeededParts | None:
    """How the arguments of a function depend on each other, None where all are always needed."""
    if function in ("&", "|") and any(map(pa.types.is_integer, types)):
        return None  # bitwise
    return _NEEDED.get(function)


class Conditional:
    """Evaluates a conditional for rows."""

    __slots__ = ("_failures", "_has_failed", "_kernel", "_needed", "_parts")

    def __init__(
        self,
        needed: NeededParts,
        parts: Sequence[Part],
        kernel: Kernel,
        failures: tuple[type[Exception], ...],
    ) -> None:
        self._needed = needed
        self._parts = parts
        self._kernel = kernel
        self._failures = failures
        self._has_failed = False

    def __call__(self, rows: ReadColumns) -> Any:
        """The values, an array with one per row."""
        if not self._has_failed:
            try:
                return self._kernel([part.evaluate(rows) for part in self._parts])
            except self._failures:
                self._has_failed = True  # perhaps on a row that did not need the part
        return self._kernel(self._needed(self._parts, rows))


class _Selection:
    """Some rows of others."""

    __slots__ = ("_columns", "_indices", "_rows", "num_rows")

    def __init__(self, rows: ReadColumns, indices: np.ndarray) -> None:
        self._rows = rows
        self._indices = pa.array(indices)
        self._columns: dict[int, pa.Array] = {}
        self.num_rows = len(indices)

    def column(self, position: int) -> pa.Array:
        column = self._columns.get(position)
        if column is None:
            column = self._rows.column(position).take(self._indices)
            self._columns[position] = column
        return column


def _where(part: Part, rows: ReadColumns, mask: np.ndarray) -> Any:
    """The values of a part where a mask (bool[n]) is true, null elsewhere."""
    if part.constant is not None:
        return part.constant
    if mask.all():
        return part.evaluate(rows)
    values = part.evaluate(_Selection(rows, np.flatnonzero(mask)))
    if isinstance(values, pa.Scalar):
        return values
    return values.take(pa.array(np.cumsum(mask) - 1, mask=~mask))


def _mask(condition: Any, rows: ReadColumns, *, null_is: bool = False) -> np.ndarray:
    """A condition as bool[n]."""
    if isinstance(condition, pa.Scalar):
        truth = condition.as_py()
        return np.full(rows.num_rows, null_is if truth is None else bool(truth))
    filled = pc.fill_null(condition, null_is) if condition.null_count else condition
    return filled.cast(pa.bool_()).to_numpy(zero_copy_only=False)


def _all(rows: ReadColumns) -> np.ndarray:
    return np.ones(rows.num_rows, np.bool_)


def _if_else(parts: Sequence[Part], rows: ReadColumns) -> list[Any]:
    condition, then, otherwise = parts
    values = condition.evaluate(rows)
    true = _mask(values, rows)
    false = ~_mask(values, rows, null_is=True)
    return [values, _where(then, rows, true), _where(otherwise, rows, false)]


def _coalesce(parts: Sequence[Part], rows: ReadColumns) -> list[Any]:
    missing = _all(rows)
    values = []
    for part in parts:
        values.append(_where(part, rows, missing))
        missing = missing & _mask(pc.is_null(values[-1]), rows)
    return values


def _and(parts: Sequence[Part], rows: ReadColumns) -> list[Any]:
    left, right = parts
    values = left.evaluate(rows)
    return [values, _where(right, rows, _mask(values, rows, null_is=True))]


def _or(parts: Sequence[Part], rows: ReadColumns) -> list[Any]:
    left, right = parts
    values = left.evaluate(rows)
    return [values, _where(right, rows, ~_mask(values, rows))]


def _case_when(parts: Sequence[Part], rows: ReadColumns) -> list[Any]:
    choice, *values = parts
    conditions: list[Any] = []
    chosen: list[Any] = []
    remaining = _all(rows)
    for value, condition in zip_longest(values, _conditions(choice, rows)):
        true = remaining
        if condition is not None:  # None: the value behind the last condition
            conditions.append(condition(remaining))
            true = remaining & _mask(conditions[-1], rows)
        chosen.append(_where(value, rows, true))
        remaining = remaining & ~true
    if choice.parts and choice.kernel is not None:
        return [choice.kernel(conditions), *chosen]
    return [choice.evaluate(rows), *chosen]


def _conditions(choice: Part, rows: ReadColumns) -> list[Callable[[np.ndarray], Any]]:
    """The conditions of a case, each to be asked for the rows that no one before was true for."""
    if choice.parts:
        return [partial(_where, part, rows) for part in choice.parts]
    struct = choice.evaluate(rows)  # a column, or constants: there to begin with
    fields = [pc.struct_field(struct, [i]) for i in range(choice.type.num_fields)]
    return [partial(_known, field) for field in fields]


def _known(values: Any, _: np.ndarray) -> Any:
    return values


def _choose(parts: Sequence[Part], rows: ReadColumns) -> list[Any]:
    choice, *values = parts
    indices = choice.evaluate(rows)
    chosen = (_mask(pc.equal(indices, i), rows) for i in range(len(values)))
    return [indices, *(_where(v, rows, mask) for v, mask in zip(values, chosen, strict=True))]


_NEEDED: dict[str, NeededParts] = {
    "if_else": _if_else,
    "coalesce": _coalesce,
    "&": _and,
    "and_kleene": _and,
    "and_not_kleene": _and,
    "|": _or,
    "or_kleene": _or,
    "case_when": _case_when,
    "choose": _choose,
}
