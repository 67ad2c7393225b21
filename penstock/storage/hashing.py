"""The 64-bit hash of keys: part of the file format, fixed by published test vectors.

A key's hash decides its key-group, and so which subtask owns it and where its state lies in every
checkpoint ever written. This module is the specification, with its inner loops (``key_loops``).
Changing any value here is a new file format.

All arithmetic is on unsigned 64-bit words, modulo 2**64.

``mix(x)``: the finaliser of splitmix64::

    x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27;  x *= 0x94D049BB133111EB
    x ^= x >> 31

One value:

- **null** of any type: ``NULL_HASH``.
- **A word** ``w`` (fixed-width types): ``mix(w + 0x9E3779B97F4A7C15)``. The word is
  - integers: the value; all widths and signs agree where the values are equal. A uint64 at or
    above 2**63 has the same word as the negative int64 of the same bits: they are not equal, but
    they never meet in one column, and a hash may collide.
  - bool: 0 or 1.
  - floats: the bits of the value as float64, ``-0.0`` as ``0.0``, every NaN as 0x7FF8000000000000;
    so float16, float32 and float64 agree. An integral float does not hash like the integer: the
    types differ, and keys of different types are never compared.
  - dates, timestamps, times, durations: nanoseconds modulo 2**64, so that one instant agrees in
    every unit. (Two instants that differ by a multiple of 2**64 ns, 584 years, share a word.)
  - decimals: ``unscaled * 10**-scale`` in the field of integers modulo ``P`` = 2**61 - 1, the
    negative ones ``P`` minus it: 1.0 and 1.00 agree, in every width.
- **Bytes** (strings, binary and fixed-size binary): with ``K`` = 0x9FB21C651E98DF25::

      h = 0x51ED270B9F8C5A37 ^ (length * K)
      for each 8 bytes, little-endian, the last padded with zero bytes:
          h = (h ^ word) * K;  h ^= h >> 32
      h = mix(h)

Several columns: ``h = hash(first)``; then for each further column
``h = mix(h * 0x9E3779B97F4A7C15 + hash(column))``, so the order matters.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (splitmix64).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.storage.key_loops import GOLDEN, LOOPS, mix
from penstock.storage.key_types import (
    Int64Array,
    KeyKind,
    UInt64Array,
    fixed_values,
    key_kind,
    null_rows,
    plain_array,
    value_type,
    variable_values,
    wide_values,
)

NULL_HASH: Final = 0x6E756C6C6B657921
DECIMAL_MODULUS: Final = 2**61 - 1

_NANOSECONDS: Final = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DAY_NANOSECONDS: Final = 86_400 * 10**9


def word_factor(type_: pa.DataType) -> int:
    """What the canonical word of a fixed-width type is multiplied by before it is hashed."""
    plain = value_type(type_)
    types = pa.types
    if types.is_date32(plain):
        return _DAY_NANOSECONDS
    if types.is_date64(plain):
        return _NANOSECONDS["ms"]
    if types.is_timestamp(plain) or types.is_time(plain) or types.is_duration(plain):
        return _NANOSECONDS[plain.unit]
    return 1


def hash_columns(columns: Sequence[pa.Array]) -> UInt64Array:
    """Hashes of the keys that the columns form, row by row.

    Args:
        columns: the key's columns in order, n rows each, at least one.

    Returns:
        uint64[n].

    Raises:
        JobRejected: a column's type cannot be a key.
    """
    if not columns:
        raise ValueError("a key has at least one column")
    hashes = hash_column(columns[0])
    for column in columns[1:]:
        hashes = mix(hashes * np.uint64(GOLDEN) + hash_column(column))
    return hashes


def hash_column(column: pa.Array) -> UInt64Array:
    """Hashes of the values of one key column, uint64[n]; see ``hash_columns``."""
    array = plain_array(column)
    kind = key_kind(array.type)
    if kind is KeyKind.NULL:
        return np.full(len(array), NULL_HASH, dtype=np.uint64)
    if kind is KeyKind.FIXED:
        hashes = LOOPS.hash_words(fixed_values(array), word_factor(array.type))
    elif kind is KeyKind.VARIABLE:
        hashes = LOOPS.hash_bytes(*variable_values(array))
    elif pa.types.is_decimal(array.type):
        hashes = LOOPS.hash_words(_decimal_residues(array), 1)
    else:
        wide = wide_values(array)
        offsets = np.arange(len(wide) + 1, dtype=np.int64) * wide.shape[1]
        hashes = LOOPS.hash_bytes(wide.reshape(-1), offsets)
    nulls = null_rows(array)
    if nulls is not None:
        hashes[nulls] = np.uint64(NULL_HASH)
    return hashes


def _decimal_residues(array: pa.DecimalArray) -> Int64Array:
    """The values of decimals modulo ``DECIMAL_MODULUS``, int64[n]."""
    width = array.type.byte_width
    raw = np.ascontiguousarray(wide_values(array))
    if width < 8:
        limbs = raw.view(np.int32).astype(np.int64).view(np.uint64)
    else:
        limbs = raw.view("<u8")
    modulus = np.uint64(DECIMAL_MODULUS)
    residues: UInt64Array = np.zeros(len(array), dtype=np.uint64)
    for limb in range(limbs.shape[1] - 1, -1, -1):  # 2**64 is 8 in the field
        residues = (residues * np.uint64(8) % modulus + limbs[:, limb] % modulus) % modulus
    negative = limbs[:, -1] >> np.uint64(63) == 1
    bias = np.uint64(pow(2, 64 * limbs.shape[1], DECIMAL_MODULUS))
    residues = np.where(negative, (residues + (modulus - bias)) % modulus, residues)
    scaled = _multiply_residues(residues, pow(10, -array.type.scale, DECIMAL_MODULUS))
    return scaled.view(np.int64)


def _multiply_residues(residues: UInt64Array, constant: int) -> UInt64Array:
    """Products modulo 2**61 - 1, in halves of 31 bits so that nothing passes 64 bits."""
    half = np.uint64(31)
    low_mask = np.uint64(2**31 - 1)
    high, low = residues >> half, residues & low_mask
    constant_high, constant_low = np.uint64(constant >> 31), np.uint64(constant & (2**31 - 1))
    middle = high * constant_low + low * constant_high
    total = high * constant_high * np.uint64(2)  # 2**62 is 2 in the field
    total = total + (middle >> np.uint64(30)) + ((middle & np.uint64(2**30 - 1)) << half)
    total = total + low * constant_low
    products: UInt64Array = total % np.uint64(DECIMAL_MODULUS)
    return products
