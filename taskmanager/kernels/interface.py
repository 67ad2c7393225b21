"""What the kernels provide: compiled ones (numba), and in tests their numpy twins.

Both give identical results. The functions take and fill plain numpy arrays and
know nothing of Arrow. An empty ``nulls`` or ``valid`` array means that every row is there.

Layout of a table's ``records`` (int64[capacity + 2, width], capacity below 2**32): column 0 is
the key word (fixed keys) or the key's hash (byte keys, which have the arena position of the key in
column 1). An empty record is the table's ``template``: ``EMPTY_WORD`` in column 0 (fixed) or -1 in
column 1 (bytes), and what a new key starts from in the others. Probing is linear from ``home``: the key's product
with the table's multiplier, as a part of 2**64, gives the same part of the slots. Two records behind the last slot are for keys that cannot be hashed into
place: row ``capacity`` for the key ``EMPTY_WORD`` itself, row ``capacity + 1`` for null.

``state`` (int64[STATE_WORDS]) carries the counters of a table, see the ``STATE_`` constants.
In the arena a key is 8 bytes of length, then its bytes.
"""

from __future__ import annotations

from typing import Final, Protocol

from penstock.storage.key_encoding import KeyLoops
from penstock.storage.key_groups import UInt16Array
from penstock.storage.key_types import BoolArray, ByteArray, Int64Array, UInt64Array
from taskmanager.kernels.accumulators import Values

EMPTY_WORD: Final = -0x5BD1E99512345679
"""Marks an empty record of fixed keys."""

HOME_MULTIPLIER: Final = 0x9E3779B97F4A7C15
"""Spreads key words before the table's own multiplier orders them; hashes need no such step."""

STATE_COUNT: Final = 0
"""Keys in the table."""
STATE_NEXT_INDEX: Final = 1
"""The next dense index that was never given out."""
STATE_FREE_COUNT: Final = 2
"""Entries on the stack of dense indices to give out again."""
STATE_SENTINEL_USED: Final = 3
"""1 when the key ``EMPTY_WORD`` is in the table."""
STATE_NULL_USED: Final = 4
"""1 when the null key is in the table."""
STATE_ARENA_USED: Final = 5
"""Bytes of the arena in use."""
STATE_ARENA_DEAD: Final = 6
"""Bytes of those that belong to removed keys."""
STATE_MULTIPLIER: Final = 7
"""What keys are multiplied with to find their home: odd, and another one in each table (``KeyRecords``)."""
STATE_WORDS: Final = 8

ARENA_HEADER_BYTES: Final = 8

PAIRS_MAX: Final = 1 << 40
"""So many pairs a set of them can hold (``add_pairs``)."""


