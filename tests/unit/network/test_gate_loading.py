"""Aim: a gate reads what is to be read first to the end of its data, and nothing else before.

Method: the gate alone; elements arrive on its channels in every order that hypothesis draws.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from common.elements import EndOfData, EndOfPartition, Watermark
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
