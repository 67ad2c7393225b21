"""The order of rows by their columns, in which Arrow leaves decimals of 32 and 64 bits where they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt


def sorted_rows(table: pa.Table, keys: Sequence[tuple[str, str]]) -> npt.NDArray[np.int64]:
    """The indices of the rows in their order, int64[n]; equal rows stay in theirs.

    Args:
        keys: columns, and "ascending" or "descending".

    >>> from decimal import Decimal
    >>> prices = pa.array([Decimal("2.50"), Decimal("-1.00")], pa.decimal32(9, 2))
    >>> sorted_rows(pa.table({"group": [1, 1], "price": prices}), [("group", "ascending"), ("price", "ascending")])
    array([1, 0])
    """
    named = dict(keys)
    columns = {name: _sortable(table.column(name)) for name in named}
    order = pc.sort_indices(pa.table(columns), list(keys)).to_numpy()
    return order.astype(np.int64)


def _sortable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pt.is_decimal(kind) and kind.bit_width < 128:
        return pc.cast(column, pa.decimal128(kind.precision, kind.scale))
    return column
