"""Accumulators that know in which order their values came: those of first, last and collect_list."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.state_tables.table_parts import Columns, WrittenAs
from penstock.state_tables.value_columns import fitted
from penstock.storage.codec import StateError
from penstock.storage.run_columns import SEQUENCE

_SEQUENCE = "sequence"
_PLACES_MAX = 1 << 62


class SequencedPart:
    """A value with its place in the order of arrival, or a list of such.

    Args:
        stored_field: of the column: a struct of ``value`` and ``sequence``, or a list of them.
        name: that the values are read by.
        sequence_name: that their places are read by.
    """

    def __init__(self, stored_field: pa.Field, name: str, sequence_name: str) -> None:
        self._field = stored_field
        self._name = name
        self._is_list = not pt.is_struct(stored_field.type)
        item = stored_field.type.value_type if self._is_list else stored_field.type
        value, sequence = item.field("value").type, pa.int64()
        kinds = [pa.list_(value), pa.list_(sequence)] if self._is_list else [value, sequence]
        self._item = item
        self._names = name, sequence_name
        self.fields = tuple(map(pa.field, self._names, kinds))
        self.optional = frozenset({self._names[1]})

    @staticmethod
    def takes(kind: pa.DataType) -> bool:
        """Whether a column of this type is one."""
        item = kind.value_type if pt.is_list(kind) else kind
        return pt.is_struct(item) and {one.name for one in item} == {"value", _SEQUENCE}

    def shown(self, stored: pa.RecordBatch) -> list[pa.Array]:
        """The values and their places."""
        column = stored.column(self._field.name)
        items = column.flatten() if self._is_list else column
        missing = items.is_null()
        found = [
            pa.compute.if_else(missing, pa.scalar(None, one.type), one)
            for one in (items.field("value"), items.field(_SEQUENCE))
        ]
        if not self._is_list:
            return found
        return [_lists(column, one) for one in found]

    def stored(self, shown: Columns, written: WrittenAs) -> dict[str, pa.Array]:
        """What is given without places comes before all that is to arrive."""
        where = f"{written.where}: column {self._name!r}"
        column, places = shown[self._name], shown.get(self._names[1])
        column = fitted(column, self.fields[0].type, where)
        if places is not None:
            name = f"{written.where}: column {self._names[1]!r}"
            places = fitted(places, self.fields[1].type, name)
            if self._is_list and not places.value_lengths().equals(column.value_lengths()):
                raise StateError(f"{where} and {self._names[1]!r} have lists of other lengths")
        values = column.flatten() if self._is_list else column
        if self._is_list and values.null_count:
            raise StateError(
                f"{where} has null among its items, which is not collected: leave it out of them"
            )
        if places is None:  # what arrives is numbered from 0 on
            before = np.arange(len(values)) - len(values) if self._is_list else -1
            sequence = pa.array(np.full(len(values), before, np.int64))
        else:
            sequence = (places.flatten() if self._is_list else places).fill_null(0)
        by_name = {"value": values, _SEQUENCE: sequence}
        mask = None if self._is_list else values.is_null()
        items = pa.StructArray.from_arrays(
            [by_name[one.name] for one in self._item], fields=list(self._item), mask=mask
        )
        return {
            self._field.name: _lists(column, items, self._field.type) if self._is_list else items
        }


def arrived_by(schema: pa.Schema, columns: Sequence[pa.Array], where: str) -> int:
    """How many rows an operator has had at least that has kept these: what comes next is numbered from there on.

    Args:
        schema: of the columns, which are stored ones.
        where: the state, for messages.

    Raises:
        StateError: no row can come behind them.
    """
    last = -1
    for field, column in zip(schema, columns, strict=True):
        places = None
        if SequencedPart.takes(field.type):
            items = column.flatten() if pt.is_list(field.type) else column
            places = pc.struct_field(items, _SEQUENCE)
        elif field.name == SEQUENCE.name:
            places = column
        if places is not None:
            largest = pc.max(places).as_py()
            last = last if largest is None else max(last, largest)
    if last > _PLACES_MAX:
        raise StateError(
            f"{where}: a row has the place {last} in the order of arrival: places end at 2^62"
        )
    return last + 1


def _lists(like: pa.Array, items: pa.Array, kind: pa.DataType | None = None) -> pa.Array:
    """Lists as long as those of another column; null where those are."""
    lengths = like.value_lengths().fill_null(0).to_numpy().astype(np.int64)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    mask = like.is_null() if like.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets), items, type=kind, mask=mask)
