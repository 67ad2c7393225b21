"""The print sink: one line per row, ``[name (subtask/parallelism)] {"column": value, ...}``.

Lines go to the task's log, and on an embedded cluster to the terminal of the user as well.
"""

from __future__ import annotations

import sys
from typing import TextIO

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.sink import SinkContext
from penstock.schema import user_batch
from taskmanager.connectors.json_text import json_rows
from taskmanager.connectors.sink_writer import SinkWriter
from taskmanager.task.user_output import terminal


_TERMINAL_VARIABLE = "PENSTOCK_TERMINAL_FD"


class PrintWriter(SinkWriter):
    """Prints to standard output, and to the terminal where the slot has been given one.

    A batch is printed at a time, so its lines stay together.
    """

    _prefix = ""
    _terminal: int | None = None
    _terminal: TextIO | None = None

    @override
    def open(self, ctx: SinkContext) -> None:
        self._prefix = f"[{ctx.operator_name} ({ctx.subtask_index + 1}/{ctx.parallelism})] "
        descriptor = os.environ.get(_TERMINAL_VARIABLE)
        self._terminal = int(descriptor) if descriptor else None
        self._terminal = terminal()

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        rows = user_batch(batch)
        text = json_rows(rows, before=self._prefix, space=" ").decode()
        sys.stdout.write(text)
        if self._terminal is not None:
            self._terminal.write(text)

    @override
    def flush(self) -> None:
        sys.stdout.flush()
        if self._terminal is not None:
            self._terminal.flush()

    @override
    def close(self) -> None:
        self.flush()
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
