"""A span of a trace, as it is told once it is over (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        start_ms: wall-clock time.
        end_ms: wall-clock time.
        attributes: facts; the names of ours begin with ``penstock.``.
        children: parts of it.
        error: why it did not come to a good end; "" = it did.
    """

    name: str
    start_ms: int
    end_ms: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    children: tuple[Span, ...] = ()
    error: str = ""


ReportSpan = Callable[[Span], None]
"""Takes a span that is over; never waits, never fails."""
