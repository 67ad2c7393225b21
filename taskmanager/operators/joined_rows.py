"""From pairs of rows to the output of a join: which column comes from where, and what is null.

The output has the key columns, the window's bounds where there is a window, the other left columns, the
other right columns and the event time; the last where the stream carries it. Its schema tells the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_from_bytes, user_schema
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.operators.key_columns import KeyColumns, as_type
from taskmanager.state import wide_columns


class JoinSide:
    """The rows of one input.

    Attributes:
        schema: of its batches, event time included.
    """

    def __init__(self, keys: Sequence[str], schema: bytes) -> None:
        self.schema = schema_from_bytes(schema)
        self.keys = KeyColumns(keys, self.schema)
        self._rest = [
            i for i, name in enumerate(user_schema(self.schema).names) if name not in keys
        ]

    def has_key(self, batch: pa.RecordBatch) -> BoolArray:
        """bool[n], False for rows with a null in their key: they equal nothing."""
        valid = np.ones(batch.num_rows, np.bool_)
        for array in self.keys.arrays(batch):
            if array.null_count or pa.types.is_null(array.type):
                valid &= pc.is_valid(array).to_numpy(zero_copy_only=False)
        return valid

    def rest(self, batch: pa.RecordBatch, rows: pa.Array | None) -> list[pa.Array]:
        """The columns that are no keys, of some rows, None = all; null gives null."""
        columns = [batch.column(i) for i in self._rest]
        if rows is not None:
            columns = [column.take(rows) for column in columns]
        return [
            as_type(column, self.schema.field(i).type)
            for i, column in zip(self._rest, columns, strict=True)
        ]


class JoinedRows:
    """Makes the output batches of one join.

    Attributes:
        left: the first input.
        right: the second input.
    """

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self.left = JoinSide(spec.join.keys, spec.input_schema)
        self.right = JoinSide(spec.join.keys, spec.second_input_schema)
        self._schema = schema_from_bytes(spec.output_schema)
        self._key_fields = [self._schema.field(i) for i in range(len(spec.join.keys))]
        self._has_event_time = EVENT_TIME in self._schema.names

    def side(self, index: int) -> JoinSide:
        """The input of that number."""
        return self.right if index else self.left

    def rows_max(self, left_row_bytes: int, right_row_bytes: int, rows_max: int) -> int:
        """How many pairs go into one batch, so that its columns stay within what offsets reach.

        Args:
            left_row_bytes: the most that a left row has (``widest_row_bytes``).
            rows_max: never more than these.
        """
        pair_bytes = max(left_row_bytes + right_row_bytes, 1)
        return max(1, min(rows_max, wide_columns.OFFSET_BYTES_MAX // pair_bytes))

    def build(
        self,
        left: pa.RecordBatch,
        left_rows: Int64Array | None,
        right: pa.RecordBatch,
        right_rows: Int64Array | None,
        window: Sequence[pa.Array],
        event_times: Int64Array,
    ) -> pa.RecordBatch:
        """n rows of output.

        Args:
            left_rows: int64[n], rows of ``left``; ``NO_ROW`` where there is none; None = all, in their order.
            right_rows: the same of ``right``.
            window: the bounds of the window, n each; none for interval joins.
            event_times: int64[n].
        """
        of_left, of_right = _indices(left_rows), _indices(right_rows)
        arrays = [
            *self._keys(left, of_left, right, of_right),
            *window,
            *self.left.rest(left, of_left),
            *self.right.rest(right, of_right),
        ]
        if self._has_event_time:
            arrays.append(pa.array(event_times))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _keys(
        self,
        left: pa.RecordBatch,
        of_left: pa.Array | None,
        right: pa.RecordBatch,
        of_right: pa.Array | None,
    ) -> Iterator[pa.Array]:
        """The keys of the pairs, from the right where there is no left row."""
        columns = zip(
            self._key_fields,
            self.left.keys.arrays(left),
            self.right.keys.arrays(right),
            strict=True,
        )
        for field, first, second in columns:
            keys = first if of_left is None else first.take(of_left)
            if of_left is not None and of_left.null_count:
                from_right = second if of_right is None else second.take(of_right)
                keys = pc.if_else(of_left.is_valid(), keys, from_right)
            yield as_type(keys, field.type)


def _indices(rows: Int64Array | None) -> pa.Array | None:
    if rows is None:
        return None
    missing = rows < 0
    return pa.array(rows, mask=missing) if missing.any() else pa.array(rows)
