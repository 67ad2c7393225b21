"""Schemas from annotations and samples; which columns a function reads, never too few."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import operator
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import pyarrow as pa
import pytest
from typing_extensions import override

from penstock.errors import JobRejected
from penstock.functions.functions import MapFunction
from penstock.functions.row_types import (
    arrow_type,
    columns_used,
    infer_output_schema,
    schema_from_annotations,
    schema_from_samples,
)
from penstock.rows.rows import rows_of
from penstock.rows.schema import EVENT_TIME

START = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


@dataclasses.dataclass
class Inner:
    n: int
    tags: list[str]


@dataclasses.dataclass
class Everything:
    i: int
    f: float | None
    s: str
    y: bytes
    b: bool
    t: dt.datetime
    d: dt.date
    td: dt.timedelta
    dec: Decimal
    numbers: tuple[int, ...]
    table: dict[str, float]
    inner: Inner
    maybe: Inner | None
    small: Annotated[int, pa.int16()]
    kind: Literal["x", "y"]


class Record(TypedDict):
    a: int
    b: NotRequired[str]


class Pair(NamedTuple):
    a: int
    b: str | None


def test_every_annotation() -> None:
    def function(row: Any) -> Everything:
        raise NotImplementedError

    inner = pa.struct(
        [pa.field("n", pa.int64(), False), pa.field("tags", pa.list_(pa.string()), False)]
    )
    expected = {
        "i": pa.int64(),
        "f": pa.float64(),
        "s": pa.string(),
        "y": pa.binary(),
        "b": pa.bool_(),
        "t": pa.timestamp("us", "UTC"),
        "d": pa.date32(),
        "td": pa.duration("us"),
        "dec": pa.decimal128(38, 9),
        "numbers": pa.list_(pa.int64()),
        "table": pa.map_(pa.string(), pa.float64()),
        "inner": inner,
        "maybe": inner,
        "small": pa.int16(),
        "kind": pa.string(),
    }
    schema = schema_from_annotations(function)
    assert schema is not None
    assert dict(zip(schema.names, schema.types, strict=True)) == expected
    assert [f.name for f in schema if f.nullable] == ["f", "maybe"]


AB = pa.schema([pa.field("a", pa.int64(), nullable=False), ("b", pa.string())])


def returns_record(row: Any) -> Record:
    raise NotImplementedError


def returns_pair(row: Any) -> Pair | None:
    raise NotImplementedError


def yields_pairs(row: Any) -> Iterator[Pair]:
    raise NotImplementedError


def lists_records(row: Any) -> list[Record]:
    raise NotImplementedError


class Callables:
    def __call__(self, row: Any) -> Pair:
        raise NotImplementedError

    def method(self, row: Any) -> Pair:
        raise NotImplementedError


@pytest.mark.parametrize(
    "function",
    [
        returns_record,
        returns_pair,
        yields_pairs,
        lists_records,
        Callables(),
        Callables().method,
        Pair,
        functools.partial(returns_pair),
    ],
)
def test_records_of_every_kind(function: Callable[..., Any]) -> None:
    assert schema_from_annotations(function) == AB


def test_what_annotations_do_not_tell() -> None:
    def number(row: Any) -> int:
        raise NotImplementedError

    def unknown(row: Any) -> NoSuchName:  # type: ignore[name-defined]  # noqa: F821
        raise NotImplementedError

    def wrong(row: Any) -> Wrong:
        raise NotImplementedError

    for function in (number, unknown, len, lambda row: row, operator.itemgetter("a"), int):
        assert schema_from_annotations(function) is None
    with pytest.raises(JobRejected, match=r"Wrong\.what: no column can hold"):
        schema_from_annotations(wrong)
    assert arrow_type(list[int] | None) == pa.list_(pa.int64())


@dataclasses.dataclass
class Wrong:
    what: object


def test_samples() -> None:
    schema = schema_from_samples([{"a": 1, "b": None}, {"a": 2.5, "b": "x", "c": [1]}])
    assert schema == pa.schema(
        [("a", pa.float64()), ("b", pa.string()), ("c", pa.list_(pa.int64()))]
    )
    rows = rows_of(pa.record_batch({"n": pa.array([1], pa.int8()), EVENT_TIME: [1]}))
    assert schema_from_samples(rows) == pa.schema([("n", pa.int8())])
    nested = schema_from_samples([{"v": Inner(1, ["a"])}])
    assert nested.field("v").type == pa.struct([("n", pa.int64()), ("tags", pa.list_(pa.string()))])
    for values, message in (
        ([], "no rows"),
        ([5], "no column names"),
        ([{"a": 1}, {"a": "x"}], "'a' has values of several types"),
        ([{"a": True}, {"a": 1}], "several types: bool, int"),
        ([{"a": START.date()}, {"a": START}], "several types: date, datetime"),
        ([{1: 1}], "must be a text"),
    ):
        with pytest.raises(JobRejected, match=message):
            schema_from_samples(values)


def returns_pair(row: Any) -> tuple[int, str]:
    raise NotImplementedError


INPUT = pa.schema([("x", pa.int64()), ("s", pa.string()), (EVENT_TIME, pa.int64())])
SAMPLE = pa.record_batch({"x": [1, 2], "s": ["a", None], EVENT_TIME: [1, 2]}, schema=INPUT)


def test_output_schemas() -> None:
    user = INPUT.remove(2)
    assert infer_output_schema(lambda r: True, "filter", INPUT, None) == user
    assert infer_output_schema(returns_record, "map", INPUT, None) == AB
    sampled = infer_output_schema(lambda r: {"k": r.s, "n": r.x / 2}, "map", INPUT, SAMPLE)
    assert sampled == pa.schema([("k", pa.string()), ("n", pa.float64())])
    flat = infer_output_schema(lambda r: ({"n": i} for i in range(r.x)), "flat_map", INPUT, SAMPLE)
    assert flat == pa.schema([("n", pa.int64())])
    assert infer_output_schema(lambda r: r, "map", INPUT, SAMPLE) == user
    keyed = infer_output_schema(lambda r: r.x % 2, "key", INPUT, SAMPLE)
    assert keyed == user.append(pa.field("key", pa.int64()))

    def annotated_key(row: Any) -> str:
        raise NotImplementedError

    keyed = infer_output_schema(annotated_key, "key", INPUT, None)
    assert keyed.field("key") == pa.field("key", pa.string(), nullable=False)


class Opens(MapFunction):
    @override
    def open(self, ctx: Any) -> None: ...

    @override
    def __call__(self, row: Any) -> Any:
        return {"a": 1}


@pytest.mark.parametrize(
    ("function", "kind", "sample", "message"),
    [
        (lambda r: {"a": r.x}, "map", None, "give schema="),
        (lambda r: {"a": r.z}, "map", SAMPLE, "no column 'z'; its columns are x, s"),
        (lambda r: {"a": 1 / 0}, "map", SAMPLE, "ZeroDivisionError.*x=1"),
        (lambda r: {"a": None}, "map", SAMPLE, "None in every row"),
        (lambda r: r.x, "map", SAMPLE, "no column names"),
        (lambda r: 5, "flat_map", SAMPLE, "not iterable"),
        (lambda r: None, "flat_map", SAMPLE, "returned no rows"),
        (lambda r: {EVENT_TIME: 1}, "map", SAMPLE, "reserved"),
        (lambda r: (1, "a"), "key", SAMPLE, r"returns a tuple.*key_by\('k', 'v'\)"),
        (lambda r: (1, 2), "key", SAMPLE, r"key_by\('k', 'v'\)"),
        (returns_pair, "key", None, r"returns_pair returns a tuple.*key_by\('k', 'v'\)"),
        (lambda r: object(), "key", SAMPLE, "annotate what the function returns"),
        (Opens(), "map", SAMPLE, r"it has open\(\)"),
    ],
)
def test_schemas_that_cannot_be_found(
    function: Callable[..., Any], kind: Any, sample: pa.RecordBatch | None, message: str
) -> None:
    with pytest.raises(JobRejected, match=message):
        infer_output_schema(function, kind, INPUT, sample)


GLOBAL: list[Any] = []
COLUMNS = pa.schema([(name, pa.int64()) for name in ("a", "b", "c", "keys")])


def reads_two(row: Any) -> Any:
    if row.a > 1:
        return {"n": row["b"]}
    return {"n": row.a.bit_length()}


def generates(row: Any) -> Any:
    for i in range(row.a):
        yield i + row.b


def catches(row: Any) -> Any:
    try:
        return row.a
    except ZeroDivisionError:
        return row.c


def keeps(row: Any) -> Any:
    GLOBAL.append(row)
    return row.a


def rebinds(row: Any) -> Any:
    row = row.a
    return row + 1


def closes_over(row: Any) -> Any:
    def inner() -> Any:
        return row.b

    return inner() + row.a


def returns_it(row: Any) -> Any:
    return row if row.a else None


def subscripts(row: Any) -> Any:
    name = "b"
    return row[name], row.a


def sees_locals(row: Any) -> Any:
    return locals()["row"].b, row.a


def compares(row: Any) -> Any:
    return row == row.a


def augments(row: Any) -> Any:
    row.a += 1
    return 1


def walrus(row: Any) -> Any:
    return (other := row) and other.b


def conditional(row: Any, flag: bool = True) -> Any:
    return (row if flag else GLOBAL[0]).b


def deletes(row: Any) -> Any:
    a = row.a
    del row
    return a


class Method:
    def __call__(self, row: Any) -> Any:
        return row.c

    def method(self, row: Any) -> Any:
        return row.a

    def leaks(self, row: Any) -> Any:
        self.last = row
        return row.a


READS: list[tuple[Any, set[str] | None]] = [
    (lambda r: r.a, {"a"}),
    (lambda r: (r.a, r["b"]), {"a", "b"}),
    (lambda r: {"x": r.a + r.b * r.a}, {"a", "b"}),
    (lambda r: f"{r.a}-{r.b:>5}", {"a", "b"}),
    (lambda r: 1, set()),
    (lambda r: r.nothing, None),  # the error names all columns then
    (lambda r, n=3: r.a + n, {"a"}),
    (lambda r: r.a if r.b else r.c, {"a", "b", "c"}),
    (lambda r: [r.a for _ in range(3)], None),
    (reads_two, {"a", "b"}),
    (generates, {"a", "b"}),
    (catches, {"a", "c"}),
    (Method(), {"c"}),
    (Method().method, {"a"}),
    (Method().leaks, None),
    (lambda r: r, None),
    (lambda r: {**r}, None),
    (lambda r: sorted(r, key=len), None),
    (lambda r: r.as_dict(), None),
    (lambda r: r.keys(), None),
    (lambda r: r.__class__, None),
    (lambda r: getattr(r, "a"), None),  # noqa: B009
    (lambda r: "a" in r, None),
    (lambda r: (GLOBAL.append(r), r.a), None),
    (lambda *r: r[0].a, None),
    (lambda **r: r, None),
    (keeps, None),
    (rebinds, None),
    (closes_over, None),
    (returns_it, None),
    (subscripts, None),
    (sees_locals, None),
    (compares, None),
    (augments, None),
    (walrus, None),
    (conditional, None),
    (deletes, None),
    (operator.attrgetter("a"), None),
    (functools.partial(reads_two), None),
    (dict, None),
    (len, None),
]


@pytest.mark.parametrize(("function", "expected"), READS, ids=range(len(READS)))
def test_columns_a_function_reads(function: Any, expected: set[str] | None) -> None:
    used = columns_used(function, COLUMNS)
    # From Python 3.12 on inner loops are part of the function, from 3.13 on both ways of a conditional
    # expression are code of their own: more is known there, never less.
    if expected is None:
        assert used in (None, frozenset({"b"} if function is conditional else {"a"}))
    else:
        assert used == expected


def test_functions_run_on_what_they_are_said_to_read() -> None:
    full = pa.record_batch({name: [3, 0] for name in COLUMNS.names})
    for function, expected in READS:
        used = columns_used(function, COLUMNS)
        if not expected or used is None:
            continue
        pruned = full.select(sorted(used))
        for whole, part in zip(rows_of(full), rows_of(pruned), strict=True):
            one, other = function(whole), function(part)
            assert (list(one), list(other)) if hasattr(one, "__next__") else one == other


def test_long_functions_are_understood() -> None:
    lines = "\n".join(f"    x{i} = row.a + {i} * row.b" for i in range(300))
    names = ", ".join(f"g{i}" for i in range(300))
    scope: dict[str, Any] = {}
    exec(
        f"def f(row):\n    global {names}\n    {names.replace(', ', ' = ')} = 1\n{lines}\n    return row.c",
        scope,
    )
    assert columns_used(scope["f"], COLUMNS) == {"a", "b", "c"}
