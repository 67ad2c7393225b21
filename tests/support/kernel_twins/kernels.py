"""The numpy implementation of ``compiled.Kernels``, the oracle of the compiled one: same results, slower."""

from penstock.storage.key_loops import copy_ranges, hash_bytes, hash_words, write_strings
from tests.support.kernel_twins.chains import extend_chains, read_chains
from tests.support.kernel_twins.checksum import add_word_bits, weighted_sum
from tests.support.kernel_twins.pairs import add_pairs, place_pairs
from tests.support.kernel_twins.rows import (
    add_floats,
    add_integers,
    count_rows,
    extreme_floats,
    extreme_integers,
    mark_seen,
    partition,
    put_words,
    slice_starts,
    value_bounds,
)
from tests.support.kernel_twins.runs import find_ranges, merge_runs, spread_ranges
from tests.support.kernel_twins.sessions import join_sessions
from tests.support.kernel_twins.table import (
    distinct_bytes,
    distinct_fixed,
    find_bytes,
    find_fixed,
    rehash,
    remove_bytes,
    remove_fixed,
    upsert_bytes,
    upsert_fixed,
)
from tests.support.kernel_twins.versions import (
    copy_changed,
    stamp_changed,
    touch,
    touch_displaced,
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
    "stamp_changed",
    "touch",
    "touch_displaced",
    "upsert_bytes",
    "upsert_fixed",
    "value_bounds",
    "weighted_sum",
    "write_strings",
]
