"""Aim: the planner takes the jobs of the benchmarks, which no other test runs all of.

Method: each is planned over a source of the columns it reads; nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import penstock as ps
from benchmarks.state_benchmarks import three_shuffles
from benchmarks.workloads import WORKLOADS
from penstock.graph.job_graph import validate
from penstock.graph.logical import reachable
from penstock.planner.planner import Planner

BIDS = {"auction": "int64", "bidder": "int64", "price": "int64", "ts": "int64", "extra": "string"}
STATE = {"key": "int64", "first": "int64"}


def shuffled(rows: ps.Stream) -> None:
    three_shuffles(rows).discard()


@pytest.mark.parametrize(
    ("columns", "job"),
    [
        *(pytest.param(BIDS, one.job, id=name) for name, one in WORKLOADS.items()),
        pytest.param(STATE, shuffled, id="alignment"),
    ],
)
def test_it_can_be_planned(columns: dict[str, str], job: Callable[[ps.Stream], object]) -> None:
    env = ps.Environment(parallelism=2)
    job(env.generate(lambda n: dict.fromkeys(columns, n), schema=columns))
    validate(Planner(reachable(env._builder.sinks), env.config).plan())
