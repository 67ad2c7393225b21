"""Aggregates in Spark's SQL, with the results that they have here: nulls skipped, NaN only where there is nothing else."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pt

from penstock.aggregates.aggregates import Aggregate
from penstock.pushdown.sql_text import NotCompiledError, cast, plain_kind, quoted, sql_type

_OF_ORDER = {
    "first": "the order in which rows come; take ps.min or ps.max, or what has a time of its own",
    "last": "the order in which rows come; take ps.min or ps.max, or what has a time of its own",
    "collect_list": "the order in which rows come",
    "custom": "a function in Python",
}


def aggregate_sql(aggregate: Aggregate, schema: pa.Schema) -> str:
    """An aggregate over a stream's columns.

    Raises:
        NotCompiledError: it does not compile; the message names it.

    Example: Spark's max of NaN and 1 is NaN.
        >>> from penstock.aggregates.aggregates import max
        >>> aggregate_sql(max("x"), pa.schema([("x", pa.float64())]))
        'coalesce(max(CASE WHEN isnan(`x`) THEN NULL ELSE `x` END), max(`x`))'
    """
    name = aggregate.function
    if name in _OF_ORDER:
        raise NotCompiledError(f"the aggregate {name!r}: it depends on {_OF_ORDER[name]}")
    column = aggregate.input_column
    if column is None:
        return "count(1)"
    kind, text = plain_kind(schema.field(column).type), quoted(column)
    if name == "count":
        return f"count({text})"
    if not _is_alike(kind):
        raise NotCompiledError(f"the aggregate {name!r} of a {schema.field(column).type}")
    match name:
        case "sum":
            return _sum(text, kind)
        case "mean":
            return _mean(text, kind)
        case "count_distinct":
            return f"count(DISTINCT {text})"
        case "max" if pt.is_floating(kind):
            return f"coalesce(max(CASE WHEN isnan({text}) THEN NULL ELSE {text} END), max({text}))"
        case "min" | "max":
            return f"{name}({text})"
        case _:
            raise NotCompiledError(f"the aggregate {name!r}")


def _is_alike(kind: pa.DataType) -> bool:
    """Whether values of a type have one order and one equality on both sides."""
    return not (pt.is_float16(kind) or pt.is_duration(kind) or pt.is_time(kind)) and not (
        pt.is_nested(kind) or pt.is_decimal256(kind)
    )


def _sum(text: str, kind: pa.DataType) -> str:
    if pt.is_floating(kind):
        return f"sum({cast(text, pa.float64())})"
    if pt.is_decimal(kind):
        return f"sum({cast(text, pa.decimal128(38, kind.scale))})"
    return f"sum({cast(text, pa.int64())})"


def _mean(text: str, kind: pa.DataType) -> str:
    if pt.is_decimal(kind):
        total = f"CAST(sum({cast(text, pa.decimal128(38, kind.scale))}) AS DOUBLE)"
        return f"({total} / nullif(count({text}), 0L))"
    return f"avg({cast(text, pa.float64())})"


def check_key(name: str, kind: pa.DataType) -> None:
    """Checks that values of a type are the same keys on both sides.

    Raises:
        NotCompiledError: they are not.
    """
    plain = plain_kind(kind)
    if not _is_alike(plain) or pt.is_null(plain):
        raise NotCompiledError(f"the key {name!r}, a {kind}")
    sql_type(plain)
