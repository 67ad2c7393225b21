"""Numbers that do not run out before a test says so, however slow the machine is, and of which some come with each checkpoint,
however fast it is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from typing_extensions import override

import penstock as ps

_LOOK_MS = 10


class PacedNumbers(ps.Source):
    """The numbers ``n`` from 0 on, dealt out to splits. Each split gives some of its numbers, more once it has been part of a
    checkpoint, and never the last one, until a file is there; then all the others at once.

    Args:
        rows: how many there are.
        gate: the file.
        splits: a subtask reads one or more.
        rows_at_once: of a split, before its first checkpoint and behind each.
    """

    schema = pa.schema({"n": pa.int64()})

    def __init__(self, rows: int, gate: Path, splits: int = 1, rows_at_once: int = 100) -> None:
        self.rows, self.gate, self.splits, self.rows_at_once = rows, gate, splits, rows_at_once

    @override
    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        return [ps.Split(str(index), b"", size=1) for index in range(self.splits)]

    @override
    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        numbers = range(int(split.id), self.rows, self.splits)
        return _Reader(self, numbers, int(position or b"0"))


class _Reader(ps.Reader):
    def __init__(self, source: PacedNumbers, numbers: range, given: int) -> None:
        self.source, self.numbers, self.given, self.saved = source, numbers, given, given

    @override
    def read(self, max_rows: int) -> Any:
        if self.given == len(self.numbers):
            return ps.END
        bound = len(self.numbers)
        if not self.source.gate.exists():
            bound = min(bound - 1, self.saved + self.source.rows_at_once)
        numbers = self.numbers[self.given : min(bound, self.given + max_rows)]
        if not numbers:
            return None
        self.given += len(numbers)
        return pa.record_batch({"n": pa.array(numbers, pa.int64())})

    @override
    def next_read_at_ms(self) -> int | None:
        return time.time_ns() // 1_000_000 + _LOOK_MS

    @override
    def position(self) -> bytes:
        self.saved = self.given
        return b"%d" % self.given
