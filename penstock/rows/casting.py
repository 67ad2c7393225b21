"""What a cast does to values.

Without ``safe``: fractions, and digits beyond the target's scale or resolution, are cut; a value that
lies outside of the target's range is an error, as is text that does not parse. With ``safe`` every loss
is an error. Arrow alone guarantees neither (floats beyond the integer range and decimals beyond the
precision come out as garbage, and so do integers as times of day and dates), so those pairs of types are checked
or go through an intermediate step here. A narrower float is rounded to, infinity included, and a decimal
becomes the nearest float64, as in Python. What is in lists, structs, maps, dictionaries and extension types is cast by the same rules
(``nested_casts``).
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.rows.nested_casts import also_of_scalars, nested_cast
from penstock.rows.time_text import time_texts
from penstock.rows.zone_clocks import by_clock

_INT64_DIGITS = 18
"""As many digits has any decimal that is an int64 without its point."""

UNITS_PER_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
"""What a time of day in each unit is less than."""

_INT64_LIMIT = 1 << 63

DIGITS_OF_64_BITS = 19
"""Decimals of so many digits Arrow divides rightly."""

_DIGITS_OF_32_BITS = 9
"""By powers of ten of so many digits it divides any decimal rightly."""

_INFINITY = r"(?i)^\s*[+-]?inf(inity)?\s*$"
"""Texts that are infinite as they stand."""

_NEGATIVE = r"^\s*-"
"""Texts of numbers below zero."""

Kernel = Callable[[Any], Any]
"""An Arrow array or scalar in, one of the same length out."""


def cast_kernel(source: pa.DataType, target: pa.DataType, *, safe: bool) -> Kernel:
    """The function that casts values of one type to another."""
    if source == target:
        return lambda value: value
    if isinstance(source, pa.BaseExtensionType):
        of_storage = cast_kernel(source.storage_type, target, safe=safe)
        return also_of_scalars(lambda value: of_storage(value.storage))
    if isinstance(target, pa.BaseExtensionType):
        to_storage = cast_kernel(source, target.storage_type, safe=safe)
        return also_of_scalars(lambda value: target.wrap_array(to_storage(value)))
    if pt.is_dictionary(source):
        of_values = cast_kernel(source.value_type, target, safe=safe)
        return also_of_scalars(lambda value: of_values(value.dictionary_decode()))
    if pt.is_dictionary(target):
        to_values = cast_kernel(source, target.value_type, safe=safe)
        return also_of_scalars(lambda value: pc.dictionary_encode(to_values(value)).cast(target))
    is_text = pt.is_string(target) or pt.is_large_string(target)
    if is_text and (pt.is_timestamp(source) or pt.is_date(source)):
        return lambda value: time_texts(value, target)
    if pt.is_integer(source) and (pt.is_time(target) or pt.is_date64(target)):
        is_time = pt.is_time(target)
        return _integer_to_time(target) if is_time else _integer_to_date64(source, safe=safe)
    if pt.is_timestamp(source) and not safe and (pt.is_date(target) or pt.is_time(target)):
        to_time = pt.is_time(target)
        return by_clock(_timestamp_to_time(source, target) if to_time else _to_date(source, target))
    nested = nested_cast(source, target, cast_kernel, safe=safe)
    if nested is not None:
        return nested
    if pt.is_signed_integer(target) and _is_written(source):
        parsed = _direct(_options(target, truncate=False))
        return lambda value: as_written(parsed(value), value)
    if safe:
        return _without_loss(source, target)
    if pt.is_floating(source) and pt.is_integer(target):
        checked = _direct(_options(target, truncate=False))
        if pt.is_float16(source):  # Arrow has no trunc for it
            widened = _direct(_options(pa.float32(), truncate=False))
            return lambda value: checked(pc.trunc(widened(value)))
        return lambda value: checked(pc.trunc(value))
    return _guarded(source, target, truncate=not pt.is_nested(target))


def _without_loss(source: pa.DataType, target: pa.DataType) -> Kernel:
    direct = _guarded(source, target, truncate=False)
    if pt.is_floating(target) and (pt.is_string(source) or pt.is_large_string(source)):
        return lambda value: as_written(direct(value), value)
    if not _needs_round_trip(source, target):
        return direct
    back = cast_kernel(target, source, safe=False)
    return lambda value: _unchanged(value, direct(value), back)


def as_written(numbers: Any, texts: Any) -> Any:
    """Numbers that were read from texts, none of which has become another as the type does not hold it.

    Arrow makes a float infinite, and takes the first bit of a hexadecimal number for the sign.

    Args:
        numbers: an array, chunked array or scalar of floats or signed integers.
        texts: what each was read from.

    Raises:
        pa.ArrowInvalid: one has.

    Example:
        >>> as_written(pa.array([float("inf")]), pa.array(["1e400"]))
        Traceback (most recent call last):
        pyarrow.lib.ArrowInvalid: the number '1e400' is beyond double
    """
    is_integer = pt.is_integer(numbers.type)
    suspects = pc.less(numbers, 0) if is_integer else pc.is_inf(numbers)
    if not pc.any(suspects, min_count=0).as_py():
        return numbers
    written = pc.match_substring_regex(texts, _NEGATIVE if is_integer else _INFINITY)
    beyond = pc.and_not(suspects, written)
    if pc.any(beyond, min_count=0).as_py():
        first = texts if isinstance(texts, pa.Scalar) else texts.filter(beyond)[0]
        shown = repr(first.as_py()).removeprefix("b")
        raise pa.ArrowInvalid(f"the number {shown} is beyond {numbers.type}")
    return numbers


def _is_written(kind: pa.DataType) -> bool:
    texts = (pt.is_string, pt.is_large_string, pt.is_binary, pt.is_large_binary)
    return any(is_text(kind) for is_text in texts)


def _guarded(source: pa.DataType, target: pa.DataType, *, truncate: bool) -> Kernel:
    """Arrow's cast, with steps in between where that alone is wrong."""
    if pt.is_decimal(target):
        return _to_decimal(source, target, truncate=truncate)
    is_apart = pt.is_decimal(source) and (
        source.scale > _DIGITS_OF_32_BITS or source.bit_width < 128
    )
    if is_apart and pt.is_integer(target):  # of few bits Arrow compares with its limits in as few
        to_whole = _to_decimal(source, pa.decimal256(76, 0), truncate=truncate)
        checked = _direct(_options(target, truncate=False))
        return lambda value: checked(to_whole(value))
    if pt.is_decimal(source) and pt.is_float64(target):
        return _nearest_float(source)
    direct = _direct(_options(target, truncate=truncate))
    return by_clock(direct) if pt.is_timestamp(source) and pt.is_date(target) else direct


