"""Aim: records that cannot be handled go where ``on_error`` says, all others go on; none is lost silently.

Method: files and functions with known bad rows among good ones, for each place that can find one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
from penstock import col
from tests.support.jobs import assert_same_rows, rows_of, run

pytestmark = [pytest.mark.integration, pytest.mark.sampled(2)]

Row = dict[str, Any]
SCHEMA = pa.schema([("n", pa.int64()), ("word", pa.string())])


def write_csv(directory: Path) -> tuple[list[Row], dict[str, str]]:
    """Two files with good and bad rows; the good ones, and the bad ones as place -> text."""
    (directory / "a.csv").write_text("n,word\n1,one\nx,not a number\n3,three\n4,four,too many\n")
    (directory / "b.csv").write_text("n,word\n5,five\n6\n7,seven\n")
    good = [{"n": n, "word": w} for n, w in ((1, "one"), (3, "three"), (5, "five"), (7, "seven"))]
    bad = {"a.csv:3": "x,not a number", "a.csv:5": "4,four,too many", "b.csv:3": "6"}
    return good, bad


def write_json(directory: Path) -> tuple[list[Row], dict[str, str]]:
    lines = ['{"n": 1, "word": "one"}', "{oops}", '{"n": "x"}', "[1]", '{"n": 2}', "null"]
    (directory / "a.json").write_text("\n".join(lines))
    (directory / "b.json").write_text('{"n": 3, "word": null}\n\n{"n": 4, "word": "four"\n')
    good = [{"n": 1, "word": "one"}, {"n": 2, "word": None}, {"n": 3, "word": None}]
    bad = {
        "a.json:2": "{oops}",
        "a.json:3": '{"n": "x"}',
        "a.json:4": "[1]",
        "a.json:6": "null",
        "b.json:3": '{"n": 4, "word": "four"',
    }
    return good, bad


FILES: dict[str, tuple[Callable[..., ps.Stream], Callable[[Path], tuple[list[Row], Any]]]] = {
    "csv": (ps.Environment.read_csv, write_csv),
    "json": (ps.Environment.read_json, write_json),
}


@pytest.mark.parametrize("form", FILES)
def test_malformed_rows_of_files_go_to_a_side_output(
    env: ps.Environment, tmp_path: Path, form: str
) -> None:
    read, write = FILES[form]
    good, bad = write(tmp_path)
    stream = read(env, str(tmp_path), schema=SCHEMA).on_error("malformed")
    side = stream.side_output("malformed")
    assert side.schema.names == ["where", "text", "error"]
    found, malformed = stream.collect(), side.collect()
    result = run(env)
    assert_same_rows(found, good)
    assert {Path(row.where).name: row.text for row in malformed} == bad
    assert all(row.error for row in malformed)
    assert result.metrics["totals"]["bad_records"] == len(bad)
    assert result.metrics["totals"]["records_in"] == len(good)


@pytest.mark.parametrize("form", FILES)
def test_malformed_rows_of_files_are_skipped_or_fail_the_job(
    env: ps.Environment, tmp_path: Path, form: str
) -> None:
    read, write = FILES[form]
    good, bad = write(tmp_path)
    stream = read(env, str(tmp_path), schema=SCHEMA).on_error("skip")
    assert_same_rows(rows_of(env, stream), good)
    read(env, str(tmp_path), schema=SCHEMA).discard()
    with pytest.raises(ps.JobFailed) as failed:
        run(env)
    assert any(place in str(failed.value) for place in bad)


NUMBERS = [{"n": n, "word": None if n % 5 == 0 else f"w{n}"} for n in range(1_000)]


def fail_on_sevens(row: ps.Row) -> Row:
    if row.n % 7 == 0:
        raise ValueError(f"no {row.n} here")
    return {"m": row.n * 2, "word": row.word}


def sevens_do_not_fit(row: ps.Row) -> Row:
    return {"m": "seven" if row.n % 7 == 0 else row.n * 2, "word": row.word}


def some_then_fail(row: ps.Row) -> Any:
    yield {"m": row.n * 2, "word": row.word}
    if row.n % 7 == 0:
        raise KeyError(row.n)


def is_unknown(row: ps.Row) -> bool:
    if row.n % 7 == 0:
        raise LookupError("unknown")
    return True


def key_fails(row: ps.Row) -> int:
    if row.n % 7 == 0:
        raise LookupError("no key")
    return int(row.n % 3)


OUTPUT = {"m": "int64", "word": "string"}
OPERATORS: dict[str, Callable[[ps.Stream], ps.Stream]] = {
    "map raises": lambda s: s.map(fail_on_sevens, schema=OUTPUT),
    "map does not fit": lambda s: s.map(sevens_do_not_fit, schema=OUTPUT),
    "flat_map raises": lambda s: s.flat_map(some_then_fail, schema=OUTPUT),
    "filter raises": lambda s: s.filter(is_unknown),
    "expression": lambda s: s.with_columns(m=col("n") // (col("n") % 7)),
    "filter expression": lambda s: s.filter(col("n") // (col("n") % 7) >= 0),
}
BAD = [row for row in NUMBERS if row["n"] % 7 == 0]


@pytest.mark.parametrize("name", OPERATORS)
def test_bad_records_of_operators(env: ps.Environment, name: str) -> None:
    stream = OPERATORS[name](env.from_rows(NUMBERS).rebalance()).on_error("bad")
    side = stream.side_output("bad")
    assert side.schema.names == ["n", "word", "error"]
    good, bad = stream.collect(), side.collect()
    skipped = OPERATORS[name](env.from_rows(NUMBERS)).on_error("skip").collect()
    result = run(env)
    assert_same_rows([{"n": row["n"], "word": row["word"]} for row in bad], BAD)
    assert len(good) == len(skipped) == len(NUMBERS) - len(BAD)
    assert not {row["word"] for row in good} & {row["word"] for row in BAD if row["word"]}
    assert result.metrics["totals"]["bad_records"] == 2 * len(BAD)


def test_bad_records_are_a_stream_like_any_other(env: ps.Environment) -> None:
    mapped = env.from_rows(NUMBERS).rebalance().map(fail_on_sevens, schema=OUTPUT).on_error("bad")
    counts = mapped.side_output("bad").key_by("error").aggregate(n=ps.count()).collect()
    total = mapped.union(mapped.side_output("bad").select("word", m=col("n"))).collect()
    run(env)
    assert len(counts) == len(BAD)
    assert any("no 14 here" in row.error for row in counts)
    assert len(total) == len(NUMBERS)


def test_the_failure_names_operator_row_and_traceback(env: ps.Environment) -> None:
    mapped = env.from_rows(NUMBERS[1:]).map(fail_on_sevens, schema=OUTPUT).parallelism(1)
    mapped.name("doubler").discard()
    with pytest.raises(ps.JobFailed, match="no 7 here") as failed:
        run(env)
    assert failed.value.operator == "doubler"
    assert "w7" in failed.value.row
    assert failed.value.subtask_index == 0
    assert "fail_on_sevens" in failed.value.user_traceback


class Refusing(ps.Sink):
    @override
    def write(self, batch: pa.RecordBatch) -> None:
        raise ConnectionError("the other side is gone")

    @override
    def flush(self) -> None:
        pass


def test_a_sink_that_raises_fails_the_job(env: ps.Environment) -> None:
    env.from_rows(NUMBERS).sink(Refusing()).name("refusing")
    with pytest.raises(ps.JobFailed, match="the other side is gone") as failed:
        run(env)
    assert failed.value.operator == "refusing"


class Broken(ps.WindowFunction):
    @override
    def process(self, key: Any, window: ps.WindowInfo, rows: Any, out: ps.Collector) -> None:
        raise RuntimeError(f"key {key} is broken")


def test_a_window_function_that_raises_fails_the_job(env: ps.Environment) -> None:
    keyed = env.from_rows(NUMBERS).key_by("word")
    keyed.window(ps.count_window(1)).process(Broken(), schema={"n": int}).discard()
    with pytest.raises(ps.JobFailed, match="is broken") as failed:
        run(env)
    assert "Broken" in str(failed.value)


def test_json_values_of_other_types_are_bad_not_lost(env: ps.Environment, tmp_path: Path) -> None:
    rows: list[Row] = [{"n": 1}, {"n": 1.5}, {"n": True}, {"n": None}, {"n": [1]}, {}, {"n": 2}]
    (tmp_path / "x.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = env.read_json(str(tmp_path), schema=pa.schema([("n", pa.int64())])).on_error("bad")
    good, bad = stream.collect(), stream.side_output("bad").collect()
    run(env)
    assert_same_rows(good, [{"n": 1}, {"n": None}, {"n": None}, {"n": 2}])
    assert sorted(row.text for row in bad) == ['{"n": 1.5}', '{"n": [1]}', '{"n": true}']
