"""Whether a function that is given to ``mapInArrow`` or ``mapInPandas`` returns the columns that it has declared.

Spark leaves out what is there beyond as many columns as were declared; of Arrow it takes the first returned column for the
first declared one, the second for the second, whatever they are called: without this, values get lost, or under wrong names,
without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

Mapping = Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]
MappingOfFrames = Callable[[Iterator[Any]], Iterable[Any]]


def checked_batches(function: Mapping, declared: pa.Schema) -> Mapping:
    """The function, which now fails where a batch is other than declared.

    What is made here travels by value, so that executors need nothing of Penstock.

    Example: other names are an error.
        >>> named = checked_batches(lambda batches: batches, pa.schema([("a", pa.int64())]))
        >>> next(named(iter([pa.record_batch({"b": [1]})])))
        Traceback (most recent call last):
        TypeError: mapInArrow: the function returned the columns 'b', and its schema declares 'a': name them so, in this order
    """

    is_same = _type_comparison()

    def problem(found: Any) -> str:
        if found.names != declared.names:
            names = [", ".join(map(repr, one.names)) or "none" for one in (found, declared)]
            return (
                f"the function returned the columns {names[0]}, and its schema declares {names[1]}: "
                "name them so, in this order"
            )
        wrong = [
            f"column {field.name!r} is {field.type} and should be {wanted.type}"
            for field, wanted in zip(found, declared, strict=True)
            if not is_same(field.type, wanted.type)
        ]
        return f"{'; '.join(wrong)}: cast what the function returns" if wrong else ""

    def checked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        never_null = [field.name for field in declared if not field.nullable]
        last = None
        for batch in function(batches):
            if hasattr(batch, "schema"):  # Spark says what is no batch
                if last is None or not batch.schema.equals(last):
                    wrong = problem(batch.schema)
                    if wrong:
                        raise TypeError(f"mapInArrow: {wrong}")
                    last = batch.schema
                for name in never_null:
                    if batch.column(name).null_count:
                        raise TypeError(
                            f"mapInArrow: column {name!r} is declared NOT NULL and has nulls"
                        )
            yield batch

    return checked


def checked_frames(function: MappingOfFrames, names: Sequence[str]) -> MappingOfFrames:
    """A function over frames of pandas, which now fails where one has more columns than were declared; Spark tells the rest.

    Example: a column that nobody declared.
        >>> import pandas as pd
        >>> run = checked_frames(lambda frames: frames, ["a"])
        >>> next(run(iter([pd.DataFrame({"a": [1], "b": [2]})])))
        Traceback (most recent call last):
        TypeError: mapInPandas: the function returned 'b' beyond the columns that its schema declares, 'a': declare them, or drop them
    """

    def checked(frames: Iterator[Any]) -> Iterator[Any]:
        for frame in function(frames):
            beyond = list(getattr(frame, "columns", ()))[len(names) :]
            if beyond:  # Spark says what is no frame
                others, own = (", ".join(map(repr, one)) for one in (beyond, names))
                raise TypeError(
                    f"mapInPandas: the function returned {others} beyond the columns that its schema declares, {own}: "
                    "declare them, or drop them"
                )
            yield frame

    return checked


def _type_comparison() -> Callable[[Any, Any], bool]:
    """A function that travels by value, as the one above."""

    def is_same(found: Any, wanted: Any) -> bool:
        """Whether Spark reads the one as the other, and loses nothing."""
        from pyarrow import types

        if types.is_null(found):
            return True
        if types.is_struct(wanted) and types.is_struct(found):
            fields, others = list(found), list(wanted)
            return [one.name for one in fields] == [one.name for one in others] and all(
                is_same(one.type, other.type) for one, other in zip(fields, others, strict=True)
            )
        if types.is_map(wanted) or types.is_map(found):
            return (
                types.is_map(wanted)
                and types.is_map(found)
                and is_same(found.key_type, wanted.key_type)
                and is_same(found.item_type, wanted.item_type)
            )
        if types.is_list(wanted) and (types.is_list(found) or types.is_large_list(found)):
            return is_same(found.value_type, wanted.value_type)
        if types.is_decimal(wanted) and types.is_decimal(found):
            digits = found.precision - found.scale, wanted.precision - wanted.scale
            return bool(found.scale <= wanted.scale and digits[0] <= digits[1])
        if types.is_timestamp(wanted) and types.is_timestamp(found):
            return bool(found.unit == wanted.unit and (found.tz is None) == (wanted.tz is None))
        large = {"large_string": "string", "large_binary": "binary"}
        return large.get(str(found), str(found)) == large.get(str(wanted), str(wanted))

    return is_same
