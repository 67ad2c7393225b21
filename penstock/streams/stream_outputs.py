"""Where streams end: files, the terminal, this process, or a sink of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from penstock.client.collected import CollectedRows
from penstock.errors import JobRejected
from penstock.graph.logical import Node, NodeInput, WriteSink, input_schema
from penstock.graph.persisted import check_name
from penstock.pb import graph_pb2
from penstock.streams.job_builder import JobBuilder
from penstock.streams.operator_properties import OperatorProperties
from penstock.streams.updates import maker_of_updates
from penstock.units import argument_ms, size_bytes

if TYPE_CHECKING:
    from penstock.connectors.sink import Sink
    from penstock.streams.windows import Duration

_LIMIT_MAX = 2**63 - 1


class StreamSink(OperatorProperties):
    """The end of a stream; ``.uid``, ``.name``, ``.parallelism`` and ``.slot_group`` apply to the sink."""

    def __init__(self, builder: JobBuilder, node: Node) -> None:
        self._builder = builder
        self._node = node

    @override
    def _target(self, call: str) -> tuple[JobBuilder, Node]:
        return self._builder, self._node


class StreamOutputs:
    """The sinks of a stream."""

    _builder: JobBuilder
    _source: NodeInput

    def write_parquet(
        self,
        directory: str,
        *,
        partition_by: Sequence[str] | None = None,
        roll: str | int = "64mb",
        roll_interval: Duration | None = None,
        inactivity: Duration | None = None,
        min_size: str | int = 0,
        max_delay: Duration | None = None,
    ) -> StreamSink:
        """Writes Parquet files into a directory.

        Args:
            partition_by: columns that become directories, ``column=value``.
            roll: size at which a new file is begun.
            roll_interval: age at which a file is completed; None = it has no limit.
            inactivity: a file that has got no rows for so long is completed; None = never. With
                checkpoints on, each completes the files that are open too.
            min_size: a checkpoint completes no file for which there are fewer bytes of rows: it takes them with it,
                and they show with a later one; 0 = it completes all.
            max_delay: a checkpoint completes the file all the same once its first row is so old; None = 1 minute.
        """
        rolls = _Rolls(roll, roll_interval, inactivity, min_size, max_delay)
        return self._write_files("parquet", directory, partition_by, rolls)

    def write_csv(
        self,
        directory: str,
        *,
        partition_by: Sequence[str] | None = None,
        roll: str | int = "64mb",
        roll_interval: Duration | None = None,
        inactivity: Duration | None = None,
        min_size: str | int = 0,
        max_delay: Duration | None = None,
    ) -> StreamSink:
        """Writes CSV files with a header into a directory; see ``write_parquet``."""
        rolls = _Rolls(roll, roll_interval, inactivity, min_size, max_delay)
        return self._write_files("csv", directory, partition_by, rolls)

    def write_json(
        self,
        directory: str,
        *,
        partition_by: Sequence[str] | None = None,
        roll: str | int = "64mb",
        roll_interval: Duration | None = None,
        inactivity: Duration | None = None,
        min_size: str | int = 0,
        max_delay: Duration | None = None,
    ) -> StreamSink:
        """Writes JSON lines into a directory; see ``write_parquet``."""
        rolls = _Rolls(roll, roll_interval, inactivity, min_size, max_delay)
        return self._write_files("json", directory, partition_by, rolls)

    def _write_files(
        self,
        form: str,
        directory: str,
        partition_by: Sequence[str] | None,
        rolls: _Rolls,
    ) -> StreamSink:
        from penstock.connectors.files import DEFAULT_DELAY_MS, file_sink

        min_size = size_bytes(rolls.min_size) if rolls.min_size else 0
        if rolls.max_delay is not None and not min_size:
            raise JobRejected(
                "max_delay says how long min_size holds rows back: give min_size, too"
            )
        spec = file_sink(
            form,
            directory,
            partition_by,
            size_bytes(rolls.roll),
            schema=input_schema(self._source),
            roll_interval_ms=_time_ms("roll_interval", rolls.roll_interval),
            inactivity_ms=_time_ms("inactivity", rolls.inactivity),
            min_size_bytes=min_size,
            max_delay_ms=_time_ms("max_delay", rolls.max_delay) or DEFAULT_DELAY_MS,
        )
        return self._end(WriteSink(spec), f"write_{form}")

    def print(self) -> StreamSink:
        """Writes rows to the task's log, and to the terminal on an embedded cluster."""
        return self._end(WriteSink(graph_pb2.SinkSpec(print=graph_pb2.PrintSink())), "print")

    def discard(self) -> StreamSink:
        """Takes the rows and forgets them."""
        from penstock.connectors.streams import discard_sink

        return self._end(WriteSink(discard_sink()), "discard")

    def collect(self, limit: int | None = None) -> CollectedRows:
        """Brings the rows back to this process.

        ``for row in stream.collect()`` submits the job and gives each row as it comes, in bounded memory; whoever
        leaves the loop ends the job. Everything else (``env.execute()``, ``to_pylist()``, ``len()``) runs it to its
        end. An endless job with nothing but limited collects ends when they have their rows.

        Args:
            limit: rows at most; None = all.
        """
        is_number = isinstance(limit, int) and not isinstance(limit, bool)
        if limit is not None and not (is_number and 1 <= limit <= _LIMIT_MAX):
            raise JobRejected(
                f"collect: limit is {limit!r}; it must be a whole number, at least 1, or None for all rows"
            )
        rows = self._builder.collect(input_schema(self._source), limit or 0)
        spec = graph_pb2.CollectSink(collect_id=rows.collect_id, limit=limit or 0)
        self._end(WriteSink(graph_pb2.SinkSpec(collect=spec)), "collect")
        return rows

    def persist(self, name: str, *, overwrite: bool = False) -> StreamSink:
        """Leaves the rows on the TaskManagers when the job has finished, for ``env.read_persisted``.

        They are there as long as the TaskManagers that hold them, or until they are dropped. A job that
        fails or is cancelled leaves nothing.

        Args:
            name: letters, digits, '.', '_' and '-'.
            overwrite: what has the name goes when the job has finished; else it is an error.
        """
        check_name("persist", name)
        if not isinstance(overwrite, bool):
            raise JobRejected(f"persist: overwrite is {overwrite!r}; it must be True or False")
        spec = graph_pb2.PersistSink(
            name=name, overwrite=overwrite, updates_of=maker_of_updates(self._source)
        )
        return self._end(WriteSink(graph_pb2.SinkSpec(persist=spec)), "persist")

    def sink(self, sink: Sink) -> StreamSink:
        """Hands the batches to a sink of the user's own.

        Args:
            sink: an object of a class derived from ``ps.TwoPhaseSink`` (exactly once), or from
                ``ps.Sink`` with ``write`` and ``flush`` (at least once, so it should be idempotent).
        """
        from penstock.connectors.sink import Sink as SinkContract
        from penstock.connectors.sink import is_two_phase

        if not isinstance(sink, SinkContract):
            hint = (
                f"{sink.__name__}()" if isinstance(sink, type) else "an object of a class of yours"
            )
            raise JobRejected(
                f"sink: {sink!r} is no penstock.Sink; derive a class from ps.Sink and pass {hint}"
            )
        spec = graph_pb2.SinkSpec(
            custom=graph_pb2.Function(),
            two_phase=is_two_phase(sink),
            supports_concurrent_attempts=sink.supports_concurrent_attempts,
        )
        return self._end(WriteSink(spec, function=sink), type(sink).__name__)

    def _end(self, operation: WriteSink, label: str) -> StreamSink:
        node = self._builder.add(
            operation,
            (self._source,),
            label=label,
            schema=input_schema(self._source),
            has_event_time=False,
        )
        return StreamSink(self._builder, node)


@dataclass(frozen=True, slots=True)
class _Rolls:
    """When files are completed, as the user says it."""

    roll: str | int
    roll_interval: Duration | None
    inactivity: Duration | None
    min_size: str | int
    max_delay: Duration | None


def _time_ms(name: str, value: Duration | None) -> int:
    """In milliseconds, 0 = none."""
    milliseconds = 0 if value is None else argument_ms(name, value)
    if value is not None and milliseconds < 1:
        raise JobRejected(f"{name} is {value!r}; it must be longer than zero, or None for never")
    return milliseconds
