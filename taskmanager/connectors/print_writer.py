"""The print sink: one line per row, ``[name (subtask/parallelism)] {"column": value, ...}``.

Lines go where all that user code prints goes: to the task's log, and on an embedded cluster to the terminal of
the user as well.
"""

from __future__ import annotations

import sys

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.sink import SinkContext
from penstock.rows.schema import user_batch
from taskmanager.connectors.json_text import json_rows
from taskmanager.connectors.sink_writer import SinkWriter


class PrintWriter(SinkWriter):
    """Prints to standard output.

    A batch is printed at a time, so its lines stay together.
    """

    _prefix = ""

    @override
    def open(self, ctx: SinkContext) -> None:
        self._prefix = f"[{ctx.operator_name} ({ctx.subtask_index + 1}/{ctx.parallelism})] "

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        lines = json_rows(user_batch(batch), before=self._prefix, space=" ")
        sys.stdout.write(lines.decode())

    @override
    def flush(self) -> None:
        sys.stdout.flush()

    @override
    def close(self) -> None:
        sys.stdout.flush()
