"""The numbers of aggregates as columns of a snapshot: null where an accumulator has no value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from penstock.storage.key_types import BoolArray
from taskmanager.kernels import AccumulatorKind
from taskmanager.kernels.accumulators import Values
from taskmanager.state.value_log import FrozenStates


def to_column(values: Values, valid: BoolArray | None) -> FrozenStates:
    """Accumulators, which must not change any more, as states.

    Args:
        values: n numbers.
        valid: bool[n], False where there is none; None = all are there.
    """
    if valid is None or valid.all():
        return lambda rows: pa.array(values[rows])
    return lambda rows: pa.array(values[rows], mask=~valid[rows])


def from_columns(
    kinds: Sequence[AccumulatorKind], columns: Sequence[pa.Array]
) -> tuple[list[Values], list[BoolArray | None]]:
    """Numbers and which of them are there; those that are not are what new accumulators hold."""
    values: list[Values] = []
    valid: list[BoolArray | None] = []
    for kind, column in zip(kinds, columns, strict=True):
        if not column.null_count:
            valid.append(None)
            values.append(column.to_numpy())
            continue
        is_valid = column.is_valid().to_numpy(zero_copy_only=False)
        initial = np.array([kind.initial_word], np.int64).view(kind.dtype)[0]
        valid.append(is_valid)
        values.append(np.where(is_valid, column.fill_null(0).to_numpy(), initial))
    return values, valid
