"""Compiled loops over key words and key bytes: hashing, copying, grouping within one batch.

The values are those of ``penstock.storage.hashing``; a little-endian machine is required.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from penstock.storage.key_loops import (
    BYTES_MULTIPLIER,
    BYTES_SEED,
    GOLDEN,
    LENGTH_BYTES,
    MIX_1,
    MIX_2,
)
from penstock.storage.key_types import BoolArray, ByteArray, Int64Array, UInt64Array
from taskmanager.kernels.jit import (
    BOOLS_IN,
    BYTES,
    BYTES_IN,
    INT64,
    INT64S,
    INT64S_IN,
    UINT32,
    UINT64,
    UINT64S,
    UINT64S_IN,
    VOID,
    inlined,
    kernel,
)

_GOLDEN = np.uint64(GOLDEN)
_MIX_1 = np.uint64(MIX_1)
_MIX_2 = np.uint64(MIX_2)
_BYTES_SEED = np.uint64(BYTES_SEED)
_BYTES_MULTIPLIER = np.uint64(BYTES_MULTIPLIER)
_ALL_BITS = np.uint64(2**64 - 1)


def _loader(bits: int, number: Any) -> Any:
    """A function of a uint8 array and any byte position in it: the number of so many bits there."""

    def load(typing_context: Any, data: Any, position: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, arguments[0])
            address = builder.gep(array.data, [arguments[1]])
            return builder.load(builder.bitcast(address, ir.IntType(bits).as_pointer()), align=1)

        return number(data, INT64), generate

    return intrinsic(load)


def _storer(bits: int, number: Any) -> Any:
    """A function that stores a number of so many bits at any byte position of a uint8 array."""

    def store(typing_context: Any, data: Any, position: Any, value: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, arguments[0])
            address = builder.gep(array.data, [arguments[1]])
            target = builder.bitcast(address, ir.IntType(bits).as_pointer())
            builder.store(arguments[2], target, align=1)
            return context.get_dummy_value()

        return VOID(data, INT64, number), generate

    return intrinsic(store)


load_word, store_word = _loader(64, UINT64), _storer(64, UINT64)
_load_half, _store_half = _loader(32, UINT32), _storer(32, UINT32)


@inlined
def mix(word: Any) -> Any:
    """The finaliser of splitmix64."""
    word = (word ^ (word >> np.uint64(30))) * _MIX_1
    word = (word ^ (word >> np.uint64(27))) * _MIX_2
    return word ^ (word >> np.uint64(31))


@inlined
def equal_bytes(left: Any, left_start: Any, right: Any, right_start: Any, length: Any) -> Any:
    """Whether two byte strings of one length are equal.

    The last word or half of a word overlaps the one before, so that no length takes a loop of bytes.
    """
    if length >= 8:
        position = length - 8
        equal = load_word(left, left_start + position) == load_word(right, right_start + position)
        position = 0
        while equal and position + 8 < length:
            word = load_word(left, left_start + position)
            equal = word == load_word(right, right_start + position)
            position += 8
    elif length >= 4:
        end = length - 4
        first = _load_half(left, left_start) ^ _load_half(right, right_start)
        last = _load_half(left, left_start + end) ^ _load_half(right, right_start + end)
        equal = (first | last) == 0
    elif length > 0:
        middle, end = length >> 1, length - 1
        equal = (
            left[np.uint64(left_start)] == right[np.uint64(right_start)]
            and left[np.uint64(left_start + middle)] == right[np.uint64(right_start + middle)]
            and left[np.uint64(left_start + end)] == right[np.uint64(right_start + end)]
        )
    else:
        equal = True
    return equal


@inlined
def copy_bytes(source: Any, source_start: Any, target: Any, target_start: Any, length: Any) -> Any:
    """Copies a byte string, as ``equal_bytes`` compares; to where it does not overlap."""
    if length >= 8:
        position = 0
        while position + 8 < length:
            store_word(target, target_start + position, load_word(source, source_start + position))
            position += 8
        position = length - 8
        store_word(target, target_start + position, load_word(source, source_start + position))
    elif length >= 4:
        end = length - 4
        _store_half(target, target_start, _load_half(source, source_start))
        _store_half(target, target_start + end, _load_half(source, source_start + end))
    elif length > 0:
        middle, end = length >> 1, length - 1
        target[np.uint64(target_start)] = source[np.uint64(source_start)]
        target[np.uint64(target_start + middle)] = source[np.uint64(source_start + middle)]
        target[np.uint64(target_start + end)] = source[np.uint64(source_start + end)]


@kernel(VOID(BYTES_IN, INT64S_IN, BYTES, INT64S_IN, INT64S_IN), nogil=True)
def copy_ranges(
    source: ByteArray,
    source_starts: Int64Array,
    target: ByteArray,
    target_starts: Int64Array,
    lengths: Int64Array,
) -> None:
    """Copies ``lengths[i]`` bytes from each source start to the target start, for all i."""
    for row in range(len(lengths)):
        copy_bytes(source, source_starts[row], target, target_starts[row], lengths[row])


@kernel(VOID(BYTES_IN, INT64S_IN, INT64S_IN, BYTES, INT64S_IN), nogil=True)
def write_strings(
    source: ByteArray,
    starts: Int64Array,
    lengths: Int64Array,
    target: ByteArray,
    positions: Int64Array,
) -> None:
    """Writes tag, length and bytes of the string at each start to the target's position."""
    for row in range(len(starts)):
        position = positions[row]
        length = lengths[row]
        target[np.uint64(position)] = 1
        for index in range(LENGTH_BYTES):
            byte = np.uint8((length >> (8 * index)) & 255)
            target[np.uint64(position + 1 + index)] = byte
        copy_bytes(source, starts[row], target, position + 1 + LENGTH_BYTES, length)


