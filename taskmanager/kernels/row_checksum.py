"""A checksum of the rows of a channel that does not depend on how they are cut into batches.

The checksum of rows ``a .. b - 1`` is the sum over them of ``weight(offset) * bits(row)`` modulo
2**64, where the offset counts from the start of the job. So checksums of neighbouring ranges add up;
what two senders of the same rows have summed agrees however they cut, and rows that were changed, left out,
doubled or exchanged are noticed.

``bits`` depends on the values alone: a dictionary-encoded, large or view layout gives those of a plain
one. Floats count by their bits: -0.0 is not 0.0, and NaNs of different payloads differ. What lies under a
null does not count.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.storage.hashing import NULL_HASH
from penstock.storage.key_loops import GOLDEN, LOOPS, mix
from penstock.storage.key_types import ByteArray, Int64Array, variable_values
from taskmanager.kernels.backend import kernels as process_kernels

CHECKSUM_MODULUS: Final = 2**64

_NULL_WORD: Final = np.int64(NULL_HASH)
_WORD_TYPES: Final = frozenset(
    {pa.int64().id, pa.uint64().id, pa.float64().id, pa.timestamp("ms").id, pa.date64().id}
)
"""Types whose values are words as they are; most columns have one of them."""
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def rows_checksum(batch: pa.RecordBatch, first_row: int) -> int:
    """The checksum of a batch's rows, 0 to 2**64 - 1.

    Args:
        batch: n rows of any types.
        first_row: offset of the first of them.
    """
    kernels = process_kernels()
    bits = np.zeros(batch.num_rows, dtype=np.uint64)
    for index, column in enumerate(batch.columns):
        kernels.add_word_bits(_words(column), _seed(index), bits)
    return kernels.weighted_sum(bits, first_row)


def _seed(index: int) -> int:
    return (index + 1) * GOLDEN % CHECKSUM_MODULUS


def _words(array: pa.Array) -> Int64Array:
    """int64[n] that stand for the values of a column; nulls are one word of their own."""
    if array.type.id in _WORD_TYPES and len(array) and not array.null_count:
        plain = np.frombuffer(array.buffers()[1], np.int64, len(array), 8 * array.offset)
        return np.require(plain, requirements=["A"])
    if isinstance(array, pa.DictionaryArray):
        return _dictionary_words(array)
    if isinstance(array, pa.ExtensionArray):
        return _words(array.storage)
    if isinstance(array, pa.RunEndEncodedArray):
        return _words(pc.run_end_decode(array))
    words = _value_words(array)
    if array.null_count:
        words = np.where(_nulls(array), _NULL_WORD, words)
    return np.require(words, requirements=["C", "A"])


def _value_words(array: pa.Array) -> Int64Array:
    types, data_type = pa.types, array.type
    rows = len(array)
    if rows == 0 or types.is_null(data_type):
        return np.full(rows, _NULL_WORD)
    if types.is_boolean(data_type):
        flags = np.frombuffer(array.buffers()[1], dtype=np.uint8)
        whole = np.unpackbits(flags, count=array.offset + rows, bitorder="little")
        return whole[array.offset :].astype(np.int64)
    if types.is_struct(data_type):
        return _struct_words(array)
    if types.is_fixed_size_list(data_type):
        starts = np.arange(rows, dtype=np.int64) * data_type.list_size
        bounds = np.append(starts, rows * data_type.list_size) + array.offset * data_type.list_size
        return _list_words(array.values, bounds)
    if types.is_list(data_type) or types.is_large_list(data_type) or types.is_map(data_type):
        bounds = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        entries = _map_entries(array) if types.is_map(data_type) else array.values
        return _list_words(entries, bounds)
    if _is_variable(data_type):
        data, offsets = variable_values(array)
        return LOOPS.hash_bytes(data, np.ascontiguousarray(offsets, dtype=np.int64)).view(np.int64)
    width = _byte_width(data_type)
    if width < 0:
        return _printed_words(array)
    data = np.frombuffer(array.buffers()[1], dtype=np.uint8)
    data = data[array.offset * width : (array.offset + rows) * width]
    if width == 8:
        return data.view(np.int64)
    if width in _UNSIGNED:
        return data.view(_UNSIGNED[width]).astype(np.int64)
    bounds = np.arange(rows + 1, dtype=np.int64) * width
    return LOOPS.hash_bytes(data, bounds).view(np.int64)


def _dictionary_words(array: pa.DictionaryArray) -> Int64Array:
    values = array.dictionary
    if len(values) > len(array) or len(values) == 0:  # most values do not occur here
        return _words(array.dictionary_decode())
    of_value = _words(values)
    indices = pc.fill_null(array.indices, 0).to_numpy(zero_copy_only=False)
    words = of_value[indices]
    if array.indices.null_count:
        words[_nulls(array.indices)] = _NULL_WORD
    return words


def _struct_words(array: pa.Array) -> Int64Array:
    bits = np.zeros(len(array), dtype=np.uint64)
    for index in range(array.type.num_fields):
        child = array.field(index)  # sliced like the struct, without its validity
        process_kernels().add_word_bits(_words(child), _seed(index), bits)
    return mix(bits).view(np.int64)


def _map_entries(array: pa.MapArray) -> pa.Array:
    return pa.StructArray.from_arrays([array.keys, array.items], names=["key", "value"])


def _list_words(values: pa.Array, bounds: Int64Array) -> Int64Array:
    """Of each list: its length, and the sum over its elements weighted by their places."""
    first, last = int(bounds[0]), int(bounds[-1])
    elements = _words(values.slice(first, last - first)).view(np.uint64)
    bounds = bounds - first
    lengths = np.diff(bounds)
    places = np.arange(last - first, dtype=np.int64) - np.repeat(bounds[:-1], lengths)
    weights = mix((places.view(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)) | np.uint64(1)
    sums = np.zeros(last - first + 1, dtype=np.uint64)
    np.cumsum(weights * mix(elements), out=sums[1:])
    within = sums[bounds[1:]] - sums[bounds[:-1]]
    return mix(within + lengths.view(np.uint64) * np.uint64(GOLDEN)).view(np.int64)


def _printed_words(array: pa.Array) -> Int64Array:
    """Of types without a layout handled above (unions, list views): how Python prints the values."""
    texts = [repr(value).encode() for value in array.to_pylist()]
    data: ByteArray = np.frombuffer(b"".join(texts), dtype=np.uint8)
    bounds = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in texts], out=bounds[1:])
    return LOOPS.hash_bytes(data, bounds).view(np.int64)


def _nulls(array: pa.Array) -> Any:
    return array.is_null().to_numpy(zero_copy_only=False)


def _is_variable(data_type: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(data_type)
        or types.is_binary(data_type)
        or types.is_large_string(data_type)
        or types.is_large_binary(data_type)
        or types.is_string_view(data_type)
        or types.is_binary_view(data_type)
    )


def _byte_width(data_type: pa.DataType) -> int:
    """Bytes of a value, -1 where they are not one run of bytes."""
    if data_type.num_fields:
        return -1
    try:
        return int(data_type.bit_width) // 8
    except ValueError:
        return -1
