"""Aim: one terminal event per attempt, in whatever order things happen; events stay in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pb import internal_pb2
from penstock.pb import client_pb2
from taskmanager.processes.exit_cause import describe_status
from taskmanager.rpc.event_outbox import EventOutbox
from taskmanager.slots.attempt_table import AttemptTable, state_event

RUNNING = client_pb2.ATTEMPT_STATE_RUNNING
CANCELING = client_pb2.ATTEMPT_STATE_CANCELING
TERMINAL = (
    client_pb2.ATTEMPT_STATE_FINISHED,
    client_pb2.ATTEMPT_STATE_CANCELED,
    client_pb2.ATTEMPT_STATE_FAILED,
)


def deployment(of: internal_pb2.AttemptId) -> internal_pb2.TaskDeployment:
    return internal_pb2.TaskDeployment(attempt=of)


def attempt(subtask: int) -> internal_pb2.AttemptId:
    return internal_pb2.AttemptId(job_id="j", vertex="v", subtask_index=subtask)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["deploy", "cancel", RUNNING, CANCELING, *TERMINAL]),
            st.integers(0, 2),
        ),
        max_size=30,
    ),
    st.booleans(),
    st.booleans(),
)
def test_each_attempt_gets_exactly_one_terminal_event(
    steps: list[tuple[object, int]], is_asked_for: bool, is_overdue: bool
) -> None:
    table = AttemptTable()
    reported: list[internal_pb2.TaskEvent] = []
    deployed: set[int] = set()
    cancelled: set[int] = set()
    for step, subtask in steps:
        if step == "deploy":
            assert table.deployed(deployment(attempt(subtask))) == (subtask not in deployed)
            deployed.add(subtask)
        elif step == "cancel":
            if table.cancelled(attempt(subtask)):
                cancelled.add(subtask)
        else:
            event = state_event(attempt(subtask), step)  # type: ignore[arg-type]
            if table.observe(event):
                reported.append(event)
    reported += table.process_ended(
        "it died", "tm", 5, is_asked_for=is_asked_for, is_overdue=is_overdue
    )
    last = [
        event.attempt.subtask_index for event in reported if event.state_changed.state in TERMINAL
    ]
    assert sorted(last) == sorted(deployed)
    assert table.process_ended("again", "tm", 6, is_asked_for=False) == []
    for event in reported:
        if event.state_changed.failure.message:
            assert not is_asked_for
            assert not (is_overdue and event.attempt.subtask_index in cancelled)


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_what_finished_attempts_kept_is_told_to_be_lost_before_the_others_end(
    is_asked_for: bool,
) -> None:
    table = AttemptTable()
    for subtask, state in enumerate((RUNNING, *TERMINAL)):
        table.deployed(deployment(attempt(subtask)))
        table.observe(state_event(attempt(subtask), state))
    events = table.process_ended("it died", "tm", 5, is_asked_for=is_asked_for)
    told = [(event.attempt.subtask_index, event.WhichOneof("event")) for event in events]
    lost = [] if is_asked_for else [(1, "kept_rows_lost")]
    assert told == [*lost, (0, "state_changed")]
    assert table.process_ended("again", "tm", 6, is_asked_for=False) == []


def test_of_an_ended_attempt_only_written_snapshots_are_heard_of() -> None:
    table = AttemptTable()
    table.deployed(deployment(attempt(0)))
    acknowledged = internal_pb2.CheckpointAcknowledged(checkpoint_id=1)
    event = internal_pb2.TaskEvent(attempt=attempt(0), checkpoint_acknowledged=acknowledged)
    assert table.observe(state_event(attempt(0), next(iter(TERMINAL))))
    assert table.observe(event), "somebody must delete its file"
    assert not table.observe(state_event(attempt(0), RUNNING))
    event.attempt.subtask_index = 1
    assert not table.observe(event), "an attempt that was never here"


@given(st.lists(st.one_of(st.just("send"), st.integers(0, 99)), max_size=60))
def test_the_outbox_is_a_queue(steps: list[object]) -> None:
    outbox, expected, sent = EventOutbox(), [], []
    for step in steps:
        if step == "send":
            batch = outbox.next_batch()
            sent += [event.attempt.subtask_index for event in batch]
            outbox.acknowledge(len(batch))
        else:
            expected.append(step)
            outbox.append(state_event(attempt(int(str(step))), RUNNING))
    assert sent == expected[: len(sent)]
    assert len(outbox) == len(expected) - len(sent)


def test_a_batch_is_bounded_and_never_empty() -> None:
    outbox = EventOutbox()
    splits = [internal_pb2.Split(id="s", payload=bytes(6 << 20))]
    big = internal_pb2.TaskEvent(
        attempt=attempt(0), splits_discovered=internal_pb2.SplitsDiscovered(splits=splits * 2)
    )
    outbox.append(big)
    outbox.append(big)
    assert len(outbox.next_batch()) == 1
    outbox.clear()
    for _ in range(2500):
        outbox.append(state_event(attempt(0), RUNNING))
    assert len(outbox.next_batch()) == 1000


def test_a_full_outbox_says_so() -> None:
    outbox = EventOutbox(events_max=2)
    for _ in range(3):
        outbox.append(state_event(attempt(0), RUNNING))
    assert outbox.is_overfull
    assert (len(outbox), outbox.dropped_count) == (2, 1)
    outbox.clear()
    assert not outbox.is_overfull


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-60, "was killed by signal 60"),
    ],
)
def test_exit_statuses_are_told_in_words(status: int, text: str) -> None:
    assert describe_status(status) == text


def test_a_process_that_outlives_many_attempts_knows_no_more_of_them() -> None:
    table, sizes = AttemptTable(), {}
    acknowledged = internal_pb2.CheckpointAcknowledged(checkpoint_id=1)
    for number in range(200):
        for subtask in range(3):
            one = internal_pb2.AttemptId(
                job_id="j", vertex="v", subtask_index=subtask, attempt=number
            )
            assert table.deployed(deployment(one))
            assert table.observe(state_event(one, RUNNING))
            assert not table.is_terminal(one)
            assert table.observe(state_event(one, client_pb2.ATTEMPT_STATE_CANCELED))
        sizes[number] = len(table.attempt_keys())
    assert sizes[5] == sizes[199] == 3
    first = internal_pb2.AttemptId(job_id="j", vertex="v", subtask_index=1, attempt=0)
    assert table.contains(first)
    assert table.is_terminal(first)
    assert not table.deployed(deployment(first)), "a call that comes again starts nothing"
    assert not table.cancelled(first)
    assert not table.observe(state_event(first, client_pb2.ATTEMPT_STATE_FAILED))
    late = internal_pb2.TaskEvent(attempt=first, checkpoint_acknowledged=acknowledged)
    assert table.observe(late), "somebody must know of the file"
    assert len(table.attempt_keys()) == 3


def test_an_attempt_that_has_not_ended_is_known_beside_newer_ones() -> None:
    table = AttemptTable()
    older = internal_pb2.AttemptId(job_id="j", vertex="v", attempt=1)
    newer = internal_pb2.AttemptId(job_id="j", vertex="v", attempt=2)
    assert table.deployed(deployment(older))
    assert table.deployed(deployment(newer))
    assert not table.is_terminal(older)
    assert table.cancelled(older)
    assert table.observe(state_event(older, client_pb2.ATTEMPT_STATE_CANCELED))
    assert len(table.process_ended("it died", "tm", 5, is_asked_for=True)) == 1
