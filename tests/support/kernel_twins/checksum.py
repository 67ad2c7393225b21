"""The numpy twins of ``compiled_checksum``: same results."""

from __future__ import annotations

import numpy as np

from penstock.storage.key_loops import GOLDEN, MIX_1, mix
from penstock.storage.key_types import Int64Array, UInt64Array


def add_word_bits(words: Int64Array, seed: int, bits: UInt64Array) -> None:
    """See ``compiled_checksum.add_word_bits``."""
    mixed = (words.view(np.uint64) ^ np.uint64(seed)) * np.uint64(MIX_1)
    bits += mixed ^ (mixed >> np.uint64(32))


def weighted_sum(bits: UInt64Array, first_row: int) -> int:
    """See ``compiled_checksum.weighted_sum``."""
    offsets = np.arange(first_row, first_row + len(bits), dtype=np.int64).view(np.uint64)
    weights = mix(offsets * np.uint64(GOLDEN) + np.uint64(GOLDEN)) | np.uint64(1)
    return int((weights * mix(bits)).sum(dtype=np.uint64))
