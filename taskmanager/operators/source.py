"""The head of a source's chain: discovers splits, takes the ones assigned, reads them.

Subtask 0 discovers and reports to the JobManager, which assigns every split to one subtask. Splits that end
are read one by one in the order of assignment, those with the smallest event times first where these are known.
Of those that do not, all are read in turn: none has to wait for the end of another.

A snapshot holds the splits that the subtask has: those being read with their positions, the others as they came,
and the names of those that it has read to their end since the last checkpoint it knows to be complete. Of those
before, the JobManager keeps a digest, and after a restore assigns what is neither named nor known so; so a split is
read once, whatever has been discovered meanwhile, and however many there have been.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import structlog

from common.clock import SteadyMs, steady_ms
from common.elements import OperatorOutput, OriginEnded, SideOutput
from common.pb import internal_pb2
from penstock.connectors.source import END, PART_OF, Reader, Source, SourceContext, Split
from penstock.errors import BadRecord, TaskFailure
from penstock.functions.functions import check_has_run
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.rows.column_values import ValueMismatch, cut_text, row_text
from penstock.rows.conforming import conformed, has_null
from penstock.rows.schema import schema_from_bytes
from taskmanager.connectors.factory import build_source
from taskmanager.operators.done_names import DoneNames
from taskmanager.operators.operator import NOTHING, OperatorContext
from taskmanager.operators.silences import SILENT_MS, Silences
from taskmanager.operators.source_contract import (
    checked_milliseconds,
    checked_position,
    checked_reader,
    checked_splits,
)
from taskmanager.user_code.user_failure import error_text, user_traceback

_log = structlog.get_logger()

BAD_RECORD_SCHEMA = pa.schema(
    [("where", pa.string()), ("text", pa.string()), ("error", pa.string())]
)
"""Rows of a source's side output for bad records."""

_LISTING = "its listing"
_ASKED_AGAIN_MS = 100
"""A reader that has nothing, and says neither when nor calls ``wake``."""
_NOT_WOKEN_MS = 1_000
"""A user's reader that could call ``wake``, or says when by a clock that is set: its rows come late, and not never."""

T = TypeVar("T")
ReportSplits = Callable[[internal_pb2.SplitsDiscovered], None]


