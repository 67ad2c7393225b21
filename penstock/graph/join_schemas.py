"""What a join gives out: its columns, their names and types.

Output: the key columns, ``window_start`` and ``window_end`` of a window join, the left columns, the right
columns. A right column whose name is taken gets the suffix ``_right``. Key columns of the sides have the
same names and types. In outer joins the columns of the side that may be missing are nullable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.graph.column_checks import require_columns
from penstock.graph.window_schemas import window_fields
from penstock.pb import graph_pb2
from penstock.storage.key_types import check_key_types, value_type

RIGHT_SUFFIX = "_right"

_KEEPS_LEFT = (graph_pb2.JOIN_KIND_LEFT, graph_pb2.JOIN_KIND_FULL)
_KEEPS_RIGHT = (graph_pb2.JOIN_KIND_RIGHT, graph_pb2.JOIN_KIND_FULL)


@dataclass(frozen=True, slots=True)
class JoinedColumns:
    """The output of a join.

    Attributes:
        schema: without the event time.
        left: columns of the left side that are no keys, with their names in the output.
        right: the same of the right side.
    """

    schema: pa.Schema
    left: tuple[tuple[str, str], ...]
    right: tuple[tuple[str, str], ...]


def keeps_left(how: graph_pb2.JoinKind.ValueType) -> bool:
    """Whether left rows without a partner come out too."""
    return how in _KEEPS_LEFT


def keeps_right(how: graph_pb2.JoinKind.ValueType) -> bool:
    """Whether right rows without a partner come out too."""
    return how in _KEEPS_RIGHT


def check_same_keys(
    where: str,
    left: pa.Schema,
    left_keys: Sequence[str],
    right: pa.Schema,
    right_keys: Sequence[str],
) -> None:
    """Checks that equal keys of two inputs are equal values of one type, so that they meet.

    Raises:
        JobRejected: there are not as many on both sides, or two differ in type.
    """
    if len(left_keys) != len(right_keys):
        raise JobRejected(
            f"{where}: the first stream has the keys ({', '.join(left_keys)}) and the second "
            f"({', '.join(right_keys)}); both need as many, in the same order"
        )
    for first, second in zip(left_keys, right_keys, strict=True):
        given, other = value_type(left.field(first).type), value_type(right.field(second).type)
        if given != other:
            raise JobRejected(
                f"{where}: key {first!r} is {given} in the first stream and "
                f"{'' if first == second else f'{second!r} '}{other} in the second, so equal keys would "
                f"not meet; convert one of them: .with_columns({second}=col({second!r})"
                f".cast('{given}', safe=True)) on the second stream"
            )


def joined_columns(
    left: pa.Schema,
    right: pa.Schema,
    keys: Sequence[str],
    how: graph_pb2.JoinKind.ValueType,
    window: graph_pb2.WindowSpec | None,
) -> JoinedColumns:
    """The output of a join of two streams.

    Args:
        left: the user's columns of the left side.
        right: the same of the right side.
        keys: columns of both sides.
        window: None for an interval join.

    Raises:
        JobRejected: a key does not exist or differs in type, or two columns would have one name.
    """
    require_columns("join: the left stream", keys, left)
    require_columns("join: the right stream", keys, right)
    check_key_types(left, keys)
    check_key_types(right, keys)
    check_same_keys("join", left, keys, right, keys)
    fields = [_nullable(left.field(key), key, right.field(key).nullable) for key in keys]
    if window is not None:
        fields += window_fields(window)
    of_left = [field for field in left if field.name not in keys]
    taken = {field.name for field in fields}
    for field in of_left:
        if field.name in taken:
            raise JobRejected(
                f"join: the left column {field.name!r} would be there twice, since the join adds a "
                f"column of that name; call .rename({field.name}='...') on the left stream before it"
            )
    taken |= {field.name for field in of_left}
    of_right = [field for field in right if field.name not in keys]
    names = _right_names([field.name for field in of_right], taken)
    fields += [_nullable(field, field.name, keeps_right(how)) for field in of_left]
    fields += [
        _nullable(field, name, keeps_left(how)) for field, name in zip(of_right, names, strict=True)
    ]
    return JoinedColumns(
        pa.schema(fields),
        tuple((field.name, field.name) for field in of_left),
        tuple((field.name, name) for field, name in zip(of_right, names, strict=True)),
    )


def _right_names(columns: Sequence[str], taken: set[str]) -> list[str]:
    names = [f"{name}{RIGHT_SUFFIX}" if name in taken else name for name in columns]
    for column, name in zip(columns, names, strict=True):
        if name in taken or names.count(name) > 1:
            raise JobRejected(
                f"join: the right column {column!r} would be called {name!r}, and there is a column of "
                f"that name already; call .rename({column}='...') on the right stream before the join"
            )
    return names


def _nullable(field: pa.Field, name: str, nullable: bool) -> pa.Field:
    return pa.field(name, field.type, field.nullable or nullable)
