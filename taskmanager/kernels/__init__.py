"""Kernels: the hot loops over keys, records and timestamps, compiled with numba.

Operators use the names exported here; importing this package imports no compiler. ``warm_up`` makes all
loops ready, before slot processes are forked. Each has a numpy twin among the tests, which is its oracle.
"""

from penstock.aggregates.accumulator_kind import AccumulatorKind
from penstock.storage.hashing import hash_columns
from penstock.storage.key_encoding import encode_keys
from taskmanager.kernels.accumulators import (
    AccumulatorOverflowError,
)
from taskmanager.kernels.backend import (
    warm_up,
)
from taskmanager.kernels.grouping import (
    distinct,
)
from taskmanager.kernels.partitioning import (
    partition_order,
)
from taskmanager.kernels.record_table import (
    GatheredRows,
    RecordTable,
    Rows,
)
from taskmanager.kernels.row_checksum import (
    rows_checksum,
)
from taskmanager.kernels.time_slices import (
    SliceSplit,
    slice_span,
    slice_start,
    slice_starts,
    split_by_slice,
    time_bounds,
)

__all__ = [
    "AccumulatorKind",
    "AccumulatorOverflowError",
    "GatheredRows",
    "RecordTable",
    "Rows",
    "SliceSplit",
    "distinct",
    "encode_keys",
    "hash_columns",
    "partition_order",
    "rows_checksum",
    "slice_span",
    "slice_start",
    "slice_starts",
    "split_by_slice",
    "time_bounds",
    "warm_up",
]
