"""The columns of the rows of one time bucket of an interval join (pure).

Values of fixed width lie in one array that grows, as long as none is null: rows are taken from it without looking for
the batch that they came in. Everything else stays in the batches it came in; only small ones are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from penstock.storage.key_encoding import bounds_of
from penstock.storage.key_types import Int64Array
from taskmanager.state.wide_columns import OFFSET_BYTES_MAX, concatenated_array, taken

_PIECE_ROWS_MAX: Final = 1 << 15
_ROWS_MIN: Final = 64
_WORDS: Final = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
"""Bits of a value -> what is copied for it."""

Words = npt.NDArray[Any]


class BucketColumn:
    """One column of the rows of a bucket, in the order in which they were added."""

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._words: Words | None = None
        if is_of_words(kind):
            self._words = np.empty(_ROWS_MIN, _WORDS[kind.bit_width])
        self._pieces: list[pa.Array] = []
        self._length = 0

    def add(self, array: pa.Array) -> None:
        """Adds n values."""
        if self._words is not None and array.null_count:
            self._pieces, self._words = self.pieces, None
        if self._words is None:
            self._pieces.append(array)
            self._merge_pieces()
        else:
            self._words = grown(self._words, self._length + len(array))
            self._words[self._length : self._length + len(array)] = _words_of(array)
        self._length += len(array)

    def memory_bytes(self) -> int:
        """What they take; batches that they came in may be shared with who keeps these."""
        if self._words is not None:
            return self._words.nbytes
        return sum(piece.nbytes for piece in self._pieces)

    @property
    def words(self) -> Words | None:
        """All values as words; None = they are not kept as such."""
        return None if self._words is None else self._words[: self._length]

    @property
    def pieces(self) -> list[pa.Array]:
        """All values, in order."""
        words = self.words
        if words is None:
            return self._pieces
        return [array_of(self._kind, words)] if len(words) else []

    def _merge_pieces(self) -> None:
        pieces = self._pieces
        while len(pieces) > 1:
            before, last = len(pieces[-2]), len(pieces[-1])
            if before > 2 * last or before + last > _PIECE_ROWS_MAX:
                return
            if pieces[-2].nbytes + pieces[-1].nbytes > OFFSET_BYTES_MAX:
                return
            pieces[-2:] = [concatenated_array(pieces[-2:])]


class Places:
    """Where rows are that are taken from several buckets; what columns ask of that is found once.

    Args:
        lengths: rows of each bucket, at least one bucket.
        bucket_of: int64[n] in which of them each row is.
        positions: int64[n] where it is in there.
    """

    def __init__(
        self, lengths: Sequence[int], bucket_of: Int64Array, positions: Int64Array
    ) -> None:
        self._lengths = lengths
        self._bucket_of = bucket_of
        self._positions = positions
        self._by_bucket: list[tuple[Int64Array, Int64Array]] | None = None
        self._in_all: Int64Array | None = None

    def taken(self, columns: Sequence[BucketColumn]) -> pa.Array:
        """The rows' values of one column, which together are not more than 32-bit offsets reach."""
        found = [words for column in columns if (words := column.words) is not None]
        if len(found) < len(columns):
            pieces = [piece for column in columns for piece in column.pieces]
            starts = bounds_of(np.array([len(piece) for piece in pieces]))[:-1]
            return taken(pieces, starts, self._places(), is_narrow=True)
        if len(found) == 1:
            return array_of(columns[0]._kind, found[0].take(self._positions))
        values = np.empty(len(self._positions), found[0].dtype)
        for words, (rows, positions) in zip(found, self._of_buckets(), strict=True):
            values[rows] = words.take(positions)
        return array_of(columns[0]._kind, values)

    def _of_buckets(self) -> list[tuple[Int64Array, Int64Array]]:
        """Per bucket which rows are in it, and where."""
        if self._by_bucket is None:
            here = [np.flatnonzero(self._bucket_of == i) for i in range(len(self._lengths))]
            self._by_bucket = [(rows, self._positions[rows]) for rows in here]
        return self._by_bucket

    def _places(self) -> Int64Array:
        """The rows' places among those of all buckets."""
        if self._in_all is None:
            self._in_all = bounds_of(np.array(self._lengths))[self._bucket_of] + self._positions
        return self._in_all


def is_of_words(kind: pa.DataType) -> bool:
    """Whether values of a type are words of one width, each in bytes of its own."""
    return pt.is_primitive(kind) and not pt.is_boolean(kind) and kind.bit_width in _WORDS


def grown(values: Words, count: int) -> Words:
    """The array with room for so many values, those that it has included."""
    if count <= len(values):
        return values
    larger = np.empty(max(count, 2 * len(values)), values.dtype)
    larger[: len(values)] = values
    return larger


def array_of(kind: pa.DataType, words: Words) -> pa.Array:
    """Words, which must not change any more, as values.

    >>> array_of(pa.date32(), np.array([1], np.uint32))[0].as_py()
    datetime.date(1970, 1, 2)
    """
    return pa.Array.from_buffers(kind, len(words), [None, pa.py_buffer(words)])


def _words_of(array: pa.Array) -> Words:
    if not len(array):
        return np.empty(0, _WORDS[array.type.bit_width])
    words = np.frombuffer(array.buffers()[1], _WORDS[array.type.bit_width])
    return words[array.offset : array.offset + len(array)]
