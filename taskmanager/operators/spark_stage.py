"""A Spark stage as an operator: keeps its input for Spark, has the driver do the stage, gives out what comes of it.

Nothing waits here: files are written on an I/O thread, the driver is watched by a thread of its own, and the chain is held
up meanwhile by ``is_available``. Neither watermarks nor event time go through: Spark sees rows, and gives out rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput, Pause, StreamStatus, Watermark, WrittenFiles
from penstock.errors import SparkFailed, TaskFailure
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes
from penstock.rows.spark_types import carried_schema
from taskmanager.connectors.hidden_files import foreign_directory, output_tag
from taskmanager.operators.operator import NOTHING, Operator, OperatorContext
from taskmanager.operators.placed_files import place_files
from taskmanager.partitions.in_place import check_files, is_below, seen_below
from taskmanager.spark.driver_runner import SparkDriverRunner
from taskmanager.spark.stage_files import (
    FUNCTION,
    OUTPUT,
    SparkOutputFile,
    StageInputFiles,
    earlier_attempts,
    indexed_output,
    read_rows,
    writing,
)
from taskmanager.spark.stage_messages import RunStage, StageInput
from taskmanager.spark.stage_table import StageEnd


class SparkStageOperator(Operator):
    """One attempt of a stage, or of a source that Spark reads."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._spec = spec.source.spark if spec.HasField("source") else spec.spark
        self._name = spec.name
        self._where = f"operator {spec.name!r}"
        self._schema = schema_from_bytes(spec.output_schema)
        self._is_writing = False
        self._is_running = False
        self._end: StageEnd | None = None

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._driver = _driver_of(context, self._name)
        place = (context.vertex_id, context.subtask_index, context.attempt)
        self._stage_id = f"{context.job_id}/{'-'.join(map(str, place))}"
        self._directory = self._driver.place.stage_directory(*place)
        self._log_file = self._driver.place.log_file(*place)
        schemas = [schema_from_bytes(schema) for schema in self._spec.input_schemas]
        self._inputs = [
            StageInputFiles(
                self._directory / f"in-{number}", schema, f"{self._where}, input {number + 1}"
            )
            for number, schema in enumerate(schemas)
        ]
        self._partitions = [one for given in context.in_place.values() for one in given]
        for number, partitions in context.in_place.items():
            for file in (file for one in partitions for file in one.files):
                self._inputs[number].files.append(str(file.path))
                context.counters.records_in += file.rows
                context.counters.bytes_in += file.size_bytes
        self._placed = {files.input: files.source for files in self._spec.files}
        self._output = self._output_directory()
        for left in earlier_attempts(self._directory):
            context.submit(partial(shutil.rmtree, left, ignore_errors=True))

    def _output_directory(self) -> Path:
        """Where Spark writes: beside the output of the sink that is given the files, if it sees that."""
        target = self._spec.output_directory
        place = seen_below(self.context.config)
        is_seen = place is None or is_below(Path(target), place)
        self._is_kept = bool(target) and is_seen
        if not self._is_kept:
            return self._directory / OUTPUT
        context = self.context
        tag = output_tag(context.job_id, self._spec.output_uid)
        place = foreign_directory(Path(target), tag, context.subtask_index, context.attempt)
        return place.absolute()

    # ------------------------------------------------------------ input

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        given = self._inputs[self.context.origins.input_index if len(self._inputs) > 1 else 0]
        given.add(batch)
        if given.is_full:
            self._write(given)
        return NOTHING

    @override
    def on_watermark(self, watermark: Watermark) -> Iterable[OperatorOutput]:
        return NOTHING

    @override
    def on_stream_status(self, status: StreamStatus) -> Iterable[OperatorOutput]:
        return NOTHING

    @override
    def is_available(self) -> bool:
        return not (self._is_writing or self._is_running)

    def _write(self, given: StageInputFiles) -> None:
        table, self._is_writing = given.take(), True
        self.context.run_in_background(lambda: given.write(table), self._on_written)

    def _on_written(self, _: None) -> None:
        self._is_writing = False
        self.context.wake()

    def _place(self, spec: graph_pb2.FileSource, given: StageInputFiles) -> None:
        self._is_writing = True
        place = partial(place_files, spec, given, seen_below(self.context.config))
        self.context.run_in_background(place, self._on_written)

    def _check(self) -> None:
        self._is_writing = True
        self.context.run_in_background(partial(check_files, self._partitions), self._on_written)

    # ------------------------------------------------------------ the stage

    @override
    def on_end_of_data(self) -> Iterator[OperatorOutput]:
        for number, given in enumerate(self._inputs):
            if number in self._placed:
                self._place(self._placed[number], given)
                yield Pause()  # until is_available
            elif given.is_open:
                self._write(given)
                yield Pause()
        if self._partitions:
            self._check()
            yield Pause()
        self._run()
        yield Pause()
        end = self._end
        assert end is not None, "the chain goes on when the stage has ended"
        if not end.is_done:
            if self._partitions:
                self._check()  # before anybody is to blame
                yield Pause()
            raise _failure(end, self._name)
        files = indexed_output(self._directory)
        if self._is_kept:
            yield WrittenFiles(tuple((file.path, file.rows) for file in files if file.rows))
            self.context.submit(partial(shutil.rmtree, self._output, ignore_errors=True))
            return
        full = [file for file in files if file.rows]
        size_bytes = sum(file.size_bytes for file in full)
        written = tuple((file.path, file.rows) for file in full)
        yield WrittenFiles(written, partial(self._rows, full), size_bytes)

    def _rows(self, files: Sequence[SparkOutputFile]) -> Iterator[pa.RecordBatch]:
        for file in files:
            yield from read_rows(file, self._schema, self.context.config.batch_rows, self._where)

    def _run(self) -> None:
        function_file = self._directory / FUNCTION
        with writing(function_file):
            self._directory.mkdir(parents=True, exist_ok=True)
            function_file.write_bytes(self._spec.function.pickled)
        stage = RunStage(
            stage_id=self._stage_id,
            operator=self._name,
            function_name=self._spec.function.display_name,
            function_file=str(function_file),
            inputs=tuple(StageInput(tuple(one.files), one.schema) for one in self._inputs),
            schema=carried_schema(self._schema),
            output=str(self._output),
            log_file=str(self._log_file),
            settings=self._driver.settings(self.context.job_name, self._spec.cores),
            is_kept=self._is_kept,
        )
        self._is_running = True
        self._driver.run(stage, self._spec.timeout_ms / 1000, self._on_end)

    def _on_end(self, end: StageEnd) -> None:
        """Called on the driver's thread."""
        self._end, self._is_running = end, False
        self.context.wake()

    @override
    def close(self) -> None:
        if self._is_running:
            self._driver.cancel(self._stage_id)
        self.context.submit(partial(_remove, self._directory, self._output))


def _failure(end: StageEnd, name: str) -> TaskFailure:
    kind = TaskFailure if end.user_traceback else SparkFailed
    return kind(end.message, operator=name, user_traceback=end.user_traceback)


def _driver_of(context: OperatorContext, name: str) -> SparkDriverRunner:
    if context.spark is None:
        raise TaskFailure(
            f"operator {name!r} runs on Spark, which this harness does not start: run the job on a cluster",
            operator=name,
        )
    return context.spark


def _remove(directory: Path, output: Path) -> None:
    """What an attempt has left, and the directory of the job where it was the last."""
    shutil.rmtree(output, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.parent.rmdir()
    except OSError:
        return  # another stage of the job has files there
