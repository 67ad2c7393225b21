"""The print sink: one line per row, ``[name (subtask/parallelism)] {"column": value, ...}``."""

from __future__ import annotations

import sys

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.sink import SinkContext
from penstock.schema import user_batch
from taskmanager.connectors.json_text import json_rows
from taskmanager.connectors.sink_writer import SinkWriter


class PrintWriter(SinkWriter):
    """Prints to standard output, a batch at a time: a batch's lines stay together."""

    _prefix = ""

    @override
    def open(self, ctx: SinkContext) -> None:
        self._prefix = f"[{ctx.operator_name} ({ctx.subtask_index + 1}/{ctx.parallelism})] "

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        rows = user_batch(batch)
        sys.stdout.write(json_rows(rows, before=self._prefix, space=" ").decode())

    @override
    def flush(self) -> None:
        sys.stdout.flush()

    @override
    def close(self) -> None:
        sys.stdout.flush()
