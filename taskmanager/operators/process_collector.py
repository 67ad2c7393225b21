"""What a process function emits, as it was emitted, with the row or timer that it was emitted for.

Rows that are emitted column by column, ``out.emit(user=1, n=2)``, or as a dict with just these columns in their order,
are kept *flat*: their values one after the other, so that columns are made of them by slicing. All others are kept as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from keyword import iskeyword
from typing import Any, Final

import pyarrow as pa
from typing_extensions import override

from penstock.functions.functions import Collector, as_mapping
from penstock.processing.process_context import ProcessContext
from penstock.rows.handed_over import handed_over_whole, may_change


class ProcessCollector(Collector):
    """Collects results with the index of the row or timer that each was emitted for.

    Invariant: ``flat`` or ``results`` is empty.

    Attributes:
        indexes: per result the row or timer.
        flat: values of results, one after the other in the order of the schema.
        side_results: (tag, row, index) of those for side outputs.
    """

    __slots__ = ("_context", "_names", "flat", "indexes", "results", "side_results")

    def __init__(self, schema: pa.Schema, side_schema: pa.Schema, context: ProcessContext) -> None:
        super().__init__(schema, side_schema)
        self._context = context
        self._names = tuple(schema.names)
        self.flat: list[Any] = []
        self.results: list[Any] = []
        self.indexes: list[int] = []
        self.side_results: list[tuple[str, Any, int]] = []

    @override
    def emit(self, row: object = None, /, **columns: Any) -> None:
        if not columns:
            result = row
        else:
            result = columns if row is None else {**as_mapping(row), **columns}
        if self.flat:
            self.unflatten()
        self.results.append(self._own(result))
        self.indexes.append(self._context.index)

    @override
    def side(self, tag: str, row: object) -> None:
        self.side_results.append((tag, self._own_of_side(row), self._context.index))

    @override
    def __len__(self) -> int:
        return len(self.indexes)

    def extend(self, results: Sequence[Any], indexes: Sequence[int]) -> None:
        """Adds results, with the row or timer of each."""
        self.unflatten()
        self.results += results
        self.indexes += indexes

    def unflatten(self) -> None:
        """Makes dicts of the results that are kept flat."""
        names, flat, self.flat = self._names, self.flat, []
        rows = zip(*(flat[n :: len(names)] for n in range(len(names))), strict=True)
        self.results += [dict(zip(names, row, strict=True)) for row in rows]

    def take_indexes(self) -> list[int]:
        """The indexes of the main results, which are to be taken as well."""
        indexes, self.indexes = self.indexes, []
        return indexes

    def take_columns(self) -> list[list[Any]]:
        """The values of flat results, column by column."""
        flat, width, self.flat = self.flat, len(self._names), []
        return [flat[n::width] for n in range(width)]

    def take_results(self) -> list[Any]:
        """The results."""
        self.unflatten()
        results, self.results = self.results, []
        return results

    def drop(self, index: int) -> None:
        """Forgets what was emitted for the latest row: its call raised."""
        while self.indexes and self.indexes[-1] == index:
            self.indexes.pop()
            if self.results:
                self.results.pop()
            else:
                del self.flat[-len(self._names) :]
        while self.side_results and self.side_results[-1][2] == index:
            self.side_results.pop()


def process_collector(
    schema: pa.Schema, side_schema: pa.Schema, context: ProcessContext
) -> ProcessCollector:
    """The collector for rows of a schema."""
    changing = frozenset(field.name for field in schema if may_change(field.type))
    return _kind(tuple(schema.names), changing)(schema, side_schema, context)


_EMIT = """
def emit(self_, row_=None, /, *, {parameters}, **others_):
    if type_(row_) is dict_ and not others_ and not self_.results and {are_missing} and tuple_(row_) == names_:
        self_.flat += {of_row}
        self_.indexes.append(self_._context.index)
        return
    if row_ is None and not others_ and {are_given}:
        if self_.results:
            self_.results.append({given})
        else:
            self_.flat += {values},
        self_.indexes.append(self_._context.index)
        return
    for name_, value_ in {as_dict}.items():
        if value_ is not missing_:
            others_[name_] = value_
    any_(self_, row_, **others_)
"""
# Names of Python's own would be hidden by columns of these names.
_BUILTINS: Final = {"type_": type, "dict_": dict, "tuple_": tuple, "map_": map}
_OWN_NAMES = frozenset(
    {"self_", "row_", "others_", "name_", "value_", "missing_", "any_", "own_", "names_"}
) | frozenset(_BUILTINS)


@lru_cache(maxsize=256)
def _kind(names: tuple[str, ...], changing: frozenset[str]) -> type[ProcessCollector]:
    """The class whose ``emit`` has the columns as its parameters."""
    if not names or not all(map(_is_parameter, names)) or len(set(names)) < len(names):
        return ProcessCollector
    own = [f"own_({name})" if name in changing else name for name in names]
    source = _EMIT.format(
        parameters=", ".join(f"{name}=missing_" for name in names),
        are_given=" and ".join(f"{name} is not missing_" for name in names),
        are_missing=" and ".join(f"{name} is missing_" for name in names),
        of_row="map_(own_, row_.values())" if changing else "row_.values()",
        as_dict="{" + ", ".join(f"{name!r}: {name}" for name in names) + "}",
        given="{" + ", ".join(map("{0[0]!r}: {0[1]}".format, zip(names, own, strict=True))) + "}",
        values=", ".join(own),
    )
    scope: dict[str, Any] = {"missing_": object(), "any_": ProcessCollector.emit}
    scope |= {"names_": names, "own_": handed_over_whole, **_BUILTINS}
    exec(compile(source, __file__, "exec"), scope)  # under our name: no frame of the user's
    emit: Callable[..., None] = scope["emit"]
    return type("ProcessCollector", (ProcessCollector,), {"__slots__": (), "emit": emit})


def _is_parameter(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not iskeyword(name) and name not in _OWN_NAMES
