"""Aim: a savepoint is written from tables exactly, or not at all.

Method: everything that the golden set holds is written again and read again; the spool is made to use its files; and each
thing that cannot be right is refused by name, and leaves nothing behind.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
from penstock.errors import StoreTransient
from penstock.pb import checkpoint_pb2
from penstock.state_tables import keyed_spool_store, savepoint_writer_store
from penstock.state_tables.keyed_spool_store import KeyedSpool
from penstock.state_tables.table_parts import NumberPart, WrittenAs
from penstock.state_tables.value_columns import fitted
from penstock.storage.codec import StateError
from penstock.storage.fsck import check_store
from penstock.storage.hashing import hash_columns
from penstock.storage.local_store import LocalStore
from penstock.storage.object_store import SwapUnanswered
from penstock.storage.restore_point import open_restore_point
from penstock.storage.savepoint import COMMITTED_PATH, MANIFEST_PATH
from tests.support.golden_job import build

GOLDEN = Path(__file__).parents[3] / "golden"


def unpacked(name: str, target: Path) -> Path:
    with tarfile.open(max(GOLDEN.glob(f"runs-*/{name}.tar.gz"))) as archive:
        archive.extractall(target, filter="data")
    return target


def content(path: Path | str, *, without: str = "key_group") -> dict[tuple[str, str], Counter[str]]:
    """All rows of all states."""
    state = ps.open_state(path)
    return {
        (operator.uid, one.name): Counter(
            str({name: value for name, value in row.items() if name != without})
            for row in state.read(operator.uid, one.name).to_pylist()
        )
        for operator in state.operators
        for one in operator.states
    }


def all_tables(state: ps.StateTables) -> Mapping[str, Mapping[str, pa.Table]]:
    return {
        operator.uid: {
            one.name: state.read(operator.uid, one.name)
            for one in operator.states
            if "splits" not in one.name
        }
        for operator in state.operators
    }


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return unpacked("hashmap-canonical", tmp_path / "base")


@pytest.mark.parametrize("name", ["hashmap-canonical", "hashmap-checkpoint", "rocksdb-native"])
@pytest.mark.parametrize("max_parallelism", [None, 77])
def test_what_was_read_is_written_and_read_again(
    name: str, max_parallelism: int | None, tmp_path: Path
) -> None:
    source = unpacked(name, tmp_path / "base")
    given = ps.write_savepoint(
        tmp_path / "given",
        all_tables(ps.open_state(source)),
        base=source,
        max_parallelism=max_parallelism,
    )
    kept = ps.write_savepoint(tmp_path / "kept", {}, base=source, max_parallelism=max_parallelism)
    wanted = content(source, without="key_group" if max_parallelism else "")
    watermarks = [key for key in wanted if key[1] == "watermark"]
    for path in (given, kept):
        found = content(path, without="key_group" if max_parallelism else "")
        if max_parallelism:  # they say of which key-groups they are
            for key in watermarks:
                items = ps.open_state(path).read(*key)["item"].to_pylist()
                assert [struct.unpack("<qii", item)[1:] for item in items] == [(0, 76)]
                del found[key]
        assert found == {key: wanted[key] for key in found}
        assert {*wanted} - {*found} <= {*watermarks}
        assert check_store(path).is_healthy
        for operator in ps.open_state(path).operators:
            assert operator.max_parallelism == (max_parallelism or 128)


def test_watermarks_of_other_key_groups_are_refused(base: Path, tmp_path: Path) -> None:
    def write(items: list[bytes], name: str) -> None:
        given = {"sums": {"watermark": [{"item": item} for item in items]}}
        ps.write_savepoint(tmp_path / name, given, base=base)

    write([struct.pack("<qii", 5, 0, 99), struct.pack("<qii", 6, 100, 127)], "whole")
    with pytest.raises(
        ps.StateError, match=r"'sums'.*different times in its key-groups \(5 to 6 ms"
    ):
        write([struct.pack("<qii", 5, 0, 31), struct.pack("<qii", 6, 32, 63)], "half")
    with pytest.raises(ps.StateError, match=r"'sums'.*no watermark"):
        write([b"5"], "text")


def test_a_job_finds_its_keys_where_they_were_written(base: Path, tmp_path: Path) -> None:
    path = ps.write_savepoint(tmp_path / "new", {}, base=base, max_parallelism=60)
    table = ps.open_state(path).read("sums", "slices")
    groups = (hash_columns([table["k"]]) % np.uint64(60)).astype(int).tolist()
    assert table["key_group"].to_pylist() == groups


def test_what_is_larger_than_memory_goes_through_files(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = KeyedSpool.__init__

    def small(self: KeyedSpool, *given: Any) -> None:
        whole(self, *given, limit_bytes=200)

    monkeypatch.setattr(keyed_spool_store.KeyedSpool, "__init__", small)
    path = ps.write_savepoint(tmp_path / "new", all_tables(ps.open_state(base)), base=base)
    assert content(path, without="") == content(base, without="")
    manifest = open_restore_point(path).manifest
    held = [o for s in manifest.subtasks for o in s.operators if o.operator_uid == "states"]
    assert len(held) == 64, "a subtask per range"
    table = ps.open_state(path).read("states", "sums")
    tables = pa.concat_tables([table, table.slice(5, 1)])
    with pytest.raises(ps.StateError, match=r"state 'sums': k=\d+ is there twice"):
        ps.write_savepoint(tmp_path / "twice", {"states": {"sums": tables}}, base=base)


def test_keys_that_only_hash_alike_are_not_there_twice(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alike(columns: list[pa.Array]) -> np.ndarray:
        return np.zeros(len(columns[0]), np.uint64)

    table = ps.open_state(base).read("states", "sums")
    monkeypatch.setattr(keyed_spool_store, "hash_columns", alike)
    assert len(table) > 1
    ps.write_savepoint(tmp_path / "new", {"states": {"sums": table}}, base=base)
    tables = pa.concat_tables([table, table.slice(1, 1)])
    with pytest.raises(ps.StateError, match="is there twice"):
        ps.write_savepoint(tmp_path / "twice", {"states": {"sums": tables}}, base=base)


def test_states_are_replaced_added_and_dropped(base: Path, tmp_path: Path) -> None:
    build(job := ps.Environment(parallelism=1), tmp_path / "out")
    before = content(base)
    path = ps.write_savepoint(
        tmp_path / "new",
        {
            "states": {
                "sums": [{"k": 1, "value": 11}, {"k": 99, "value": -1}],
                "texts": pa.table({"k": [5], "map_key": ["a"], "value": [1]}),
                "timers.processing": [{"k": 1, "time_ms": 5}],
                "halves": [{"k": 1, "value": [0.5, 1.5]}, {"k": 2, "value": []}],  # no items: none
                "counts": None,
            },
            "within": None,
        },
        base=base,
        job=job,
    )
    state = ps.open_state(path)
    assert sorted(state.read("states", "sums").select(["k", "value"]).to_pylist(), key=str) == [
        {"k": 1, "value": 11},
        {"k": 99, "value": -1},
    ]
    assert state.read("states", "timers.processing")["time_ms"].to_pylist() == [5]
    assert state.read("states", "halves")["value"].to_pylist() == [[0.5, 1.5]]
    after = content(path)
    assert {*before} - {*after} == {key for key in before if key[0] == "within"}
    assert not after["states", "counts"]
    changed = ("sums", "texts", "timers.processing", "halves", "counts")
    same = {key for key in after if key[0] != "states" or key[1] not in changed}
    assert {key: after[key] for key in same} == {key: before.get(key, Counter()) for key in same}


class Unanswering(ps.KeyedBroadcastProcessFunction):
    """Does nothing at timers."""

    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None: ...

    @override
    def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None: ...


class Keeps(Unanswering):
    """Has states of all kinds of operators."""

    seen = ps.ValueState("seen", pa.bool_(), ttl=ps.Ttl("1h"))
    rules = ps.BroadcastState("rules", pa.string(), pa.int64())
    left = ps.OperatorListState("left", pa.int64())

    @override
    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None: ...


def kept_by(function: Any) -> ps.Environment:
    env = ps.Environment(parallelism=1)
    rows = env.from_rows([{"k": 1}]).uid("rows")
    kept = rows.key_by("k").connect(rows.broadcast()).process(function, schema={"k": "int64"})
    kept.uid("kept").discard()
    return env


def test_timers_are_written_for_functions_that_answer_them(tmp_path: Path) -> None:
    timers = {"kept": {"timers.processing": [{"k": 1, "time_ms": 5}]}}
    ps.write_savepoint(tmp_path / "answered", timers, job=kept_by(Keeps()))
    with pytest.raises(ps.StateError, match=r"no state 'timers\.processing' that can be written"):
        ps.write_savepoint(tmp_path / "refused", timers, job=kept_by(Unanswering()))


def test_a_declared_state_that_is_empty_is_a_table_and_is_written_without_the_job(
    tmp_path: Path,
) -> None:
    nothing = ps.open_state(ps.write_savepoint(tmp_path / "empty", {}, job=kept_by(Keeps())))
    kinds = {one.name: one.kind for one in nothing.operator("kept").states}
    timers = {"timers.event": "timers", "timers.processing": "timers"}
    assert kinds == {"seen": "value", "rules": "broadcast map", "left": "split list", **timers}
    columns = {name: nothing.read("kept", name).schema.names for name in kinds}
    assert columns["seen"] == ["k", "value", "written_at", "expires_at", "key_group"]
    assert columns["rules"] == ["map_key", "value"]
    assert columns["left"] == ["subtask", "item"]

    given = {"seen": [{"k": 1, "value": True}], "left": [{"item": 5}]}
    given["rules"] = [{"map_key": "a", "value": 7}]
    state = ps.open_state(ps.write_savepoint(tmp_path / "new", {"kept": given}, base=nothing))
    assert state.read("kept", "rules").to_pylist() == given["rules"]
    assert state.read("kept", "left")["item"].to_pylist() == [5]
    assert state.read("kept", "seen").select(["k", "value"]).to_pylist() == given["seen"]


def test_values_expire_as_it_is_said(tmp_path: Path) -> None:
    written, hour = DAY, dt.timedelta(hours=1)
    times = [(written, None), (None, written + hour), (written, written + hour), (None, None)]
    rows = [
        {"k": k, "value": True, "written_at": at, "expires_at": until}
        for k, (at, until) in enumerate(times)
    ]
    path = ps.write_savepoint(tmp_path / "new", {"kept": {"seen": rows}}, job=kept_by(Keeps()))
    found = {one["k"]: one for one in ps.open_state(path).read("kept", "seen").to_pylist()}
    assert [found[k]["written_at"] for k in range(3)] == [written] * 3
    assert all(one["expires_at"] - one["written_at"] == hour for one in found.values())
    assert found[3]["written_at"] > written
    rows[2]["expires_at"] += hour
    with pytest.raises(
        ps.StateError, match=r"'seen'.*'expires_at' has .* 3600000 ms behind 'written_at'"
    ):
        ps.write_savepoint(tmp_path / "both", {"kept": {"seen": rows}}, job=kept_by(Keeps()))


@pytest.mark.parametrize(
    ("subtask", "message"),
    [("x", "is int32, got string"), (1.5, "is int32, got double"), (-3, "has numbers below 0")],
)
def test_items_are_given_to_subtasks_by_number(subtask: Any, message: str, tmp_path: Path) -> None:
    items = {"kept": {"left": pa.table({"item": [5], "subtask": [subtask]})}}
    with pytest.raises(ps.StateError, match=f"state 'left' .*column 'subtask' {message}"):
        ps.write_savepoint(tmp_path / "new", items, job=kept_by(Keeps()))


AGGREGATED = {"k": [1, 2], "first": [1, 2], "all": [[1, 2], [3]], "all_sequence": [[0, 1], [2]]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"first": ["1", "2"]}, "column 'first' is int64, got string: cast it"),
        ({"first": [True, False]}, "column 'first' is int64, got bool: cast it"),
        ({"all": [["1", "2"], ["3"]]}, "column 'all' is list<.*>, got list<.*string>: cast it"),
        ({"all_sequence": [["0", "1"], ["2"]]}, "column 'all_sequence' is .*, got .*: cast it"),
        ({"all_sequence": [[0], [1, 2]]}, "'all_sequence' have lists of other lengths"),
        ({"all": [[1, None], [3]]}, "column 'all' has null among its items"),
        (
            {"all_sequence": [[0, 1], [2**63 - 1]]},
            "'running': a row has the place 9223372036854775807",
        ),
        ({}, ""),
    ],
)
def test_what_knows_its_order_is_taken_as_it_is_or_not_at_all(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    job = ps.Environment(parallelism=1)
    rows = job.from_rows([{"k": 1, "n": 2}]).uid("rows").key_by("k")
    rows.aggregate(first=ps.first("n"), all=ps.collect_list("n")).uid("kept").discard()
    states = {"kept": {"running": pa.table(AGGREGATED | given)}}
    if not message:
        state = ps.open_state(ps.write_savepoint(tmp_path / "new", states, job=job))
        table = state.read("kept", "running").sort_by("k")
        assert table.select(list(AGGREGATED)).to_pydict() == AGGREGATED
        [arrived] = state.read("kept", "arrived")["item"].to_pylist()
        assert struct.unpack("<q", arrived) == (3,), "what comes next is numbered behind them"
        return
    with pytest.raises(ps.StateError, match=message):
        ps.write_savepoint(tmp_path / "new", states, job=job)


def counted() -> ps.Environment:
    env = ps.Environment(parallelism=1)
    rows = env.from_rows([{"k": 1, "n": 2}]).uid("rows").key_by("k")
    rows.window(ps.count_window(3)).aggregate(m=ps.mean("n")).uid("kept").discard()
    return env


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, ""),
        ({"m_sum": None, "m_count": 0, "filled": 0}, ""),
        ({"filled": -1}, "'filled' has -1"),
        ({"filled": None}, "'filled' has nulls"),
        ({"window_index": -2}, "'window_index' has -2"),
        ({"m_sum": None}, "'m_sum' is null where 'm_count' is more than 0"),
    ],
)
def test_windows_of_so_many_rows_have_counts(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    row = {"k": 1, "filled": 1, "window_index": 0, "m_sum": 2.0, "m_count": 1} | given
    states = {"kept": {"counts": [row]}}
    if message:
        with pytest.raises(ps.StateError, match=f"'counts' of operator 'kept': column {message}"):
            ps.write_savepoint(tmp_path / "new", states, job=counted())
        return
    table = ps.open_state(ps.write_savepoint(tmp_path / "new", states, job=counted()))
    assert table.read("kept", "counts").select([*row]).to_pylist() == [row]


@pytest.mark.parametrize(
    ("window", "lateness", "start_ms", "is_over"),
    [
        (ps.tumbling("1s"), 0, 4000, True),
        (ps.tumbling("1s"), "2s", 4000, False),
        (ps.tumbling("1s"), 0, 5000, False),
        (ps.sliding("4s", "2s"), 0, 0, True),
        (ps.sliding("4s", "2s"), 0, 2000, False),
        (ps.sliding("4s", "2s", "1s"), 0, 1000, True),
    ],
)
def test_windows_that_are_over_in_the_base_are_refused(
    window: Any, lateness: Any, start_ms: int, is_over: bool, tmp_path: Path
) -> None:
    """Nothing would come of them: the job takes them for fired."""

    def job() -> ps.Environment:
        env = ps.Environment(parallelism=1)
        rows = env.from_rows([{"k": 1, "ts": 2}]).uid("rows").with_event_time("ts").uid("time")
        windowed = rows.key_by("k").window(window, allowed_lateness=lateness)
        windowed.aggregate(n=ps.count()).uid("kept").discard()
        return env

    base = ps.open_state(ps.write_savepoint(tmp_path / "base", {}, job=job()))
    [held] = [o for s in base.manifest.subtasks for o in s.operators if o.operator_uid == "kept"]
    held.lists.add(
        name="watermark",
        redistribution=checkpoint_pb2.REDISTRIBUTION_UNION,
        codec="watermark/1",
        items=[struct.pack("<qii", 4999, 0, 127)],
    )
    base = ps.open_state(ps.write_savepoint(tmp_path / "timed", {}, base=base))
    [name] = [n for n in base.schema("kept", "slices").names if n.endswith("_start")]
    at = dt.datetime.fromtimestamp(start_ms / 1000, dt.UTC)
    states: dict[str, Any] = {"slices": [{"k": 1, name: at, "n": 3}]}
    if is_over:
        with pytest.raises(
            ps.StateError,
            match=r"'slices' of operator 'kept' has a window that is over at \d+ ms, and .* 4999",
        ):
            ps.write_savepoint(tmp_path / "new", {"kept": states}, base=base)
        states["watermark"] = None
    path = ps.write_savepoint(tmp_path / "open", {"kept": states}, base=base)
    assert ps.open_state(path).read("kept", "slices")["n"].to_pylist() == [3]


FAR = 1 << 62
FAR_KEYS = [pa.timestamp("us", "UTC"), pa.timestamp("ms"), pa.duration("s")]


@pytest.mark.parametrize("kind", FAR_KEYS, ids=str)
def test_keys_that_python_has_no_value_for_are_told_of(kind: pa.DataType, tmp_path: Path) -> None:
    job = ps.Environment(parallelism=1)
    rows = job.from_arrow(pa.table({"k": pa.array([], kind), "n": pa.array([], "int64")}))
    rows.uid("rows").key_by("k").aggregate(n=ps.max("n")).uid("kept").discard()
    far = pa.array([FAR, FAR], "int64").view(kind)
    states = {"kept": {"running": pa.table({"k": far, "n": [1, 2]})}}
    with pytest.raises(ps.StateError, match=r"state 'running': k=.* is there twice"):
        ps.write_savepoint(tmp_path / "new", states, job=job)


NOON = dt.datetime(2020, 1, 1, 12)  # noqa: DTZ001
DAY = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
HOUR = dt.timedelta(hours=1)

WRONG: list[tuple[Any, str]] = [
    ({"sum": {"slices": []}}, r"no operator of uid 'sum': there are .*'numbers'"),
    ({"sums": {"slice": []}}, r"no state 'slice' that can be written: it has 'slices', 'watermark'"),
    ({"sums": []}, r"takes \{uid: \{state: table\}\}"),
    ([], r"takes \{uid: \{state: table\}\}"),
    ({"states": {"sums": [{"k": 1, "value": "x"}]}}, "its rows do not fit"),
    ({"states": {"sums": [{"k": 1, "value": 1}, {"k": 2, "value": 1.5}]}}, "row 1: .*'value'.*1.5"),
    ({"states": {"sums": [{"k": 1, "value": True}]}}, "row 0: .*'value'.*True"),
    ({"states": {"sums": [{"k": 1.5, "value": 1}]}}, "row 0: .*'k'.*1.5"),
    ({"states": {"sums": [{"k": 1, "valeu": 1}]}}, "unknown .'valeu'"),
    ({"states": {"sums": pa.table({"k": [1]})}}, "without 'value'; its columns are k: int64, value"),
    ({"states": {"sums": pa.table({"k": [1], "value": [1.5]})}}, "is int64, got double: cast it"),
    ({"states": {"sums": pa.table({"k": [1.0], "value": [1]})}}, "'k' is int64, got double"),
    ({"states": {"sums": pa.table({"k": ["a"], "value": [1]})}}, "'k' is int64, got string"),
    ({"states": {"sums": pa.table({"k": [True], "value": [1]})}}, "'k' is int64, got bool: cast it"),
    ({"states": {"sums": pa.table({"k": [NOON], "value": [1]})}}, "'k' is int64, got timestamp"),
    ({"states": {"timers.processing": pa.table({"k": [1], "time_ms": [NOON]})}}, "'time_ms' is int64, got timestamp"),
    ({"states": {"pairs": pa.table({"k": [1], "value": [{"low": 1, "hihg": 1}]})}}, "got struct<low: .*hihg: .*: cast it"),
    ({"states": {"sums": pa.table({"k": [1], "value": pa.nulls(1, "int64")})}}, "null is no value"),
    ({"states": {"sums": [{"k": 1, "value": 1}, {"k": 1, "value": 2}]}}, "k=1 is there twice"),
    (
        {"states": {"texts": [{"k": 1, "map_key": "a", "value": 1}] * 2}},
        "k=1, map_key='a' is there twice",
    ),
    ({"states": {"texts": [{"k": 1, "map_key": None, "value": 1}]}}, "'map_key' has nulls"),
    ({"states": {"pairs": [{"k": 1, "value": {"low": 1 << 70, "high": 1}}]}}, "do not fit"),
    ({"states": {"pairs": [{"k": 1, "value": {"low": 1, "hihg": 1}}]}}, "row 0: .*'hihg'"),
    ({"states": {"sums": 5}}, "given as int: give a pyarrow table"),
    ({"states": {"sums": [1, 2]}}, "an iterable of int, not of batches"),
    ({"sums": {"slices": [{"k": 1, "window_start": DAY, "number": 1, "c": -1}]}}, "'c' is a count, and has -1"),
    ({"distinct": {"slices": [{"k": 1, "window_start": DAY, "c": ["a", None]}]}}, "'c' has null among its items, .*: leave it out"),
    ({"states": {"sums": pa.table({"k": [1], "value": [1], "written_at": [NOON]})}}, "with unknown 'written_at'"),
    ({"states": {"sums": pa.table({"k": [1], "value": [1], "expires_at": [NOON]})}}, "with unknown 'expires_at'"),
    ({"states": {"halves": pa.table({"k": [1], "value": [[0.5]], "written_at": [[NOON]]})}}, "with unknown 'written_at'"),
    ({"sums": {"slices": [{"k": 1, "window_start": DAY, "window_end": DAY + dt.timedelta(1, 1), "number": 1, "c": 1}]}}, "'window_end' has .*: they are 86400000 ms long; leave"),
    ({"sessions": {"sessions": [{"k": 1, "window_start": DAY, "window_end": DAY, "number": 1}]}}, "'window_end' has 2020.*, not behind 'window_start', 2020"),
    (
        {"sessions": {"sessions": [{"k": k, "window_start": DAY + n * HOUR, "window_end": DAY + (n + length) * HOUR, "number": 1} for k, n, length in [(1, 5, 1), (2, 1, 9), (3, 3, 2), (2, 0, 1)]]}},
        "'sessions': k=2 has sessions that touch, 2020-01-01 00:00.* to 2020-01-01 01:00.* and 2020-01-01 01:00.* to 2020-01-01 10:00.*: give them as one",
    ),
    (
        {"sums": {"slices": pa.table({"k": [1], "window_start": [pa.scalar(2**62 + 1, pa.timestamp("ms", "UTC"))], "number": [1], "c": [1]})}},
        "'window_start' has .*, where none begins",
    ),
    (
        {"sums": {"slices": pa.table({"k": [1], "window_start": [pa.scalar(5, pa.timestamp("ms", "UTC"))], "number": [1], "c": [1]})}},
        "where none begins: they begin every 86400000 ms",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([NOON], pa.date32()),
        ([[NOON]], pa.list_(pa.date32())),
        ([{"a": [NOON]}], pa.struct([("a", pa.list_(pa.date32()))])),
        ([{"a": 1, "b": 2}], pa.struct([("a", pa.int64())])),
        ([[True]], pa.list_(pa.int64())),
        ([["1"]], pa.list_(pa.int64())),
        ([[{"a": 1}]], pa.list_(pa.map_(pa.string(), pa.int64()))),
        ([1], pa.duration("us")),
        ([1], pa.bool_()),
        ([1.0], pa.decimal128(5, 2)),
    ],
    ids=str,
)
def test_values_of_another_kind_are_not_taken(values: list[Any], wanted: pa.DataType) -> None:
    with pytest.raises(ps.StateError, match=r"^here is .*, got .*: cast it to"):
        fitted(pa.array(values), wanted, "here")


def test_values_of_the_same_kind_are_taken() -> None:
    given = pa.array([{"b": [1], "a": "x"}])
    wanted = pa.struct([("a", pa.large_string()), ("b", pa.list_(pa.float64())), ("c", pa.int8())])
    assert fitted(given, wanted, "here").to_pylist() == [{"a": "x", "b": [1.0], "c": None}]
    assert fitted(pa.array(["x"]), pa.large_string(), "here").to_pylist() == ["x"]
    # Spark has durations and times of day as numbers.
    spans = fitted(pa.array([[1, None]]), pa.list_(pa.duration("ms")), "here")
    assert spans.to_pylist() == [[dt.timedelta(milliseconds=1), None]]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(0.1, pa.float32()), (1e300, pa.float32()), (70_000, pa.float16()), (2049, pa.float16())],
    ids=str,
)
def test_values_that_a_float_would_round_are_not_taken(value: float, wanted: pa.DataType) -> None:
    with pytest.raises(ps.StateError, match=r"^here is .*, got .* that does not fit: "):
        fitted(pa.array([value]), wanted, "here")
    assert fitted(pa.array([1.5, math.inf, None]), wanted, "here").to_pylist() == [
        1.5,
        math.inf,
        None,
    ]


@pytest.mark.parametrize(("states", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_fit_is_refused_and_leaves_nothing(
    states: Any, message: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(ps.StateError, match=message):
        ps.write_savepoint(tmp_path / "new", states, base=base)
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").rglob("*"))


def test_a_source_that_fails_in_the_middle_leaves_nothing(base: Path, tmp_path: Path) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"k": [1], "value": [1]})
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        ps.write_savepoint(tmp_path / "new", {"states": {"sums": rows()}}, base=base)
    assert not list((tmp_path / "new").rglob("*"))


@pytest.mark.parametrize("fails", [True, False])
def test_a_savepoint_that_another_writer_has_put_there_meanwhile_stays(
    fails: bool, base: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    mark = base / COMMITTED_PATH  # which both write as it is
    mark.write_text("by its job")
    tables = all_tables(ps.open_state(base))
    # Before anything else is there of it.
    uid, name = next((uid, next(iter(own))) for uid, own in tables.items() if own)

    def rows() -> Iterator[pa.RecordBatch]:
        ps.write_savepoint(new, {}, base=base)
        if fails:
            raise OSError("gone")
        yield from tables[uid][name].to_batches()

    error, told = (OSError, "gone") if fails else (ps.StateError, "was written there meanwhile")
    with pytest.raises(error, match=told):
        ps.write_savepoint(new, {uid: {name: rows()}}, base=base)
    assert content(new) == content(base)
    assert (new / COMMITTED_PATH).read_text() == mark.read_text()
    assert check_store(str(new)).jobs[0].orphans == ()


class LosingAnswers(LocalStore):
    """The answer to the swap of a savepoint's manifest is lost: once, or as long as nothing can be read either."""

    lost: ClassVar[Callable[[], bool]]
    stays_silent = False
    is_silent = False

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        is_done = super().compare_and_swap(path, expected, new)
        if path == MANIFEST_PATH and expected is None:
            self.is_silent = self.stays_silent
            return type(self).lost()
        return is_done

    @override
    def get(self, path: str) -> bytes:
        if self.is_silent:
            raise StoreTransient("no answer")
        return super().get(path)


