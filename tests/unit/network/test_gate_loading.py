"""Aim: a gate reads what is to be read first to the end of its data, and nothing else before.

Method: the gate alone; elements arrive on its channels in every order that hypothesis draws.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from common.elements import (
    MAX_TIMESTAMP_MS,
    EndOfData,
    EndOfPartition,
    StreamStatus,
    Watermark,
)
from taskmanager.network.credit import charge_of
from taskmanager.network.input_gate import ChannelSpec, InputGate
from taskmanager.operators.metrics import SubtaskCounters
from tests.support.examples import examples
from tests.support.exchange_slots import numbers

FIRST = (True, False, True)
"""Of three channels."""


def failed(error: Exception) -> None:
    raise error


def new_gate(on_loaded: list[int]) -> InputGate:
    gate = InputGate(
        [ChannelSpec(f"c{index}", is_first=first) for index, first in enumerate(FIRST)],
        1 << 20,
        counters=SubtaskCounters(),
        on_available=lambda: None,
        on_error=failed,
    )
    gate.on_loaded = [lambda: on_loaded.append(1)]
    return gate


def arrive(gate: InputGate, channel: int, element: Any, row: int) -> None:
    if isinstance(element, pa.RecordBatch):
        gate.channels[channel].batch_arrived(element, row, charge_of(element.nbytes))
    else:
        gate.channels[channel].control_arrived(element)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
@examples(200)
def test_nothing_of_the_others_comes_before_the_first_have_ended(
    steps: list[tuple[int, bool]],
) -> None:
    loaded: list[int] = []
    gate = new_gate(loaded)
    scripts: list[list[Any]] = [
        [numbers(0, 2), Watermark(5), numbers(2, 3), EndOfData(), EndOfPartition()] for _ in FIRST
    ]
    rows, came = [0, 0, 0], []
    drain = [(channel, True) for channel in range(3) for _ in range(8)]
    for channel, polls in [*steps, *drain]:
        if scripts[channel]:
            element = scripts[channel].pop(0)
            arrive(gate, channel, element, rows[channel])
            rows[channel] += element.num_rows if isinstance(element, pa.RecordBatch) else 0
        while polls and (element := gate.poll()) is not None:
            if isinstance(element, pa.RecordBatch):
                came.append(gate.current_channel)
                assert FIRST[gate.current_channel] or not gate.is_loading
    assert came.count(0) == came.count(1) == came.count(2) == 2
    assert came.index(1) > max(i for i, channel in enumerate(came) if FIRST[channel])
    assert loaded == [1]
    assert gate.is_finished
    assert not gate.is_loading


def history_gate() -> InputGate:
    """A history of two channels, and one that goes on from there."""
    return InputGate(
        [
            ChannelSpec("h0", is_first=True),
            ChannelSpec("live", follows=True),
            ChannelSpec("h1", is_first=True),
        ],
        1 << 20,
        counters=SubtaskCounters(),
        on_available=lambda: None,
        on_error=failed,
    )


def polled(gate: InputGate) -> list[Any]:
    came = []
    while (element := gate.poll()) is not None:
        came.append(element)
    return [one for one in came if isinstance(one, (Watermark, StreamStatus))]


def test_what_follows_a_history_holds_no_watermark_back_and_the_end_of_one_is_not_that_of_time() -> (
    None
):
    gate = history_gate()
    arrive(gate, 0, Watermark(10), 0)
    assert polled(gate) == []
    arrive(gate, 2, Watermark(7), 0)
    assert polled(gate) == [Watermark(7)]
    arrive(gate, 2, Watermark(25), 0)
    for end in (Watermark(MAX_TIMESTAMP_MS), EndOfData(), EndOfPartition()):
        arrive(gate, 2, end, 0)
    assert polled(gate) == [Watermark(10)]
    arrive(gate, 0, Watermark(20), 0)
    assert polled(gate) == [Watermark(20)]
    for end in (Watermark(MAX_TIMESTAMP_MS), EndOfData(), EndOfPartition()):
        arrive(gate, 0, end, 0)
    assert polled(gate) == [Watermark(25)]
    assert not gate.is_loading
    arrive(gate, 1, Watermark(15), 0)
    assert polled(gate) == []
    arrive(gate, 1, Watermark(30), 0)
    assert polled(gate) == [Watermark(30)]
    arrive(gate, 1, Watermark(MAX_TIMESTAMP_MS), 0)
    assert polled(gate) == [Watermark(MAX_TIMESTAMP_MS)]


def test_the_other_input_of_a_function_holds_the_time_of_its_side_back() -> None:
    gate = InputGate(
        [ChannelSpec("side", is_first=True), ChannelSpec("main")],
        1 << 20,
        counters=SubtaskCounters(),
        on_available=lambda: None,
        on_error=failed,
    )
    arrive(gate, 0, Watermark(10), 0)
    assert polled(gate) == []
