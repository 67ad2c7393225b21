"""What the rows of a state are as a table: which columns it has, and how they come of what is stored.

Columns, in this order: those of the key by their names in the job, then those that tell rows of a key apart (key of a
map, window, time of a timer), the values, when a value was written and will expire where it has a time to live, and
``key_group``. Accumulators of aggregates are named after the results they are for: the number itself, or
``<name>_sum`` and ``<name>_count`` of a mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.aggregates.stored_fields import USES
from penstock.pb import graph_pb2
from penstock.rows.column_values import shown_value
from penstock.state_tables.group_parts import SequencedPart
from penstock.state_tables.table_parts import (
    TIME,
    Columns,
    ListPart,
    NumberPart,
    PlainPart,
    TablePart,
    ValuePart,
    WrittenAs,
)
from penstock.state_tables.value_columns import fitted
from penstock.storage.codec import StateError
from penstock.storage.key_types import Int64Array
from penstock.storage.run_columns import CODEC, DELETED, ROW_KEYS
from penstock.storage.run_columns import KEY_GROUP as STORED_KEY_GROUP

KEY_GROUP: Final = "key_group"
_OWN: Final = frozenset({STORED_KEY_GROUP, DELETED})
_STAMPED: Final = "stamped/1:"
_SLICES: Final = frozenset({"slices", "left_slices", "right_slices"})
"""Tables whose namespaces are the starts of slices of time."""
_WHOLE: Final = "running"
"""A table of groups that has one namespace only."""


class StateView:
    """A state of an operator.

    Args:
        stored_schema: of its rows in runs.
        declared: what is known of the operator.
        ttl_ms: how long values live; 0 = for ever.

    Attributes:
        name: as the function declares it, or the operator calls it.
        kind: "value", "list", "map", "group", "sessions", "counts", "timers", "rows".
        stored_schema: of stored rows.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        stored_schema: pa.Schema,
        declared: graph_pb2.Operator,
        ttl_ms: int = 0,
    ) -> None:
        self.name = name
        self.kind = kind
        self.stored_schema = stored_schema
        self._declared = declared
        self._ttl_ms = ttl_ms
        keys = [one for one in self.stored_schema if _is_key(one.name)]
        self.key_count = len(keys)
        self._window = self._slice_ms()
        rest = list(self._rest())
        taken = {one.name for part in rest for one in part.fields} | {*self._namespace_names}
        self.key_names = self._names_of_keys(keys, taken)
        plain = zip(keys, self.key_names, strict=True)
        self._parts: list[TablePart] = [
            *(PlainPart(one, name, may_be_null=True) for one, name in plain),
            *rest,
        ]
        fields = [one for part in self._parts[: len(keys)] for one in part.fields]
        fields += [pa.field(name, kind) for name, kind in self._namespace_fields()]
        fields += [one for part in rest for one in part.fields]
        names = {one.name for one in fields}
        self.key_group_name = KEY_GROUP if KEY_GROUP not in names else STORED_KEY_GROUP
        fields.append(pa.field(self.key_group_name, pa.int32()))
        self.schema = pa.schema(fields)

    def shown(self, namespace: int, stored: pa.RecordBatch) -> pa.RecordBatch:
        """Stored rows, none of them removed, as rows of the table.

        Args:
            namespace: that they are in.

        Raises:
            StoreCorrupt: a value cannot be read.
        """
        keys, rest = self._parts[: self.key_count], self._parts[self.key_count :]
        columns = [column for part in keys for column in part.shown(stored)]
        for name, kind in self._namespace_fields():
            end = name.endswith("_end")
            start = namespace + (self._window[1] if end and self._window else 0)
            columns.append(pa.repeat(pa.scalar(start, pa.int64()), stored.num_rows).cast(kind))
        columns += [column for part in rest for column in part.shown(stored)]
        columns.append(stored.column(STORED_KEY_GROUP).cast(pa.int32()))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def stored(
        self, shown: pa.RecordBatch, written: WrittenAs
    ) -> tuple[Int64Array, list[pa.Array]]:
        """Rows of the table as they are stored.

        Returns:
            Their namespaces, and the columns of ``stored_schema`` but for key-groups and marks of removal; without
            rows of empty lists, which a key without items has none of.

        Raises:
            StateError: they do not fit.
        """
        given = {one.name: column for one, column in zip(shown.schema, shown.columns, strict=True)}
        self.check_names(shown.schema.names, written.where)
        found: dict[str, pa.Array] = {}
        for part in self._parts:
            found.update(part.stored(given, written))
        if self.kind == "sessions":
            _check_sessions(found, written.where)
        if self.kind == "counts":
            _check_counts(found, written.where)
        self._check_means(given, written.where)
        columns = [found[one.name] for one in self.stored_schema if one.name not in _OWN]
        namespaces = self._namespaces(given, shown.num_rows, written)
        return _with_items(namespaces, columns) if self.kind == "list" else (namespaces, columns)

    def closed_at_ms(self, namespaces: Int64Array) -> int | None:
        """The watermark that ends the last window which has any of the rows that came first.

        Args:
            namespaces: of rows.

        Returns:
            None where they are not told apart by windows of time.
        """
        spec = self._declared.WhichOneof("spec")
        if self._window is None or spec is None or not len(namespaces):
            return None
        window = getattr(self._declared, spec).window
        slide_ms = window.slide_ms or window.size_ms
        first = int(namespaces.min())
        last_start = first - (first - window.offset_ms) % slide_ms
        closed_at_ms: int = last_start + window.size_ms - 1 + window.allowed_lateness_ms
        return closed_at_ms

    def check_names(self, names: Sequence[str], where: str) -> None:
        """Checks that rows with these columns can be stored.

        Raises:
            StateError: one is missing, or none of the state's.
        """
        optional = {self.key_group_name, *self._namespace_names[1:]}
        optional |= {name for part in self._parts for name in part.optional}
        missing = [name for name in self.schema.names if name not in {*names} | optional]
        unknown = [name for name in names if name not in {*self.schema.names} | optional]
        twice = sorted({name for name in names if list(names).count(name) > 1})
        if missing or unknown or twice:
            told = [
                f"{what} {', '.join(map(repr, which))}"
                for what, which in (
                    ("without", missing),
                    ("with unknown", unknown),
                    ("with repeated", twice),
                )
                if which
            ]
            columns = ", ".join(
                f"{one.name}: {one.type}" for one in self.schema if one.name not in optional
            )
            raise StateError(f"{where} is given {' and '.join(told)}; its columns are {columns}")

    def keys(self, stored: Sequence[pa.Array]) -> list[pa.Array]:
        """The key of stored rows, without marks and key-groups."""
        names = [one.name for one in self.stored_schema if one.name not in _OWN]
        if self.key_count:
            return [one for name, one in zip(names, stored, strict=True) if _is_key(name)]
        metadata = self.stored_schema.metadata or {}
        return [stored[names.index(name)] for name in json.loads(metadata.get(ROW_KEYS, b"[]"))]

    def _rest(self) -> Iterator[TablePart]:
        """What there is beside keys and namespaces."""
        means = self._means()
        results = self._results(means)
        for field in self.stored_schema:
            name, metadata = field.name, field.metadata or {}
            if name in _OWN or _is_key(name):
                continue
            codec = metadata.get(CODEC, b"").decode()
            uses = json.loads(metadata.get(USES, b"[]"))
            if codec and name == "map_key":
                yield ValuePart(field, "map_key", codec)
            elif codec:
                yield self._values(field, codec)
            elif name.startswith("number_") and uses:
                names = [_shown_name(use, means, results) for use in uses]
                yield NumberPart(field, names, is_count=name.endswith("_count"))
            elif name.startswith("column_"):
                yield _group_column(field, uses, results)
            elif self.kind == "sessions" and name in ("start", "end"):
                yield PlainPart(field, f"window_{name}", is_time=True)
            elif self.kind == "sessions" and name == "fired":
                yield PlainPart(field, _beside(name, results), default=False)
            elif self.kind == "timers":
                yield PlainPart(field, "time_ms")
            elif self.kind == "counts" and name == "touched_ms":
                yield PlainPart(field, _beside("touched_at", results), is_time=True)
            else:
                yield PlainPart(field, _beside(name, results), may_be_null=True)

    def _values(self, field: pa.Field, codec: str) -> TablePart:
        inner, ttl_ms = codec.removeprefix(_STAMPED), self._ttl_ms
        values = ValuePart(
            field,
            "value",
            inner,
            is_stamped=inner != codec,
            ttl_ms=ttl_ms,
            may_be_null=self.kind != "value",
            has_none=self.kind in ("list", "map"),
        )
        return ListPart(field, values) if self.kind == "list" else values

    def _check_means(self, given: Columns, where: str) -> None:
        means = self._means()
        results = self._results(means)
        for mean in means:
            total = _shown_name(f"value {mean}", means, results)
            count = _shown_name(f"count {mean}", means, results)
            if total in given and count in given and given[total].null_count:
                counted = pc.greater(given[count].cast(pa.int64()), 0)
                if pc.any(pc.and_(given[total].is_null(), counted)).as_py():
                    raise StateError(
                        f"{where}: column {total!r} is null where {count!r} is more than 0: a sum of nothing has the count 0"
                    )

    def _means(self) -> frozenset[str]:
        return frozenset(name for what, name in self._uses() if what == "count")

    def _results(self, means: frozenset[str]) -> frozenset[str]:
        """Names that columns have for the results that they are for."""
        return frozenset(name for what, name in self._uses() if what == "value") - means

    def _uses(self) -> Iterator[tuple[str, str]]:
        for field in self.stored_schema:
            for use in json.loads((field.metadata or {}).get(USES, b"[]")):
                what, _, name = use.partition(" ")
                yield what, name

    def _names_of_keys(self, keys: Sequence[pa.Field], taken: set[str]) -> list[str]:
        spec = self._declared.WhichOneof("spec")
        names = list(getattr(self._declared, spec).keys) if spec else []
        if len(names) != len(keys):
            return [one.name for one in keys]
        return [one.name if name in taken else name for one, name in zip(keys, names, strict=True)]

    def _slice_ms(self) -> tuple[str, int, int] | None:
        """What parts of time are called, how long they are, and from where they are counted; None = there are none."""
        if self.name not in _SLICES:
            return None
        spec = self._declared.WhichOneof("spec")
        if spec not in ("window_aggregate", "window_function", "join"):
            return None
        window = getattr(self._declared, spec).window
        slice_ms = math.gcd(window.size_ms, window.slide_ms)
        if not slice_ms:
            return None
        name = "window" if slice_ms == window.size_ms else "slice"
        return name, slice_ms, window.offset_ms % slice_ms

    @property
    def _namespace_names(self) -> list[str]:
        return [name for name, _ in self._namespace_fields()]

    def _namespace_fields(self) -> list[tuple[str, pa.DataType]]:
        if self._window is not None:
            name = self._window[0]
            return [(f"{name}_start", TIME), (f"{name}_end", TIME)]
        if self.kind in ("group", "rows") and self.name != _WHOLE:
            return [("namespace", pa.int64())]
        return []

    def _namespaces(self, shown: Columns, rows: int, written: WrittenAs) -> Int64Array:
        fields = self._namespace_fields()
        if not fields:
            return np.zeros(rows, np.int64)
        name, kind = fields[0]
        part = PlainPart(pa.field("namespace", pa.int64()), name, is_time=kind == TIME)
        found: Int64Array = part.stored(shown, written)["namespace"].to_numpy()
        if self._window is not None:
            _, slice_ms, offset_ms = self._window
            wrong = np.flatnonzero((found - offset_ms) % slice_ms)
            if len(wrong):
                raise StateError(
                    f"{written.where}: column {name!r} has {shown_value(shown[name][int(wrong[0])])}, where none begins: they "
                    f"begin every {slice_ms} ms from {offset_ms} ms on"
                )
            end = fields[1][0]
            if end in shown:
                ends = fitted(shown[end], TIME, f"{written.where}: column {end!r}").cast(pa.int64())
                size_ms = ends.fill_null(0).to_numpy() - found
                wrong = np.flatnonzero((size_ms != slice_ms) & ends.is_valid().to_numpy(False))
                if len(wrong):
                    raise StateError(
                        f"{written.where}: column {end!r} has {shown_value(shown[end][int(wrong[0])])}, and {name!r} "
                        f"{shown_value(shown[name][int(wrong[0])])}: they are {slice_ms} ms long; leave {end!r} out to have it computed"
                    )
        return found