def unanswered() -> bool:
    raise SwapUnanswered("no answer")


def failed() -> bool:
    raise StoreTransient("the directory cannot be synced")


@pytest.mark.parametrize("lost", [unanswered, failed, lambda: False])
@pytest.mark.parametrize("stays_silent", [False, True])
def test_a_savepoint_stays_though_the_answer_to_its_last_write_is_lost(
    lost: Callable[[], bool],
    stays_silent: bool,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LosingAnswers, "lost", lost, raising=False)
    monkeypatch.setattr(LosingAnswers, "stays_silent", stays_silent)
    new = tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(savepoint_writer_store, "open_store", lambda uri: LosingAnswers(Path(uri)))
        told = (
            pytest.raises(SwapUnanswered, match="may or may not") if stays_silent else nullcontext()
        )
        with told:
            ps.write_savepoint(new, {}, base=base)
    assert content(new) == content(base)


def test_a_directory_that_holds_something_is_left_alone(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ps.StateError, match="is not empty"):
        ps.write_savepoint(base, {}, base=base)
    with pytest.raises(ps.StateError, match="needs base="):
        ps.write_savepoint(tmp_path / "new", {})
    for wrong in ("64", True):
        with pytest.raises(ps.StateError, match="is no number of key-groups"):
            ps.write_savepoint(tmp_path / "new", {}, base=base, max_parallelism=wrong)  # type: ignore[arg-type]
    assert content(base)


