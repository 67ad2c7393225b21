"""The columns of a stream: chosen, added, left out, renamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.expressions import Expr, col, lit
from penstock.graph.column_checks import check_output_names, column_name, require_columns
from penstock.graph.logical import Operation, Project

if TYPE_CHECKING:
    from penstock.streams.stream import Stream


class StreamColumns:
    """The projections of a stream."""

    if TYPE_CHECKING:

        @property
        def schema(self) -> pa.Schema:
            """The columns of the rows."""

        def _then(self, operation: Operation, label: str, schema: pa.Schema) -> Stream: ...

    def select(self, *cols: str | Expr, **exprs: Any) -> Self:
        """Replaces the columns by the given ones.

        Args:
            cols: names, or ``col("x")``.
            exprs: new columns by name: expressions or constants.
        """
        return self._project(
            "select", [*(self._named(c) for c in cols), *self._expressions("select", exprs).items()]
        )

    def with_columns(self, **exprs: Any) -> Self:
        """Adds columns, or replaces those that exist; all expressions see the old values."""
        if not exprs:
            raise JobRejected(
                "with_columns: give at least one column: with_columns(euro=col('usd') * 0.9)"
            )
        columns = {name: col(name) for name in self.schema.names}
        columns.update(self._expressions("with_columns", exprs))
        return self._project("with_columns", list(columns.items()))

    def drop(self, *cols: str) -> Self:
        """Leaves the columns out."""
        require_columns("drop", cols, self.schema)
        kept = [name for name in self.schema.names if name not in cols]
        return self._project("drop", [(name, col(name)) for name in kept])

    def rename(self, **names: str) -> Self:
        """Gives columns other names: ``rename(old="new")``."""
        require_columns("rename", names, self.schema)
        columns = [(names.get(name, name), col(name)) for name in self.schema.names]
        return self._project("rename", columns)

    def _named(self, column: str | Expr) -> tuple[str, Expr]:
        if isinstance(column, str):
            return column, col(column)
        if not isinstance(column, Expr):
            raise JobRejected(f"select: {column!r} is neither a column name nor an expression")
        name = column_name(column)
        if name is None:
            raise JobRejected(f"select: the expression {column} needs a name: select(name=...)")
        return name, column

    def _project(self, label: str, columns: Sequence[tuple[str, Expr]]) -> Self:
        check_output_names(label, [name for name, _ in columns])
        fields = []
        for name, expression in columns:
            require_columns(label, sorted(expression.columns()), self.schema)
            fields.append(pa.field(name, expression.type(self.schema)))
        # A keyed stream stays one unless a key column is touched; then it says so when it is needed.
        return cast("Self", self._then(Project(tuple(columns)), label, pa.schema(fields)))

    def _expressions(self, label: str, exprs: dict[str, Any]) -> dict[str, Expr]:
        """What the columns are made of. Text that is the name of a column could be meant either way."""
        for name, value in exprs.items():
            if isinstance(value, str) and value in self.schema.names:
                raise JobRejected(
                    f"{label}: {name}={value!r} would be this text in every row, and there is a column of "
                    f"that name: col({value!r}) is the column, ps.lit({value!r}) the text"
                )
        return {name: lit(value) for name, value in exprs.items()}
