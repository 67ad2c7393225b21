"""Calls of a function for the rows of a batch, one after the other.

A row object is used again for the next row where nobody but the loop holds it: a function that keeps a row, emits
it, or lets another thread or a generator have it finds it as it was. So does the loop with a result that somebody else
holds: the function may give it again, with other values in it. What a function has read of one batch by name
is put into the rows of the next ones as they are made (it is *eager*): reading it is then no call of Python.

The loops are generated, one for each number of eager columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from sys import getrefcount
from typing import Any

import pyarrow as pa

from penstock.rows.handed_over import NEVER_CHANGED, handed_over
from penstock.rows.rows import Row, decoded_column, eager_row_class, lazy_columns

_EAGER_MAX = 8
"""Putting a value into a row costs a third of reading it by a call."""

_LOOK_AGAIN_AFTER = 64
"""Batches until it is found out anew what the function reads."""


class RowCalls:
    """The calls of one function.

    Args:
        hands_over: what it returns becomes part of rows; False = it says yes or no.

    Attributes:
        columns: what the rows of the batch share, see ``lazy_columns``.

    Example:
        >>> calls, lengths = RowCalls(), []
        >>> calls.begin(pa.record_batch({"word": ["one", "three"]}))
        >>> calls.map(lambda row: len(row.word), lengths, 0, 2)
        >>> lengths
        [3, 5]
    """

    def __init__(self, *, hands_over: bool = True) -> None:
        self._hands_over = hands_over
        self.columns: list[Any] = []
        self._names: tuple[str, ...] = ()
        self._eager: tuple[int, ...] = ()
        self._read: set[int] = set()
        self._batches = 0

    def begin(self, batch: pa.RecordBatch) -> None:
        """The next calls are for rows of this batch."""
        names = tuple(batch.schema.names)
        self._batches += 1
        if names != self._names or self._batches % _LOOK_AGAIN_AFTER == 0:
            self._names, self._eager = names, ()
        elif self._read:
            self._eager = tuple(sorted({*self._eager, *self._read}))[:_EAGER_MAX]
        self.columns = columns = lazy_columns(batch)
        self._read = columns[-2]
        eager = self._eager
        self._values = [decoded_column(columns, position) for position in eager]
        if not all(type(values) is list for values in self._values):
            eager, self._values = (), []  # raises for the row that reads what Python does not have
        self._kind = eager_row_class(names, eager)
        self._map, self._process = _loops(len(eager), self._hands_over)

    def end(self) -> None:
        """The batch is done: nothing of it is held any more."""
        self.columns, self._values = [], []

    def map(
        self, function: Callable[[Row], Any], results: list[Any], start: int, stop: int
    ) -> None:
        """Appends what the function returns for the rows from ``start`` up to ``stop``; what it raises is raised."""
        self._map(
            function,
            self._kind,
            self.columns,
            results.append,
            start,
            stop,
            *self._part(start, stop),
        )

    def process(
        self,
        call: Callable[..., Any],
        context: Any,
        out: Any,
        emit_returned: Callable[[Any, Any], None],
        slots: Sequence[int | None],
        start: int,
        stop: int,
    ) -> None:
        """Calls ``call(row, context, out)`` for the rows from ``start`` up to ``stop``; what it raises is raised.

        Args:
            context: its ``index`` and ``slot`` are those of the row.
            emit_returned: called with what a call returned that is not None, and ``out.emit``.
            slots: of the keys of all rows of the batch.
        """
        context.index = start
        values = self._part(start, stop)
        slots = slots[start:stop]
        kind, columns = self._kind, self.columns
        self._process(call, kind, columns, context, out, emit_returned, slots, start, stop, *values)

    def _part(self, start: int, stop: int) -> list[list[Any]]:
        return [values[start:stop] for values in self._values]


def _references_of_one_holder() -> int:
    """What ``getrefcount`` says of an object that one local variable holds."""
    row = object()
    return getrefcount(row)


_LOOPS = """
def map_rows(call, kind, columns, add, start, stop{arguments}):
    row = new(kind)
    row._penstock_columns = columns
    kept = {{*never_changed, kind}}
    for index, {items}in zip(range(start, stop){arguments}):
        if getrefcount(row) > {alone}:
            row = new(kind)
            row._penstock_columns = columns
        row._penstock_index = index
        {fill}
        {take}

def process_rows(call, kind, columns, ctx, out, emit_returned, slots, start, stop{arguments}):
    row = new(kind)
    row._penstock_columns = columns
    for index, slot, {items}in zip(range(start, stop), slots{arguments}):
        if getrefcount(row) > {alone}:
            row = new(kind)
            row._penstock_columns = columns
        row._penstock_index = index
        {fill}
        ctx.index = index
        ctx.slot = slot
        returned = call(row, ctx, out)
        if returned is not None:
            emit_returned(returned, out.emit)
"""


_TAKE = """result = call(row)
        if getrefcount(result) > {alone} and type(result) not in kept:
            result = handed_over(result)
        add(result)"""


@lru_cache(maxsize=2 * (_EAGER_MAX + 1))
def _loops(eager: int, hands_over: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    """The two loops for rows with so many eager columns, and for functions that hand results over, or say yes or no."""
    alone = _references_of_one_holder()
    numbers = range(eager)
    source = _LOOPS.format(
        alone=alone,
        take=_TAKE.format(alone=alone) if hands_over else "add(call(row))",
        arguments="".join(f", column_{n}" for n in numbers),
        items="".join(f"value_{n}, " for n in numbers),
        fill="; ".join(f"row._penstock_value_{n} = value_{n}" for n in numbers) or "pass",
    )
    scope: dict[str, Any] = {"new": object.__new__, "getrefcount": getrefcount}
    scope.update(handed_over=handed_over, never_changed=NEVER_CHANGED)
    exec(compile(source, __file__, "exec"), scope)  # under our name: no frame of the user's
    return scope["map_rows"], scope["process_rows"]
