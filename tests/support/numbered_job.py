"""Jobs in which every row shows who made it: which subtask, in which life, and how often.

Row ``n`` of the source belongs to key ``n % KEYS``; the rows of each key are numbered from 1 by keyed
state, and carry the incarnation of the function that numbered them. So the output says without the engine's
help whether every row has had its effect once (``check``) and which functions were ever opened
(``incarnations``).
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import penstock as ps
from tests.support.committed_files import Table

KEYS = 40
ROW = pa.schema([("n", pa.int64()), ("key", pa.int64()), ("pad", pa.string())])
NUMBERED = pa.schema(
    [
        ("n", pa.int64()),
        ("key", pa.int64()),
        ("number", pa.int64()),
        ("subtask", pa.int64()),
        ("incarnation", pa.string()),
        ("at_ms", pa.int64()),
    ]
)
JOINED = pa.schema([("n", pa.int64()), ("key", pa.int64()), ("number", pa.int64())])

Before = Callable[[Any], None]
"""Called with each row before it is numbered; raises, waits or ends the process where a test says so."""


class _Marked:
    """Knows which copy of a function it is, and in which life."""

    def open(self, ctx: ps.FunctionContext) -> None:
        self.subtask = ctx.subtask_index
        self.incarnation = f"{ctx.attempt}-{os.getpid()}-{uuid.uuid4().hex}"

    def emit(self, row: Any, number: int, ctx: Any, out: Any) -> None:
        out.emit(
            n=row.n, key=row.key, number=number,
            subtask=self.subtask, incarnation=self.incarnation, at_ms=ctx.now_ms,
        )  # fmt: skip


class Number(_Marked, ps.KeyedProcessFunction):
    """Numbers the rows of each key."""

    last = ps.ValueState("last", pa.int64(), default=0)

    def __init__(self, before: Before | None = None) -> None:
        self.before = before

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        if self.before is not None:
            self.before(row)
        assert not row.pad.strip("x")
        number = self.last.value() + 1
        self.last.update(number)
        self.emit(row, number, ctx, out)


class Count(_Marked, ps.ProcessFunction):
    """Numbers the rows of a subtask, by a counter that lives in operator state."""

    counter = ps.OperatorListState("counter", ps.MSGPACK)

    def __init__(self, before: Before | None = None) -> None:
        self.before = before

    def open(self, ctx: ps.FunctionContext) -> None:
        super().open(ctx)
        self.n = sum(self.counter.get())

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        if self.before is not None:
            self.before(row)
        self.n += 1
        self.emit(row, self.n, ctx, out)

    def snapshot(self, ctx: ps.CheckpointContext) -> None:
        self.counter.update([self.n])


class Pair(ps.KeyedCoProcessFunction):
    """Joins a number with its row, whichever comes first; both come once."""

    row = ps.ValueState("row", pa.int64())
    number = ps.ValueState("number", pa.int64())

    def process_left(self, row: Any, ctx: Any, out: Any) -> None:
        self.number.update(row.number)
        self._join(row.n, out)

    def process_right(self, row: Any, ctx: Any, out: Any) -> None:
        self.row.update(row.key)
        self._join(row.n, out)

    def _join(self, n: int, out: Any) -> None:
        key, number = self.row.value(), self.number.value()
        if key is not None and number is not None:
            out.emit(n=n, key=key, number=number)


@dataclass(frozen=True)
class NumberedJob:
    """One job and its output.

    Attributes:
        rows: of the source.
        rate: rows per second of the source; None = as fast as it goes.
        output: directory of its outputs.
        pad_bytes: by which rows are longer than they need be, on their way to the numbering.
    """

    rows: int
    rate: float | None
    output: Path
    pad_bytes: int = 0

    @property
    def numbered(self) -> str:
        return str(self.output / "numbered")

    @property
    def joined(self) -> str:
        return str(self.output / "joined")

    # ------------------------------------------------------------ what runs

    def source(self, env: ps.Environment) -> ps.Stream:
        """Rows, made by columnar code that is reproducible."""
        pad = "x" * self.pad_bytes

        def make(start: int, count: int) -> pa.RecordBatch:
            numbers = range(start, start + count)
            columns = [list(numbers), [n % KEYS for n in numbers], [pad] * count]
            return pa.record_batch(columns, schema=ROW)

        return env.generate(make, rows=self.rows, rate=self.rate, schema=ROW).uid("rows")

    def build(self, env: ps.Environment, before: Before | None = None) -> None:
        """rows -> key_by -> number -> sink."""
        self._numbered(self.source(env), before).write_json(self.numbered).uid("sink")

    def build_pipelines(self, env: ps.Environment, before: Before | None = None) -> None:
        """Rows that never meet: each subtask reads, counts and writes its own."""
        counted = self.source(env).process(Count(before), schema=NUMBERED).uid("number")
        counted.write_json(self.numbered).uid("sink")

    def build_stages(
        self, env: ps.Environment, before: Before | None = None, exchange: str = ""
    ) -> None:
        """rows -> number, which is written; numbers and rows are joined behind it.

        Args:
            exchange: of the rows in front of the numbering, and of the numbers; "" = the mode's.
        """
        rows = self.source(env)
        if exchange:
            rows = rows.exchange(exchange)
        numbered = self._numbered(rows, before)
        if exchange:
            numbered = numbered.exchange(exchange)
        numbered.rebalance().write_json(self.numbered).uid("sink")
        pairs = numbered.key_by("n").connect(rows.key_by("n")).process(Pair(), schema=JOINED)
        pairs.uid("pair").write_json(self.joined).uid("joined-sink")

    def _numbered(self, rows: ps.Stream, before: Before | None) -> ps.Stream:
        return rows.key_by("key").process(Number(before), schema=NUMBERED).uid("number")

    # ------------------------------------------------------------ what must come out

    def written(self) -> list[dict[str, Any]]:
        """The rows that have been committed, each of them once.

        Raises:
            AssertionError: a row has come twice.
        """
        table = Table(self.numbered, lambda row: row["n"])
        table.look()
        return table.rows()

    def check(self) -> list[dict[str, Any]]:
        """Every row has had its effect once; returns what was written."""
        rows = self.written()
        assert sorted(row["n"] for row in rows) == list(range(self.rows))
        by_key: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            assert row["key"] == row["n"] % KEYS, row
            by_key[row["key"]].append(row["number"])
        for key, numbers in by_key.items():
            assert sorted(numbers) == list(range(1, len(numbers) + 1)), f"key {key}"
        return rows

    def check_stages(self) -> None:
        """The same of both outputs of ``build_stages``."""
        numbers = {row["n"]: row["number"] for row in self.check()}
        table = Table(self.joined, lambda row: row["n"])
        table.look()
        assert {row["n"]: row["number"] for row in table.rows()} == numbers

    def check_pipelines(self) -> list[dict[str, Any]]:
        """Every row has come once, each subtask's counted without a gap."""
        rows = self.written()
        assert sorted(row["n"] for row in rows) == list(range(self.rows))
        by_subtask: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            by_subtask[row["subtask"]].append(row["number"])
        for subtask, numbers in by_subtask.items():
            assert sorted(numbers) == list(range(1, len(numbers) + 1)), f"subtask {subtask}"
        return rows


def incarnations(rows: Iterable[dict[str, Any]]) -> dict[int, int]:
    """Subtask -> lives of its function that rows came from."""
    lives = {(row["subtask"], row["incarnation"]) for row in rows}
    return dict(Counter(subtask for subtask, _ in lives))


def longest_gap_ms(rows: Iterable[dict[str, Any]], subtask: int) -> int:
    """The longest time in which a subtask handled no row."""
    times = sorted(row["at_ms"] for row in rows if row["subtask"] == subtask)
    return max(later - earlier for earlier, later in itertools.pairwise(times))
