"""``harness``: runs a function or a chain of operators under test, and shows what became of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, Self, overload

import pyarrow as pa

from penstock.config import Configuration
from penstock.connectors.memory import rows_to_table
from penstock.errors import JobRejected
from penstock.loops.declaration import uncompiled
from penstock.rows.column_values import ValueMismatch
from penstock.rows.conforming import conformed
from penstock.rows.decoded_values import dicts_of
from penstock.rows.schema import EVENT_TIME, user_batch
from penstock.storage.arrow_codecs import exact_array
from penstock.streams.windows import Window
from penstock.testing.pipeline import (
    INPUT_UIDS,
    OUTPUT_UID,
    Pipeline,
    Shape,
    build,
    input_count,
    row_schema,
)
from penstock.testing.runtime import run_graph
from penstock.units import argument_ms

Row = dict[str, Any]


def harness(
    tested: Any,
    *,
    schema: Any = None,
    second_schema: Any = None,
    keys: str | Sequence[str] = (),
    second_keys: str | Sequence[str] | None = None,
    output_schema: Any = None,
    window: Window | None = None,
    inputs: int | None = None,
    event_time: bool = True,
    backend: Literal["hashmap", "rocksdb"] = "hashmap",
    config: Mapping[str, object] | None = None,
    now: int = 0,
    restore: bytes | Sequence[bytes] | None = None,
    subtask: int = 0,
    parallelism: int = 1,
) -> Harness:
    """Runs what is tested as a job of one subtask per operator, in this process.

    Args:
        tested: an object of a function class (``ps.KeyedProcessFunction``, ``ps.MapFunction``, a sink, a
            source, an aggregate ...), or a function that builds a chain:
            ``lambda stream: stream.key_by("user").aggregate(n=ps.count())``, with two parameters for two
            streams.
        schema: columns of the rows to be pushed: whatever ``schema=`` takes elsewhere, or a list of rows
            like them.
        second_schema: of the second stream; None = the same.
        keys: key columns, where a function is tested that goes on a keyed stream.
        second_keys: of the second stream; None = the same.
        output_schema: columns of what the function emits; None = from its annotations.
        window: that a ``ps.WindowFunction`` or an aggregate is applied to.
        inputs: 1 or 2 streams; None = as many as the function has parameters without a default, at least 1.
        event_time: rows have event time.
        backend: where state lives.
        config: more configuration of the job.
        now: where the clock starts, in milliseconds since the epoch.
        restore: what ``snapshot`` returned; a list of them where several subtasks were run.
        subtask: which of the parallel subtasks this is; it gets the rows of its own keys only.
        parallelism: how many subtasks there are.

    Raises:
        JobRejected: a cluster would refuse it.
        JobFailed: ``open`` or ``restore`` of a function raised.
    """
    if not 0 <= subtask < parallelism:
        raise JobRejected(
            f"harness: subtask={subtask} of parallelism={parallelism}; subtasks count from 0"
        )
    configuration = _configuration(config, parallelism, backend)
    count = input_count(tested, inputs)
    if not count and subtask and restore is None:
        raise JobRejected("harness: it is subtask 0 of a source that finds its splits")
    schemas = _schemas(count, schema, second_schema)
    both_keys = (_names(keys), _names(keys if second_keys is None else second_keys))
    shape = Shape(both_keys, output_schema, window)
    with uncompiled():
        pipeline = build(tested, schemas, shape, configuration, has_event_time=event_time)
    return Harness(pipeline, configuration, now, restore, subtask)


def _configuration(
    config: Mapping[str, object] | None, parallelism: int, backend: str
) -> Configuration:
    return Configuration.from_mapping(
        {
            # Snapshots are bytes in the test's hands, however large.
            "execution.checkpointing.jobmanager.max-size": 1 << 40,
            **dict(config or {}),
            "parallelism.default": parallelism,
            "state.backend.type": backend,
        }
    )


def _schemas(count: int, schema: Any, second_schema: Any) -> list[pa.Schema]:
    schemas = [row_schema(schema, "schema")] if count else []
    if count == 2:
        has_own = second_schema is not None
        schemas.append(row_schema(second_schema, "second_schema") if has_own else schemas[0])
    return schemas


def _names(keys: str | Sequence[str]) -> tuple[str, ...]:
    return (keys,) if isinstance(keys, str) else tuple(keys)


class Harness:
    """A running job of one subtask per operator; made by ``harness``. A context manager.

    Every call runs all that follows from it before it returns; nothing happens in between. Once something
    has failed, every call raises the same ``ps.JobFailed``.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        config: Configuration,
        now: int,
        restore: bytes | Sequence[bytes] | None,
        subtask: int,
    ) -> None:
        snapshots = [restore] if isinstance(restore, bytes) else list(restore or ())
        self._pipeline = pipeline
        self._runner = run_graph(
            pipeline.graph,
            inputs=INPUT_UIDS[: len(pipeline.inputs)],
            output=OUTPUT_UID if pipeline.has_output else "",
            config=config,
            now_ms=now,
            subtask_index=subtask,
            snapshots=snapshots,
        )
        self._close = weakref.finalize(self, self._runner.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the functions and removes what the backend has on disk; repeatable."""
        self._close()

    # ------------------------------------------------------------ what comes in

    def push(
        self, row: Mapping[str, Any], event_time: int | None = None, *, input: int = 0
    ) -> None:
        """Hands in one row.

        Args:
            row: by column; a column that is missing is null.
            event_time: in ms; None = the time of the clock.
            input: 0, or 1 for the second of two streams.
        """
        times = None if event_time is None else [event_time]
        self._push(rows_to_table([row], self._schema(input)), times, input)

    def push_many(
        self,
        rows: Iterable[Mapping[str, Any]] | pa.RecordBatch | pa.Table,
        event_times: Sequence[int] | str | None = None,
        *,
        input: int = 0,
    ) -> None:
        """Hands in rows as one batch.

        Args:
            rows: dicts, or a batch or table with the columns of the schema.
            event_times: in ms, one per row, or the name of an integer column; None = the time of the clock.
            input: 0, or 1 for the second of two streams.
        """
        schema = self._schema(input)
        if isinstance(rows, (pa.RecordBatch, pa.Table)):
            try:
                batches = [conformed(batch, schema) for batch in pa.table(rows).to_batches()]
            except ValueMismatch as error:
                raise JobRejected(
                    f"push_many: the batch has ({_columns(rows.schema)}), the stream ({_columns(schema)}): "
                    f"{error}"
                ) from error
            table = pa.Table.from_batches(batches, schema)
        else:
            table = rows_to_table(list(rows), schema)
        times = event_times
        if isinstance(times, str):
            if times not in schema.names:
                raise JobRejected(
                    f"push_many: there is no column {times!r} to take event times from"
                )
            times = table.column(times).to_pylist()
        self._push(table, times, input)

    def _schema(self, input: int) -> pa.Schema:
        self._check_input(input)
        return self._pipeline.inputs[input]

    def _check_input(self, input: int) -> None:
        count = len(self._pipeline.inputs)
        if not count:
            raise JobRejected("a source makes its own rows: call read()")
        if input not in range(count):
            raise JobRejected(f"input={input!r}: there {_are(count)}, counted from 0")

    def _push(self, table: pa.Table, times: Sequence[int] | None, input: int) -> None:
        if not table.num_rows:
            return
        planned = self._runner.input_schemas[input]
        (batch,) = table.combine_chunks().to_batches()
        arrays = {name: batch.column(name) for name in table.schema.names}
        if EVENT_TIME in planned.names:
            given = [self.now] * batch.num_rows if times is None else list(times)
            if len(given) != batch.num_rows:
                raise JobRejected(
                    f"push_many: {len(given)} event times for {batch.num_rows} rows; give one per row"
                )
            arrays[EVENT_TIME] = _times(given)
        elif times is not None and not self._pipeline.has_event_time:
            raise JobRejected("push: the stream has no event time (event_time=False)")
        columns = [arrays[name] for name in planned.names]
        self._runner.push(pa.RecordBatch.from_arrays(columns, schema=planned), input)

    def watermark(self, timestamp: int, *, input: int | None = None) -> None:
        """Says that no row at or before ``timestamp`` (ms) is expected: windows and timers fire.

        Args:
            timestamp: in ms.
            input: of one of two streams; None = of all. Event time is as far as the slower one is.
        """
        self._check_input(input or 0)
        if type(timestamp) is not int:
            raise JobRejected(f"watermark: {timestamp!r} is no time in ms")
        if not self._pipeline.has_event_time:
            raise JobRejected("watermark: the stream has no event time (event_time=False)")
        self._runner.watermark(timestamp, input)

    def advance(self, duration: str | float | timedelta) -> None:
        """Moves the clock on: processing-time timers and windows fire at their times, TTLs expire.

        Args:
            duration: "10s", a timedelta, or milliseconds.
        """
        self._runner.advance(self.now + argument_ms("advance", duration))

    def read(self, rows: int | None = None) -> None:
        """Lets a tested source read on.

        Args:
            rows: until so many have come out at least; None = until it has nothing for now, or has ended.
        """
        if not self._pipeline.has_source:
            raise JobRejected("read: no source is tested: call push()")
        self._runner.read(rows)

    def end(self, *, input: int | None = None) -> None:
        """Ends the data: the watermark goes to the end of time, everything fires, sinks commit.

        Args:
            input: of one of two streams only: what waits for it (``.broadcast(load_first=True)``) goes on;
                None = of all.
        """
        if self._pipeline.has_source:
            self._runner.read(None)
        else:
            self._check_input(input or 0)
            self._runner.end(input)

    # ------------------------------------------------------------ what comes out

    @property
    def output(self) -> list[Row]:
        """The rows that came out since the last ``take``."""
        return [row for batch in self._runner.batches for row in _rows_of(batch)]

    @overload
    def take(self, *, event_time: Literal[False] = False) -> list[Row]: ...

    @overload
    def take(self, *, event_time: Literal[True]) -> list[tuple[int, Row]]: ...

    def take(self, *, event_time: bool = False) -> list[Row] | list[tuple[int, Row]]:
        """Returns ``output`` and forgets it.

        Args:
            event_time: return (event time in ms, row) instead of rows.
        """
        batches = self._runner.batches
        if event_time and any(EVENT_TIME not in batch.schema.names for batch in batches):
            raise JobRejected("take: the output has no event time")
        rows = self.output
        self._runner.batches = []
        if not event_time:
            return rows
        times = [time for batch in batches for time in batch.column(EVENT_TIME).to_pylist()]
        return list(zip(times, rows, strict=True))

    def side(self, tag: str) -> list[Row]:
        """The rows that came out by a side output since the last call for it."""
        batches = self._runner.sides.pop(tag, [])
        return [row for batch in batches for row in _rows_of(batch)]

    @property
    def watermark_ms(self) -> int:
        """The last watermark that has come out; ``ps.MIN_WATERMARK`` before there is one."""
        return self._runner.watermark_ms

    @property
    def now(self) -> int:
        """The clock, in ms since the epoch."""
        return self._runner.clock.now_ms()

    @property
    def late_rows(self) -> int:
        """Rows that came too late for their windows, dropped or sent to a side output."""
        return self._runner.count("late_records")

    @property
    def bad_rows(self) -> int:
        """Rows that the error policy has dealt with (``.on_error``)."""
        return self._runner.count("bad_records")

    # ------------------------------------------------------------ state

    def state(self, name: str, key: Any = ..., *, operator: str | None = None) -> Any:
        """What a declared state holds.

        Args:
            name: of the state, as it is declared.
            key: whose; a tuple where there are several key columns. Left out for operator and broadcast
                state.
            operator: name or uid, where several functions have a state of that name.

        Returns:
            The value (or the default), a list, or a dict. Looking renews no TTL.
        """
        return self._runner.state(name, key, operator)

    def timers(
        self,
        key: Any = ...,
        *,
        domain: Literal["event", "processing"] = "event",
        operator: str | None = None,
    ) -> list[int]:
        """The times of the timers that are set, ascending, in ms.

        Args:
            key: whose; left out = of all keys.
            domain: "event" or "processing".
            operator: name or uid, where several functions have timers.
        """
        return self._runner.timers(domain, key, operator)

    def snapshot(self, *, complete: bool = True) -> bytes:
        """Takes a checkpoint; ``harness(..., restore=...)`` starts from what is returned.

        Args:
            complete: everybody is told that the checkpoint is complete, so that sinks commit; False: the
                job has "failed" right before that.
        """
        return self._runner.snapshot(is_completed=complete)


def _rows_of(batch: pa.RecordBatch) -> list[Row]:
    remedy = "cast the column at the end of what is tested"
    return dicts_of(user_batch(batch), remedy)


def _times(values: Sequence[Any]) -> pa.Array:
    try:
        return exact_array(values, pa.int64())
    except ValueError as error:
        raise JobRejected(f"push: event times are milliseconds, as integers: {error}") from error


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _are(count: int) -> str:
    return "is 1 input" if count == 1 else f"are {count} inputs"
