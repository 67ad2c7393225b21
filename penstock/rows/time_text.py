"""Times and dates as text: what Arrow has no text for is an error, not a text that says so, or that of another year."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.rows.zone_clocks import check_clocks, clock_texts, is_far

_NO_TEXT = "<value out of range"


def time_texts(times: Any, target: pa.DataType | None = None) -> Any:
    """The text of each timestamp or date.

    Args:
        times: an array or a scalar.
        target: the kind of text; None = a plain one.

    Raises:
        pa.ArrowInvalid: one lies outside of the years -32767 to 32767.

    >>> time_texts(pa.scalar(-1, pa.timestamp("ms"))).as_py()
    '1969-12-31 23:59:59.999'
    """
    check_time_texts(times)
    if is_far(times):
        times = clock_texts(times, "%Y-%m-%d %H:%M:%S%z")
    return pc.cast(times, target or pa.string())


def check_time_texts(times: Any) -> None:
    """Raises what ``time_texts`` does, and makes no text but that of the first and the last time.

    Raises:
        pa.ArrowInvalid: one lies outside of the years -32767 to 32767.
    """
    check_clocks(times)
    kind = times.type
    instant = pa.timestamp(kind.unit) if pt.is_timestamp(kind) else kind
    for bound in [times] if isinstance(times, pa.Scalar) else pc.min_max(times).values():
        text = pc.cast(pc.cast(bound, instant), pa.string()).as_py() or ""
        if text.startswith(_NO_TEXT):
            number = text.partition(": ")[2].partition(">")[0]
            raise pa.ArrowInvalid(
                f"a {kind} of {number} has no text: it lies outside of the years -32767 to 32767"
            )
