"""Aim: with ``load_first`` a function sees no row of the other input before its side is read whole: in every run,
at any parallelism, over restarts; no checkpoint completes meanwhile, and nothing of the side is read twice.

Method: real cluster. Sources note each read in a file and wait for files that the test makes, so that the order of
events is the test's.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import StreamError
from penstock.pb import client_pb2
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import DEADLINE_S, cancel, run

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

FLIGHT = pa.schema([("n", pa.int64()), ("code", pa.string())])
AIRPORT = pa.schema([("code", pa.string()), ("name", pa.string())])
NAMED = pa.schema([("n", pa.int64()), ("name", pa.string())])
CODES = [f"A{number:03}" for number in range(300)]
FLIGHTS = 5_000


class _Reader(ps.Reader):
    def __init__(self, source: Rows, split: int, given: int) -> None:
        self.source, self.split, self.given = source, split, given

    def read(self, max_rows: int) -> Any:
        source = self.source
        with source.notes.open("a") as notes:
            notes.write("read\n")
        rows = source.rows[self.split :: source.splits]
        gate = source.gates.get(self.given)
        if gate is not None and not gate.exists():
            return None
        if self.given >= len(rows):
            return ps.END
        end = min([len(rows), self.given + 100, *(at for at in source.gates if at > self.given)])
        batch = pa.RecordBatch.from_pylist(rows[self.given : end], schema=source.schema)
        self.given = end
        return batch

    def next_read_at_ms(self) -> int | None:
        return 0

    def position(self) -> bytes:
        return str(self.given).encode()


class Rows(ps.Source):
    """Rows in splits; the reader of each waits at the rows of ``gates`` for their files."""

    schema = FLIGHT

    def __init__(
        self,
        schema: pa.Schema,
        rows: list[dict[str, Any]],
        notes: Path,
        gates: dict[int, Path] | None = None,
        splits: int = 1,
    ) -> None:
        self.rows, self.notes, self.gates, self.splits = rows, notes, gates or {}, splits
        self.schema = schema

    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        return [ps.Split(str(split), b"", size=1) for split in range(self.splits)]

    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        return _Reader(self, int(split.id), int(position or b"0"))


class Name(ps.BroadcastProcessFunction):
    names = ps.BroadcastState("names", pa.string(), pa.string())

    def __init__(self, fails: tuple[int, Path] | None = None) -> None:
        self.fails = fails

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        if self.fails is not None and row.n == self.fails[0] and not self.fails[1].exists():
            self.fails[1].touch()
            raise RuntimeError("as the test wants it")
        out.emit(n=row.n, name=self.names.get(row.code))

    def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
        self.names.put(row.code, row.name)


class NameKeyed(Name, ps.KeyedBroadcastProcessFunction):
    pass


def flights(notes: Path, gates: dict[int, Path] | None = None, splits: int = 2) -> Rows:
    rows = [{"n": n, "code": CODES[n % len(CODES)]} for n in range(FLIGHTS)]
    return Rows(FLIGHT, rows, notes, gates, splits)


def airports(notes: Path, gates: dict[int, Path] | None = None, splits: int = 1) -> Rows:
    rows = [{"code": code, "name": f"name of {code}"} for code in CODES]
    return Rows(AIRPORT, rows, notes, gates, splits)


def check(rows: list[Any]) -> None:
    assert sorted(row.n for row in rows) == list(range(FLIGHTS))
    assert all(row.name == f"name of {CODES[row.n % len(CODES)]}" for row in rows)


def lines(notes: Path) -> int:
    return len(notes.read_text().splitlines()) if notes.exists() else 0


def await_running(handle: ps.JobHandle, restarts: int = 0, *, may_wait: bool = False) -> None:
    class Held(Exception):  # noqa: N818 - not an error
        pass

    def look(details: client_pb2.JobDetails) -> None:
        live = [client_pb2.ATTEMPT_STATE_RUNNING, client_pb2.ATTEMPT_STATE_FINISHED]
        live += [client_pb2.ATTEMPT_STATE_CREATED] if may_wait else []
        subtasks = [subtask for vertex in details.vertices for subtask in vertex.subtasks]
        states = [subtask.state for subtask in subtasks]
        has_restarted = max(subtask.attempt for subtask in subtasks) >= restarts
        if has_restarted and live[0] in states and all(state in live for state in states):
            raise Held

    with pytest.raises(Held):
        handle.wait(DEADLINE_S, on_progress=look)


def await_checkpoint(handle: ps.JobHandle) -> None:
    """Takes one as soon as the side has been read."""
    while True:
        try:
            handle.checkpoint()
        except StreamError as error:
            waits = ("load_first", "not all tasks of the job are running")
            assert any(words in str(error) for words in waits)  # noqa: PT017 - until it has been loaded
        else:
            return


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("exchange", ["pipelined", "caching", "blocking"])
@pytest.mark.parametrize(("mode", "load_first"), [("streaming", True), ("batch", None)])
def test_every_row_finds_its_name(
    new_env: NewEnvironment,
    tmp_path: Path,
    mode: str,
    load_first: bool | None,
    exchange: str,
    keyed: bool,
) -> None:
    parallelism = random.Random(exchange).choice([1, 2, 3])
    env = new_env(parallelism, config={"execution.runtime-mode": mode})
    main = env.source(flights(tmp_path / "flights"))
    side = env.source(airports(tmp_path / "airports", splits=3))
    if (exchange, mode) != ("blocking", "streaming"):  # which is refused
        side = side.exchange(exchange)
    other = side.broadcast(load_first=load_first) if load_first is not None else side.broadcast()
    if keyed:
        named = main.exchange(exchange).key_by("code").connect(other)
        rows = named.process(NameKeyed(), schema=NAMED).collect()
    else:
        rows = main.exchange(exchange).connect(other).process(Name(), schema=NAMED).collect()
    run(env)
    check(list(rows))


@pytest.mark.parametrize("mode", ["streaming", "batch"])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_stream_that_is_its_own_side(
    new_env: NewEnvironment, tmp_path: Path, mode: str, keyed: bool
) -> None:
    env = new_env(2, config={"execution.runtime-mode": mode})
    rows = env.source(flights(tmp_path / "flights"))
    names = rows.select(code=ps.col("code"), name=ps.fn.utf8_lower(ps.col("code")))
    side = names.broadcast(load_first=True)
    function: Any = NameKeyed() if keyed else Name()
    main: Any = rows.key_by("code") if keyed else rows
    collected = main.connect(side).process(function, schema=NAMED).collect()
    run(env)
    found = list(collected)
    assert sorted(row.n for row in found) == list(range(FLIGHTS))
    assert all(row.name == CODES[row.n % len(CODES)].lower() for row in found)


def test_an_empty_side(new_env: NewEnvironment, tmp_path: Path) -> None:
    env = new_env(2)
    side = env.from_rows([], schema=AIRPORT).broadcast(load_first=True)
    rows = env.source(flights(tmp_path / "f")).connect(side).process(Name(), schema=NAMED).collect()
    run(env)
    found = list(rows)
    assert len(found) == FLIGHTS
    assert {row.name for row in found} == {None}


def restarting(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.checkpointing.interval": "50ms",
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": 3,
        "restart-strategy.fixed-delay.delay": "10ms",
        **more,
    }


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("strategy", ["region", "full"])
@pytest.mark.parametrize("exchange", ["pipelined", "caching"])
def test_no_checkpoint_while_loading_and_nothing_is_read_again(
    new_env: NewEnvironment, tmp_path: Path, exchange: str, strategy: str, backend: str
) -> None:
    gate, second = tmp_path / "gate", tmp_path / "second"
    config = restarting(tmp_path)
    config["jobmanager.execution.failover-strategy"] = strategy
    config["state.backend.type"] = backend
    env = new_env(2, config=config)
    read, side_read = tmp_path / "read", tmp_path / "side-read"
    main = env.source(flights(read, {2_000: second})).exchange(exchange)
    side = (
        env.source(airports(side_read, {150: gate})).exchange(exchange).broadcast(load_first=True)
    )
    function = NameKeyed((4_500, tmp_path / "failed"))
    rows = main.key_by("code").connect(side).process(function, schema=NAMED).collect()
    handle = env.submit("enrichment")
    await_running(handle)
    with pytest.raises(StreamError, match="load_first"):
        handle.checkpoint()
    if exchange == "pipelined":
        assert not read.exists(), "the source that waits is not read"
    assert handle.checkpoints() == []
    gate.touch()
    await_checkpoint(handle)
    loaded = lines(side_read)
    second.touch()
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert (tmp_path / "failed").exists()
    assert lines(side_read) == loaded, "what was loaded is restored"
    check(list(rows))
    assert all(entry.status != "failed" for entry in handle.checkpoints()), handle.checkpoints()


@pytest.mark.parametrize("strategy", ["region", "full"])
def test_no_checkpoint_while_a_blocking_exchange_leads_to_the_side(
    new_env: NewEnvironment, tmp_path: Path, strategy: str
) -> None:
    """After a full restart what it keeps is made again, and not handed on again."""
    gate, second, failed = tmp_path / "gate", tmp_path / "second", tmp_path / "failed"
    config = restarting(tmp_path)
    config["jobmanager.execution.failover-strategy"] = strategy
    env = new_env(2, config=config)

    class Once(Name):
        def process(self, row: Any, ctx: Any, out: Any) -> None:
            assert len(self.names) == len(CODES), "the side is not whole"
            super().process(row, ctx, out)

        def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
            assert row.code not in self.names, "the side is read again"
            super().process_broadcast(row, ctx, out)

    side = env.source(airports(tmp_path / "a", {150: gate})).exchange("blocking").rebalance()
    other = side.filter(ps.col("name").is_valid()).broadcast(load_first=True)
    main = env.source(flights(tmp_path / "f", {2_000: second}))
    rows = main.connect(other).process(Once((4_500, failed)), schema=NAMED).collect()
    handle = env.submit("blocking in front")
    await_running(handle, may_wait=True)
    with pytest.raises(StreamError, match="load_first"):
        handle.checkpoint()
    assert handle.checkpoints() == []
    gate.touch()
    await_checkpoint(handle)
    made = lines(tmp_path / "a")
    second.touch()
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert failed.exists()
    assert (lines(tmp_path / "a") > made) == (strategy == "full")
    check(list(rows))


def test_a_failure_while_loading_loads_again(new_env: NewEnvironment, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    env = new_env(2, config=restarting(tmp_path))
    failed = tmp_path / "failed"

    class Failing(Name):
        def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
            if row.code == CODES[100] and not failed.exists():
                failed.touch()
                raise RuntimeError("as the test wants it")
            super().process_broadcast(row, ctx, out)

    side = env.source(airports(tmp_path / "a", {150: gate})).broadcast(load_first=True)
    main = env.source(flights(tmp_path / "f"))
    rows = main.connect(side).process(Failing(), schema=NAMED).collect()
    handle = env.submit("fails while loading")
    await_running(handle, restarts=1)
    gate.touch()
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    check(list(rows))


def test_a_side_that_ends_in_an_error_fails_the_job(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    env = new_env(2)
    bad = env.source(airports(tmp_path / "a")).map(_divide, schema=AIRPORT)
    main = env.source(flights(tmp_path / "f"))
    main.connect(bad.broadcast(load_first=True)).process(Name(), schema=NAMED).discard()
    with pytest.raises(ps.JobFailed, match="ZeroDivisionError"):
        run(env)
    assert lines(tmp_path / "f") == 0


def _divide(row: Any) -> Any:
    return {"code": row.code, "name": str(1 // (row.code != CODES[50]))}


def test_a_job_is_cancelled_while_it_loads(new_env: NewEnvironment, tmp_path: Path) -> None:
    env = new_env(2)
    side = env.source(airports(tmp_path / "a", {150: tmp_path / "never"}))
    main = env.source(flights(tmp_path / "f"))
    main.connect(side.broadcast(load_first=True)).process(Name(), schema=NAMED).discard()
    handle = env.submit("cancelled")
    await_running(handle)
    cancel(handle)
    assert lines(tmp_path / "f") == 0


def test_several_sides_one_behind_the_other(new_env: NewEnvironment, tmp_path: Path) -> None:
    env = new_env(2)

    class Again(ps.BroadcastProcessFunction):
        names = ps.BroadcastState("names", pa.string(), pa.string())

        def process(self, row: Any, ctx: Any, out: Any) -> None:
            out.emit(n=row.n, name=json.dumps([row.name, self.names.get(CODES[row.n % 300])]))

        def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
            self.names.put(row.code, row.name)

    first = env.source(airports(tmp_path / "a", splits=2))
    more = env.source(airports(tmp_path / "c")).union(env.source(airports(tmp_path / "d")))
    main = env.source(flights(tmp_path / "f"))
    once = main.connect(first.broadcast(load_first=True)).process(Name(), schema=NAMED)
    twice = once.connect(more.broadcast(load_first=True)).process(Again(), schema=NAMED)
    rows = twice.collect()
    run(env)
    for row in rows:
        name = f"name of {CODES[row.n % len(CODES)]}"
        assert json.loads(row.name) == [name, name]
