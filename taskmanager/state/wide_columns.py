"""Columns with more bytes than 32-bit offsets reach: put together with 64-bit ones, or kept in several pieces.

Text, bytes and lists of a batch have offsets of 32 bits; many batches together may have more than 2 GiB of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.types as pt

OFFSET_BYTES_MAX = (1 << 31) - 1


def concatenated_array(pieces: Sequence[pa.Array], bytes_max: int = OFFSET_BYTES_MAX) -> pa.Array:
    """The pieces, at least one, as one array; of a type with 64-bit offsets where they are too large for theirs."""
    if len(pieces) == 1:
        return pieces[0]
    if sum(piece.nbytes for piece in pieces) > bytes_max:
        wide = wide_type(pieces[0].type)
        pieces = [piece if piece.type == wide else piece.cast(wide) for piece in pieces]
    return pa.concat_arrays(pieces)


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
