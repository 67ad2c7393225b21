"""Durations and sizes as people write them."""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction

from penstock.errors import ConfigurationError

_QUANTITY = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-zµ]*)\s*", re.IGNORECASE)

DURATION_MAX_MS = 10_000 * 366 * 86_400_000
"""10,000 years: any time plus or minus it fits into 64 bits."""
SIZE_MAX_BYTES = 2**63 - 1

_MILLISECONDS: dict[str, int | Fraction] = {}
for _factor, _names in (
    (Fraction(1, 1_000_000), "ns nano nanos nanosecond nanoseconds"),
    (Fraction(1, 1000), "us µs micro micros microsecond microseconds"),
    (1, "ms milli millis millisecond milliseconds"),
    (1000, "s sec secs second seconds"),
    (60_000, "m min mins minute minutes"),
    (3_600_000, "h hr hour hours"),
    (86_400_000, "d day days"),
):
    _MILLISECONDS.update(dict.fromkeys(_names.split(), _factor))

_BYTES: dict[str, int] = {}
for _exponent, _names in enumerate(
    ("b byte bytes", "k kb kib", "m mb mib", "g gb gib", "t tb tib")
):
    _BYTES.update(dict.fromkeys(_names.split(), 1024**_exponent))


def duration_ms(value: str | float | timedelta) -> int:
    """A duration in whole milliseconds.

    Args:
        value: ``"10s"``, ``"250ms"``, ``"1 min"``, ``"2h"``, a timedelta, or a number of milliseconds.

    Raises:
        ConfigurationError: it is none of these, negative, longer than 10,000 years, or finer than a
            millisecond.
    """
    if isinstance(value, timedelta):
        return _whole_ms(value / timedelta(milliseconds=1), value)
    if isinstance(value, bool):
        raise ConfigurationError(f"{value!r} is not a duration; write for example '10s'")
    if isinstance(value, (int, float)):
        return _whole_ms(value, value)
    number, unit = _split(value, "a duration", "'10s', '250ms', '1 min' or '2h'")
    if unit and unit not in _MILLISECONDS:
        raise ConfigurationError(
            f"{value!r} is not a duration: unknown unit {unit!r}; units are ms, s, min, h and d"
        )
    return _whole_ms(number * _MILLISECONDS[unit or "ms"], value)


def signed_duration_ms(value: str | float | timedelta) -> int:
    """The same, and it may be negative: ``"-5s"``.

    Raises:
        ConfigurationError: it is no duration, longer than 10,000 years, or finer than a millisecond.
    """
    if isinstance(value, str):
        is_negative, length = value.lstrip().startswith("-"), value.lstrip().removeprefix("-")
        return -duration_ms(length) if is_negative else duration_ms(length)
    if isinstance(value, timedelta):
        return -duration_ms(-value) if value < timedelta() else duration_ms(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
        return -duration_ms(-value)
    return duration_ms(value)


def argument_ms(name: str, value: str | float | timedelta, *, is_signed: bool = False) -> int:
    """A duration that a call is given, in whole milliseconds.

    Args:
        name: of the call and the argument, for errors: ``"session: gap"``.
        value: as of ``duration_ms``; with ``is_signed`` as of ``signed_duration_ms``.

    Raises:
        ConfigurationError: it is none; says which argument.
    """
    try:
        return signed_duration_ms(value) if is_signed else duration_ms(value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None


def size_bytes(value: str | int) -> int:
    """A size in bytes; units are powers of 1024.

    Args:
        value: ``"64mb"``, ``"20 kb"``, ``"1g"``, or a number of bytes.

    Raises:
        ConfigurationError: it is none of these, negative, or does not fit into 64 bits.
    """
    if isinstance(value, bool):
        raise ConfigurationError(f"{value!r} is not a size; write for example '64mb'")
    if isinstance(value, (int, float)):
        return _whole_bytes(value, value)
    number, unit = _split(value, "a size", "'64mb', '20kb' or '1g'")
    if unit and unit not in _BYTES:
        raise ConfigurationError(
            f"{value!r} is not a size: unknown unit {unit!r}; units are b, kb, mb, gb and tb"
        )
    return _whole_bytes(number * _BYTES[unit or "b"], value)


def _split(value: str, kind: str, examples: str) -> tuple[Fraction, str]:
    """The number as it is written, and the unit: no float is 1.1, and 1.1 hours are whole milliseconds."""
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigurationError(f"{value!r} is not {kind}; write for example {examples}")
    return Fraction(Decimal(match["number"])), match["unit"].lower()


def _whole_ms(number: float | Fraction, value: object) -> int:
    return _whole(number, value, DURATION_MAX_MS, "is longer than 10,000 years")


def _whole_bytes(number: float | Fraction, value: object) -> int:
    return _whole(number, value, SIZE_MAX_BYTES, "is more than 8 EiB")


def _whole(number: float | Fraction, value: object, number_max: int, too_much: str) -> int:
    if number != number:
        raise ConfigurationError(f"{value!r} is not a number")
    if number < 0:
        raise ConfigurationError(f"{value!r} is negative")
    if number > number_max:
        raise ConfigurationError(f"{value!r} {too_much}")
    if number != int(number):
        raise ConfigurationError(f"{value!r} is finer than the smallest unit (1 ms or 1 byte)")
    return int(number)