class Kernels(KeyLoops, Protocol):
    """The loops that are worth compiling."""

    def upsert_fixed(
        self,
        keys: Int64Array,
        nulls: BoolArray,
        records: Int64Array,
        state: Int64Array,
        free: Int64Array,
        index_column: int,
        limit: int,
        version_column: int,
        version: int,
        slots: Int64Array,
    ) -> int:
        """Finds or inserts keys, fills ``slots``; the rows done: fewer than n when full.

        Args:
            keys: int64[n] key words.
            nulls: bool[n] or empty.
            records: the table.
            state: counters.
            free: stack of dense indices.
            index_column: column of the dense index, -1 for none.
            limit: keys the table may hold before it must grow.
            version_column: column that is set to ``version`` in all records; -1 for none.
            version: what it is set to.
            slots: int64[n], filled with each key's record.
        """

    def find_fixed(
        self,
        keys: Int64Array,
        nulls: BoolArray,
        records: Int64Array,
        state: Int64Array,
        slots: Int64Array,
    ) -> None:
        """Fills ``slots`` with each key's record, -1 where it is not in the table."""

    def remove_fixed(
        self,
        keys: Int64Array,
        nulls: BoolArray,
        records: Int64Array,
        template: Int64Array,
        state: Int64Array,
        free: Int64Array,
        index_column: int,
    ) -> None:
        """Removes keys; those that are not there are ignored. ``free`` has room for all of them."""

    def upsert_bytes(
        self,
        data: ByteArray,
        offsets: Int64Array,
        hashes: UInt64Array,
        records: Int64Array,
        state: Int64Array,
        free: Int64Array,
        arena: ByteArray,
        index_column: int,
        limit: int,
        version_column: int,
        version: int,
        slots: Int64Array,
    ) -> int:
        """Like ``upsert_fixed`` for byte keys; the arena has room for all keys of the batch."""

    def find_bytes(
        self,
        data: ByteArray,
        offsets: Int64Array,
        hashes: UInt64Array,
        records: Int64Array,
        state: Int64Array,
        arena: ByteArray,
        slots: Int64Array,
    ) -> None:
        """Like ``find_fixed`` for byte keys."""

    def remove_bytes(
        self,
        data: ByteArray,
        offsets: Int64Array,
        hashes: UInt64Array,
        records: Int64Array,
        template: Int64Array,
        state: Int64Array,
        free: Int64Array,
        arena: ByteArray,
        index_column: int,
    ) -> None:
        """Like ``remove_fixed`` for byte keys; their bytes in the arena become dead."""

    def rehash(
        self, source: Int64Array, target: Int64Array, state: Int64Array, byte_keys: bool
    ) -> None:
        """Moves all records of one table into an empty, larger one of the same width."""

    def distinct_fixed(
        self,
        keys: Int64Array,
        nulls: BoolArray,
        scratch: Int64Array,
        first: Int64Array,
        inverse: Int64Array,
    ) -> int:
        """Group ordinals of keys in order of first appearance; the number of groups.

        Args:
            keys: int64[n] key words.
            nulls: bool[n] or empty.
            scratch: int64[power of two >= 2n], filled with -1.
            first: int64[n], filled with the first row of each group.
            inverse: int64[n], filled with the group of each row.
        """

    def distinct_bytes(
        self,
        data: ByteArray,
        offsets: Int64Array,
        hashes: UInt64Array,
        scratch: Int64Array,
        first: Int64Array,
        inverse: Int64Array,
    ) -> int:
        """Like ``distinct_fixed`` for byte keys."""

    def put_words(
        self, slots: Int64Array, words: Int64Array, records: Int64Array, column: int
    ) -> None:
        """Sets columns from ``column`` on of the records of n rows to ``words``: int64[columns, n]."""

    def count_rows(
        self, slots: Int64Array, valid: BoolArray, records: Int64Array, column: int
    ) -> None:
        """Adds 1 to the column of the record of each valid row."""

    def add_integers(
        self, slots: Int64Array, values: Values, valid: BoolArray, records: Int64Array, column: int
    ) -> int:
        """Adds int64 values; the row at which a sum overflowed (nothing added there), or -1."""

    def add_floats(
        self, slots: Int64Array, values: Values, valid: BoolArray, records: Values, column: int
    ) -> None:
        """Adds float64 values; ``records`` is the table seen as float64."""

    def extreme_integers(
        self,
        slots: Int64Array,
        values: Values,
        valid: BoolArray,
        records: Int64Array,
        column: int,
        largest: bool,
    ) -> None:
        """Keeps the largest or smallest of int64 values."""

    def extreme_unsigned(
        self,
        slots: Int64Array,
        values: Values,
        valid: BoolArray,
        records: Values,
        column: int,
        largest: bool,
    ) -> None:
        """Keeps the largest or smallest of uint64 values; ``records`` is seen as uint64."""

    def extreme_floats(
        self,
        slots: Int64Array,
        values: Values,
        valid: BoolArray,
        records: Values,
        column: int,
        largest: bool,
    ) -> None:
        """Keeps the largest or smallest of float64 values, NaN only where there is nothing else."""

    def mark_seen(
        self, slots: Int64Array, valid: BoolArray, records: Int64Array, column: int, bit: int
    ) -> None:
        """Sets a bit in the column of the record of each valid row."""

    def touch(
        self,
        slots: Int64Array,
        records: Int64Array,
        column: int,
        version: int,
        touched: Int64Array,
        before: Int64Array,
    ) -> int:
        """Sets the column of all records at ``slots`` to the version, and tells what it has changed.

        Args:
            touched: int64[n], filled with the (different) slots that had another version.
            before: int64[n], filled with the versions they had.

        Returns:
            How many there are.
        """

    def touch_displaced(
        self,
        slots: Int64Array,
        records: Int64Array,
        column: int,
        byte_keys: bool,
        after: int,
        up_to: int,
        from_slot: int,
        version: int,
        touched: Int64Array,
        before: Int64Array,
    ) -> int:
        """Stamps what removing the records at ``slots`` will empty or move, as far as it matters.

        Args:
            slots: the records to be removed.
            after: only records with a version above it, ...
            up_to: ... and at most this, ...
            from_slot: ... and from this slot on are stamped.
            touched: int64[records], filled with the slots that were stamped.
            before: int64[records], filled with the versions they had.

        Returns:
            How many there are; a twin, which moves more, stamps more.
        """

    def copy_changed(
        self,
        records: Int64Array,
        column: int,
        after: int,
        up_to: int,
        start: int,
        stop: int,
        found: Int64Array,
        copies: Int64Array,
    ) -> int:
        """Fills ``found`` (int64[stop - start]) with the slots in ``start .. stop - 1``, ascending, whose
        version is above ``after`` and at most ``up_to``, and ``copies`` (int64[stop - start, width])
        with their records; returns how many."""

    def slice_starts(
        self, timestamps: Int64Array, size: int, offset: int, starts: Int64Array
    ) -> None:
        """Fills ``starts`` with the start of each timestamp's slice."""

    def value_bounds(self, values: Int64Array, bounds: Int64Array) -> None:
        """Fills ``bounds`` (int64[2]) with the minimum and maximum of at least one value."""

    def partition(self, channels: UInt16Array, order: Int64Array, bounds: Int64Array) -> int:
        """Stable order of rows by channel, and the channels' bounds; a bad row's index, or -1."""

    def find_ranges(
        self,
        hashes: UInt64Array,
        times: Int64Array,
        wanted: UInt64Array,
        first: Int64Array,
        last: Int64Array,
        starts: Int64Array,
        counts: Int64Array,
    ) -> None:
        """Where the rows of a run with one hash and a time from one to another are.

        Args:
            hashes: uint64[m] ascending.
            times: int64[m] ascending where hashes are equal.
            wanted: uint64[n] ascending.
            first: int64[n] earliest times.
            last: int64[n] latest times, below 2**63 - 1.
            starts: int64[n], filled with the first of these rows.
            counts: int64[n], filled with how many there are.
        """

    def spread_ranges(
        self,
        rows: Int64Array,
        starts: Int64Array,
        counts: Int64Array,
        first_row: int,
        places: Int64Array,
        run_times: Int64Array,
        run_positions: Int64Array,
        bucket: int,
        times: Int64Array,
        positions: Int64Array,
        buckets: Int64Array,
    ) -> None:
        """Copies what ranges of a run (``starts``, ``counts``: int64[k]) hold to where the rows have theirs that they were found for.

        Args:
            rows: int64[k] these rows; ``first_row`` is the first and ``first_row + n - 1`` the last of which anything is copied.
            places: int64[n] where each of them has what comes next in the last three; moved on.
        """

    def merge_runs(
        self,
        hashes: UInt64Array,
        times: Int64Array,
        positions: Int64Array,
        later_hashes: UInt64Array,
        later_times: Int64Array,
        later_positions: Int64Array,
        all_hashes: UInt64Array,
        all_times: Int64Array,
        all_positions: Int64Array,
    ) -> None:
        """Fills the last three with two runs in their order; of equal rows those of the first come first."""

    def join_sessions(
        self,
        order: Int64Array,
        keys: Int64Array,
        times: Int64Array,
        first_row: int,
        gap: int,
        version: int,
        steps_max: int,
        table: tuple[Int64Array, ...],
        fired: BoolArray,
        fresh: Int64Array,
        found: tuple[Int64Array, ...],
    ) -> int:
        """Puts rows into the sessions of their keys (``SessionTable``), one after the other.

        A row touches one session or two, or opens one. Of two the earlier one stays. An absorbed session is
        no longer in the chain, and is what rows before may have in ``of_row``.

        Args:
            order: int64[n] the rows in which order; those from ``first_row`` on.
            keys: int64[n], indices into ``head``.
            times: int64[n].
            steps_max: gives up when so many sessions were passed on the way to others.
            table: head (by key its latest session, -1 = none); by session start, end, key, earlier, later,
                the versions in which it changed and has got its start.
            fired: bool by session.
            fresh: int64[n] numbers for new sessions.
            found: filled: of_row (int64[n], the session of each row); absorbed (int64[n]) sessions that
                became part of others, and absorbing, these, which may be absorbed later; dead_keys and
                dead_starts (int64[2 n]) that sessions had before this version, and have no longer; and
                counts (int64[4]), moved on: used numbers of ``fresh``, absorbed sessions, the dead; the
                smallest end of sessions that have got rows.

        Returns:
            How many rows of ``order`` are done.
        """

    def extend_chains(
        self,
        groups: Int64Array,
        sequence: Int64Array,
        row: int,
        first: int,
        end: Int64Array,
        count: Int64Array,
        entries: Int64Array,
        used: Int64Array,
    ) -> int:
        """Adds n values to the chains of their groups, from ``row`` on.

        A chain is made of blocks with room for 1, 2, 4, ... values; in front of each block is where the one before
        it ends.

        Args:
            groups: int64[n].
            sequence: int64[n], kept beside each value.
            first: the position of the first of the n values.
            end: by group the entry behind its newest value; changed.
            count: by group how many it has; changed.
            entries: int64[m, 2], position and sequence of values; changed.
            used: int64[1], how many of the entries are taken; changed.

        Returns:
            How many of the n are done: not all where there was no entry left.
        """

    def read_chains(
        self,
        end: Int64Array,
        bounds: Int64Array,
        entries: Int64Array,
        positions: Int64Array,
        sequence: Int64Array,
    ) -> None:
        """What lies in the chains of n groups, one group after the other, oldest first.

        Args:
            end: int64[n], see ``extend_chains``.
            bounds: int64[n + 1], 0 and the running sums of how many values they have.
            entries: see ``extend_chains``.
            positions: int64[bounds[n]], filled.
            sequence: int64[bounds[n]], filled.
        """

    def add_pairs(
        self,
        ones: Int64Array,
        others: Int64Array,
        slots: Int64Array,
        held_ones: Int64Array,
        held_others: Int64Array,
        count: int,
        is_new: BoolArray,
    ) -> int:
        """Adds n pairs of words to a set; those that it has already stay where they are.

        Args:
            slots: a power of two of them, more than pairs; -1 = empty, else the position of a pair, and above it
                bits of its hash; changed.
            held_ones: the pairs by position, as ``held_others``, with room for n more; changed.
            count: pairs that are held; returned as it is now.
            is_new: bool[n], filled: which were not there.
        """

    def place_pairs(
        self, held_ones: Int64Array, held_others: Int64Array, count: int, slots: Int64Array
    ) -> None:
        """Fills the empty ``slots`` for pairs that are held, see ``add_pairs``."""

    def add_word_bits(self, words: Int64Array, seed: int, bits: UInt64Array) -> None:
        """Adds to ``bits`` (uint64[n]) what int64[n] words of a column contribute to their rows.

        Args:
            seed: of the column, below 2**64.
        """

    def weighted_sum(self, bits: UInt64Array, first_row: int) -> int:
        """The sum, modulo 2**64, of the mixed bits of n rows, each times the weight of its offset.

        Args:
            first_row: offset of the first row.
        """
