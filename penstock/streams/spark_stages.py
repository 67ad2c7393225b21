"""What runs on Spark, in the graph: ``Stream.spark`` and ``env.spark``, checked and made nodes of."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.errors import ConfigurationError, JobRejected
from penstock.graph.logical import (
    ANY_ROUTING,
    NodeInput,
    ReadSource,
    SparkStage,
    endless_input,
    input_schema,
)
from penstock.pb import graph_pb2
from penstock.rows.spark_types import check_for_spark, check_from_spark
from penstock.streams.function_schemas import declared_schema
from penstock.streams.job_builder import JobBuilder
from penstock.streams.stream import Schema, Stream
from penstock.streams.updates import check_no_updates
from penstock.units import duration_ms

if TYPE_CHECKING:
    from penstock.streams.windows import Duration

_CORES_MAX = 1_024


def add_spark_stage(
    builder: JobBuilder,
    inputs: Sequence[NodeInput],
    fn: Any,
    schema: Schema,
    timeout: Duration | None,
    cores: int | None,
) -> Stream:
    """The output of a stage; see ``Stream.spark``.

    Raises:
        JobRejected: the arguments are none, or do not go with the streams.
    """
    _check_function(fn, len(inputs))
    output = _output_schema(schema)
    for position, source in enumerate(inputs, start=1):
        which = "the stream" if len(inputs) == 1 else f"stream {position}"
        check_no_updates("spark", source)
        endless = endless_input(source)
        if endless:
            raise JobRejected(
                f"spark: {which} never ends, since {endless!r} reads without end, and Spark takes whole inputs: give "
                "the source an end (a number of rows, no watch=), or use .map_batches(...)"
            )
        check_for_spark(f"spark: {which}", input_schema(source))
    node = builder.add(
        SparkStage(fn, _timeout_ms(timeout), _cores(cores)),
        tuple(replace(source, routing=ANY_ROUTING) for source in inputs),
        label="spark",
        schema=output,
        has_event_time=False,
    )
    return Stream(builder, NodeInput(node))


def spark_source(
    fn: Any, schema: Schema, timeout: Duration | None, cores: int | None
) -> tuple[ReadSource, pa.Schema]:
    """What ``env.spark`` reads, and its columns.

    Raises:
        JobRejected: the arguments are none.
    """
    _check_function(fn, 1)
    output = _output_schema(schema)
    spec = graph_pb2.SourceSpec(
        spark=graph_pb2.SparkSpec(timeout_ms=_timeout_ms(timeout), cores=_cores(cores)),
        bounded=True,
    )
    return ReadSource(spec, function=fn, is_single=True), output


def _output_schema(schema: Schema) -> pa.Schema:
    if schema is None:
        raise JobRejected(
            "spark: the columns of the DataFrame that the function returns are not known before it runs: give "
            "schema=pa.schema([...]), a dataclass, or {'name': 'int64', ...}"
        )
    output = declared_schema("spark", schema)
    check_from_spark("spark: schema", output)
    return output


def _check_function(fn: Any, arguments: int) -> None:
    if not callable(fn):
        raise JobRejected(
            f"spark: {fn!r} is no function; it takes DataFrames and returns one: .spark(lambda df: df.distinct(), ...)"
        )
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise JobRejected(
            "spark: the function is a coroutine or a generator; it must return a DataFrame"
        )
    try:
        inspect.signature(fn).bind(*range(arguments))
    except TypeError as error:
        raise JobRejected(
            f"spark: the function is called with {arguments} argument{'s' if arguments > 1 else ''}, one per "
            f"stream (or the session, for env.spark), and does not take them: {error}"
        ) from error
    except ValueError:
        return  # of C code, whose signature nobody knows


def _timeout_ms(timeout: Duration | None) -> int:
    try:
        milliseconds = 0 if timeout is None else duration_ms(timeout)
    except ConfigurationError as error:
        raise JobRejected(f"spark: timeout: {error}") from error
    if timeout is not None and milliseconds < 1:
        raise JobRejected(f"spark: timeout is {timeout!r}; it must be longer than zero, or None")
    return milliseconds


def _cores(cores: int | None) -> int:
    if cores is None:
        return 0
    if isinstance(cores, bool) or not isinstance(cores, int) or not 1 <= cores <= _CORES_MAX:
        raise JobRejected(f"spark: cores={cores!r} is not a number from 1 to {_CORES_MAX}")
    return cores
