"""What a partial row stands for: a key and, where different values are counted, one of them each.

Keys and values get numbers as they come, and one word holds the numbers of a row: tables of words are several times as
fast as such of keys of several columns. The words are valid until ``clear``.

Example: rows of one key and one value have one word.
    >>> batch = pa.RecordBatch.from_pydict({"key": ["a", "b", "a"], "value": [7, 7, 7]})
    >>> parts = parts_of(["key"], ["value"], batch.schema)
    >>> keys = PartialKeys(parts)
    >>> words = keys.words([part.encode(batch) for part in parts])
    >>> (words.fixed == words.fixed[0]).tolist()
    [True, False, True]
    >>> [array.to_pylist() for array in keys.arrays(words.slice(1, 2))]
    [['b'], [7]]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array
from taskmanager.kernels import RecordTable, distinct, encode_keys
from taskmanager.operators.key_columns import KeyColumns

_BITS: Final = 32
_MASK: Final = (1 << _BITS) - 1


class PartialKeys:
    """See the module. Where no values are counted, words are the keys themselves, and nothing is kept.

    Args:
        parts: the keys, and per value that is counted its column.
    """

    def __init__(self, parts: Sequence[KeyColumns]) -> None:
        self._numbers: list[RecordTable] = []
        self._joined: list[RecordTable] = []
        self.types = parts[0].types
        """Of the words."""
        if len(parts) > 1:
            self._numbers = [_numbers(part.types) for part in parts]
            self._joined = [_numbers([pa.int64()]) for _ in parts[2:]]
            self.types = [pa.int64()]

    def words(self, parts: Sequence[KeyBatch]) -> KeyBatch:
        """The words of n rows.

        Args:
            parts: what ``encode`` of each part says of them.
        """
        if not self._numbers:
            return parts[0]
        first, *others = (
            table.lookup_or_insert(part) for table, part in zip(self._numbers, parts, strict=True)
        )
        words = first << _BITS | others[0]
        for table, other in zip(self._joined, others[1:], strict=True):
            words = table.lookup_or_insert(_keys_of(words)) << _BITS | other
        return _keys_of(words)

    def arrays(self, words: KeyBatch) -> list[pa.Array]:
        """The key columns and the values of words."""
        return [array for part in self.parts(words) for array in part.to_arrays()]

    def parts(self, words: KeyBatch) -> list[KeyBatch]:
        """What ``words`` has made of them: the keys, and per value that is counted the same of it."""
        if not self._numbers:
            return [words]
        left, others = _fixed(words), []
        for joined in [*reversed(self._joined), None]:
            others.append(left & _MASK)
            left = left >> _BITS
            if joined is not None:
                left = _fixed(joined.rows().keys)[left]
        numbers = [left, *reversed(others)]
        return [
            table.rows().keys.take(own) for table, own in zip(self._numbers, numbers, strict=True)
        ]

    def clear(self) -> None:
        """Forgets all words."""
        for table in (*self._numbers, *self._joined):
            table.clear()


def words_of_batch(parts: Sequence[KeyBatch]) -> KeyBatch:
    """Words of n rows that are compared with each other alone: nothing is kept.

    Args:
        parts: as of ``PartialKeys.words``.
    """
    words = parts[0]
    for part in parts[1:]:
        (_, ones), (first, others) = distinct(words), distinct(part)
        words = _keys_of(ones * len(first) + others)
    return words


def parts_of(keys: Sequence[str], values: Sequence[str], schema: pa.Schema) -> list[KeyColumns]:
    """The parts of partial rows.

    Args:
        keys: names of the key columns.
        values: names of the columns whose values are counted.
        schema: that has them.
    """
    return [KeyColumns(keys, schema), *(KeyColumns([name], schema) for name in values)]


def _numbers(types: Sequence[pa.DataType]) -> RecordTable:
    return RecordTable(types, [], with_index=True)


def _keys_of(words: Int64Array) -> KeyBatch:
    return encode_keys([pa.array(words)])


def _fixed(words: KeyBatch) -> Int64Array:
    assert words.fixed is not None
    return words.fixed
