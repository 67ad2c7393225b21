"""Aim: rows whose text is larger than 32-bit offsets reach are kept and given out as they came.

Method: the limit is lowered to a few bytes, so that small data crosses it everywhere; what comes out is compared with
the same without a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
import penstock.testing as pt
from penstock.storage import batch_parts
from taskmanager.state import row_table, value_log, wide_columns
from taskmanager.state.rocksdb import database_store, memory_shares, spilled_table
from taskmanager.state.row_table import concatenated
from taskmanager.state.value_log import GroupedLog, ValueLog
from taskmanager.state.value_words import ValueWords
from taskmanager.state.wide_columns import concatenated_array, narrow_pieces, taken

TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "text": (pa.string(), ["a", None, "ccc"]),
    "bytes": (pa.binary(), [b"a", None, b"ccc"]),
    "list": (pa.list_(pa.string()), [["a", "b"], None, []]),
    "struct": (pa.struct([("x", pa.string()), ("n", pa.int64())]), [{"x": "a", "n": 1}, None]),
    "map": (pa.map_(pa.string(), pa.binary()), [[("a", b"b")], None, []]),
    "number": (pa.int64(), [1, None, 3]),
    "codes": (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a"]),
}


@pytest.mark.parametrize("name", TYPES)
def test_pieces_become_one_array_of_wider_offsets_and_back(name: str) -> None:
    kind, values = TYPES[name]
    array = pa.array(values, kind)
    assert concatenated_array([array, array]).type == kind
    wide = concatenated_array([array, array, array], 1)
    assert wide.to_pylist() == values * 3
    pieces = list(narrow_pieces(wide, kind, 1))
    assert {piece.type for piece in pieces} == {kind}
    assert pa.chunked_array(pieces).to_pylist() == values * 3


def test_a_batch_gets_the_columns_that_it_needs() -> None:
    batch = pa.record_batch({"n": [1, 2], "text": ["aaaaaaaaaaaaaaaaaaaaaaa", "b"]})
    both = concatenated([batch, batch], bytes_max=40)
    assert both.schema.types == [pa.int64(), pa.large_string()]
    assert both.to_pylist() == batch.to_pylist() * 2


def test_a_log_keeps_chunks_below_the_limit() -> None:
    log = ValueLog(pa.string(), chunk_bytes_max=64)
    texts = [f"{n:03}" for n in range(200)]
    for start in range(0, 200, 4):
        log.append(pa.array(texts[start : start + 4]))
    assert max(chunk.nbytes for chunk in log._chunks) <= 64
    order = np.random.default_rng(1).permutation(200)
    assert log.take(order).to_pylist() == [texts[i] for i in order]
    log.keep(order[:50])
    assert log.take(np.arange(50)).to_pylist() == [texts[i] for i in order[:50]]
    assert {chunk.type for chunk in log._chunks} == {pa.string()}
    log.append(pa.array(["x"]))
    assert len(log) == 51


def test_groups_move_between_logs_with_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ValueLog.__init__, "__defaults__", (64,))
    log = GroupedLog(pa.string())
    for start in range(0, 100, 10):
        rows = np.arange(start, start + 10)
        log.append(rows % 3, rows, pa.array([f"value-{n}" for n in rows]))
    log.merge(log, np.array([0]), np.array([5]))
    log.clear(np.array([0]))
    counts, sequence, values = log.gather(np.array([5, 1]))
    expected = [*range(0, 100, 3), *range(1, 100, 3)]
    assert sequence.tolist() == expected
    assert counts.tolist() == [34, 33]
    assert values.to_pylist() == [f"value-{n}" for n in expected]


@pytest.fixture
def small_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if offsets reached 100 bytes."""
    for function, default in (
        (concatenated, 100),
        (concatenated_array, 100),
        (narrow_pieces, 100),
        (taken, 100),
        (ValueLog.__init__, 100),
        (ValueWords.__init__, 100),
    ):
        monkeypatch.setattr(function, "__defaults__", (default,))
    monkeypatch.setattr(wide_columns, "OFFSET_BYTES_MAX", 100)
    assert row_table.concatenated is concatenated
    assert value_log.ValueLog is ValueLog
    assert wide_columns.concatenated_array is concatenated_array


class Texts(ps.WindowFunction):
    @override
    def process(self, key: Any, window: Any, rows: Any, out: Any) -> Any:
        return [{"k": key, "text": "".join(row.text for row in rows), "tags": rows[0].tags}]


