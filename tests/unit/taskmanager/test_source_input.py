"""Barriers and rows at the head of a source's chain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from common.elements import CheckpointBarrier
from taskmanager.task.inputs import SourceInput


def polled(source: SourceInput, count: int) -> list[Any]:
    return [source.poll() for _ in range(count)]


def barrier(checkpoint_id: int) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, 0)


def test_a_barrier_goes_ahead_of_what_has_not_been_read() -> None:
    source = SourceInput(cast("Any", SimpleNamespace(poll=lambda: ("rows",))))
    assert polled(source, 1) == [("rows",)]
    source.trigger(barrier(1))
    assert polled(source, 2) == [(barrier(1),), ("rows",)]


def test_checkpoints_that_follow_each_other_closely_let_rows_pass_between_them() -> None:
    source = SourceInput(cast("Any", SimpleNamespace(poll=lambda: ("rows",))))
    for checkpoint_id in (1, 2, 3):
        source.trigger(barrier(checkpoint_id))
    assert polled(source, 6) == [
        (barrier(1),),
        ("rows",),
        (barrier(2),),
        ("rows",),
        (barrier(3),),
        ("rows",),
    ]


def test_a_reader_that_has_nothing_holds_no_barrier_up() -> None:
    source = SourceInput(cast("Any", SimpleNamespace(poll=lambda: None)))
    source.trigger(barrier(1))
    source.trigger(barrier(2))
    assert polled(source, 3) == [(barrier(1),), (barrier(2),), None]
