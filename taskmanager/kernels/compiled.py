"""The compiled kernels; importing this compiles or loads all of them.

They take and fill plain numpy arrays and know nothing of Arrow. An empty ``nulls`` or ``valid`` array means that every
row is there. Tests have a numpy twin of each, which gives identical results.
"""

from taskmanager.kernels import (
    compiled_chains,
    compiled_checksum,
    compiled_pairs,
    compiled_rows,
    compiled_runs,
    compiled_sessions,
    compiled_table,
    compiled_versions,
    compiled_words,
)


class Kernels:
    """The loops that are worth compiling, each as its module declares it."""

    extend_chains = staticmethod(compiled_chains.extend_chains)
    read_chains = staticmethod(compiled_chains.read_chains)

    add_word_bits = staticmethod(compiled_checksum.add_word_bits)
    weighted_sum = staticmethod(compiled_checksum.weighted_sum)

    add_pairs = staticmethod(compiled_pairs.add_pairs)
    place_pairs = staticmethod(compiled_pairs.place_pairs)

    add_floats = staticmethod(compiled_rows.add_floats)
    add_integers = staticmethod(compiled_rows.add_integers)
    count_rows = staticmethod(compiled_rows.count_rows)
    extreme_floats = staticmethod(compiled_rows.extreme_floats)
    extreme_integers = staticmethod(compiled_rows.extreme_integers)
    mark_seen = staticmethod(compiled_rows.mark_seen)
    partition = staticmethod(compiled_rows.partition)
    put_words = staticmethod(compiled_rows.put_words)
    slice_starts = staticmethod(compiled_rows.slice_starts)
    value_bounds = staticmethod(compiled_rows.value_bounds)

    find_ranges = staticmethod(compiled_runs.find_ranges)
    merge_runs = staticmethod(compiled_runs.merge_runs)
    spread_ranges = staticmethod(compiled_runs.spread_ranges)

    join_sessions = staticmethod(compiled_sessions.join_sessions)

    find_bytes = staticmethod(compiled_table.find_bytes)
    find_fixed = staticmethod(compiled_table.find_fixed)
    rehash = staticmethod(compiled_table.rehash)
    remove_bytes = staticmethod(compiled_table.remove_bytes)
    remove_fixed = staticmethod(compiled_table.remove_fixed)
    upsert_bytes = staticmethod(compiled_table.upsert_bytes)
    upsert_fixed = staticmethod(compiled_table.upsert_fixed)

    copy_changed = staticmethod(compiled_versions.copy_changed)
    stamp_changed = staticmethod(compiled_versions.stamp_changed)
    touch = staticmethod(compiled_versions.touch)
    touch_displaced = staticmethod(compiled_versions.touch_displaced)

    copy_ranges = staticmethod(compiled_words.copy_ranges)
    distinct_bytes = staticmethod(compiled_words.distinct_bytes)
    distinct_fixed = staticmethod(compiled_words.distinct_fixed)
    hash_bytes = staticmethod(compiled_words.hash_bytes)
    hash_words = staticmethod(compiled_words.hash_words)
    write_strings = staticmethod(compiled_words.write_strings)
