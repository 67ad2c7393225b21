"""Plays the transcript of an operator: a job, what it is given, and beside it what comes out.

The job runs as ``penstock.testing`` runs it, one harness per subtask. Each line of a step is a command; the lines
below ``push`` are a table of rows, in which the column ``at`` is their event time.

=========================  =======================================================================================
``job``                    the lines below define ``job(stream)``, ``job(left, right)`` or, without parameters and
                           with a source of its own, ``job(env)``, and ``schema``; ``directory`` is an empty one
``push``                   rows come, those of each subtask's keys to it
``watermark MS``           event time has come so far
``advance DURATION``       the clock moves
``read [N]``               sources read N rows, or all they have
``checkpoint [untold]``    is taken; untold: the job fails before anybody hears that it is complete
``crash``                  everything is gone but the last checkpoint
``restore at N``           it goes on, with N subtasks
``state NAME KEY``         what a state holds
``end``                    the end of the data
=========================  =======================================================================================

Where there are two streams, ``first`` or ``second`` behind a command says which one is meant.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import structlog.testing

import penstock as ps
from penstock.config import Configuration
from penstock.errors import StreamError
from penstock.graph.job_graph import validate
from penstock.graph.logical import reachable
from penstock.pb import graph_pb2
from penstock.planner.planner import Planner
from penstock.streams.stream import Stream
from penstock.testing import pipeline as building
from penstock.testing.harness import Harness
from tests.support.transcripts import shown, table

Backend = Literal["hashmap", "rocksdb"]


class OperatorPlayer:
    """Runs a job step by step.

    Args:
        backend: where its state lives; what comes out is the same.
        directory: an empty one, for files that it reads or writes.

    Attributes:
        operators: of the jobs that were built.
    """

    def __init__(self, backend: Backend, directory: Path) -> None:
        self.operators: list[graph_pb2.Operator] = []
        self._backend: Backend = backend
        self._directory = directory
        self._names: dict[str, Any] = {}
        self._harnesses: list[Harness] = []
        self._snapshots: list[bytes] = []
        self._checkpoints = 0
        self._now_ms = 0
        self._files: dict[str, str] = {}
        self._late = 0
        self._bad = 0
        self._watermark_ms: int | None = None

    def close(self) -> None:
        """Ends what runs."""
        for harness in self._harnesses:
            harness.close()
        self._harnesses = []

    def play(self, lines: Sequence[str]) -> list[str]:
        """What came out of one step."""
        printed = io.StringIO()
        said: list[str] = []
        with contextlib.redirect_stdout(printed), structlog.testing.capture_logs():
            if lines[0].startswith("job"):
                self._define(lines)
            else:
                for command, rows in _commands(lines):
                    try:
                        said += self._do(command, rows)
                    except StreamError as error:
                        said.append(f"{type(error).__name__}: {_first_line(error)}")
                        break
        said += [f"printed  {line}" for line in printed.getvalue().splitlines()]
        return [*said, *self._came_out()] or ["nothing"]

    # ------------------------------------------------------------ commands

    def _define(self, lines: Sequence[str]) -> None:
        self._names = {
            "__name__": "transcript",
            "ps": ps,
            "pa": pa,
            "col": ps.col,
            "directory": str(self._directory),
        }
        self._checkpoints = 0
        exec("\n".join(lines[1:]), self._names)
        self._start(int(lines[0].split()[-1]) if " at " in lines[0] else 1, [])

    def _start(self, parallelism: int, snapshots: Sequence[bytes]) -> None:
        self.close()
        self._late = self._bad = 0
        self._watermark_ms = None
        self._harnesses = [
            self._harness(index, parallelism, snapshots) for index in range(parallelism)
        ]

    def _harness(self, subtask: int, parallelism: int, snapshots: Sequence[bytes]) -> Harness:
        config = {
            "execution.checkpointing.jobmanager.max-size": 1 << 40,
            "parallelism.default": parallelism,
            "state.backend.type": self._backend,
        }
        settings = Configuration.from_mapping(config)
        pipeline = self._pipeline(settings)
        self.operators += [op for vertex in pipeline.graph.vertices for op in vertex.operators]
        return Harness(pipeline, settings, self._now_ms, list(snapshots) or None, subtask)

    def _pipeline(self, settings: Configuration) -> building.Pipeline:
        job = self._names["job"]
        if list(inspect.signature(job).parameters) == ["env"]:
            return _pipeline_of_sources(job, settings)
        count = building.input_count(job, None)
        first = self._names["schema"]
        schemas = [first, self._names.get("second_schema", first)][:count]
        return building.build(
            job,
            [building.row_schema(schema, "schema") for schema in schemas],
            building.Shape(((), ()), None, None),
            settings,
            has_event_time=self._names.get("event_time", True),
        )

    def _do(self, command: Sequence[str], rows: Sequence[str]) -> list[str]:
        verb, *words = command
        which = {"first": 0, "second": 1}.get(words[-1] if words else "")
        match verb:
            case "push":
                self._push(rows, which or 0)
            case "watermark":
                for harness in self._harnesses:
                    harness.watermark(int(words[0]), input=which)
            case "advance":
                for harness in self._harnesses:
                    harness.advance(words[0])
                self._now_ms = self._harnesses[0].now
            case "read":
                for harness in self._harnesses:
                    harness.read(int(words[0]) if words else None)
            case "checkpoint":
                told = words != ["untold"]
                self._snapshots = [each.snapshot(complete=told) for each in self._harnesses]
                self._checkpoints += 1
                return [f"checkpoint {self._checkpoints}"]
            case "crash":
                before = self._came_out()
                self.close()
                return [*before, f"gone: what came after checkpoint {self._checkpoints}"]
            case "restore":
                self._start(int(words[1]), self._snapshots)
            case "state":
                return self._state(*words)
            case "end":
                for harness in self._harnesses:
                    harness.end(input=which)
            case _:
                raise ValueError(f"a transcript has no command {verb!r}")
        return []

    def _push(self, lines: Sequence[str], input: int) -> None:
        header, *cells = [line.split() for line in lines]
        schema = self._harnesses[0]._schema(input)
        rows = [dict(zip(header, line, strict=True)) for line in cells]
        times = [int(row.pop("at")) for row in rows] if "at" in header else None
        parsed = [
            {name: _value(text, schema.field(name)) for name, text in row.items()} for row in rows
        ]
        for harness in self._harnesses:
            harness.push_many(parsed, times, input=input)

    def _state(self, name: str, key: str = "") -> list[str]:
        if not key:
            return [f"{name} = {shown(harness.state(name))}" for harness in self._harnesses]
        for harness in self._harnesses:
            with contextlib.suppress(ps.JobRejected):  # another subtask's key
                return [f"{name} of {key} = {shown(harness.state(name, key))}"]
        raise ValueError(f"there is no state {name!r} of {key!r}")

    # ------------------------------------------------------------ what comes out

    def _came_out(self) -> list[str]:
        rows = []
        for index, harness in enumerate(self._harnesses):
            place = {"subtask": index} if len(self._harnesses) > 1 else {}
            for tag in sorted(harness._runner.sides):
                rows += [{**place, "output": tag, **row} for row in harness.side(tag)]
            try:
                taken = [{"at": at, **row} for at, row in harness.take(event_time=True)]
            except StreamError:
                taken = harness.take()
            rows += [{**place, **row} for row in taken]
        # In which order a firing gives out its keys is nobody's promise.
        rows.sort(
            key=lambda row: (
                row.get("subtask", 0),
                row.get("output", ""),
                row.get("at", 0),
                repr(row),
            )
        )
        return [*(table(rows) if rows else []), *self._counts(), *self._changed_files()]

    def _counts(self) -> Iterator[str]:
        late = sum(harness.late_rows for harness in self._harnesses)
        bad = sum(harness.bad_rows for harness in self._harnesses)
        if late > self._late:
            yield f"late rows: {late}"
        if bad > self._bad:
            yield f"bad rows: {bad}"
        self._late, self._bad = late, bad
        if self._names.get("show_watermarks") and self._harnesses:
            now = min(harness.watermark_ms for harness in self._harnesses)
            if now not in (self._watermark_ms, ps.MIN_WATERMARK):
                yield "watermark: " + ("the end" if now > 1 << 61 else str(now))
            self._watermark_ms = now

    def _changed_files(self) -> list[str]:
        found = {
            str(path.relative_to(self._directory)): path.read_text()
            for path in sorted(self._directory.rglob("*"))
            if path.is_file() and path.suffix != ".csv_in"
        }
        changes = [f"- {name}" for name in sorted(self._files.keys() - found.keys())]
        for name, text in found.items():
            if text != self._files.get(name):
                changes.append(f"+ {name}  {' | '.join(text.splitlines())}".rstrip())
        self._files = found
        return changes


def _commands(lines: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Each command with the table below it; its lines are indented."""
    command: list[str] = []
    rows: list[str] = []
    for line in lines:
        if line.startswith(" "):
            rows.append(line)
            continue
        if command:
            yield command, rows
        command, rows = line.split(), []
    yield command, rows


def _value(text: str, field: pa.Field) -> Any:
    if text == "null":
        return None
    if pa.types.is_string(field.type):
        return text
    return pa.scalar(text).cast(field.type).as_py()


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def _pipeline_of_sources(job: Any, settings: Configuration) -> building.Pipeline:
    """As ``building.build`` plans a source that is tested, of any kind and with a chain behind it."""
    environment = ps.Environment()
    stream = job(environment)
    if isinstance(stream, Stream):
        building._take_output(environment._builder, stream._source)
    nodes = reachable(environment._builder.sinks)
    building._read_side_outputs(environment._builder, nodes)
    graph = Planner(reachable(environment._builder.sinks), settings).plan()
    graph.name = "test"
    graph.config.update(settings.to_mapping())
    validate(graph)
    return building.Pipeline(graph, (), isinstance(stream, Stream), True, False)
