"""Penstock: a fault-tolerant stateful stream processor for Python, columnar on Arrow.

This package is all that user code imports: ``import penstock as ps``.
"""

from penstock.aggregates import (
    Aggregate,
    AggregateFunction,
    aggregate,
    collect_list,
    count,
    count_distinct,
    first,
    last,
    max,
    mean,
    min,
    sum,
)
from penstock.cluster import Cluster, connect
from penstock.collected import CollectedRow, CollectedRows
from penstock.connectors.sink import Sink, SinkContext
from penstock.connectors.source import END, EndOfSplit, Reader, Source, SourceContext, Split
from penstock.environment import Environment, JobPlan
from penstock.errors import (
    BadRecord,
    ConfigurationError,
    ExpressionError,
    JobCanceled,
    JobFailed,
    JobManagerUnreachable,
    JobNotFound,
    JobRejected,
    StreamError,
)
from penstock.expressions import Expr, col, fn, lit, when
from penstock.functions import (
    Collector,
    FilterFunction,
    FlatMapFunction,
    FunctionContext,
    MapFunction,
    WindowFunction,
    WindowInfo,
)
from penstock.job import JobHandle, JobResult
from penstock.keyed_stream import KeyedStream, WindowedStream
from penstock.rows import Row
from penstock.stream import Stream
from penstock.stream_outputs import StreamSink
from penstock.windows import Window, count_window, session, sliding, tumbling

__version__ = "0.1.0"

__all__ = [
    "END",
    "Aggregate",
    "AggregateFunction",
    "BadRecord",
    "Cluster",
    "CollectedRow",
    "CollectedRows",
    "Collector",
    "ConfigurationError",
    "EndOfSplit",
    "Environment",
    "Expr",
    "ExpressionError",
    "FilterFunction",
    "FlatMapFunction",
    "FunctionContext",
    "JobCanceled",
    "JobFailed",
    "JobHandle",
    "JobManagerUnreachable",
    "JobNotFound",
    "JobPlan",
    "JobRejected",
    "JobResult",
    "KeyedStream",
    "MapFunction",
    "Reader",
    "Row",
    "Sink",
    "SinkContext",
    "Source",
    "SourceContext",
    "Split",
    "Stream",
    "StreamError",
    "StreamSink",
    "Window",
    "WindowFunction",
    "WindowInfo",
    "WindowedStream",
    "aggregate",
    "col",
    "collect_list",
    "connect",
    "count",
    "count_distinct",
    "count_window",
    "first",
    "fn",
    "last",
    "lit",
    "max",
    "mean",
    "min",
    "session",
    "sliding",
    "sum",
    "tumbling",
    "when",
]
