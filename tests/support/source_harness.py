"""Reads a source as a subtask would: a context that records, and a loop that reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from common.split_cuts import in_one_cut
from penstock.connectors.source import END, Source, SourceContext, Split
from penstock.errors import BadRecord
from penstock.pb import graph_pb2
from penstock.rows.column_values import ValueMismatch
from penstock.rows.conforming import conformed
from penstock.rows.schema import schema_to_bytes
from taskmanager.connectors.factory import build_source


@dataclass
class SourceHarness:
    """Opens sources as a subtask would, on a clock that the test moves."""

    skip_bad: bool = False
    now: int = 1_000_000
    parallelism: int = 1
    batch_rows: int = 8192
    event_time_column: str = ""
    artifact_paths: dict[str, str] = field(default_factory=dict)
    bad: list[tuple[str, str, str]] = field(default_factory=list)
    wakes: list[int] = field(default_factory=list)
    wake: Callable[[], None] | None = None
    takes_checkpoints: bool = True

    def on_bad(self, where: str, text: str, error: str) -> None:
        self.bad.append((where, text, error))
        if not self.skip_bad:
            raise BadRecord(f"{where}: {error}")

    def context(self) -> SourceContext:
        return SourceContext(
            job_id="j" * 32,
            operator_name="source",
            subtask_index=0,
            parallelism=self.parallelism,
            wake=self.wake or (lambda: self.wakes.append(1)),
            now_ms=lambda: self.now,
            bad_record=self.on_bad,
            artifact_paths=self.artifact_paths,
            event_time_column=self.event_time_column,
            batch_rows=self.batch_rows,
            takes_checkpoints=self.takes_checkpoints,
        )

    def start(self, spec: graph_pb2.SourceSpec, schema: pa.Schema) -> Source:
        operator = graph_pb2.Operator(
            uid="s", name="source", output_schema=schema_to_bytes(schema), source=spec
        )
        source = build_source(spec, operator)
        source.start(self.context())
        assert source.schema.equals(schema)
        return source

    def discover(self, source: Source) -> list[Split]:
        return source.discover(self.context())

    def read_split(
        self,
        source: Source,
        split: Split,
        max_rows: int = 8192,
        stop_after: int | None = None,
        position: bytes | None = None,
    ) -> tuple[list[pa.RecordBatch], bytes]:
        """The batches up to the end, or up to ``stop_after`` reads, and the position behind them."""
        reader = source.open(split, position)
        batches: list[pa.RecordBatch] = []
        reads = 0
        try:
            while stop_after is None or reads < stop_after:
                batch = reader.read(max_rows)
                reads += 1
                if batch is END:
                    break
                if batch is None:
                    due = reader.next_read_at_ms()
                    assert due is not None
                    self.now = max(self.now, due)
                    continue
                assert isinstance(batch, pa.RecordBatch)
                assert 0 < batch.num_rows <= max_rows
                batches.append(_conformed(batch, source.schema, split))
                batches[-1].validate(full=True)
            return batches, reader.position()
        finally:
            reader.close()

    def read_all(
        self, spec: graph_pb2.SourceSpec, schema: pa.Schema, max_rows: int = 8192
    ) -> pa.Table:
        source = self.start(spec, schema)
        batches: list[pa.RecordBatch] = []
        for split in in_one_cut(self.discover(source), lambda ids: [False] * len(ids)):
            batches.extend(self.read_split(source, split, max_rows)[0])
        return pa.Table.from_batches(batches, schema=schema)

    def rows(self, opened: tuple[graph_pb2.SourceSpec, pa.Schema], max_rows: int = 8192) -> Any:
        return self.read_all(*opened, max_rows=max_rows).to_pylist()


def _conformed(batch: pa.RecordBatch, schema: pa.Schema, split: Split) -> pa.RecordBatch:
    try:
        return conformed(batch, schema)
    except ValueMismatch as error:
        raise BadRecord(f"{split.id}: {error}") from error
