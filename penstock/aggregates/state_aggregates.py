"""The built-in aggregates one value at a time, for ``AggregatingState``.

Semantics are those of the aggregates of windows: None is skipped, an aggregate of nothing but None is
None, a count of them 0, a list of them empty; ``min`` and ``max`` give NaN only where there is nothing else.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BuiltInAccumulator:
    """One built-in aggregate, in the form of ``ps.AggregateFunction``.

    Attributes:
        create: makes the accumulator of no values.
        step: the accumulator with one more value that is not None.
        finish: the result of an accumulator.
    """

    create: Callable[[], Any]
    step: Callable[[Any, Any], Any]
    finish: Callable[[Any], Any]

    def create_accumulator(self) -> Any:
        """The accumulator of no values."""
        return self.create()

    def add(self, accumulator: Any, value: Any) -> Any:
        """The accumulator with one more value."""
        return accumulator if value is None else self.step(accumulator, value)

    def result(self, accumulator: Any) -> Any:
        """The aggregate's value."""
        return self.finish(accumulator)


def _nothing() -> None:
    return None


def _as_it_is(value: Any) -> Any:
    return value


def _sum(total: Any, value: Any) -> Any:
    return value if total is None else total + value


def _min(best: Any, value: Any) -> Any:
    if best is None or best != best:
        return value
    return min(best, value, key=_moment)


def _max(best: Any, value: Any) -> Any:
    if best is None or best != best:
        return value
    return max(best, value, key=_moment)


def _first(held: Any, value: Any) -> Any:
    return value if held is None else held


def _last(_held: Any, value: Any) -> Any:
    return value


def _count(held: int, _value: Any) -> int:
    return held + 1


def _mean(held: list[Any], value: Any) -> list[Any]:
    count, total = held
    return [count + 1, value if total is None else total + value]


def _mean_result(held: list[Any]) -> Any:
    count, total = held
    return total / count if count else None


def _distinct(held: set[Any], value: Any) -> set[Any]:
    held.add(_moment(value) if value == value else None)  # every NaN is one, also of a restored set
    return held


def _moment(value: Any) -> Any:
    """A time with a zone as one that is compared as columns are.

    In a zone of its own a datetime is compared by what the clock shows: both moments of an hour that comes twice are equal.
    """
    is_zoned = isinstance(value, dt.datetime) and value.tzinfo is not None
    return value.astimezone(dt.UTC) if is_zoned else value


def _collect(held: list[Any], value: Any) -> list[Any]:
    held.append(value)
    return held


BUILT_IN_ACCUMULATORS: dict[str, BuiltInAccumulator] = {
    "count": BuiltInAccumulator(int, _count, _as_it_is),
    "sum": BuiltInAccumulator(_nothing, _sum, _as_it_is),
    "min": BuiltInAccumulator(_nothing, _min, _as_it_is),
    "max": BuiltInAccumulator(_nothing, _max, _as_it_is),
    "mean": BuiltInAccumulator(lambda: [0, None], _mean, _mean_result),
    "first": BuiltInAccumulator(_nothing, _first, _as_it_is),
    "last": BuiltInAccumulator(_nothing, _last, _as_it_is),
    "count_distinct": BuiltInAccumulator(set, _distinct, len),
    "collect_list": BuiltInAccumulator(list, _collect, _as_it_is),
}
