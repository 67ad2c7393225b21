"""What aggregates keep per key, by name: the columns that state of ``.aggregate(...)`` is written from."""

from __future__ import annotations

from typing import Final

from penstock.aggregates.aggregates import Aggregate
from penstock.errors import JobRejected

_OF_SETS: Final = {"count_distinct": "collect_set"}
_SHORT: Final = frozenset({"count", "sum", "min", "max", "mean", "first", "last"})


def accumulators(**aggregates: Aggregate | str) -> dict[str, tuple[str, str | None]]:
    """The columns that aggregates are kept in, and what each is of the rows that they have seen.

    Args:
        aggregates: as ``.aggregate(...)`` takes them; ``mean="x"`` is short for ``mean=ps.mean("x")``.

    Returns:
        Name of the column -> (function, input column): "count", "sum", "min", "max", "first", "last", "collect_list" or
        "collect_set"; the column of a count of rows is None.

    Raises:
        JobRejected: an aggregate is no built-in one of a column, or two of them keep a column of one name.

    Example: a mean is kept as a sum and a count.
        >>> accumulators(mean="x")
        {'mean_sum': ('sum', 'x'), 'mean_count': ('count', 'x')}
    """
    found: dict[str, tuple[str, str | None]] = {}
    for name, given in aggregates.items():
        aggregate = given
        if isinstance(given, str):
            if name not in _SHORT:
                raise JobRejected(
                    f"accumulators: {name}={given!r} names no aggregate: say {name}=ps.sum({given!r}), for example"
                )
            aggregate = Aggregate(name, given)
        if not isinstance(aggregate, Aggregate) or aggregate.custom is not None:
            raise JobRejected(
                f"accumulators: {name}={given!r} is no built-in aggregate: what a function of one's own keeps, only it knows"
            )
        column = aggregate.input_column
        if aggregate.function == "mean":
            kept = {f"{name}_sum": ("sum", column), f"{name}_count": ("count", column)}
        else:
            kept = {name: (_OF_SETS.get(aggregate.function, aggregate.function), column)}
        for twice in kept.keys() & found.keys():
            raise JobRejected(
                f"accumulators: {name} and another keep a column {twice!r}, as a mean keeps _sum and _count: "
                "give one of them another name"
            )
        found |= kept
    return found
