"""Python's operators on columns: which kernel an operator means for given types.

Integers never wrap: what does not fit is an error, under the names of Arrow's functions too; beside floats they are floats (``mixed_numbers``). Divisions are Python's (``division``), comparisons of
numbers exact (``comparisons``). ``&`` and ``|`` are SQL's for booleans (null = unknown) and bitwise for
integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.expressions.comparisons import COMPARISONS, comparison_kernel
from penstock.expressions.division import floor_divide, modulo, true_divide
from penstock.expressions.literals import key_of
from penstock.expressions.mixed_numbers import beside_unsigned, of_floats
from penstock.rows.casting import UNITS_PER_DAY

Apply = Callable[[list[Any]], Any]
"""Arrow arrays or scalars in, an array or scalar out."""

_DIRECT = {
    "-": "subtract_checked",
    "*": "multiply_checked",
    "**": "power_checked",
    "neg": "negate_checked",
    "abs": "abs_checked",
}
_BITWISE = {"&": "bit_wise_and", "|": "bit_wise_or", "^": "bit_wise_xor", "~": "bit_wise_not"}
_LOGICAL = {"&": "and_kleene", "|": "or_kleene", "^": "xor", "~": "invert"}
OPERATORS = frozenset({*_DIRECT, *_BITWISE, *COMPARISONS, "+", "/", "//", "%", "[]"})
"""Names of the operators in ``Call.function``; all other names are functions of pyarrow.compute."""
SAME_AS_OPERATORS = {"add": "+", "subtract": "-", "multiply": "*", "power": "**", "negate": "neg"}
"""Functions of pyarrow.compute that wrap integers there, and the operators that they mean here."""


def operator_kernel(symbol: str, types: Sequence[pa.DataType]) -> Apply:
    """What an operator does to arguments of these types (``"[]"`` aside: see ``item_kernel``)."""
    if symbol == "neg" and pt.is_duration(types[0]):  # Arrow's own wraps
        zero = pa.scalar(0, types[0])
        return lambda args: pc.subtract_checked(zero, args[0])
    if symbol in ("+", "-") and any(map(pt.is_time, types)) and any(map(pt.is_duration, types)):
        return _within_day("add_checked" if symbol == "+" else "subtract_checked", types)
    if symbol in _DIRECT:
        return _of_numbers(_function(_DIRECT[symbol]), types)
    if symbol in _BITWISE:
        both_integers = all(map(pt.is_integer, types))
        return _function((_BITWISE if both_integers else _LOGICAL)[symbol])
    if symbol == "+":
        return _add(types)
    if symbol in COMPARISONS:
        return comparison_kernel(COMPARISONS[symbol], types)
    divisions = {"/": true_divide, "//": floor_divide, "%": modulo}
    return _of_numbers(divisions[symbol](types), types)


def item_kernel(container: pa.DataType, key: pa.Scalar) -> Apply:
    """``column[key]``: a field of a struct, an element of a list (from 0), the value of a map's key.

    Raises:
        TypeError: the column has no items, or the key is of the wrong kind.
    """
    value = key.as_py()
    if pt.is_struct(container):
        if not isinstance(value, str):
            raise TypeError(f"a field of a {container} is asked for by name, not {value!r}")
        if container.get_field_index(value) < 0:
            names = ", ".join(container.field(i).name for i in range(container.num_fields))
            raise TypeError(f"it has no field {value!r}; its fields are {names}")
        return _of_first("struct_field", pc.StructFieldOptions([value]))
    if pt.is_map(container):
        options = pc.MapLookupOptions(key_of(key, container.key_type), "first")
        return _of_first("map_lookup", options)
    if pt.is_list(container) or pt.is_large_list(container) or pt.is_fixed_size_list(container):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise TypeError(
                f"an element of a {container} is asked for by a number from 0, not {value!r}"
            )
        element = pc.get_function("list_element")
        index = pa.scalar(value, pa.int64())
        return lambda args: element.call([args[0], index])
    raise TypeError(f"a {container} has no items")


def _function(name: str) -> Apply:
    return pc.get_function(name).call


def _of_first(name: str, options: Any) -> Apply:
    call = pc.get_function(name).call
    return lambda args: call(args[:1], options)


def _add(types: Sequence[pa.DataType]) -> Apply:
    if any(map(_is_text, types)):
        return _concatenate(types)
    return _of_numbers(_function("add_checked"), types)


def _within_day(name: str, types: Sequence[pa.DataType]) -> Apply:
    """A time of day and a duration, of which Arrow takes the lowest 32 bits only; null where one is."""
    compute = _function(name)
    index = 0 if pt.is_duration(types[0]) else 1
    limit = UNITS_PER_DAY[types[index].unit]

    def apply(args: list[Any]) -> Any:
        units = pc.cast(args[index], pa.int64())
        is_short = pc.and_(pc.greater(units, -limit), pc.less(units, limit))
        if pc.all(is_short, min_count=0).as_py() is False:
            raise pa.ArrowInvalid("a time of day and a whole day or more is none")
        both = pc.and_(*map(pc.is_valid, args))
        if pc.all(both).as_py():
            return compute(args)
        # What lies under a null is computed with as well.
        found = compute([pc.if_else(both, arg, pa.scalar(0, arg.type)) for arg in args])
        return pc.if_else(both, found, pa.scalar(None, found.type))

    return apply


def _of_numbers(kernel: Apply, types: Sequence[pa.DataType]) -> Apply:
    return beside_unsigned(of_floats(kernel, types), types)


def _concatenate(types: Sequence[pa.DataType]) -> Apply:
    """Texts of any kind, the result large where one of them is."""
    target = pa.large_string() if any(map(pt.is_large_string, types)) else pa.string()
    join = pc.get_function("binary_join_element_wise")
    separator = pa.scalar("", target)
    if all(kind == target for kind in types):
        return lambda args: join.call([*args, separator])

    def one_kind(value: Any) -> Any:
        is_other = value.type != target and (_is_text(value.type) or pt.is_null(value.type))
        return value.cast(target) if is_other else value

    return lambda args: join.call([*map(one_kind, args), separator])


def _is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))
