"""Aim: a result without a column of its schema is a bad record that names the column, never a null without a word.

Method: row functions and reduce through the harness, with declared, annotated and sampled schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NotRequired, TypedDict

import pytest

import penstock as ps
import penstock.testing as pt

INPUT = {"k": "string", "n": "int64"}
OUTPUT = {"k": "string", "m": "int64"}

CALLS: dict[str, Callable[[ps.Stream], ps.Stream]] = {
    "map": lambda s: s.map(lambda row: {"k": row.k} if row.n == 2 else (row.k, row.n), OUTPUT),
    "map of dicts": lambda s: s.map(
        lambda row: {"k": row.k} | ({} if row.n == 2 else {"m": row.n}), OUTPUT
    ),
    "map of rows": lambda s: s.map(lambda row: row if row.n == 2 else (row.k, row.n), OUTPUT),
    "flat_map": lambda s: s.flat_map(
        lambda row: [{"k": row.k} if row.n == 2 else {"k": row.k, "m": row.n}], OUTPUT
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_result_without_a_column_is_a_bad_record(call: str) -> None:
    with pt.harness(lambda s: CALLS[call](s).on_error("bad"), schema=INPUT) as h:
        h.push_many([{"k": "a", "n": n} for n in (1, 2, 3)])
        assert h.output == [{"k": "a", "m": 1}, {"k": "a", "m": 3}]
        (bad,) = h.side("bad")
        wanted = "unknown columns n" if call == "map of rows" else "no column m"
        assert wanted in bad["error"]


def push_and_end(h: pt.Harness) -> None:
    h.push_many([{"k": "a", "n": n} for n in (1, 2, 3)])
    h.end()


def test_a_side_output_has_all_columns_of_the_input() -> None:
    class Sides(ps.ProcessFunction):
        def process(self, row: Any, ctx: Any, out: Any) -> None:
            out.side("late", {"k": row.k})

    h = pt.harness(lambda s: s.process(Sides(), schema=OUTPUT).side_output("late"), schema=INPUT)
    with h, pytest.raises(ps.JobFailed, match="no column n"):
        push_and_end(h)


class Sparse(TypedDict):
    k: str
    m: NotRequired[int]


def sparse(row: Any) -> Sparse:
    return {"k": row.k} if row.n == 2 else {"k": row.k, "m": row.n}


def test_columns_that_are_said_not_to_be_required_may_be_left_out() -> None:
    with pt.harness(lambda s: s.map(sparse), schema=INPUT) as h:
        h.push_many([{"k": "a", "n": n} for n in (1, 2)])
        assert h.output == [{"k": "a", "m": 1}, {"k": "a", "m": None}]


def test_columns_that_the_sample_shows_to_be_left_out_may_be() -> None:
    with ps.Environment() as env:
        rows = env.from_rows([{"k": "a", "n": n} for n in (1, 2, 3)])
        found = rows.map(lambda r: {"k": r.k} if r.n == 2 else {"k": r.k, "m": r.n}).collect()
        assert list(found) == [
            {"k": "a", "m": 1},
            {"k": "a", "m": None},
            {"k": "a", "m": 3},
        ]
