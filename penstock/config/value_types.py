"""What values of configuration keys can be, and how they are written: durations, sizes, counts, choices."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from penstock.errors import ConfigurationError
from penstock.units import duration_ms, size_bytes

_INFINITE = -1


def _duration(value: object) -> object:
    if isinstance(value, (str, int, float, timedelta)):
        return _as_value_error(duration_ms, value)
    return value


def _size(value: object) -> object:
    return _as_value_error(size_bytes, value) if isinstance(value, (str, int, float)) else value


def _count_or_infinite(value: object, parse: ValidatorFunctionWrapHandler) -> int:
    if value in ("infinite", "unlimited"):
        return _INFINITE
    count: int = parse(value)
    if count < 0:
        raise ValueError("is a number of at least 0, or `infinite` for no limit")
    return count


def _count_text(count: int) -> int | str:
    return "infinite" if count == _INFINITE else count


def _strategy_name(value: object) -> object:
    if value is False:
        return "off"  # YAML reads a plain off as false
    return value.strip().lower() if isinstance(value, str) else value


def _none_as_zero(value: object) -> object:
    return 0 if value is False or value in ("none", "off", "disabled") else value


def _pre_aggregation(value: object) -> object:
    named = {True: "always", False: "never", "true": "always", "false": "never"}
    return named.get(value, value) if isinstance(value, (bool, str)) else value


def _as_value_error(parse: Any, value: object) -> object:
    try:
        return parse(value)
    except ConfigurationError as error:
        raise ValueError(str(error)) from error


DurationMs = Annotated[
    int, BeforeValidator(_duration), Field(json_schema_extra={"type": "duration"})
]
IntervalMs = Annotated[DurationMs, BeforeValidator(_none_as_zero)]
"""A duration, or ``none`` (0)."""
SizeBytes = Annotated[int, BeforeValidator(_size), Field(json_schema_extra={"type": "size"})]
RestartStrategyType = Literal[
    "none",
    "off",
    "disable",
    "fallback",
    "fixed-delay",
    "fixeddelay",
    "failure-rate",
    "failurerate",
    "exponential-delay",
    "exponentialdelay",
]
RestartStrategy = Annotated[RestartStrategyType | None, BeforeValidator(_strategy_name)]
PreAggregation = Annotated[Literal["auto", "always", "never"], BeforeValidator(_pre_aggregation)]
Count = Annotated[int, WrapValidator(_count_or_infinite), PlainSerializer(_count_text)]
"""A number from 0 on, or ``infinite`` (-1 in here, and refused from outside)."""
Port = Annotated[int, Field(ge=0, le=65535)]
MetricsPort = Annotated[int, Field(ge=-1, le=65535)]
DEADLINE_MAX_MS = 10 * 366 * 86_400_000
"""Ten years: gRPC takes a deadline some centuries ahead for one that is over."""
