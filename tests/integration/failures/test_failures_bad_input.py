"""Aim: bad input ends a job with an error that says what, where and what to do; nothing else happens.

Method: jobs on a cluster of real daemons over files that are missing, unreadable or wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock import col

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

MakeEnvironment = Callable[..., ps.Environment]

NUMBERS = pa.schema([("a", pa.int64()), ("b", pa.int64())])

MALFORMED = {
    # form, content, line of the bad record, its text, what is wrong with it
    "json-syntax": ("json", '{"a":1,"b":2}\n{"a":3\n{"a":5,"b":6}\n', 2, '{"a":3', "malformed"),
    "json-type": (
        "json",
        '{"a":1,"b":2}\n{"a":"x","b":4}\n{"a":5,"b":6}\n',
        2,
        '{"a":"x","b":4}',
        'column "a": "x" is not int64',
    ),
    "csv-columns": ("csv", "a,b\n1,2\n3\n5,6\n", 3, "3", "Expected 2 columns, got 1"),
    "csv-type": ("csv", "a,b\n1,2\nx,4\n5,6\n", 3, "x,4", 'column "a"'),
}


def failure_of(env: ps.Environment) -> ps.JobFailed:
    with pytest.raises(ps.JobFailed) as raised:
        env.execute("bad-input")
    return raised.value


def read(env: ps.Environment, form: str, path: Path, **options: Any) -> ps.Stream:
    stream: ps.Stream = getattr(env, f"read_{form}")(path, **options)
    return stream


@pytest.mark.parametrize("form", ["parquet", "csv", "json", "arrow"])
def test_a_missing_file_is_refused_when_the_job_is_built(
    environment: MakeEnvironment, tmp_path: Path, form: str
) -> None:
    path = tmp_path / f"nothing.{form}"
    with pytest.raises(ps.JobRejected, match="no such file or directory") as raised:
        read(environment(), form, path)
    assert str(path) in str(raised.value)
    with pytest.raises(ps.JobRejected, match="no such file or directory"):
        read(environment(), form, path, schema=NUMBERS)


def test_a_file_that_vanished_meanwhile_fails_the_job(
    environment: MakeEnvironment, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    env = environment()
    env.read_csv(path).discard()
    path.unlink()
    error = failure_of(env)
    assert str(path) in str(error)
    assert "no such file" in str(error)
    assert error.operator == "read_csv"


@pytest.mark.parametrize("form", ["parquet", "csv", "json", "arrow"])
def test_a_file_that_the_taskmanager_may_not_read_fails_the_job(
    environment: MakeEnvironment, tmp_path: Path, form: str
) -> None:
    path = tmp_path / f"secret.{form}"
    path.write_text("a,b\n1,2\n")
    path.chmod(0)
    env = environment()
    read(env, form, path, schema=NUMBERS).discard()
    error = failure_of(env)
    assert str(path) in str(error)
    assert "ermission denied" in str(error)
    assert error.operator == f"read_{form}"
    assert error.subtask_index == 0


def test_a_directory_without_files_is_refused(environment: MakeEnvironment, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ps.JobRejected, match="is empty"):
        environment().read_parquet(tmp_path / "empty")


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_file_of_another_format(environment: MakeEnvironment, tmp_path: Path, form: str) -> None:
    path = tmp_path / f"text.{form}"
    path.write_text("this is no such file")
    with pytest.raises(ps.JobRejected, match=r"not a readable") as raised:
        read(environment(), form, path)
    assert str(path) in str(raised.value)
    env = environment()
    read(env, form, path, schema=NUMBERS).discard()
    error = failure_of(env)
    assert str(path) in str(error)
    assert "not a readable" in str(error)


def test_a_file_without_a_column_of_the_schema(
    environment: MakeEnvironment, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"a": [1, 2], "b": [3, 4]}), tmp_path / "one.parquet")
    env = environment()
    env.read_parquet(tmp_path / "one.parquet", schema=NUMBERS).discard()
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "one.parquet")
    with pytest.raises(ps.JobRejected, match=r'one.parquet: has no column "b"'):
        environment().read_parquet(tmp_path / "one.parquet", schema=NUMBERS)
    error = failure_of(env)
    assert 'has no column "b"' in str(error)
    assert "one.parquet" in str(error)
    with pytest.raises(ps.JobRejected, match='no column "q"; columns: a'):
        environment().read_parquet(tmp_path / "one.parquet", columns=["q"])


def test_a_file_with_another_type_than_the_schema(
    environment: MakeEnvironment, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"a": ["1", "x"], "b": [1, 2]}), tmp_path / "text.parquet")
    env = environment()
    env.read_parquet(tmp_path / "text.parquet", schema=NUMBERS).discard()
    error = failure_of(env)
    assert "column 'a' as string, which does not go into the declared int64" in str(error)
    assert "text.parquet, row 2" in str(error)


@pytest.mark.parametrize("form", ["parquet", "json"])
def test_a_null_that_is_declared_never_to_be(
    environment: MakeEnvironment, tmp_path: Path, form: str
) -> None:
    path = tmp_path / f"nulls.{form}"
    if form == "parquet":
        pq.write_table(pa.table({"a": [1, None], "b": [1, 2]}), path)
    else:
        path.write_text('{"a":1}\n{"b":2}\n')
    env = environment()
    never_null = pa.schema([NUMBERS.field("a").with_nullable(False), NUMBERS.field("b")])
    read(env, form, path, schema=never_null).discard()
    error = str(failure_of(env))
    assert "a null in column 'a', which is declared as never null" in error
    assert f"nulls.{form}, " in error
    assert " 2" in error


def write_numbers(path: Path, rows: list[tuple[int | None, int | None]]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([{"a": a, "b": b} for a, b in rows], NUMBERS), path)
    elif path.suffix == ".csv":
        texts = [["" if n is None else str(n) for n in row] for row in rows]
        path.write_text("".join(",".join(row) + "\n" for row in [["a", "b"], *texts]))
    else:
        path.write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in rows))


@pytest.mark.parametrize("form", ["parquet", "csv", "json"])
def test_a_null_that_is_declared_never_to_be_is_a_bad_record_of_its_row(
    environment: MakeEnvironment, tmp_path: Path, form: str
) -> None:
    path, only_bad = tmp_path / f"nulls.{form}", tmp_path / f"only.{form}"
    write_numbers(path, [(1, 1), (None, 2), (3, None), (4, 4)])
    write_numbers(only_bad, [(None, 2), (None, None)])
    never_null = pa.schema([field.with_nullable(False) for field in NUMBERS])
    env = environment()
    numbers = read(env, form, path, schema=never_null).on_error("bad")
    bad, good = numbers.side_output("bad").collect(), numbers.collect()
    none = read(env, form, only_bad, schema=never_null).on_error("skip")
    counted = none.key_by("a").aggregate(n=ps.count()).collect()
    env.execute()
    assert [(row.a, row.b) for row in good] == [(1, 1), (4, 4)]
    assert not list(counted)
    first = 3 if form == "csv" else 2
    assert [row.where[-2:] for row in bad] == [f" {first}", f" {first + 1}"]
    assert ["'a'" in row.error for row in bad] == [True, False]
    env = environment()
    numbers = read(env, form, path, schema=never_null).on_error("skip")
    numbers.map(lambda row: {"n": row.b // (row.a - 4)}, schema={"n": "int64"}).discard()
    assert failure_of(env).position.endswith(f" {first + 2}"), (
        "rows behind them are where they were"
    )


def test_a_null_of_a_generator_that_is_declared_never_to_be(environment: MakeEnvironment) -> None:
    never_null = pa.schema([pa.field("a", pa.int64(), nullable=False)])

    def numbers(start: int, count: int) -> pa.RecordBatch:
        made = [None if n == 5 else n for n in range(start, start + count)]
        return pa.record_batch([pa.array(made, pa.int64())], names=["a"])

    env = environment()
    env.generate(numbers, rows=8, schema=never_null).discard()
    error = str(failure_of(env))
    assert "a null in column 'a', which is declared as never null" in error
    assert ", row 6" in error


def lists_of_doubles(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"a": [[1e300 if n == 2 else 0.5] for n in range(start, start + count)]})


@pytest.mark.parametrize("made", ["generate", "parquet"])
def test_a_value_that_would_become_another_one(
    environment: MakeEnvironment, tmp_path: Path, made: str
) -> None:
    """Arrow's own cast makes infinity of it, without a word."""
    env, schema = environment(), pa.schema([("a", pa.list_(pa.float32()))])
    if made == "generate":
        env.generate(lists_of_doubles, rows=3, schema=schema).discard()
    else:
        path = tmp_path / "wide.parquet"
        pq.write_table(pa.table(lists_of_doubles(0, 3)), path)
        env.read_parquet(path, schema=schema).discard()
    error = str(failure_of(env))
    assert "column 'a' as list<" in error
    assert "1e+300 would change" in error
    assert "row 3" in error


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_line_fails_the_job(
    environment: MakeEnvironment, tmp_path: Path, case: str
) -> None:
    form, content, line, text, reason = MALFORMED[case]
    path = tmp_path / f"lines.{form}"
    path.write_text(content)
    env = environment()
    read(env, form, path, schema=NUMBERS).discard()
    error = failure_of(env)
    assert error.cause == "BadRecord"
    assert f"{path}:{line}" in str(error)
    assert reason in str(error)
    assert error.row == text
    assert error.operator == f"read_{form}"


