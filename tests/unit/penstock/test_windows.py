"""Aim: window objects say what they are, and refuse what makes no sense in the user's words."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from penstock.errors import ConfigurationError, JobRejected
from penstock.graph.window_spec import is_event_time, slice_ms
from penstock.pb import graph_pb2
from penstock.state.base import Ttl
from penstock.streams.windows import count_window, session, sliding, tumbling


def test_lengths_become_milliseconds() -> None:
    spec = tumbling("10s").to_proto()
    assert (spec.kind, spec.size_ms, spec.slide_ms) == (
        graph_pb2.WINDOW_KIND_TUMBLING,
        10_000,
        10_000,
    )
    spec = sliding(timedelta(minutes=1), "15s", offset="1s").to_proto("processing")
    assert (spec.size_ms, spec.slide_ms, spec.offset_ms) == (60_000, 15_000, 1000)
    assert spec.time == graph_pb2.TIME_DOMAIN_PROCESSING
    assert session("30 s").to_proto().gap_ms == 30_000
    assert count_window(7).to_proto().count == 7


def test_equal_windows_are_equal() -> None:
    assert tumbling("1s") == tumbling(1000)
    assert {sliding("2s", "1s"), sliding(2000, 1000)} == {sliding("2s", "1s")}


@pytest.mark.parametrize("offset", ["-8h", timedelta(hours=-8), -8 * 3_600_000])
def test_a_negative_offset_is_its_equal_within_the_size(offset: object) -> None:
    assert tumbling("1d", offset=offset).to_proto().offset_ms == 16 * 3_600_000  # type: ignore[arg-type]


def test_lateness_and_side_output() -> None:
    spec = session("1s").to_proto(allowed_lateness="2s", late_tag="late")
    assert (spec.allowed_lateness_ms, spec.late_tag) == (2000, "late")
    assert is_event_time(spec)
    assert not is_event_time(count_window(2).to_proto())
    assert slice_ms(sliding(10, 4).to_proto()) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tumbling(0), "size is 0; it must be longer"),
        (lambda: tumbling("ten"), "is not a duration"),
        (lambda: tumbling(10, offset=10), "offset .* must be shorter"),
        (lambda: sliding(10, 0), "slide is 0"),
        (lambda: sliding(5, 10), "longer than size"),
        (lambda: sliding("1d", "7ms"), "slices"),
        (lambda: session("0s"), "gap"),
        (lambda: count_window(0), "at least 1"),
        (lambda: count_window(2.5), "must be an integer"),  # type: ignore[arg-type]
        (lambda: tumbling(5).to_proto("wall"), "'event' or 'processing'"),
        (lambda: tumbling(5).to_proto("processing", "1s"), "allowed_lateness does not go"),
        (lambda: tumbling(5).to_proto("processing", late_tag="l"), "late_to does not go"),
        (lambda: count_window(5).to_proto(allowed_lateness=1), "no row is late"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, message: str) -> None:
    with pytest.raises(JobRejected, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    "value", [-1, 1.5, float("nan"), 10**30, timedelta.max, True, None, "soon"]
)
@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (tumbling, "tumbling: size"),
        (lambda value: sliding("10s", value), "sliding: slide"),
        (session, "session: gap"),
        (lambda value: tumbling("1s").to_proto(allowed_lateness=value), "window: allowed_lateness"),
        (Ttl, "Ttl"),
    ],
    ids=["size", "slide", "gap", "lateness", "ttl"],
)
def test_a_length_that_is_none_is_refused_under_its_name(
    make: Callable[[Any], object], argument: str, value: Any
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{argument}: "):
        make(value)


def test_a_count_window_has_as_many_rows_as_can_be_counted() -> None:
    """2**63 failed as the job was sent, with a message of protobuf's."""
    assert count_window(2**63 - 1).to_proto().count == 2**63 - 1
    with pytest.raises(JobRejected, match="it must be at most 9223372036854775807"):
        count_window(2**63)
