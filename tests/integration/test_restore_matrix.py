"""Aim: whatever a job was run with, and is run with now, what it has kept is all there.

Method: generated: what was kept (checkpoint, native or canonical savepoint; either backend; rows on their way kept or not;
pre-aggregation or not) by what it is started with (either backend where the format allows it, pre-aggregation, more and
fewer subtasks, a changed declaration of its state). All is emitted at the end of the data, so the result is exact. CI takes
a sample, ``make restore-matrix`` everything.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import JobRejected
from tests.integration.conftest import NewEnvironment
from tests.support.golden_job import DAY, KEYS, NUMBERS, ROWS, numbers, result
from tests.support.jobs import DEADLINE_S, await_details, cancel, canonical

pytestmark = [pytest.mark.integration, pytest.mark.sampled(100)]

RATE = 100
"""Rows per second: a job takes what is asked of it long before its end, however slow the machine."""
FAR_MS = 10**9
FORMATS = ("checkpoint", "native", "canonical")
SEEN = {"name": "string", "key": "int64", "number": "int64"}


class Before(ps.KeyedProcessFunction):
    """Keeps the smallest and the number of rows of a key."""

    pair = ps.ValueState("pair", pa.struct([("low", pa.int32()), ("seen", pa.int32())]))

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        pair = self.pair.value() or {"low": row.n, "seen": 0}
        self.pair.update({"low": min(pair["low"], row.n), "seen": pair["seen"] + 1})
        ctx.timers.event_time(FAR_MS)

    def on_timer(self, time: int, ctx: Any, out: Any) -> None:
        pair = self.pair.value()
        out.emit(name="states", key=ctx.key, number=pair["low"] * ROWS + pair["seen"])


class After(ps.KeyedProcessFunction):
    """The same with a wider field, one of another name, and one that is new."""

    pair = ps.ValueState(
        "pair",
        pa.struct(
            [
                ps.field("extra", pa.int64(), default=3),
                ps.field("count", pa.int64(), alias="seen"),
                ps.field("low", pa.int64()),
            ]
        ),
    )

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        pair = self.pair.value() or {"low": row.n, "count": 0, "extra": 3}
        self.pair.update({**pair, "low": min(pair["low"], row.n), "count": pair["count"] + 1})
        ctx.timers.event_time(FAR_MS)

    def on_timer(self, time: int, ctx: Any, out: Any) -> None:
        pair = self.pair.value()
        number = pair["low"] * ROWS + pair["count"] + pair["extra"] - 3
        out.emit(name="states", key=ctx.key, number=number)


def build(
    env: ps.Environment, output: Path, rate: float | None = None, *, is_changed: bool = False
) -> None:
    source = env.generate(numbers, rows=ROWS, rate=rate, schema=NUMBERS).uid("numbers")
    rows = source.with_event_time("ts", out_of_orderness="0s").uid("time")
    sums = rows.key_by("k").window(ps.tumbling(DAY)).aggregate(number=ps.sum("n"), c=ps.count())
    named = sums.uid("sums").select(
        name=ps.lit("sums"), key=ps.col("k"), number=ps.col("number") * ROWS + ps.col("c")
    )
    named.uid("names").write_parquet(output / "sums").uid("sums-files")
    function = After() if is_changed else Before()
    states = rows.key_by("k").process(function, schema=SEEN).uid("states")
    states.write_parquet(output / "states").uid("states-files")


def expected() -> Counter[Any]:
    found: Counter[Any] = Counter()
    for key in range(KEYS):
        mine = range(key, ROWS, KEYS)
        sums = {"name": "sums", "key": key, "number": sum(mine) * ROWS + len(mine)}
        found[canonical(sums)] += 1
        found[canonical({"name": "states", "key": key, "number": key * ROWS + len(mine)})] += 1
    return found


@dataclass(frozen=True)
class Run:
    """What a job is run with."""

    backend: str
    exchange: str
    pre_aggregation: str

    def config(self, directory: Path) -> dict[str, object]:
        return {
            "execution.checkpointing.dir": str(directory),
            "execution.checkpointing.interval": "200ms",
            "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
            "state.backend.type": self.backend,
            "execution.exchange.default": self.exchange,
            "execution.pre-aggregation": self.pre_aggregation,
        }


RUNS = [
    Run(*one)
    for one in product(("hashmap", "rocksdb"), ("pipelined", "caching"), ("always", "never"))
]


KEPT: dict[Run, dict[str, Path]] = {}
"""What each has left; taken once."""


def cases() -> list[Any]:
    found = []
    for before, after, format, parallelism, is_changed in product(
        RUNS, RUNS, FORMATS, (3, 1), (False, True)
    ):
        is_readable = before.backend in (after.backend, "hashmap") or format == "canonical"
        if is_readable and before.exchange == after.exchange:
            name = "-".join([*vars(before).values(), format, after.backend, after.pre_aggregation])
            name += f"-{parallelism}" + "-changed" * is_changed
            found.append(pytest.param(before, after, format, parallelism, is_changed, id=name))
    random.Random(7).shuffle(found)  # so that a sample of them has a little of everything
    return found


def kept(new_env: NewEnvironment, directory: Path, run: Run) -> dict[str, Path]:
    """What a job at parallelism 2 has left, by format."""
    env = new_env(2, run.config(directory / "checkpoints"))
    build(env, directory / "out", RATE)
    handle = env.submit("first")
    await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > 2)
    found = {
        format: Path(handle.savepoint(directory / "kept", format, timeout=DEADLINE_S))
        for format in ("native", "canonical")
    }
    cancel(handle)
    return found | {"checkpoint": directory / "checkpoints" / handle.job_id}


@pytest.mark.parametrize(("before", "after", "format", "parallelism", "is_changed"), cases())
def test_all_is_there(
    new_env: NewEnvironment,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    before: Run,
    after: Run,
    format: str,
    parallelism: int,
    is_changed: bool,
) -> None:
    if before not in KEPT:
        KEPT[before] = kept(new_env, tmp_path_factory.mktemp("first"), before)
    env = new_env(parallelism, after.config(tmp_path / "checkpoints"))
    build(env, tmp_path / "out", is_changed=is_changed)
    refusal = ""
    try:
        handle = env.submit("second", from_savepoint=KEPT[before][format])
    except JobRejected as refused:
        refusal = str(refused)
    if refusal:
        # A savepoint lets go what pre-aggregation holds; a checkpoint keeps it for the same phase.
        ways = (format, before.pre_aggregation, after.pre_aggregation)
        assert ways == ("checkpoint", "always", "never"), refusal
        assert "execution.pre-aggregation" in refusal
        return
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert result(tmp_path / "out") == expected()
