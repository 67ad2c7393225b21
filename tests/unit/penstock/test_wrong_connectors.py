"""Aim: a source or sink whose methods return something else says what, where and what to do; nothing is left unread or
unwritten without a word.

Method: sources and sinks on the harness with one wrong method each.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
import penstock.testing as pt

ROWS = pa.record_batch({"n": [1, 2]})
SPLIT = ps.Split("a")


class Two(ps.Reader):
    """One batch, then the end; other methods return what they are told."""

    def __init__(self, returned: dict[str, Any]) -> None:
        self.batches = [ROWS]
        self.returned = returned

    @override
    def read(self, max_rows: int) -> Any:
        if "next_read_at_ms" in self.returned:
            return None
        return self.batches.pop() if self.batches else ps.END

    @override
    def position(self) -> Any:
        return self.returned.get("position", b"")

    @override
    def next_read_at_ms(self) -> Any:
        return self.returned.get("next_read_at_ms")

    @override
    def min_event_time_ms(self) -> Any:
        return self.returned.get("min_event_time_ms")


class Numbers(ps.Source):
    schema = ROWS.schema

    def __init__(self, **returned: Any) -> None:
        self.returned = returned

    @override
    def discover(self, ctx: ps.SourceContext) -> Any:
        return self.returned.get("discover", [SPLIT])

    @override
    def discovery_interval_ms(self) -> Any:
        return self.returned.get("discovery_interval_ms")

    @override
    def open(self, split: ps.Split, position: bytes | None) -> Any:
        return self.returned.get("open", Two(self.returned))


def run_to_its_end(tested: ps.Source | ps.Sink, **options: Any) -> None:
    with pt.harness(tested, **options) as h:
        if isinstance(tested, ps.Source):
            h.read(2)
        else:
            h.push({"n": 1})
        h.snapshot()
        h.end()


@pytest.mark.parametrize(
    ("method", "returned", "message"),
    [
        ("discover", None, r"Numbers.discover\(\) returned None .*a list of ps.Split"),
        ("discover", "a", r"returned 'a' \(str\); it must return a list of ps.Split"),
        ("discover", ["a"], r"returned a list with 'a' \(str\); .* ps.Split\(id=...\)"),
        ("discover", [SPLIT, SPLIT], "lists split 'a' twice"),
        ("discover", [ps.Split(1)], r"whose id is 1 \(int\); it must be text"),  # type: ignore[arg-type]
        ("discover", [ps.Split("a", "x")], r"whose payload is 'x' \(str\); it must be bytes"),  # type: ignore[arg-type]
        ("discover", [ps.Split("a", b"", 0.5)], r"size is 0.5 \(float\).*an integer"),  # type: ignore[arg-type]
        ("discover", [ps.Split("a", b"", 0, 0.5)], r"min_event_time_ms is 0.5 \(float\)"),  # type: ignore[arg-type]
        ("discovery_interval_ms", "1s", r"returned '1s' \(str\); .* milliseconds as an integer"),
        ("open", None, r"Numbers.open\(\) returned None .*derived from ps.Reader"),
        ("position", None, r"Two.position\(\) returned None \(NoneType\); it must return bytes"),
        ("position", "1", r"returned '1' \(str\); .* str\(...\).encode\(\)"),
        ("next_read_at_ms", "soon", r"Two.next_read_at_ms\(\) returned 'soon'"),
        ("min_event_time_ms", 0.5, r"Two.min_event_time_ms\(\) returned 0.5"),
    ],
)
def test_what_a_source_must_not_return(method: str, returned: Any, message: str) -> None:
    with pytest.raises(ps.JobFailed, match=message) as failed:
        run_to_its_end(Numbers(**{method: returned}))
    assert failed.value.operator == "Numbers"


def test_a_source_gives_no_null_where_its_schema_has_none() -> None:
    """What counts and averages such a column looks at no nulls: a mean over 1 and null was 0.5."""

    class Numbered(Numbers):
        schema = pa.schema([pa.field("n", pa.int64(), nullable=False)])

        @override
        def open(self, split: ps.Split, position: bytes | None) -> Any:
            reader = Two({})
            reader.batches = [pa.RecordBatch.from_arrays([pa.array([1, None])], schema=self.schema)]
            return reader

    with pytest.raises(ps.JobFailed, match="a null in column 'n', which is declared as never null"):
        run_to_its_end(Numbered())


def test_splits_of_a_generator_are_read() -> None:
    class Yielding(Numbers):
        @override
        def discover(self, ctx: ps.SourceContext) -> Any:
            yield SPLIT

    with pt.harness(Yielding()) as h:
        h.end()
        assert h.output == [{"n": 1}, {"n": 2}]


def test_whether_a_source_ends_is_true_or_false() -> None:
    class Unsure(Numbers):
        bounded = None  # type: ignore[assignment]

    with pytest.raises(ps.JobRejected, match=r"Unsure\.bounded is None; .* True or False"):
        ps.Environment("127.0.0.1:1").source(Unsure())


class Kept(ps.TwoPhaseSink):
    @override
    def write(self, batch: pa.RecordBatch) -> None:
        pass

    @override
    def prepare_commit(self, checkpoint_id: int) -> list[bytes]:
        return [b"a"]

    @override
    def commit(self, committable: bytes) -> None:
        pass

    @override
    def abort(self, committable: bytes) -> None:
        pass


@pytest.mark.parametrize("method", ["open", "write", "flush", "commit"])
@pytest.mark.parametrize("kind", ["generator", "coroutine"])
def test_a_sink_of_which_no_line_runs_is_no_sink(method: str, kind: str) -> None:
    def generator(self: Any, *arguments: Any) -> Any:
        yield

    async def coroutine(self: Any, *arguments: Any) -> Any:
        await asyncio.sleep(0)

    call = generator if kind == "generator" else coroutine
    sink = type("Wrong", (Kept,), {method: call})()
    message = rf"Wrong.{method} raised .*{method} is a {kind}, .*: "
    with pytest.raises(ps.JobFailed, match=message):
        run_to_its_end(sink, schema=ROWS.schema)
