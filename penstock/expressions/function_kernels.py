"""Functions of pyarrow.compute by name, and what some of them need to be right.

Of two forms of a function the one is taken that refuses what it cannot compute. Where Arrow is wrong for some rows, its own kernel is
given others, or what it gives is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.expressions.division import true_divide
from penstock.expressions.literals import array_of_scalars

Kernel = Callable[..., Any]
"""Arrow arrays or scalars, and options, in; an array or scalar out."""

_EXTREMES = frozenset({"max_element_wise", "min_element_wise"})
_LENGTHS = {"binary_slice": pc.binary_length, "utf8_slice_codeunits": pc.utf8_length}
_CHECKED = {"shift_right": "shift_right_checked"}
_PADDED = frozenset(
    {f"{of}_{how}" for of in ("ascii", "utf8") for how in ("lpad", "rpad", "center")}
    | {"utf8_zero_fill"}
)
_BYTES_MAX = (1 << 31) - 1
"""Of the texts that one call makes: as many as a column of strings has room for. Arrow's own count of them wraps."""


def function_kernel(
    name: str, types: Sequence[pa.DataType], given: Mapping[str, Any] | None = None
) -> Kernel:
    """A function of pyarrow.compute for arguments of these types.

    Args:
        given: options by name.

    >>> function_kernel("divide", [pa.int8(), pa.int8()])([pa.scalar(7), pa.scalar(2)]).as_py()
    3
    """
    if name == "divide" and all(map(pt.is_integer, types)):
        name = "divide_checked"
    if name in ("divide", "divide_checked") and any(map(pt.is_decimal, types)):
        return true_divide(types)
    if name in ("shift_left", "shift_left_checked"):
        return _shift_left
    kernel: Kernel = pc.get_function(_CHECKED.get(name, name)).call
    if name in _EXTREMES and any(map(pt.is_fixed_size_binary, types)):
        return _of_whole_arrays(kernel)
    if name in _LENGTHS:
        return _slices(kernel, _LENGTHS[name], given or {})
    if name in _PADDED:
        return _padded(kernel, int((given or {}).get("width", 0)))
    return _MENDED[name](kernel) if name in _MENDED else kernel


def _padded(kernel: Kernel, width: int) -> Kernel:
    def apply(args: list[Any], *options: Any) -> Any:
        _check_size(width * (1 if isinstance(args[0], pa.Scalar) else len(args[0])))
        return kernel(args, *options)

    return apply


def _repeated(kernel: Kernel) -> Kernel:
    def apply(args: list[Any], *options: Any) -> Any:
        lengths, counts = (
            pc.cast(arg, pa.float64(), safe=False) for arg in (pc.binary_length(args[0]), args[1])
        )
        sizes = pc.max_element_wise(pc.multiply(lengths, counts), 0.0)
        _check_size(pc.sum(sizes).as_py() or 0)
        return kernel(args, *options)

    return apply


def _check_size(size_bytes: float) -> None:
    if size_bytes > _BYTES_MAX:
        raise pa.ArrowInvalid(
            f"the texts of one batch would take {size_bytes:.3g} bytes, and may take {_BYTES_MAX}"
        )


def _of_whole_arrays(kernel: Kernel) -> Kernel:
    """Of parts of arrays of binaries of one length Arrow takes the first rows of the whole array."""

    def apply(args: list[Any], *options: Any) -> Any:
        parts = [isinstance(arg, pa.Array) and arg.offset for arg in args]
        pairs = zip(args, parts, strict=True)
        return kernel(
            [arg.take(pa.array(np.arange(len(arg)))) if part else arg for arg, part in pairs],
            *options,
        )

    return apply


def _day_parts(**parts: Kernel) -> Callable[[Kernel], Kernel]:
    """Structs of the parts of a day, each of its own function: of more than 32 rows Arrow's own write where they have no room."""

    def apply(args: list[Any]) -> Any:
        days = args[0]
        if isinstance(days, pa.Scalar):
            return apply([array_of_scalars([days], days.type)])[0]
        fields = [part(days) for part in parts.values()]
        return pa.StructArray.from_arrays(fields, list(parts), mask=pc.is_null(days))

    return lambda _: apply


def _day_of_week(days: pa.Array) -> pa.Array:
    return pc.day_of_week(days, count_from_zero=False, week_start=1)


def _with_rows_of_nothing(kernel: Kernel) -> Kernel:
    """Texts joined without the nulls: where all are null Arrow leaves the row out, and the text is empty."""

    def apply(args: list[Any], *options: Any) -> Any:
        rows = max((len(arg) for arg in args if isinstance(arg, pa.Array)), default=None)
        if rows is None:
            return apply([array_of_scalars([arg], arg.type) for arg in args], *options)[0]
        found = kernel(args, *options)
        if len(found) == rows:
            return found
        *values, separator = args
        none = pc.is_null(values[0])
        for value in values[1:]:
            none = pc.and_(none, pc.is_null(value))
        first = pc.cast(values[0], found.type)
        empty = pa.scalar(b"", pa.binary()).cast(found.type)
        return kernel([pc.if_else(none, empty, first), *values[1:], separator], *options)

    return apply


def _of_whole_characters(kernel: Kernel) -> Kernel:
    """What bytes of a text are replaced by has to leave a text."""

    def apply(args: list[Any], *options: Any) -> Any:
        found = kernel(args, *options)
        found.validate(full=True)
        return found

    return apply


def _slices(kernel: Kernel, length: Kernel, given: Mapping[str, Any]) -> Kernel:
    """Parts of texts and bytes: of bounds far outside Arrow makes too much room, or too little."""

    def apply(args: list[Any], _: object) -> Any:
        lengths = length(args[0])
        longest = (lengths if isinstance(lengths, pa.Scalar) else pc.max(lengths)).as_py() or 0
        bounds = dict(given)
        if bounds.get("stop") is None:
            bounds["stop"] = longest if bounds.get("step", 1) > 0 else -longest - 1
        for bound in ("start", "stop"):
            bounds[bound] = min(max(bounds[bound], -longest - 1), longest)
        bounds["step"] = min(max(bounds.get("step", 1), -longest - 1), longest + 1)
        return kernel(args, pc.SliceOptions(**bounds))

    return apply


def _shift_left(args: list[Any]) -> Any:
    """Shifted so far that shifting back gives what was there: no bit of it is lost."""
    shifted = pc.shift_left_checked(*args)
    again = pc.equal(pc.shift_right(shifted, args[1]), args[0])
    if pc.all(again, min_count=0).as_py() is False:
        raise pa.ArrowInvalid(
            f"overflow: bits are shifted out of {shifted.type}; cast it to a wider type first, or leave them away by &"
        )
    return shifted


_MENDED: dict[str, Callable[[Kernel], Kernel]] = {
    "year_month_day": _day_parts(year=pc.year, month=pc.month, day=pc.day),
    "iso_calendar": _day_parts(
        iso_year=pc.iso_year, iso_week=pc.iso_week, iso_day_of_week=_day_of_week
    ),
    "binary_join_element_wise": _with_rows_of_nothing,
    "binary_replace_slice": _of_whole_characters,
    "binary_repeat": _repeated,
}
