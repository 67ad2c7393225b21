"""Many byte strings in one buffer, and entries of a database made of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.storage.key_encoding import bounds_of
from penstock.storage.key_loops import LOOPS
from penstock.storage.key_types import BoolArray, ByteArray, Int64Array


@dataclass(frozen=True, slots=True)
class ByteStrings:
    """n byte strings in one buffer.

    Attributes:
        data: uint8[...].
        offsets: int64[n + 1] bounds of the strings in ``data``.
    """

    data: ByteArray
    offsets: Int64Array

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self) -> Int64Array:
        """int64[n]."""
        return np.diff(self.offsets)

    def at(self, row: int) -> bytes:
        """One string."""
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()

    def to_list(self) -> list[bytes]:
        """All strings."""
        lengths = self.lengths()
        if not len(lengths):
            return []
        start, stop = int(self.offsets[0]), int(self.offsets[-1])
        width = int(lengths[0])
        if width and (lengths == width).all():
            items: list[bytes] = self.data[start:stop].view(f"V{width}").tolist()
            return items
        data = self.data[start:stop].tobytes()
        bounds = (self.offsets - start).tolist()
        return [data[low:high] for low, high in pairwise(bounds)]

    def take(self, rows: Int64Array) -> ByteStrings:
        """The strings of the given rows."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        bounds = bounds_of(lengths)
        data = np.empty(int(bounds[-1]), np.uint8)
        LOOPS.copy_ranges(self.data, starts, data, bounds[:-1], lengths)
        return ByteStrings(data, bounds)

    def followed_by(self, others: ByteStrings) -> ByteStrings:
        """Each string with another one behind it."""
        lengths, added = self.lengths(), others.lengths()
        bounds = bounds_of(lengths + added)
        data = np.empty(int(bounds[-1]), np.uint8)
        LOOPS.copy_ranges(self.data, self.offsets[:-1], data, bounds[:-1], lengths)
        LOOPS.copy_ranges(others.data, others.offsets[:-1], data, bounds[:-1] + lengths, added)
        return ByteStrings(data, bounds)

    @classmethod
    def rows_of(cls, matrix: npt.NDArray[np.uint8]) -> ByteStrings:
        """The rows of a matrix."""
        count, width = matrix.shape
        data = np.ascontiguousarray(matrix).reshape(-1)
        return cls(data, np.arange(count + 1, dtype=np.int64) * width)

    @classmethod
    def of(cls, items: list[bytes]) -> ByteStrings:
        """The strings of a list."""
        lengths = np.fromiter(map(len, items), np.int64, len(items))
        data = np.frombuffer(b"".join(items), np.uint8)
        return cls(data, bounds_of(lengths))


@dataclass(frozen=True, slots=True)
class SstEntries:
    """n entries in the order of their keys.

    Attributes:
        keys: different, ascending by their bytes.
        values: of the same length; what stands where ``deleted`` is True is ignored.
        deleted: bool[n], True where the key is removed; None = nowhere.
    """

    keys: ByteStrings
    values: ByteStrings
    deleted: BoolArray | None


def varint(number: int) -> bytes:
    """A number in groups of seven bits, the lowest first."""
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