class SourceOperator:
    """Reads the splits of one subtask of a source.

    Attributes:
        split_parallelism: how many subtasks its splits were made for.
    """

    def __init__(self, spec: graph_pb2.Operator, event_time_column: str) -> None:
        self.split_parallelism = 0
        self._spec = spec
        self._event_time_column = event_time_column
        self._schema = schema_from_bytes(spec.output_schema)
        self._declared = _declared(spec.source, self._schema)
        self._splits: deque[Split] = deque()
        self._reading: deque[tuple[Split, Reader]] = deque()
        """What is being read, the next first; at most one where splits end."""
        self._last: tuple[Split, Reader] | None = None
        """What the batch handed out last came from."""
        self._kept: npt.NDArray[np.int64] | None = None
        """Which rows of those that were read last were handed out; None = all."""
        self._bad: list[tuple[str, str, str]] = []
        self._lists_again_at: SteadyMs | None = None
        self._listed: frozenset[str] | None = None
        self._has_listed_all = True
        """Of who discovers: all that it finds was reported."""
        self._positions: dict[str, bytes] = {}
        self._done = DoneNames()
        self._dry: set[str] = set()
        """Splits of which the last read brought nothing."""
        self._has_news = False
        self._silences = Silences()
        self._asked_again_ms = 0
        """How long after a None a reader that does not say when is asked again; 0 = when it is woken only."""

    def open(
        self,
        context: OperatorContext,
        report_splits: ReportSplits,
        restored: Iterable[checkpoint_pb2.SplitSnapshot] = (),
        split_parallelism: int = 0,
    ) -> None:
        """Starts the source with the splits it had; subtask 0 begins to discover.

        Args:
            split_parallelism: how many subtasks the splits were made for before; 0 = as many as there are. Made for
                another number they would be others, and rows would be read twice.
        """
        self.split_parallelism = split_parallelism or context.parallelism
        self._context = context
        self._report_splits = report_splits
        self._source = self._guard(lambda: build_source(self._spec.source, self._spec))
        context.origins.bounded = self._source.bounded
        context.origins.has_waiting = lambda split: split not in self._dry
        self._source_context = SourceContext(
            job_id=context.job_id,
            operator_name=context.operator_name,
            subtask_index=context.subtask_index,
            parallelism=context.parallelism,
            wake=context.wake,
            now_ms=context.clock.now_ms,
            bad_record=self._on_bad_record,
            artifact_paths=context.artifact_paths,
            event_time_column=self._event_time_column,
            batch_rows=context.config.batch_rows,
            submit=context.submit_apart if self._spec.source.HasField("custom") else context.submit,
            post=context.post,
            takes_checkpoints=context.takes_checkpoints,
        )
        self._name = type(self._source).__name__
        self._guard(lambda: check_has_run(self._source.start(self._source_context), "start"))  # type: ignore[func-returns-value]
        if type(self._source).start is Source.start:
            self._asked_again_ms = _ASKED_AGAIN_MS
        elif self._spec.source.HasField("custom"):
            self._asked_again_ms = _NOT_WOKEN_MS
        self._discovery_context = replace(self._source_context, parallelism=self.split_parallelism)
        self._restore(restored)
        if context.subtask_index == 0:
            self._has_listed_all = False
            self._discover()

    def _restore(self, restored: Iterable[checkpoint_pb2.SplitSnapshot]) -> None:
        for snapshot in restored:
            if snapshot.done:
                continue
            if snapshot.HasField("position"):
                self._positions[snapshot.id] = snapshot.position
            bound = snapshot.min_event_time_ms if snapshot.HasField("min_event_time_ms") else None
            self._splits.append(Split(snapshot.id, snapshot.payload, snapshot.size, bound))
            self._context.origins.add(snapshot.id, bound)

    def split_snapshots(self, checkpoint_id: int) -> list[checkpoint_pb2.SplitSnapshot]:
        """Every split of this subtask as it stands between two batches, but for those that a completed
        checkpoint knows as done."""
        done = self._done.snapshot(checkpoint_id)
        snapshots = [checkpoint_pb2.SplitSnapshot(id=id, done=True) for id in done]
        for split, reader in self._reading:
            position = self._guard(partial(_position, reader))
            snapshots.append(_snapshot(split, position))
        snapshots += [_snapshot(split, self._positions.get(split.id)) for split in self._splits]
        return snapshots

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """What it knows as done is named no more."""
        self._done.completed(checkpoint_id)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The next one names what it has named."""
        self._done.aborted(checkpoint_id)

    def _discover(self) -> None:
        self._lists_again_at = None
        self._await(_LISTING)
        self._context.run_in_background(lambda: self._guard(self._list), self._on_discovered)

    def _list(self) -> Sequence[Split]:
        return checked_splits(self._name, self._source.discover(self._discovery_context))

    def _on_discovered(self, splits: Sequence[Split]) -> None:
        self._silences.end(_LISTING)
        interval_ms = self._guard(
            lambda: checked_milliseconds(
                f"{self._name}.discovery_interval_ms", self._source.discovery_interval_ms()
            )
        )
        # What is listed again after it was away is reported again; the JobManager knows what it has assigned.
        before = self._listed or frozenset()
        new = [split for split in splits if split.id not in before]
        if new or self._listed is None or interval_ms is None:
            self._report_splits(
                internal_pb2.SplitsDiscovered(
                    operator_uid=self._spec.uid,
                    splits=[_split_to_proto(split) for split in new],
                    final=interval_ms is None,
                )
            )
        self._listed = frozenset(split.id for split in splits)
        if interval_ms is None:
            self._has_listed_all = True
            self._context.wake()
        else:
            self._lists_again_at = SteadyMs(steady_ms(self._context.clock) + interval_ms)
            self._context.call_after(interval_ms)

    def on_pause_over(self) -> None:
        """Lists again where it is time to, and says what does not come; paced readers are asked again by ``poll``."""
        now = steady_ms(self._context.clock)
        for what in self._silences.due(now):
            if what == _LISTING or self._is_being_read(what):
                reason = f"nothing has come of it for {SILENT_MS // 1000} s: does its storage hang, or a function?"
                _log.warning("source.silent", operator=self._spec.name, what=what, reason=reason)
        if (silent_in_ms := self._silences.left_ms(now)) is not None:
            self._context.call_after(silent_in_ms)
        if self._lists_again_at is None:
            return
        left_ms = self._lists_again_at - now
        if left_ms <= 0:
            self._discover()
        else:
            self._context.call_after(left_ms)

    def add_splits(self, command: internal_pb2.AddSplits) -> None:
        """Takes splits that the JobManager assigned to this subtask."""
        origins = self._context.origins
        for proto in command.splits:
            split = _split_from_proto(proto)
            self._splits.append(split)
            origins.add(split.id, split.min_event_time_ms)
        if all(split.min_event_time_ms is not None for split in self._splits):
            self._splits = deque(
                sorted(self._splits, key=lambda split: split.min_event_time_ms or 0)
            )
        origins.all_known = origins.all_known or command.final
        self._has_news = True
        self._context.wake()

    def _await(self, what: str) -> None:
        """What is silent for too long is told of: once, until it has come."""
        if self._silences.begin(what, steady_ms(self._context.clock)):
            self._context.call_after(SILENT_MS)

    def _is_being_read(self, split_id: str) -> bool:
        """Whether rows are on their way still: those that have come wait where there is no room for them."""
        return any(split.id == split_id and reader.is_reading() for split, reader in self._reading)

    @property
    def is_finished(self) -> bool:
        """True when every split is read and no more will come.

        Also of an unbounded source: one whose splits have all ended (a socket that the server has closed)
        has nothing left to read. Who discovers goes on until it has: a JobManager that takes the job over knows no
        other splits than those which are in what it has reported, though the one before knew them all.
        """
        is_read = self._context.origins.all_known and not self._reading and not self._splits
        return is_read and self._has_listed_all

    def poll(self) -> Iterable[OperatorOutput] | None:
        """The next rows, or None when there are none for now."""
        while self._splits and (self._source.has_endless_splits or not self._reading):
            self._open_next()
        if not self._reading:
            # A subtask that got no split says once that it is idle: it must hold nothing back.
            return NOTHING if self._take_news() else None
        for _ in range(len(self._reading)):
            split, reader = self._last = self._reading[0]
            self._reading.rotate(-1)
            outputs = self._read(split, reader)
            if outputs is not None:
                return outputs
        return None

    def _read(self, split: Split, reader: Reader) -> Iterable[OperatorOutput] | None:
        """The next rows of a split, or None when it has none for now."""
        self._kept = None
        origins = self._context.origins
        origins.current = split.id
        # What was read before has gone through the chain by now.
        origins.rest_is_from(split.id, self._guard(lambda: _rest_is_from(reader)))
        read = self._guard(lambda: reader.read(self._context.config.batch_rows))
        bad = self._take_bad_records()
        self._dry.discard(split.id)
        if read is not None:
            self._silences.end(split.id)
        if read is END:
            self._guard(reader.close)
            self._reading.pop()  # it was put last
            self._last = None
            origins.end(split.id)
            self._done.append(split.id)
            return (*bad, OriginEnded(split.id))
        if read is None:
            if reader.is_reading():
                self._await(split.id)
            else:
                self._silences.end(split.id)
                self._dry.add(split.id)
            pause_ms = self._asked_again_ms
            next_at_ms = self._guard(lambda: _next_read_at_ms(reader))
            if (
                next_at_ms is not None
            ):  # by the wall clock, which may be set before: it is asked in between
                pause_ms = min(max(next_at_ms - self._context.clock.now_ms(), 1), _NOT_WOKEN_MS)
            if pause_ms:
                self._context.call_after(pause_ms)
            return bad or None
        if not isinstance(read, pa.RecordBatch):
            raise TaskFailure(
                f"read() returned {type(read).__name__}, not a RecordBatch, None or ps.END",
                operator=self._spec.name,
            )
        if read.num_rows == 0:
            return bad or NOTHING
        self._context.counters.records_in += read.num_rows
        good = self._without_bad_nulls(read)
        bad += self._take_bad_records()
        return (*bad, self._conform(good)) if good.num_rows else bad

    def _take_news(self) -> bool:
        has_news, self._has_news = self._has_news, False
        return has_news

    def _open_next(self) -> None:
        split = self._splits.popleft()
        position = self._positions.pop(split.id, None)
        reader = self._guard(lambda: checked_reader(self._name, self._source.open(split, position)))
        self._reading.append((split, reader))
        self._context.origins.start(split.id)

    def _without_bad_nulls(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch without rows that are null where none may be, which are bad records."""
        if self._declared is self._schema or self._fails_at_bad_records:
            return batch
        found = {
            field.name: batch.column(field.name)
            for field in self._declared
            if not field.nullable
            and field.name in batch.schema.names
            and has_null(batch.column(field.name))
        }
        if not found:
            return batch
        is_bad = np.zeros(batch.num_rows, bool)
        for name, column in found.items():
            nulls = column.is_null().to_numpy(zero_copy_only=False)
            for index in np.flatnonzero(nulls & ~is_bad).tolist():
                where = self.position_of(batch.num_rows, index)
                reason = f"a null in column {name!r}, which is declared as never null"
                self._on_bad_record(where, row_text(batch, index), reason)
            is_bad |= nulls
        self._kept = np.flatnonzero(~is_bad)
        return batch.take(pa.array(self._kept))

    def _conform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        try:
            rows = conformed(batch, self._declared)
            if self._declared is self._schema:
                return rows
            return pa.RecordBatch.from_arrays(rows.columns, schema=self._schema)
        except ValueMismatch as error:
            index = error.index if error.index >= 0 else None
            raise BadRecord(
                f"the source returned {error}",
                operator=self._spec.name,
                row="" if index is None else row_text(batch, index),
                position=self.position_of(batch.num_rows, index),
            ) from error

    def position_of(self, rows: int, index: int | None) -> str:
        """Where rows of the batch handed out last stand, as a person finds them.

        Args:
            index: which of them it is about, None = any.
        """
        if self._last is None:
            return ""
        split, reader = self._last
        whole = split.id.partition(PART_OF)[0]
        where = whole if self._spec.source.HasField("files") else f"split {whole!r}"
        first, last = (0, rows - 1) if index is None else (index, index)
        if self._kept is not None and rows:
            first, last = int(self._kept[first]), int(self._kept[last])
        try:
            numbers = reader.row_number(first), reader.row_number(last)
        except Exception as error:  # noqa: BLE001 - the failure to be described must not get lost
            _log.warning("source.row_number_failed", reason=repr(error), split=split.id)
            return where
        if None in numbers:
            return where
        noun = reader.row_noun
        if numbers[0] == numbers[1]:
            return f"{where}, {noun} {numbers[0]}"
        return f"{where}, {noun}s {numbers[0]} to {numbers[1]}"

    @property
    def _fails_at_bad_records(self) -> bool:
        return self._spec.on_error.action == graph_pb2.ERROR_ACTION_FAIL

    def _on_bad_record(self, where: str, text: str, error: str) -> None:
        if self._fails_at_bad_records:
            raise BadRecord(
                f"{where}: {error}",
                operator=self._spec.name,
                row=cut_text(text),
                position=where,
            )
        self._context.counters.bad_records += 1
        if self._spec.on_error.action == graph_pb2.ERROR_ACTION_SIDE_OUTPUT:
            self._bad.append((where, text, error))

    def _take_bad_records(self) -> tuple[SideOutput, ...]:
        if not self._bad:
            return ()
        columns = [list(column) for column in zip(*self._bad, strict=True)]
        self._bad = []
        batch = pa.RecordBatch.from_arrays(
            [pa.array(column, pa.string()) for column in columns], schema=BAD_RECORD_SCHEMA
        )
        return (SideOutput(self._spec.on_error.tag, batch),)

    def _guard(self, call: Callable[[], T]) -> T:
        """Turns what connector code raises into a failure that names the operator."""
        try:
            return call()
        except TaskFailure as failure:
            failure.operator = failure.operator or self._spec.name
            raise
        except (Exception, SystemExit) as error:
            raise TaskFailure(
                error_text(error),
                operator=self._spec.name,
                user_traceback=user_traceback(error),
            ) from error

    def close(self) -> None:
        """Closes the readers that are open."""
        while self._reading:
            _, reader = self._reading.popleft()
            reader.close()


