"""The compiled ``interface.Kernels``; importing it compiles or loads everything."""

from taskmanager.kernels.compiled_chains import extend_chains, read_chains
from taskmanager.kernels.compiled_checksum import add_word_bits, weighted_sum
from taskmanager.kernels.compiled_pairs import add_pairs, place_pairs
from taskmanager.kernels.compiled_rows import (
    add_floats,
    add_integers,
    count_rows,
    extreme_floats,
    extreme_integers,
    extreme_unsigned,
    mark_seen,
    partition,
    put_words,
    slice_starts,
    value_bounds,
)
from taskmanager.kernels.compiled_runs import find_ranges, merge_runs, spread_ranges
from taskmanager.kernels.compiled_sessions import join_sessions
from taskmanager.kernels.compiled_table import (
    find_bytes,
    find_fixed,
    rehash,
    remove_bytes,
    remove_fixed,
    upsert_bytes,
    upsert_fixed,
)
from taskmanager.kernels.compiled_versions import (
    copy_changed,
    touch,
    touch_displaced,
)
from taskmanager.kernels.compiled_words import (
    copy_ranges,
    distinct_bytes,
    distinct_fixed,
    hash_bytes,
    hash_words,
    write_strings,
)

__all__ = [
    "add_floats",
    "add_integers",
    "add_pairs",
    "add_word_bits",
    "copy_changed",
    "copy_ranges",
    "count_rows",
    "distinct_bytes",
    "distinct_fixed",
    "extend_chains",
    "extreme_floats",
    "extreme_integers",
    "extreme_unsigned",
    "find_bytes",
    "find_fixed",
    "find_ranges",
    "hash_bytes",
    "hash_words",
    "join_sessions",
    "mark_seen",
    "merge_runs",
    "partition",
    "place_pairs",
    "put_words",
    "read_chains",
    "rehash",
    "remove_bytes",
    "remove_fixed",
    "slice_starts",
    "spread_ranges",
    "touch",
    "touch_displaced",
    "upsert_bytes",
    "upsert_fixed",
    "value_bounds",
    "weighted_sum",
    "write_strings",
]
