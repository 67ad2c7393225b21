"""The print sink: one line per row, ``[name (subtask/parallelism)] {"column": value, ...}``.

Lines go to the task's log, and on an embedded cluster to the terminal of the user as well.
"""

from __future__ import annotations

import os
import sys

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.sink import SinkContext
from penstock.schema import user_batch
from taskmanager.connectors.json_text import json_rows
from taskmanager.connectors.sink_writer import SinkWriter

_TERMINAL_VARIABLE = "PENSTOCK_TERMINAL_FD"


class PrintWriter(SinkWriter):
    """Prints to standard output, and to the terminal where the slot has been given one.

    A batch is printed at a time, so its lines stay together.
    """

    _prefix = ""
    _terminal: int | None = None

    @override
    def open(self, ctx: SinkContext) -> None:
        self._prefix = f"[{ctx.operator_name} ({ctx.subtask_index + 1}/{ctx.parallelism})] "
        descriptor = os.environ.get(_TERMINAL_VARIABLE)
        self._terminal = int(descriptor) if descriptor else None

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        lines = json_rows(user_batch(batch), before=self._prefix, space=" ")
        sys.stdout.write(lines.decode())
        if self._terminal is not None:
            _write_all(self._terminal, lines)

    @override
    def flush(self) -> None:
        sys.stdout.flush()

    @override
    def close(self) -> None:
        sys.stdout.flush()


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
