"""Frames while a part is being compiled: what columns they have, and the steps that have made them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa

from penstock.pushdown.sql_text import quoted
from penstock.pushdown.steps import Column, Step
from penstock.rows.schema import EVENT_TIME


@dataclass(frozen=True, slots=True)
class SparkFrame:
    """The rows of an output in Spark.

    Attributes:
        columns: of the user's, as far as they are needed.
        no_event_time: why they have no event time; "" = they have it, as one more column.
    """

    number: int
    columns: pa.Schema
    no_event_time: str = ""

    def own(self, names: Iterable[str] | None = None) -> tuple[Column, ...]:
        """Columns as they are, all or some, with the event time where there is any."""
        kept = list(self.columns.names if names is None else names)
        return as_they_are([*kept, *([] if self.no_event_time else [EVENT_TIME])])


@dataclass(slots=True)
class Steps:
    """The steps so far, behind ``input_count`` frames that are given."""

    input_count: int
    done: list[Step] = field(default_factory=list)

    def add(self, step: Step) -> int:
        """One more step; the number of the frame that it makes."""
        self.done.append(step)
        return self.input_count + len(self.done) - 1


def as_they_are(names: Iterable[str]) -> tuple[Column, ...]:
    """Columns by their names."""
    return tuple((name, quoted(name)) for name in names)