def _integer_to_time(target: pa.DataType) -> Kernel:
    direct = _direct(_options(target, truncate=False))
    limit = UNITS_PER_DAY[target.unit]

    def cast(value: Any) -> Any:
        inside = pc.and_(pc.greater_equal(value, 0), pc.less(value, limit))
        if pc.all(inside, min_count=0).as_py() is False:
            outside = value if isinstance(value, pa.Scalar) else value.filter(pc.invert(inside))[0]
            raise pa.ArrowInvalid(
                f"{outside.as_py()} is no time of day as {target}, which has 0 to {limit - 1}"
            )
        return direct(value)

    return cast


def _integer_to_date64(source: pa.DataType, *, safe: bool) -> Kernel:
    """Milliseconds as the day that they are in, which Arrow takes as they are for a date of no whole days."""
    if not pt.is_int64(source):
        return _direct(_options(pa.date64(), truncate=False))  # there is none
    to_moments = _direct(_options(pa.timestamp("ms"), truncate=False))
    to_days = cast_kernel(pa.timestamp("ms"), pa.date64(), safe=safe)
    return lambda value: to_days(to_moments(value))


def _timestamp_to_time(source: pa.DataType, target: pa.DataType) -> Kernel:
    """The time of day in the timestamp's own unit, and then in the other: Arrow's own way round overflows."""
    is_short = source.unit in ("s", "ms")
    own_unit = pa.time32(source.unit) if is_short else pa.time64(source.unit)
    to_own, to_target = (_direct(_options(kind, truncate=True)) for kind in (own_unit, target))
    return lambda value: to_target(to_own(value))


def _to_date(source: pa.DataType, target: pa.DataType) -> Kernel:
    """Days, of which Arrow keeps the lowest 32 bits where there are more."""
    direct = _direct(_options(target, truncate=True))
    limit = min(UNITS_PER_DAY[source.unit] << 31, _INT64_LIMIT)
    as_number = _direct(_options(pa.int64(), truncate=False))

    def cast(value: Any) -> Any:
        numbers = as_number(value)
        inside = pc.and_(pc.greater_equal(numbers, -limit), pc.less_equal(numbers, limit - 1))
        if pc.all(inside, min_count=0).as_py() is False:
            raise pa.ArrowInvalid(f"a {source} is outside of the days that {target} has")
        return direct(value)

    return cast


def _to_decimal(source: pa.DataType, target: pa.DataType, *, truncate: bool) -> Kernel:
    checked = _direct(_options(target, truncate=False))
    if pt.is_floating(source):
        if target.bit_width >= 128:
            return checked  # rounds to the scale, refuses what is out of range
        rounded = _direct(
            _options(pa.decimal128(target.precision, target.scale), truncate=False)
        )  # garbage in fewer bits
        return lambda value: checked(rounded(value))
    wide = pa.decimal256(76, target.scale)
    widened = _direct(_options(wide, truncate=truncate))
    if pt.is_decimal(source) and source.precision > DIGITS_OF_64_BITS:
        widened = _cut(source.scale, target.scale, truncate=truncate)
    if pt.is_decimal(source) and source.scale < target.scale:
        widened = _with_room(source, widened, target.scale - source.scale)
    if pt.is_string(source) or pt.is_large_string(source):
        widened = _of_fitting_text(widened, 76 - target.scale, truncate=truncate)
    if target.bit_width >= 128:
        return lambda value: checked(widened(value))
    # Arrow takes the lowest bits of what is too large for so few.
    of_digits = pa.decimal128(target.precision, target.scale)
    fitting = _direct(_options(of_digits, truncate=False))
    return lambda value: checked(fitting(widened(value)))