def test_a_column_that_does_not_exist_is_refused_by_name(environment: MakeEnvironment) -> None:
    rows = environment().from_rows([{"price": 1, "bidder": "x"}])
    for build in (
        lambda: rows.filter(col("prize") > 1),
        lambda: rows.select("prize"),
        lambda: rows.with_columns(x=col("prize") + 1),
        lambda: rows.key_by("prize"),
        lambda: rows.with_event_time("prize"),
        lambda: rows.drop("prize"),
        lambda: rows.rename(prize="x"),
    ):
        with pytest.raises(ps.JobRejected, match=r"no column ['\"]prize['\"]") as raised:
            build()
        assert "price" in str(raised.value), "the message names the columns there are"


def test_a_row_function_that_reads_a_column_that_does_not_exist(
    environment: MakeEnvironment,
) -> None:
    env = environment()
    env.from_rows([{"price": 1}]).map(lambda row: row.prize, schema={"x": pa.int64()}).discard()
    error = failure_of(env)
    assert "the row has no column 'prize'" in str(error)
    assert "did you mean 'price'?" in str(error)
    assert error.operator == "map"


def test_a_row_that_an_expression_cannot_be_computed_for(environment: MakeEnvironment) -> None:
    env = environment()
    stream = env.from_rows([{"a": "1"}, {"a": "x"}]).select(b=col("a").cast("int64"))
    stream.name("to-number").discard()
    error = failure_of(env)
    assert error.cause == "BadRecord"
    assert error.operator == "to-number"
    assert error.row == "{'a': 'x'}"
    assert "cast(a, int64)" in str(error)


