"""What a call is named here that a user knows from elsewhere: the answer to an attribute that is not there."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import JobRejected
from penstock.naming import nearest_hint
from penstock.streams.kept_keys import LostKeys

_KEY_FIRST = (
    "call key_by first: stream.key_by('user').aggregate(n=ps.count()), or cut it into windows: "
    ".key_by('user').window(ps.tumbling('10s')).aggregate(n=ps.count())"
)
_AGGREGATE = "write .aggregate(n=ps.count(), total=ps.sum('price'))"
_KEY_BY = "write .key_by('user'), and .aggregate(n=ps.count()) on what it returns"
_WITH_COLUMNS = "write .with_columns(euro=col('price') * 0.9)"

_NAMES: Mapping[str, str] = {
    "group_by": _KEY_BY,
    "groupBy": _KEY_BY,
    "groupby": _KEY_BY,
    "keyBy": _KEY_BY,
    "withColumn": _WITH_COLUMNS,
    "withColumns": _WITH_COLUMNS,
    "with_column": _WITH_COLUMNS,
    "withColumnRenamed": "write .rename(old='new')",
    "alias": (
        "a column gets its name where it is made, .select(total=col('price')), or by .rename(old='new'); an "
        "operator by .name('...')"
    ),
    "where": "write .filter(col('price') > 100)",
    "limit": (
        "a stream has no end to count to: .collect(limit=10) brings the first rows back, and "
        "env.generate(..., rows=10) makes so many"
    ),
    "reduce": "it goes with windows: .key_by('user').window(ps.tumbling('10s')).reduce(fn)",
}
_AGGREGATIONS = ("aggregate", "agg")


class UnknownCallError(JobRejected, AttributeError):
    """A stream has no call of that name."""


def missing_call(stream: object, name: str, lost: LostKeys | None = None) -> AttributeError:
    """The error for an attribute that a stream does not have.

    Args:
        lost: the keys that it had on its way here.
    """
    kind = type(stream)
    message = f"{kind.__name__} has no attribute {name!r}"
    if name.startswith("_"):  # asked for by Python's own protocols, such as copying
        return AttributeError(message, name=name, obj=stream)
    known = [each for each in dir(kind) if not each.startswith("_")]
    if name in _AGGREGATIONS and "aggregate" in known:
        advice = f": {_AGGREGATE}"
    elif name in _AGGREGATIONS and lost is not None:
        advice = f": {lost.story}: call .key_by(...) again before it"
    elif name in _AGGREGATIONS and "key_by" in known:
        advice = f": {_KEY_FIRST}"
    elif name in _NAMES and "key_by" in known:
        advice = f": {_NAMES[name]}"
    else:
        advice = nearest_hint(name, known) or f"; it has {', '.join(known)}"
    return UnknownCallError(message + advice)
