"""Batches that a user's function made, as the columns of an operator's output schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from penstock.errors import TaskFailure
from penstock.naming import nearest_hint
from penstock.rows.column_values import ValueMismatch
from penstock.rows.conforming import conformed_column
from penstock.rows.whole_batches import one_array


def result_columns(
    result: Any, schema: pa.Schema, wrong: Callable[[str], TaskFailure]
) -> list[pa.Array]:
    """The result's columns in the schema's order and types.

    Args:
        result: what the function returned or emitted.
        schema: of the output, without the event-time column.
        wrong: the failure to raise, of what is wrong: "returned ...".

    Raises:
        TaskFailure: it does not fit.
    """
    if not isinstance(result, pa.RecordBatch | pa.Table):
        raise wrong(
            f"returned {type(result).__name__}, it must return a pyarrow RecordBatch or Table "
            "(pa.RecordBatch.from_pandas(frame, preserve_index=False), frame.to_arrow())"
        )
    names = result.schema.names
    unknown = [name for name in names if name not in schema.names]
    missing = [name for name in schema.names if name not in names]
    if missing or unknown or len(names) != len(set(names)):
        hint = nearest_hint(missing[0], unknown) if missing else ""
        raise wrong(
            f"returned the columns {', '.join(names) or 'none'}, expected "
            f"{', '.join(schema.names)}{hint}; say what it returns with schema=..."
        )
    try:
        return [conformed_column(one_array(result.column(f.name)), f) for f in schema]
    except ValueMismatch as e:
        place = f" (row {e.index} of what it returned)" if e.index >= 0 else ""
        raise wrong(f"returned {e}{place}") from e
