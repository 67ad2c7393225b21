"""A compiled part of a job as the function of a Spark stage; what it does is called by the driver, which has pyspark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from penstock.config.spark_keys import PINNED
from penstock.errors import TaskFailure
from penstock.pushdown.sql_text import quoted
from penstock.pushdown.steps import (
    Column,
    GroupRows,
    JoinFrames,
    Select,
    Step,
    UnionAll,
    Where,
    step_text,
)


@dataclass(frozen=True, slots=True)
class CompiledPart:
    """Steps over the DataFrames that a stage is given, the first of which are frames 0, 1, ...

    Attributes:
        operators: names of the operators that were compiled.
    """

    operators: tuple[str, ...]
    input_count: int
    steps: tuple[Step, ...]

    def __call__(self, *frames: Any) -> Any:
        """The DataFrame that comes of them.

        Raises:
            TaskFailure: the session is not as results that are ours need it.
        """
        assert len(frames) == self.input_count, "as many as were compiled"
        _check_session(frames[0].sparkSession)
        made = list(frames)
        for step in self.steps:
            made.append(_frame(step, made))
        return made[-1]

    @override
    def __str__(self) -> str:
        numbered = enumerate(self.steps, start=self.input_count)
        return "\n".join(f"#{number} {step_text(step)}" for number, step in numbered)


def _check_session(session: Any) -> None:
    other = [
        key
        for key, value in PINNED.items()
        if session.conf.get(key, value).lower() != value.lower()
    ]
    if other:
        shown = ", ".join(f"{key} = {session.conf.get(key, '')}" for key in other)
        raise TaskFailure(
            f"the session of Spark has {shown}, with which results would not be those of Penstock's engine: leave "
            "these keys out of the configuration of the TaskManagers, and of the server of Spark Connect"
        )


def _frame(step: Step, frames: list[Any]) -> Any:
    match step:
        case Select(frame, columns):
            return frames[frame].selectExpr(*map(_named, columns))
        case Where(frame, condition):
            return frames[frame].where(condition)
        case GroupRows(frame, keys, aggregates):
            from pyspark.sql.functions import expr

            grouped = frames[frame].groupBy(*map(quoted, keys))
            return grouped.agg(*(expr(_named(column)) for column in aggregates))
        case JoinFrames(left, right, condition, how):
            from pyspark.sql.functions import expr

            return frames[left].join(frames[right], expr(condition), how)
        case UnionAll(several):
            first, *others = (frames[frame] for frame in several)
            for other in others:
                first = first.union(other)
            return first


def _named(column: Column) -> str:
    name, text = column
    return f"{text} AS {quoted(name)}"