def _position(reader: Reader) -> bytes:
    return checked_position(type(reader).__name__, reader.position())


def _rest_is_from(reader: Reader) -> int | None:
    name = f"{type(reader).__name__}.min_event_time_ms"
    return checked_milliseconds(name, reader.min_event_time_ms())


def _next_read_at_ms(reader: Reader) -> int | None:
    name = f"{type(reader).__name__}.next_read_at_ms"
    return checked_milliseconds(name, reader.next_read_at_ms())


def _split_to_proto(split: Split) -> internal_pb2.Split:
    return internal_pb2.Split(
        id=split.id,
        payload=split.payload,
        size=split.size,
        min_event_time_ms=split.min_event_time_ms,
        replaces=split.replaces,
    )


def _declared(source: graph_pb2.SourceSpec, schema: pa.Schema) -> pa.Schema:
    """The schema that a source's rows must have, with what is declared as never null there.

    The stream's own schema has it as nullable, which state was stored by.
    """
    if source.HasField("files"):
        in_files = schema_from_bytes(source.files.schema)
        never_null = {field.name for field in in_files if not field.nullable}
    else:
        never_null = set(source.generator.never_null)
    if not never_null:
        return schema
    return pa.schema(
        [field.with_nullable(False) if field.name in never_null else field for field in schema]
    )


def _split_from_proto(proto: internal_pb2.Split) -> Split:
    bound = proto.min_event_time_ms if proto.HasField("min_event_time_ms") else None
    return Split(proto.id, proto.payload, proto.size, bound)


def _snapshot(split: Split, position: bytes | None) -> checkpoint_pb2.SplitSnapshot:
    return checkpoint_pb2.SplitSnapshot(
        id=split.id,
        payload=split.payload,
        size=split.size,
        min_event_time_ms=split.min_event_time_ms,
        position=position,
    )