SCHEMA = pa.schema([("k", pa.string()), ("text", pa.string()), ("tags", pa.list_(pa.string()))])
WINDOW = ps.tumbling("1s")
OPERATORS: dict[str, Callable[[Any], Any]] = {
    "window": lambda s: s.key_by("k").window(WINDOW).process(Texts(), schema=SCHEMA),
    "all": lambda s: s.window(WINDOW).process(Texts(), schema=SCHEMA),
    "reduce": lambda s: (
        s.key_by("k").window(WINDOW).reduce(lambda a, b: {"text": a.text + b.text, "tags": a.tags})
    ),
    "session": lambda s: s.key_by("k").window(ps.session("1s")).process(Texts(), schema=SCHEMA),
    "count": lambda s: s.key_by("k").window(ps.count_window(40)).process(Texts(), schema=SCHEMA),
    "lists": lambda s: s.key_by("k").window(WINDOW).aggregate(all=ps.collect_list("text")),
    "lists of lists": lambda s: s.key_by("k").window(WINDOW).aggregate(all=ps.collect_list("tags")),
    "lists of sessions": lambda s: (
        s.key_by("text").window(ps.session("1s")).aggregate(all=ps.collect_list("k"))
    ),
    "running lists": lambda s: s.key_by("k").aggregate(all=ps.collect_list("text")),
    "different": lambda s: s.key_by("k").window(WINDOW).aggregate(n=ps.count_distinct("text")),
    "last": lambda s: s.key_by("text").window(WINDOW).aggregate(text2=ps.last("k")),
    "largest": lambda s: s.key_by("k").window(WINDOW).aggregate(text=ps.max("text")),
    "window join": lambda s: s.join(s.rename(text="other"), on="k", window=WINDOW),
    "interval join": lambda s: s.join(s.rename(text="other"), on="k", within=("-1ms", "1ms")),
    "session join": lambda s: s.join(s.rename(text="other"), on="k", window=ps.session("1s")),
}


def outcome(
    build: Callable[[Any], Any], backend: Any, config: dict[str, str] | None = None
) -> list[Any]:
    rows = [{"k": f"key-{n % 2}", "text": f"{n:05}" * 5, "tags": ["t", str(n)]} for n in range(80)]
    with pt.harness(build, schema=SCHEMA, backend=backend, config=config) as h:
        for start in range(0, 40, 8):
            h.push_many(rows[start : start + 8], list(range(start, start + 8)))
        snapshot = h.snapshot()
    with pt.harness(build, schema=SCHEMA, backend=backend, config=config, restore=snapshot) as h:
        for start in range(40, 80, 8):
            h.push_many(rows[start : start + 8], list(range(start, start + 8)))
        h.end()
        return sorted(h.output, key=str)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("name", OPERATORS)
def test_windows_and_joins_give_out_the_same_beyond_the_limit(
    name: str, backend: Any, request: pytest.FixtureRequest
) -> None:
    expected = outcome(OPERATORS[name], backend)
    assert expected
    request.getfixturevalue("small_offsets")
    assert outcome(OPERATORS[name], backend) == expected


@pytest.mark.parametrize("name", ["window join", "interval join", "session join", "lists"])
def test_results_leave_in_batches_that_offsets_reach(
    name: str, small_offsets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_columns, "OFFSET_BYTES_MAX", 2_000)
    column = "all" if name == "lists" else "text"
    keys = 5 if name == "lists" else 1
    rows = [{"k": str(n % keys), "text": f"{n:0150}", "tags": []} for n in range(20)]
    with pt.harness(OPERATORS[name], schema=SCHEMA) as h:
        for start in range(0, 20, 2):
            h.push_many(rows[start : start + 2], [5, 5])
        h.end()
        sizes = [batch.column(column).nbytes for batch in h._runner.batches]
        assert len(h.output) == (5 if name == "lists" else 400)
    assert len(sizes) > 1
    assert max(sizes) <= 2_100


@pytest.mark.parametrize("name", OPERATORS)
def test_parts_of_a_database_are_as_small_as_they_must_be(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is written and read again a few bytes at a time."""
    expected = outcome(OPERATORS[name], "hashmap")
    monkeypatch.setattr(database_store, "SCAN_BYTES", 100)
    monkeypatch.setattr(spilled_table, "PART_BYTES", 100)
    monkeypatch.setattr(batch_parts, "PART_BYTES", 100)
    monkeypatch.setattr(memory_shares, "CACHE_BYTES_MIN", 1 << 12)
    assert (
        outcome(OPERATORS[name], "rocksdb", {"taskmanager.memory.managed.size": "16kb"}) == expected
    )


def test_a_value_that_is_too_large_for_a_database_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database_store, "VALUE_BYTES_MAX", 100)
    monkeypatch.setattr(memory_shares, "CACHE_BYTES_MIN", 1 << 12)
    config = {"taskmanager.memory.managed.size": "16kb"}
    rows = [{"k": "one", "text": "x" * 200, "tags": []} for _ in range(400)]
    for name in ("window", "lists", "session", "window join"):
        with (
            pt.harness(OPERATORS[name], schema=SCHEMA, backend="rocksdb", config=config) as h,
            pytest.raises(ps.JobFailed, match="RocksDB keeps values of at most"),
        ):
            push_and_end(h, rows)


def push_and_end(h: pt.Harness, rows: list[dict[str, Any]]) -> None:
    for start in range(0, len(rows), 50):
        h.push_many(rows[start : start + 50], [5] * 50)
    h.end()
