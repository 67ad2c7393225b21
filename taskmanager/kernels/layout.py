"""What kernels and those who call them agree on: the layout of tables.

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

from typing import Final

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
