"""Casts of lists, structs and maps: what is in them is cast as a value of its own is.

Keys of maps are cast without any loss, so that no two of them become one. What lies under a null is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

Kernel = Callable[[Any], Any]


CastKernel = Callable[..., Kernel]
"""``cast_kernel``: source, target, safe= -> the cast of the one to the other."""


def nested_cast(
    source: pa.DataType, target: pa.DataType, cast_kernel: CastKernel, *, safe: bool
) -> Kernel | None:
    """The cast of one nested type to another, part by part; None = Arrow's own is meant.

    Args:
        cast_kernel: makes the casts of the parts.
    """
    cast = None
    if _is_list(source) and _is_list(target):
        cast = _list_to_list(source, target, cast_kernel, safe)
    elif pt.is_map(source) and pt.is_map(target):
        cast = _map_to_map(source, target, cast_kernel, safe)
    elif pt.is_map(source) and _is_list(target) and _is_pair(target.value_type):
        cast = _map_to_list(source, target, cast_kernel, safe)
    elif pt.is_struct(source) and pt.is_struct(target) and _has_distinct_names(source, target):
        cast = _struct_to_struct(source, target, cast_kernel, safe)
    return None if cast is None else also_of_scalars(cast)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def _has_distinct_names(source: pa.DataType, target: pa.DataType) -> bool:
    names = [[field.name for field in kind] for kind in (source, target)]
    return bool(target.num_fields) and all(len(some) == len(set(some)) for some in names)


def _is_pair(kind: pa.DataType) -> bool:
    return bool(pt.is_struct(kind)) and kind.num_fields == 2


def also_of_scalars(cast: Kernel) -> Kernel:
    """A cast of arrays as one of scalars too."""
    return lambda value: (
        cast(pa.repeat(value, 1))[0] if isinstance(value, pa.Scalar) else cast(value)
    )


def _list_to_list(
    source: pa.DataType, target: pa.DataType, cast_kernel: CastKernel, safe: bool
) -> Kernel:
    cast_items = cast_kernel(source.value_type, target.value_type, safe=safe)
    given = pa.large_list(target.value_field)

    def cast(value: pa.Array) -> pa.Array:
        items = cast_items(value.flatten())
        _refuse_nulls(items.null_count, target.value_field)
        if pt.is_fixed_size_list(target):
            return _of_one_size(value, items, target)
        lists = pa.LargeListArray.from_arrays(
            _offsets(value), items, type=given, mask=value.is_null()
        )
        return lists.cast(target)

    return cast


def _of_one_size(lists: pa.Array, items: pa.Array, kind: pa.FixedSizeListType) -> pa.Array:
    """Lists of one size of these items, which are those of the lists that are not null; also a null has its places.

    Arrow's cast reads beyond the items where a list is null.
    """
    size, is_there = kind.list_size, lists.is_valid()
    if pc.all(pc.equal(pc.list_value_length(lists), size), min_count=0).as_py() is False:
        raise pa.ArrowInvalid(f"a list has another size than {kind}")
    if lists.null_count:
        there = is_there.to_numpy(zero_copy_only=False)
        first = size * (np.cumsum(there) - 1)
        places = (first[:, None] + np.arange(size)).ravel()
        items = items.take(pa.array(places, mask=np.repeat(~there, size)))
    return pa.Array.from_buffers(kind, len(lists), [is_there.buffers()[1]], children=[items])


def _map_to_map(
    source: pa.DataType, target: pa.DataType, cast_kernel: CastKernel, safe: bool
) -> Kernel:
    cast_keys = cast_kernel(source.key_type, target.key_type, safe=True)
    cast_items = cast_kernel(source.item_type, target.item_type, safe=safe)
    pairs_type = pa.list_(pa.struct([source.key_field, source.item_field]))

    def cast(value: pa.Array) -> pa.Array:
        pairs = value.cast(pairs_type)
        keys, items = pairs.flatten().flatten()
        items = cast_items(items)
        _refuse_nulls(items.null_count, target.item_field)
        offsets = pa.array(_offsets(pairs), pa.int32())
        return pa.MapArray.from_arrays(
            offsets, cast_keys(keys), items, type=target, mask=value.is_null()
        )

    return cast


def _map_to_list(
    source: pa.MapType, target: pa.DataType, cast_kernel: CastKernel, safe: bool
) -> Kernel:
    fields = zip((source.key_field, source.item_field), target.value_type, strict=True)
    pairs = pa.list_(pa.struct([given.with_name(wanted.name) for given, wanted in fields]))
    cast_pairs = cast_kernel(pairs, target, safe=safe)
    return lambda value: cast_pairs(value.cast(pairs))


def _struct_to_struct(
    source: pa.DataType, target: pa.DataType, cast_kernel: CastKernel, safe: bool
) -> Kernel:
    given = {field.name: (index, field.type) for index, field in enumerate(source)}
    casts: list[tuple[int, Kernel] | None] = []
    for field in target:
        index, kind = given.get(field.name, (-1, None))
        casts.append(None if index < 0 else (index, cast_kernel(kind, field.type, safe=safe)))

    def cast(value: pa.Array) -> pa.Array:
        parts, columns = value.flatten(), []
        for field, found in zip(target, casts, strict=True):
            if found is None:
                columns.append(pa.nulls(len(value), field.type))
            else:
                index, cast_part = found
                columns.append(cast_part(parts[index]))
            _refuse_nulls(columns[-1].null_count - value.null_count, field)
        return pa.StructArray.from_arrays(columns, fields=list(target), mask=value.is_null())

    return cast


def _offsets(lists: pa.Array) -> Any:
    """Where each list begins among the items of all that are not null, and where the last one ends."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _refuse_nulls(nulls: int, field: pa.Field) -> None:
    if nulls > 0 and not field.nullable:
        raise pa.ArrowInvalid(f"{field.name!r} of type {field.type} may not be null")