def test_an_event_time_that_is_null(environment: MakeEnvironment) -> None:
    env = environment()
    rows = env.from_rows([{"t": 1}, {"t": None}], schema={"t": pa.int64()})
    rows.with_event_time("t").key_by("t").window(ps.tumbling("1s")).aggregate(n=ps.count()).uid(
        "w"
    ).discard()
    error = failure_of(env)
    assert error.cause == "BadRecord"
    assert error.operator == "with_event_time"
    assert "t is null" in str(error)
    assert error.row == "{'t': None}"


# ---------------------------------------------------------------- output


@pytest.mark.parametrize("form", ["parquet", "csv", "json"])
def test_an_output_directory_that_cannot_be_written(
    environment: MakeEnvironment, tmp_path: Path, form: str
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o500)
    env = environment()
    rows = env.from_rows([{"a": 1}])
    getattr(rows, f"write_{form}")(closed / "out")
    error = failure_of(env)
    assert str(closed / "out") in str(error)
    assert "ermission denied" in str(error)
    assert error.operator == f"write_{form}"
    assert list(closed.iterdir()) == []


def test_an_output_directory_that_is_a_file(environment: MakeEnvironment, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ps.JobRejected, match="is not a directory"):
        environment().from_rows([{"a": 1}]).write_parquet(tmp_path / "file")
    env = environment()
    env.from_rows([{"a": 1}]).write_parquet(tmp_path / "file" / "out")
    error = failure_of(env)
    assert "Not a directory" in str(error)
    assert error.operator == "write_parquet"


def test_a_failed_job_leaves_no_output_behind(environment: MakeEnvironment, tmp_path: Path) -> None:
    env = environment(parallelism=2)

    def fail_at_the_end(row: Any) -> bool:
        if row.a == 9_999:
            raise ValueError("the last row")
        return True

    rows = env.from_arrow(pa.table({"a": range(10_000)}))
    rows.rebalance().filter(fail_at_the_end).write_parquet(tmp_path / "out")
    error = failure_of(env)
    assert error.row == "Row(a=9999)"
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []


# ---------------------------------------------------------------- configuration and addresses


def test_wrong_configuration_names_the_key(environment: MakeEnvironment) -> None:
    with pytest.raises(ps.ConfigurationError, match=r"did you mean heartbeat\.timeout\?"):
        environment(config={"heartbeat.timeuot": "3s"})
    with pytest.raises(ps.ConfigurationError, match=r"heartbeat\.timeout.*lightyears"):
        environment(config={"heartbeat.timeout": "3 lightyears"})


def test_a_function_that_cannot_be_pickled_names_what_in_it(
    environment: MakeEnvironment,
) -> None:
    import threading

    lock = threading.Lock()
    env = environment()
    env.from_rows([{"a": 1}]).map(lambda row: lock.locked(), schema={"b": pa.bool_()}).discard()
    with pytest.raises(ps.JobRejected, match="'lock' in its closure") as raised:
        env.execute("unpicklable")
    assert "operator 'map'" in str(raised.value)
    assert "open()" in str(raised.value), "what to do"
