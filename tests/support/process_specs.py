"""Operators for process functions, ready to be driven by a harness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import pyarrow as pa

from penstock.pb import graph_pb2
from penstock.processing.process_functions import process_kind
from penstock.rows.schema import EVENT_TIME, schema_to_bytes
from taskmanager.operators.factory import build_operator
from tests.support.object_backend import ObjectBackend
from tests.support.operator_harness import OperatorHarness

EVENT_FIELD = pa.field(EVENT_TIME, pa.int64(), nullable=False)
INPUT = pa.schema([("user", pa.int64()), ("n", pa.int64())])
OUTPUT = pa.schema([("user", pa.int64()), ("text", pa.string())])


class Backend:
    """What ``run_process`` keeps state in; the fixtures of a package of tests may change it."""

    current: Callable[..., Any] = ObjectBackend


def process_spec(
    function: Any,
    *,
    schema: pa.Schema = INPUT,
    second: pa.Schema | None = None,
    output: pa.Schema = OUTPUT,
    keys: tuple[str, ...] = ("user",),
    event_time: bool = True,
    on_error: str = "fail",
) -> graph_pb2.Operator:
    """The specification of ``.process(function)``; ``on_error`` is fail, skip or the tag of a side output."""
    info = process_kind(function)
    spec = graph_pb2.Operator(uid="uid", name="process")
    extra = [EVENT_FIELD] if event_time else []
    spec.input_schema = schema_to_bytes(pa.schema([*schema, *extra]))
    spec.output_schema = schema_to_bytes(pa.schema([*output, *extra]))
    if second is not None:
        spec.second_input_schema = schema_to_bytes(pa.schema([*second, *extra]))
    spec.process.kind = info.kind
    spec.process.function.pickled = cloudpickle.dumps(function)
    spec.process.function.display_name = type(function).__name__
    if info.is_keyed:
        spec.process.keys.extend(keys)
        if info.methods[-1] == "process_right":
            spec.process.second_keys.extend(keys)
    if on_error == "skip":
        spec.on_error.action = graph_pb2.ERROR_ACTION_SKIP
    elif on_error != "fail":
        spec.on_error.action = graph_pb2.ERROR_ACTION_SIDE_OUTPUT
        spec.on_error.tag = on_error
    return spec


def run_process(function: Any, *, harness: dict[str, Any] | None = None, **spec: Any) -> Any:
    """The function in an open operator."""
    operator = build_operator(process_spec(function, **spec))
    return OperatorHarness(operator, **{"backend": Backend.current, **(harness or {})})


def rows(*values: tuple[Any, ...], schema: pa.Schema = INPUT) -> pa.RecordBatch:
    """A batch of (column, column, ..., event time)."""
    full = pa.schema([*schema, EVENT_FIELD])
    columns = list(zip(*values, strict=True)) or [() for _ in full]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, full, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=full)
