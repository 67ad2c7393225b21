"""All that user code names: ``ps.Environment`` is ``penstock.api.Environment``."""

from penstock.aggregates.aggregates import (
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
from penstock.client.cluster import Cluster, connect
from penstock.client.collected import CollectedRow, CollectedRows
from penstock.client.job import JobHandle
from penstock.client.job_result import JobResult
from penstock.connectors.sink import Sink, SinkContext, TwoPhaseSink
from penstock.connectors.source import END, EndOfSplit, Reader, Source, SourceContext, Split
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
    Unrecoverable,
)
from penstock.expressions import Expr, col, fn, lit, when
from penstock.functions.functions import (
    Collector,
    FilterFunction,
    FlatMapFunction,
    FunctionContext,
    MapFunction,
    WindowFunction,
    WindowInfo,
)
from penstock.loops.declaration import compiled
from penstock.processing.process_context import MAX_WATERMARK, MIN_WATERMARK, ProcessContext, Timers
from penstock.processing.process_functions import (
    BatchCollector,
    BroadcastProcessFunction,
    CheckpointContext,
    CoProcessFunction,
    KeyedBatchFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    ProcessFunction,
)
from penstock.rows.rows import Row
from penstock.state.declarations import (
    MSGPACK,
    PICKLE,
    AggregatingState,
    BroadcastState,
    ListState,
    MapState,
    OperatorListState,
    ReducingState,
    Ttl,
    ValueState,
)
from penstock.state_tables.accumulators import accumulators
from penstock.state_tables.opened_state import (
    StateTableInfo,
    StateTables,
    StoredOperator,
    open_state,
)
from penstock.state_tables.savepoint_writer_store import write_savepoint
from penstock.state_tables.source_positions import files_done
from penstock.state_tables.spark_state_client import read_state, register
from penstock.storage.codec import StateError
from penstock.storage.codec_migration import field
from penstock.streams.connected_streams import ConnectedStreams
from penstock.streams.environment import Environment, JobPlan
from penstock.streams.keyed_stream import KeyedStream, WindowedStream
from penstock.streams.restart_strategies import RestartStrategies
from penstock.streams.stream import Stream
from penstock.streams.stream_outputs import StreamSink
from penstock.streams.windows import Window, count_window, session, sliding, tumbling

__all__ = [
    "END",
    "MAX_WATERMARK",
    "MIN_WATERMARK",
    "MSGPACK",
    "PICKLE",
    "Aggregate",
    "AggregateFunction",
    "AggregatingState",
    "BadRecord",
    "BatchCollector",
    "BroadcastProcessFunction",
    "BroadcastState",
    "CheckpointContext",
    "Cluster",
    "CoProcessFunction",
    "CollectedRow",
    "CollectedRows",
    "Collector",
    "ConfigurationError",
    "ConnectedStreams",
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
    "KeyedBatchFunction",
    "KeyedBroadcastProcessFunction",
    "KeyedCoProcessFunction",
    "KeyedProcessFunction",
    "KeyedStream",
    "ListState",
    "MapFunction",
    "MapState",
    "OperatorListState",
    "ProcessContext",
    "ProcessFunction",
    "Reader",
    "ReducingState",
    "RestartStrategies",
    "Row",
    "Sink",
    "SinkContext",
    "Source",
    "SourceContext",
    "Split",
    "StateError",
    "StateTableInfo",
    "StateTables",
    "StoredOperator",
    "Stream",
    "StreamError",
    "StreamSink",
    "Timers",
    "Ttl",
    "TwoPhaseSink",
    "Unrecoverable",
    "ValueState",
    "Window",
    "WindowFunction",
    "WindowInfo",
    "WindowedStream",
    "accumulators",
    "aggregate",
    "col",
    "collect_list",
    "compiled",
    "connect",
    "count",
    "count_distinct",
    "count_window",
    "field",
    "files_done",
    "first",
    "fn",
    "last",
    "lit",
    "max",
    "mean",
    "min",
    "open_state",
    "read_state",
    "register",
    "session",
    "sliding",
    "sum",
    "tumbling",
    "when",
    "write_savepoint",
]
