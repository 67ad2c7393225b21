"""Aim: a job goes on with its aggregates when they are declared in another order, without some, or with more.

Method: a job is cancelled behind a checkpoint and started again from there with other aggregates, at another
parallelism; what comes out at the end is compared with sums over all rows, or over those that came since.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import DEADLINE_S, await_details, cancel

pytestmark = [pytest.mark.integration, pytest.mark.sampled(6)]

KEYS, ROWS, RATE = 7, 4_004, 100

Aggregates = dict[str, Any]


HALF, PAUSE_MS = ROWS // 2, 10_000
"""The second half of the rows is in other windows, and in other sessions."""


def numbers(start: int, count: int) -> pa.RecordBatch:
    places = range(start, start + count)
    times = [place if place < HALF else place + PAUSE_MS for place in places]
    return pa.record_batch({"n": pa.array(places, pa.int64()), "t": pa.array(times, pa.int64())})


def running(keyed: Any, aggregates: Aggregates) -> Any:
    return keyed.aggregate(**aggregates)


def tumbling(keyed: Any, aggregates: Aggregates) -> Any:
    return keyed.window(ps.tumbling(PAUSE_MS)).aggregate(**aggregates)


def session(keyed: Any, aggregates: Aggregates) -> Any:
    return keyed.window(ps.session(PAUSE_MS // 2)).aggregate(**aggregates)


def counted(keyed: Any, aggregates: Aggregates) -> Any:
    return keyed.window(ps.count_window(HALF // KEYS)).aggregate(**aggregates)


GROUPED = [running, tumbling, session, counted]


def build(
    env: ps.Environment,
    output: Path,
    grouped: Callable[[Any, Aggregates], Any],
    aggregates: Aggregates,
    rate: float | None = None,
) -> None:
    rows = env.generate(numbers, rows=ROWS, rate=rate, schema={"n": "int64", "t": "int64"}).uid(
        "numbers"
    )
    timed = rows.with_event_time("t").parallelism(1).uid("timed")
    with_keys = timed.with_columns(key=ps.col("n") % KEYS).parallelism(1).uid("keys")
    keyed = with_keys.key_by("key")
    grouped(keyed, aggregates).uid("sums").write_parquet(output).uid("files")


def results(output: Path, by: str) -> dict[int, list[dict[str, Any]]]:
    """The rows of each key, in the order of a sum."""
    found: dict[int, list[dict[str, Any]]] = {key: [] for key in range(KEYS)}
    for path in output.glob("[!._]*.parquet"):
        for row in pq.read_table(path).to_pylist():
            found[row["key"]].append(row)
    return {key: sorted(rows, key=lambda row: row[by]) for key, rows in found.items()}


def restarted(
    new_env: NewEnvironment,
    tmp_path: Path,
    backend: str,
    grouped: Callable[[Any, Aggregates], Any],
    before: Aggregates,
    after: Aggregates,
    *,
    is_savepoint: bool = False,
) -> Path:
    """Where a job has written that began with some aggregates and ended with others."""
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.checkpointing.interval": "100ms",
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        "state.backend.type": backend,
    }
    env = new_env(2, config)
    build(env, tmp_path / "before", grouped, before, RATE)
    handle = env.submit("first")
    await_details(
        handle,
        lambda _metrics, state: state == "RUNNING" and handle.details().last_checkpoint_id > 2,
    )
    if is_savepoint:
        path = Path(handle.stop(tmp_path / "savepoints"))
    else:
        cancel(handle)
        path = tmp_path / "checkpoints" / handle.job_id
    env = new_env(3, config)
    build(env, tmp_path / "after", grouped, after)
    assert env.submit("second", from_savepoint=path).wait(DEADLINE_S).status == "FINISHED"
    return tmp_path / "after"


def complete(grouped: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results that together have all rows of a key."""
    return rows[-1:] if grouped is running else rows


@pytest.mark.parametrize("grouped", GROUPED)
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_aggregates_in_another_order_and_without_some_keep_their_numbers(
    new_env: NewEnvironment, tmp_path: Path, backend: str, grouped: Any
) -> None:
    doubled = ps.sum(ps.col("n") * 2)
    before = {"gone": ps.max("n"), "once": ps.sum("n"), "twice": doubled, "mean": ps.mean("n")}
    after = {"twice": doubled, "mean": ps.mean("n"), "once": ps.sum("n")}
    output = restarted(new_env, tmp_path, backend, grouped, before, after)
    for key, found in results(output, "twice").items():
        rows = complete(grouped, found)
        assert sum(row["once"] for row in rows) == sum(range(key, ROWS, KEYS))
        for row in rows:
            assert row["twice"] == 2 * row["once"]
            assert round(row["once"] / row["mean"], 6) == ROWS // KEYS // len(rows)


@pytest.mark.parametrize("grouped", GROUPED)
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("with_lists", [False, True])
def test_new_aggregates_begin_with_the_next_window_or_empty(
    new_env: NewEnvironment, tmp_path: Path, backend: str, grouped: Any, with_lists: bool
) -> None:
    before = {"rows": ps.count(), "total": ps.sum("n")}
    lists = {"all": ps.collect_list("n"), "first": ps.first("n")}
    added = {
        "since": ps.count(),
        "sum": ps.sum("n"),
        "mean": ps.mean("n"),
        "kinds": ps.count_distinct("n"),
    }
    after = added | before | (lists if with_lists else {})
    # With lists nothing is pre-aggregated any more, and only a savepoint does not depend on that.
    output = restarted(new_env, tmp_path, backend, grouped, before, after, is_savepoint=with_lists)
    for key, found in results(output, "total").items():
        rows = complete(grouped, found)
        assert sum(row["rows"] for row in rows) == ROWS // KEYS
        assert sum(row["total"] for row in rows) == sum(range(key, ROWS, KEYS))
        last = rows[-1]
        assert last["mean"] == last["sum"] / last["since"]
        assert last["kinds"] == last["since"]
        if grouped is running:
            assert 0 < last["since"] < last["rows"]
        else:
            assert (last["since"], last["sum"]) == (last["rows"], last["total"])
            assert [rows[0][name] for name in after if name not in before] == [None] * (
                len(after) - len(before)
            )
        if with_lists:
            assert (sum(last["all"]), len(last["all"])) == (last["sum"], last["since"])
            assert last["first"] == last["all"][0]
