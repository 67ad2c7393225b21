"""Compiled loops of the row checksum; see ``row_checksum`` for what it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.storage.key_loops import GOLDEN, MIX_1
from penstock.storage.key_types import Int64Array, UInt64Array
from taskmanager.kernels.compiled_words import mix
from taskmanager.kernels.jit import INT64, INT64S_IN, UINT64, UINT64S, UINT64S_IN, VOID, kernel

_GOLDEN = np.uint64(GOLDEN)
_MULTIPLIER = np.uint64(MIX_1)
_ONE = np.uint64(1)


@kernel(VOID(INT64S_IN, UINT64, UINT64S))
def add_word_bits(words: Int64Array, seed: int, bits: UInt64Array) -> None:
    """Adds to ``bits`` (uint64[n]) what int64[n] words of a column contribute to their rows.

    Args:
        seed: of the column, below 2**64.
    """
    for row in range(len(words)):
        word = (np.uint64(words[row]) ^ seed) * _MULTIPLIER
        bits[row] += word ^ (word >> np.uint64(32))


@kernel(UINT64(UINT64S_IN, INT64))
def _weighted_sum(bits: UInt64Array, first_row: int) -> Any:
    total = np.uint64(0)
    for row in range(len(bits)):
        offset = np.uint64(first_row + row)
        total += (mix(offset * _GOLDEN + _GOLDEN) | _ONE) * mix(bits[row])
    return total


def weighted_sum(bits: UInt64Array, first_row: int) -> int:
    """The sum, modulo 2**64, of the mixed bits of n rows, each times the weight of its offset.

    Args:
        first_row: offset of the first row.
    """
    return int(_weighted_sum(bits, first_row))