@pytest.mark.parametrize(
    "spelt", ["{base}/new", "{base}//state/deep/new/", "{base}/../base/new", "file://{link}/new"]
)
def test_no_savepoint_is_written_inside_of_another(spelt: str, base: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(base)
    before = sorted(base.rglob("*"))
    with pytest.raises(ps.StateError, match=rf"inside of the savepoint {base}: .* outside of it"):
        ps.write_savepoint(spelt.format(base=base, link=tmp_path / "link"), {}, base=base)
    assert sorted(base.rglob("*")) == before


def test_no_savepoint_is_written_among_a_jobs_checkpoints(tmp_path: Path) -> None:
    job = unpacked("hashmap-checkpoint", tmp_path / "job")
    with pytest.raises(
        ps.StateError, match=rf"inside of the directory of a job's checkpoints {job}"
    ):
        ps.write_savepoint(job / "kept" / "new", {}, base=job)
    assert not (job / "kept").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "manifest").write_text("of something else")
    (mine / "HEAD").write_text("ref: refs/heads/main")
    assert content(ps.write_savepoint(mine / "new", {}, base=job))


def test_a_job_that_could_not_start_from_it_is_told_so(base: Path, tmp_path: Path) -> None:
    env = ps.Environment(parallelism=1)
    rows = env.from_rows([{"k": 1, "n": 2}]).uid("numbers")
    rows.key_by("k").aggregate(number=ps.max("n")).uid("sums").discard()
    with pytest.raises(ps.JobRejected, match=r"cannot be started.*uid 'states'.*no such operator"):
        ps.write_savepoint(tmp_path / "new", {"sums": None}, base=base, job=env)
    with pytest.raises(ps.StateError, match="the job has no operator of uid 'states'"):
        ps.write_savepoint(tmp_path / "new", {"states": None}, base=base, job=env)


def taken_by_two_names(first: pa.Array, second: list[Any]) -> pa.Array:
    part = NumberPart(pa.field("s", first.type), ("s", "m_sum"), is_count=False)
    columns = {"s": first, "m_sum": pa.array(second, first.type)}
    return part.stored(columns, WrittenAs(0, "here"))["s"]


def test_a_number_that_is_read_by_two_names_is_written_by_both() -> None:
    """A sum of rows one of which had NaN was unequal to itself."""
    sums = pa.array([0.0, math.nan, None])
    assert taken_by_two_names(sums, [-0.0, math.nan, None]) is sums
    assert taken_by_two_names(pa.array([1, None]), [1, None]).to_pylist() == [1, None]
    for other in ([1.0, math.nan, None], [0.0, None, None], [0.0, math.nan, math.nan]):
        with pytest.raises(StateError, match="here: columns 's' and 'm_sum' are one number, and"):
            taken_by_two_names(sums, other)
