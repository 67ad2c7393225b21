"""The numbers per key that aggregates are made of."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import numpy as np
import pyarrow as pa


class AccumulatorKind(Enum):
    """What one accumulator of a record does with the values it is given.

    Sums of integers are int64 and overflow is an error (a uint64 column is cast to int64 first, with
    a check). ``MIN_UINT64`` and ``MAX_UINT64`` compare uint64 columns, whose upper half int64 cannot
    order. Minima and maxima of floats ignore NaN unless all values are NaN.
    """

    COUNT = "count"
    SUM_INT64 = "sum_int64"
    SUM_FLOAT64 = "sum_float64"
    MIN_INT64 = "min_int64"
    MAX_INT64 = "max_int64"
    MIN_UINT64 = "min_uint64"
    MAX_UINT64 = "max_uint64"
    MIN_FLOAT64 = "min_float64"
    MAX_FLOAT64 = "max_float64"

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the accumulator and of the values it takes."""
        return _DTYPES[self]

    @property
    def initial_word(self) -> int:
        """The accumulator before its first value, as the bits of an int64."""
        return _INITIAL_WORDS[self]

    @property
    def arrow_type(self) -> pa.DataType:
        """Type of the accumulator's column in a partial batch."""
        return pa.from_numpy_dtype(self.dtype)


_NAN_WORD: Final = 0x7FF8000000000000

_DTYPES: Final = {
    AccumulatorKind.COUNT: np.dtype(np.int64),
    AccumulatorKind.SUM_INT64: np.dtype(np.int64),
    AccumulatorKind.SUM_FLOAT64: np.dtype(np.float64),
    AccumulatorKind.MIN_INT64: np.dtype(np.int64),
    AccumulatorKind.MAX_INT64: np.dtype(np.int64),
    AccumulatorKind.MIN_UINT64: np.dtype(np.uint64),
    AccumulatorKind.MAX_UINT64: np.dtype(np.uint64),
    AccumulatorKind.MIN_FLOAT64: np.dtype(np.float64),
    AccumulatorKind.MAX_FLOAT64: np.dtype(np.float64),
}

_INITIAL_WORDS: Final = {
    AccumulatorKind.COUNT: 0,
    AccumulatorKind.SUM_INT64: 0,
    AccumulatorKind.SUM_FLOAT64: 0,
    AccumulatorKind.MIN_INT64: 2**63 - 1,
    AccumulatorKind.MAX_INT64: -(2**63),
    AccumulatorKind.MIN_UINT64: -1,
    AccumulatorKind.MAX_UINT64: 0,
    AccumulatorKind.MIN_FLOAT64: _NAN_WORD,
    AccumulatorKind.MAX_FLOAT64: _NAN_WORD,
}