@kernel(VOID(INT64S_IN, UINT64, UINT64S))
def _hash_words(words: Int64Array, factor: int, hashes: UInt64Array) -> None:
    for row in range(len(words)):
        hashes[row] = mix(np.uint64(words[row]) * factor + _GOLDEN)


def hash_words(words: Int64Array, factor: int) -> UInt64Array:
    """Hashes of int64[n] words, each multiplied by ``factor`` first."""
    hashes = np.empty(len(words), dtype=np.uint64)
    _hash_words(words, factor, hashes)
    return hashes


@kernel(VOID(BYTES_IN, INT64S_IN, UINT64S), nogil=True)
def _hash_bytes(data: ByteArray, offsets: Int64Array, hashes: UInt64Array) -> None:
    total = len(data)
    for row in range(len(hashes)):
        position = offsets[row]
        stop = offsets[row + 1]
        state = _BYTES_SEED ^ (np.uint64(stop - position) * _BYTES_MULTIPLIER)
        while position + 8 <= stop:
            state = (state ^ load_word(data, position)) * _BYTES_MULTIPLIER
            state ^= state >> np.uint64(32)
            position += 8
        if position < stop:
            rest = stop - position
            if position + 8 <= total:
                word = load_word(data, position) & (_ALL_BITS >> np.uint64(64 - 8 * rest))
            else:
                word = np.uint64(0)
                for index in range(rest):
                    byte = np.uint64(data[np.uint64(position + index)])
                    word |= byte << np.uint64(8 * index)
            state = (state ^ word) * _BYTES_MULTIPLIER
            state ^= state >> np.uint64(32)
        hashes[row] = mix(state)


def hash_bytes(data: ByteArray, offsets: Int64Array) -> UInt64Array:
    """Hashes of the n byte strings ``data[offsets[i]:offsets[i + 1]]``."""
    hashes = np.empty(len(offsets) - 1, dtype=np.uint64)
    _hash_bytes(data, offsets, hashes)
    return hashes


@kernel(INT64(INT64S_IN, BOOLS_IN, INT64S, INT64S, INT64S), nogil=True)
def distinct_fixed(
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
    mask = np.uint64(len(scratch) - 1)
    groups = 0
    null_group = -1
    for row in range(len(keys)):
        if len(nulls) > 0 and nulls[row]:
            if null_group < 0:
                null_group = groups
                first[groups] = row
                groups += 1
            inverse[row] = null_group
            continue
        key = keys[row]
        slot = mix(np.uint64(key)) & mask
        while True:
            group = scratch[slot]
            if group < 0:
                scratch[slot] = groups
                first[groups] = row
                inverse[row] = groups
                groups += 1
                break
            if keys[np.uint64(first[np.uint64(group)])] == key:
                inverse[row] = group
                break
            slot = (slot + np.uint64(1)) & mask
    return groups


@kernel(INT64(BYTES_IN, INT64S_IN, UINT64S_IN, INT64S, INT64S, INT64S), nogil=True)
def distinct_bytes(
    data: ByteArray,
    offsets: Int64Array,
    hashes: UInt64Array,
    scratch: Int64Array,
    first: Int64Array,
    inverse: Int64Array,
) -> int:
    """Like ``distinct_fixed`` for byte keys."""
    mask = np.uint64(len(scratch) - 1)
    groups = 0
    for row in range(len(hashes)):
        key_hash = hashes[row]
        start = offsets[row]
        length = offsets[row + 1] - start
        slot = (key_hash >> np.uint64(32)) & mask
        while True:
            group = scratch[slot]
            if group < 0:
                scratch[slot] = groups
                first[groups] = row
                inverse[row] = groups
                groups += 1
                break
            other = np.uint64(first[np.uint64(group)])
            other_start = offsets[other]
            if (
                hashes[other] == key_hash
                and offsets[other + np.uint64(1)] - other_start == length
                and equal_bytes(data, start, data, other_start, length)
            ):
                inverse[row] = group
                break
            slot = (slot + np.uint64(1)) & mask
    return groups
