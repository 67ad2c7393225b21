"""Columns with more bytes than 32-bit offsets reach: put together with 64-bit ones, or kept in several pieces.

Text, bytes and lists of a batch have offsets of 32 bits; many batches together may have more than 2 GiB of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import Unrecoverable
from penstock.storage.key_types import Int64Array

OFFSET_BYTES_MAX = (1 << 31) - 1


def concatenated_array(pieces: Sequence[pa.Array], bytes_max: int = OFFSET_BYTES_MAX) -> pa.Array:
    """The pieces, at least one, as one array; of a type with 64-bit offsets where they, or one, are too large for theirs."""
    if len(pieces) == 1:
        return pieces[0]
    kind = pieces[0].type
    is_mixed = any(piece.type != kind for piece in pieces)
    if is_mixed or sum(piece.nbytes for piece in pieces) > bytes_max:
        wide = wide_type(kind)
        pieces = [piece if piece.type == wide else piece.cast(wide) for piece in pieces]
    return pa.concat_arrays(pieces)


def taken(
    pieces: Sequence[pa.Array],
    starts: Sequence[int] | Int64Array,
    places: Int64Array,
    bytes_max: int = OFFSET_BYTES_MAX,
    *,
    is_narrow: bool,
) -> pa.Array:
    """Some values of an array in pieces, at least one of each.

    Args:
        pieces: of one type, some of its wide form perhaps.
        starts: the place of the first value of each.
        places: int64[n].
        bytes_max: what offsets reach.
        is_narrow: what is taken has no more than that.
    """
    kind = pieces[0].type
    if len(pieces) == 1:
        return pieces[0].take(pa.array(places))
    if is_narrow and not pt.is_dictionary(kind) and all(piece.type == kind for piece in pieces):
        return pa.chunked_array(pieces).take(pa.array(places)).combine_chunks()
    piece_of = np.searchsorted(starts, places, side="right") - 1
    order = np.argsort(piece_of, kind="stable")
    present, firsts = np.unique(piece_of[order], return_index=True)
    parts = [
        pieces[piece].take(pa.array(places[rows] - starts[piece]))
        for piece, rows in zip(present.tolist(), np.split(order, firsts[1:]), strict=True)
    ]
    inverse = np.empty(len(order), np.int64)
    inverse[order] = np.arange(len(order))
    return concatenated_array(parts, bytes_max).take(pa.array(inverse))


def narrow_pieces(
    array: pa.Array, kind: pa.DataType, bytes_max: int = OFFSET_BYTES_MAX
) -> Iterator[pa.Array]:
    """The values as arrays of ``kind``, as many as its offsets ask for."""
    if array.nbytes <= bytes_max or len(array) == 1:
        yield array if array.type == kind else array.cast(kind)
        return
    half = len(array) // 2
    yield from narrow_pieces(array.slice(0, half), kind, bytes_max)
    yield from narrow_pieces(array.slice(half), kind, bytes_max)


def narrow_batches(arrays: Sequence[pa.Array], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of columns of which some may have wider types than the schema's, in as many batches as it takes.

    Raises:
        Unrecoverable: one value is larger than its type can say.
    """
    pairs = list(zip(arrays, schema, strict=True))
    wide = [(array, field) for array, field in pairs if array.type != field.type]
    if not wide:
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        return
    rows = len(arrays[0])
    if rows > 1 and any(array.nbytes > OFFSET_BYTES_MAX for array, _ in wide):
        for start, stop in ((0, rows // 2), (rows // 2, rows)):
            yield from narrow_batches([a.slice(start, stop - start) for a in arrays], schema)
        return
    narrow = []
    for array, field in pairs:
        try:
            narrow.append(array if array.type == field.type else array.cast(field.type))
        except pa.ArrowInvalid as error:
            raise Unrecoverable(
                f"column {field.name!r}: what one key has there takes {array.nbytes >> 20} MB, and a value of type "
                f"{field.type} may have {OFFSET_BYTES_MAX >> 20} MB: use smaller windows, or fewer rows per key"
            ) from error
    yield pa.RecordBatch.from_arrays(narrow, schema=schema)


def widest_row_bytes(batch: pa.RecordBatch) -> int:
    """The most bytes of text, bytes and lists that a row has."""
    columns = [column for column in batch.columns if not pt.is_primitive(column.type)]
    if not columns:
        return 0
    starts = np.arange(batch.num_rows, dtype=np.int64)
    total = np.zeros(batch.num_rows, np.int64)
    for column in columns:
        total += _bytes_between(column, starts, starts + 1)
    return int(total.max(initial=0))


def _bytes_between(array: pa.Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
    """What the values ``starts[i] .. stops[i] - 1`` have in buffers behind offsets; int64[n]."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _bytes_between(array.storage, starts, stops)
    if pt.is_struct(kind):
        found = np.zeros(len(starts), np.int64)
        for index in range(kind.num_fields):
            found += _bytes_between(array.field(index), starts, stops)
        return found
    if pt.is_string(kind) or pt.is_binary(kind):
        offsets = _offsets(array, np.int32)
        return offsets[stops] - offsets[starts]
    if pt.is_large_string(kind) or pt.is_large_binary(kind):
        offsets = _offsets(array, np.int64)
        return offsets[stops] - offsets[starts]
    if pt.is_list(kind) or pt.is_map(kind) or pt.is_large_list(kind):
        offsets = _offsets(array, np.int64 if pt.is_large_list(kind) else np.int32)
        first, last = offsets[starts], offsets[stops]
        found = last - first
        for items in [array.keys, array.items] if pt.is_map(kind) else [array.values]:
            found = found + _bytes_between(items, first, last)
        return found
    return np.zeros(len(starts), np.int64)


def _offsets(array: pa.Array, width: type[np.int32 | np.int64]) -> Int64Array:
    if not len(array):
        return np.zeros(1, np.int64)
    offsets = np.frombuffer(array.buffers()[1], width)
    return offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)


def wide_type(kind: pa.DataType) -> pa.DataType:
    """The type with 64-bit offsets throughout."""
    if pt.is_string(kind):
        return pa.large_string()
    if pt.is_binary(kind):
        return pa.large_binary()
    if pt.is_list(kind):
        return pa.large_list(_wide_field(kind.value_field))
    if pt.is_struct(kind):
        return pa.struct([_wide_field(kind.field(i)) for i in range(kind.num_fields)])
    if pt.is_map(kind):
        return pa.map_(_wide_field(kind.key_field), _wide_field(kind.item_field))
    return kind


def _wide_field(field: pa.Field) -> pa.Field:
    return field.with_type(wide_type(field.type))
