"""Results of a row function as output batches: columns built, checked, and put beside the input's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from common.elements import OperatorOutput
from penstock.errors import TaskFailure
from penstock.pb import graph_pb2
from penstock.rows.column_values import ROW_BYTES, ValueMismatch, encode, short_repr
from penstock.rows.rows import RowBuilder, RowMismatch, rows_of
from penstock.rows.schema import schema_from_bytes, user_schema
from taskmanager.operators.bad_records import BadRecordPolicy

KEY_COLUMN = "key"
"""What a key function adds to the row."""


class RowResults:
    """Builds the output of one operator.

    Args:
        spec: the operator, of kind map, flat_map or key.
        policy: where rows go of whose results one does not fit the output schema, the others with it.

    Attributes:
        last_bad: the last such row of a batch, -1 = none.
    """

    def __init__(self, spec: graph_pb2.Operator, policy: BadRecordPolicy) -> None:
        self._operator = spec.name
        self._function = spec.row_function.function.display_name
        self._schema = schema_from_bytes(spec.output_schema)
        self._policy = policy
        self.last_bad = -1
        self._key: pa.Field | None = None
        if spec.row_function.kind == graph_pb2.ROW_FUNCTION_KIND_KEY:
            self._key = self._schema.field(KEY_COLUMN)
        self._built_schema = (
            user_schema(self._schema) if self._key is None else pa.schema([self._key])
        )

    def emit(
        self, batch: pa.RecordBatch, results: list[Any], indexes: Sequence[int]
    ) -> Iterator[OperatorOutput]:
        """The output batch and what the error policy makes of the rest.

        Args:
            results: of the function, n values.
            indexes: per result the row of ``batch`` it was made from, ascending.
        """
        if results:
            built, kept = self._checked(batch, results, indexes)
            if kept:
                yield self._beside_input(batch, built, kept)
        yield from self._policy.side_output(batch)

    def _checked(
        self, batch: pa.RecordBatch, results: list[Any], indexes: Sequence[int]
    ) -> tuple[pa.RecordBatch, Sequence[int]]:
        """The results as columns, and their rows; rows with one that does not fit are left to the policy."""
        try:
            return self._build(results), indexes
        except RowMismatch as e:
            if e.index < 0:
                raise self._mismatch(batch, indexes[0], e) from e
        fitting = []
        bad: set[int] = set()
        for position, (result, index) in enumerate(zip(results, indexes, strict=True)):
            if index in bad:
                continue
            try:
                self._build([result])
                fitting.append(position)
            except RowMismatch as e:
                self._policy.handle(index, lambda e=e, i=index: self._mismatch(batch, i, e))  # type: ignore[misc]
                bad.add(index)
                self.last_bad = index
        good = [position for position in fitting if indexes[position] not in bad]
        return self._build([results[p] for p in good]), [indexes[p] for p in good]

    def _build(self, results: list[Any]) -> pa.RecordBatch:
        if self._key is None:
            builder = RowBuilder(self._built_schema)
            builder.extend(results)
            return builder.build()
        try:
            key = encode(results, self._key)
        except ValueMismatch as e:
            raise RowMismatch(str(e), index=e.index) from e
        return pa.RecordBatch.from_arrays([key], schema=self._built_schema)

    def _beside_input(
        self, batch: pa.RecordBatch, built: pa.RecordBatch, indexes: Sequence[int]
    ) -> pa.RecordBatch:
        """Built columns, and the others (event time, a keyed row's own) from the input's rows."""
        passed_on = [n for n in self._schema.names if built.schema.get_field_index(n) < 0]
        if not passed_on:
            return built
        rows = _rows(batch.select(passed_on), indexes)
        columns = [
            (rows if name in passed_on else built).column(name) for name in self._schema.names
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _mismatch(self, batch: pa.RecordBatch, index: int, error: RowMismatch) -> TaskFailure:
        return TaskFailure(
            f"operator {self._operator!r}: the result of {self._function} does not fit: {error}",
            operator=self._operator,
            row=short_repr(row_at(batch, index), ROW_BYTES),
        )


def row_at(batch: pa.RecordBatch, index: int) -> object:
    """One row for an error, without decoding the others."""
    return rows_of(batch.slice(index, 1))[0]


def _rows(batch: pa.RecordBatch, indexes: Sequence[int]) -> pa.RecordBatch:
    """Rows by ascending index: a slice where they are neighbours, each once."""
    first, count = indexes[0], len(indexes)
    if indexes[-1] - first + 1 == count and (
        isinstance(indexes, range) or all(map(int.__eq__, indexes, range(first, first + count)))
    ):
        return batch.slice(first, count)
    return batch.take(pa.array(indexes, pa.int64()))