def _with_items(
    namespaces: Int64Array, columns: list[pa.Array]
) -> tuple[Int64Array, list[pa.Array]]:
    """The rows whose list has items."""
    lists = next(one for one in columns if pt.is_list(one.type))
    has_items = pc.greater(pc.list_value_length(lists), 0)
    return namespaces[has_items.to_numpy(zero_copy_only=False)], [
        one.filter(has_items) for one in columns
    ]


def _check_sessions(found: Columns, where: str) -> None:
    wrong = np.flatnonzero(found["end"].to_numpy() <= found["start"].to_numpy())
    if len(wrong):
        row = int(wrong[0])
        start, end = (shown_value(found[name][row].cast(TIME)) for name in ("start", "end"))
        raise StateError(
            f"{where}: column 'window_end' has {end}, not behind 'window_start', {start}: a session ends its gap "
            "behind its last row"
        )


def _check_counts(found: Columns, where: str) -> None:
    for name in ("filled", "window_index"):
        column = found[name]
        if column.null_count or (len(column) and pc.min(column).as_py() < 0):
            raise StateError(
                f"{where}: column {name!r} has {'nulls' if column.null_count else pc.min(column)}: how many rows the open window "
                "has, and which one of its key it is, are counted from 0 on"
            )


def _group_column(field: pa.Field, uses: Sequence[str], results: frozenset[str]) -> TablePart:
    name = uses[0].removeprefix("value ") if uses else field.name
    codec = field.name.rpartition("_custom_")[2] if "_custom_" in field.name else ""
    if codec:
        return ValuePart(field, name, codec, may_be_null=True)
    if SequencedPart.takes(field.type):
        return SequencedPart(field, name, _beside(f"{name}_sequence", results))
    is_set = field.name.endswith("_count_distinct")
    return PlainPart(field, name, may_be_null=True, is_set=is_set)


def _shown_name(use: str, means: frozenset[str], results: frozenset[str]) -> str:
    what, _, name = use.partition(" ")
    if what == "count":
        return _beside(f"{name}_count", results)
    if what == "value":
        return _beside(f"{name}_sum", results) if name in means else name
    return f"__{what}_{name}"


def _beside(name: str, results: frozenset[str]) -> str:
    """The name of a column that is no result itself, with as many underscores behind it as no result has.

    >>> _beside("m_sum", frozenset({"m_sum"}))
    'm_sum_'
    """
    while name in results:
        name += "_"
    return name


def _is_key(name: str) -> bool:
    return name.startswith("key_") and name.removeprefix("key_").isdigit()