def _cut(digits: int, scale: int, *, truncate: bool) -> Kernel:
    """To 256 bits and fewer digits behind the point, so many at once as Arrow cuts rightly."""
    scales = [*range(digits - _DIGITS_OF_32_BITS, scale, -_DIGITS_OF_32_BITS), scale]
    steps = [_direct(_options(pa.decimal256(76, each), truncate=truncate)) for each in scales]
    return lambda value: reduce(lambda found, step: step(found), steps, value)


def _with_room(source: pa.DataType, widened: Kernel, more_digits: int) -> Kernel:
    """Refuses decimals of more digits than stand beside those that are added; Arrow wraps them."""
    room = 76 - more_digits
    if source.precision <= room:
        return widened
    if room < max(source.scale, 1):
        raise pa.ArrowInvalid(
            f"a {source} has no room for {more_digits} more digits behind the point"
        )
    fitting = _direct(_options(pa.decimal256(room, source.scale), truncate=False))
    return lambda value: widened(fitting(value))


def _of_fitting_text(widened: Kernel, digits: int, *, truncate: bool) -> Kernel:
    """Refuses texts of numbers with more digits before the point, which Arrow wraps, and cuts those that are far behind it."""
    limit = Decimal(f"1E{digits}")
    as_float = _direct(_options(pa.float64(), truncate=False))
    kept = max(76 - digits, 0) + _DIGITS_OF_32_BITS
    cut_at = {"pattern": rf"^([^eE]*\.\d{{{kept}}})\d+$", "replacement": r"\1"}

    def cast(value: Any) -> Any:
        if truncate and pc.any(pc.greater(pc.binary_length(value), kept), min_count=0).as_py():
            value = pc.replace_substring_regex(value, **cut_at)
        numbers = widened(value)
        is_near = pc.greater(pc.abs(as_float(value)), float(limit) * 0.99)
        if pc.any(is_near, min_count=0).as_py():
            near = [value.as_py()] if isinstance(value, pa.Scalar) else value.filter(is_near)
            for text in map(str, near):
                if Decimal(text).copy_abs() >= limit:  # which round nothing
                    raise pa.ArrowInvalid(
                        f"{text!r} has more than {digits} digits before the point"
                    )
        return numbers

    return cast


def _nearest_float(source: pa.DataType) -> Kernel:
    """Decimals as the nearest float64: as a quotient where both of its sides are floats, else by their texts."""
    text, parsed = (_direct(_options(kind, truncate=False)) for kind in (pa.string(), pa.float64()))
    if source.precision > _INT64_DIGITS or not 0 <= source.scale <= _INT64_DIGITS:
        return lambda value: parsed(text(value))
    units_per_one = pa.scalar(Decimal(10) ** source.scale)
    to_integer = _direct(_options(pa.int64(), truncate=False))
    to_float = _direct(_options(pa.float64(), truncate=True))

    def cast(value: Any) -> Any:
        units = to_integer(pc.multiply(value, units_per_one))
        if pc.all(pc.less_equal(pc.abs(units), 2**53), min_count=0).as_py() is False:
            return parsed(text(value))
        return pc.divide(to_float(units), 10.0**source.scale)

    return cast


def _direct(options: pc.CastOptions) -> Kernel:
    function = pc.get_function("cast")

    def cast(value: Any) -> Any:
        return function.call([value], options)

    return cast


def _options(target: pa.DataType, *, truncate: bool) -> pc.CastOptions:
    return pc.CastOptions(
        target,
        allow_time_truncate=truncate,
        allow_float_truncate=truncate,
        allow_decimal_truncate=truncate,
    )


def _needs_round_trip(source: pa.DataType, target: pa.DataType) -> bool:
    """Pairs that Arrow's own safe cast takes although something is lost."""
    kinds: tuple[Callable[[pa.DataType], bool], ...]
    if pt.is_floating(source):
        if pt.is_floating(target) and source.bit_width < target.bit_width:
            return False
        kinds = (pt.is_floating, pt.is_decimal, pt.is_boolean)
    elif pt.is_decimal(source):
        kinds = (pt.is_floating,)
    elif pt.is_integer(source):
        kinds = (pt.is_boolean, pt.is_float16)
    elif pt.is_timestamp(source):
        kinds = (pt.is_date, pt.is_time)
    else:
        return False
    return any(is_kind(target) for is_kind in kinds)


def _unchanged(value: Any, result: Any, back: Kernel) -> Any:
    again = back(result)
    if pt.is_float16(value.type):  # Arrow does not compare these
        value, again = (pc.cast(each, pa.float32()) for each in (value, again))
    same = pc.equal(again, value)
    if pt.is_floating(value.type):
        same = pc.or_(same, pc.and_(pc.is_nan(again), pc.is_nan(value)))
    if pc.all(same, min_count=0).as_py() is False:
        lost = value if isinstance(value, pa.Scalar) else value.filter(pc.invert(same))[0]
        raise pa.ArrowInvalid(f"{lost.as_py()!r} would change when it is cast to {result.type}")
    return result
