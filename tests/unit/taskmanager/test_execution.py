"""The boundary of a task: it ends once, closes what it opened, and a slot outlives what it raises."""

from types import SimpleNamespace

import pytest
import structlog

from common.elements import CheckpointBarrier
from common.pb import internal_pb2
from penstock.errors import PartitionUnavailable, StoreTransient, TaskFailure
from penstock.partition_id import PartitionId
from penstock.pb import checkpoint_pb2, client_pb2
from penstock.storage.checkpoint_properties import BehindBarrier, CheckpointProperties
from penstock.storage.manifest import properties_message
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.processes.mailbox import Mailbox
from taskmanager.task.execution import Execution
from taskmanager.task.slot_runtime import SlotRuntime
from taskmanager.task.subtask import Progress
from tests.support.in_memory_network import SimulatedLoop


class FullDisk:
    def write(self, text=""):
        raise OSError(28, "No space left on device")

    close = write


class FakeSubtask:
    """Notes how it was ended."""

    def __init__(self):
        self.is_waiting = False
        self.sealed_bytes = {}
        self.closed = 0
        self.committed = 0
        self.is_discarded = False
        self.aborted = []
        self.holds_back = False
        self.passed_checkpoint_id = 0
        self.flushed_at_ns = []
        self.work = lambda: Progress.IDLE

    def flush(self):
        self.holds_back = False
        self.flushed_at_ns.append(self.now_ns())
        return Progress.IDLE

    def step(self, turn_ns):
        if not self.is_waiting:
            return self.work()
        return Progress.ENDED if self.committed else Progress.WAITING

    def commit_output(self):
        if self.is_waiting:
            self.committed += 1

    def discard_output(self):
        assert not self.closed
        self.is_discarded = True

    def close(self, *, has_finished=False):
        self.closed += 1
        return []

    def next_call_ns(self, now_ms, now_ns):
        return None

    def flush_deadline_ns(self):
        return None

    def flush_if_due(self, now_ns):
        pass

    def settle_waiting(self):
        pass

    def checkpoint_aborted(self, checkpoint_id, *, is_known=True):
        self.aborted.append((checkpoint_id, is_known))


class Slot:
    """A slot runtime with one execution whose parts are fakes."""

    def __init__(self, build=None, open_log=None, create_partitions=lambda execution: None):
        self.loop, self.mailbox, self.reports = SimulatedLoop(), Mailbox(), []
        self.subtask = FakeSubtask()
        self.subtask.now_ns = self.loop.monotonic_ns
        self.released = 0
        counters = SubtaskCounters()
        self.parts = SimpleNamespace(
            counters=counters,
            gauges=counters.gauges,
            open_state=lambda execution, when_open: when_open(),
            build=build or (lambda execution: self.subtask),
            create_partitions=create_partitions,
            source=None,
            collects=[],
            is_loading=False,
            restore_limit_ms=5_000,
            restored_bytes=0,
            release=self._release,
            take_last_states=lambda when_written: (),
            close=list,
            checkpoint_aborted=lambda checkpoint_id: None,
        )
        self.open_log = open_log
        exchange = SimpleNamespace(next_deadline_ns=None)
        self.runtime = SlotRuntime(
            self.loop,
            self.mailbox,
            exchange,
            self._build,
            self.reports.append,
            self.loop.monotonic_ns,
        )
        self.attempt = internal_pb2.AttemptId(vertex="v0")
        deployment = internal_pb2.TaskDeployment(attempt=self.attempt)
        self.runtime.handle(internal_pb2.SlotCommand(deploy=deployment))

    def _build(self, deployment, schedule, deadline_moved):
        self.execution = Execution(
            deployment,
            self.parts,
            report=self.reports.append,
            clock=self.loop,
            taskmanager_id="tm",
            post=self.mailbox.post,
            schedule=schedule,
            deadline_moved=deadline_moved,
            open_log=self.open_log,
        )
        return self.execution

    def _release(self):
        self.released += 1

    def run(self):
        while self.runtime.run_one():
            pass

    def cancel_command(self, is_final=False):
        cancel = internal_pb2.CancelTask(is_final=is_final)
        command = internal_pb2.TaskCommand(attempt=self.attempt, cancel=cancel)
        return internal_pb2.SlotCommand(task_command=command)

    def command(self, **kind):
        self.runtime.handle(
            internal_pb2.SlotCommand(
                task_command=internal_pb2.TaskCommand(attempt=self.attempt, **kind)
            )
        )

    @property
    def states(self):
        events = [r.task_event for r in self.reports if r.WhichOneof("report") == "task_event"]
        return [
            client_pb2.AttemptState.Name(e.state_changed.state).rsplit("_", 1)[1]
            for e in events
            if e.HasField("state_changed")
        ]

    def metrics_count(self):
        return sum(r.WhichOneof("report") == "metrics" for r in self.reports)


def test_a_full_disk_under_the_log_hides_no_cause_and_leaks_nothing():
    slot = Slot(build=lambda execution: 1 / 0, open_log=FullDisk)
    slot.run()
    assert slot.states == ["INITIALIZING", "FAILED"]
    assert slot.released == 1


def test_what_could_not_be_read_is_named_whatever_the_error_came_out_of():
    slot = Slot()
    partition = PartitionId("e0", "v7", 3, 2)

    def step(turn_ns):
        raise PartitionUnavailable("e0: rows are gone", partition=partition) from (
            PartitionUnavailable("rows are gone")
        )

    slot.subtask.step = step
    slot.run()
    changed = slot.reports[-1].task_event.state_changed
    assert changed.failure.error_class == "PartitionUnavailable"
    missing = changed.missing_partition
    assert missing == internal_pb2.PartitionId(
        edge_id="e0", vertex="v7", subtask_index=3, attempt=2
    )


def test_a_log_that_cannot_be_opened_fails_the_attempt_only():
    def refuse():
        raise OSError(28, "No space left on device")

    slot = Slot(open_log=refuse)
    slot.run()
    assert slot.states == ["FAILED"]


def test_a_commit_that_nobody_waits_for_changes_nothing():
    slot = Slot()
    slot.run()
    slot.command(commit_output=internal_pb2.CommitOutput())
    slot.run()
    assert slot.states == ["INITIALIZING", "RUNNING"]
    assert slot.subtask.committed == slot.subtask.closed == 0


def test_commands_that_come_early_wait_until_the_operators_are_open():
    slot = Slot()
    slot.subtask.is_waiting = True
    slot.command(commit_output=internal_pb2.CommitOutput())
    assert slot.subtask.committed == 0
    slot.run()
    assert slot.subtask.committed == 1
    assert slot.states[-1] == "FINISHED"


def test_of_what_an_earlier_jobmanager_may_have_completed_no_operator_is_told_that_it_is_void():
    slot = Slot()
    slot.run()
    slot.command(checkpoint_aborted=internal_pb2.CheckpointAborted(checkpoint_id=3))
    unknown = internal_pb2.CheckpointAborted(checkpoint_id=5, first_checkpoint_id=5)
    slot.command(checkpoint_aborted=unknown)
    assert slot.subtask.aborted == [(3, True), (5, False)]


def test_the_end_of_the_data_is_reported_once():
    slot = Slot()
    slot.subtask.is_waiting = True
    slot.run()
    slot.command(checkpoint_aborted=internal_pb2.CheckpointAborted(checkpoint_id=1))
    slot.run()
    events = [r.task_event for r in slot.reports if r.WhichOneof("report") == "task_event"]
    assert sum(event.HasField("end_of_data") for event in events) == 1


def test_the_sizes_of_what_is_complete_are_told_with_the_end_of_the_data_and_of_the_attempt():
    slot = Slot()
    slot.subtask.is_waiting, slot.subtask.sealed_bytes = True, {"e": 7}
    slot.run()
    slot.command(commit_output=internal_pb2.CommitOutput())
    slot.run()
    events = [r.task_event for r in slot.reports if r.HasField("task_event")]
    told = [e.end_of_data.written for e in events if e.HasField("end_of_data")]
    told += [e.state_changed.written for e in events if e.HasField("state_changed")]
    written = [internal_pb2.WrittenPartition(edge_id="e", size_bytes=7)]
    assert [list(one) for one in told] == [written, [], [], written]
    assert slot.states == ["INITIALIZING", "RUNNING", "FINISHED"]


def test_a_restore_that_reads_nothing_any_more_fails_and_takes_its_process_with_it():
    opened = []
    slot = Slot()
    slot.parts.open_state = lambda execution, when_open: opened.append(when_open)
    slot.run()
    for read_bytes, wait_ms in ((100, 5_000), (200, 5_000), (200, 4_999)):  # it is slow
        slot.parts.restored_bytes = read_bytes
        slot.loop.advance(wait_ms * 1_000_000)
        slot.run()
    assert slot.states == ["INITIALIZING"]
    slot.loop.advance(1_000_000)
    with pytest.raises(StoreTransient, match="has not come back"):  # its thread is needed
        slot.run()
    failure = slot.reports[-1].task_event.state_changed.failure
    assert slot.states == ["INITIALIZING", "FAILED"]
    assert failure.error_class == "StoreTransient"
    assert "after 200 bytes nothing was read for 5 s" in failure.message
    assert len(opened) == 1
    assert slot.released == 1


def test_a_failure_while_it_is_built_closes_what_was_opened():
    def build(execution):
        execution.fail_later(ConnectionError("refused"))
        return slot.subtask

    slot = Slot(build=build)
    slot.run()
    assert slot.states == ["INITIALIZING", "RUNNING", "FAILED"]
    assert slot.subtask.closed == 1


@pytest.mark.parametrize("end", ["fail", "cancel"])
def test_an_attempt_that_ended_outside_of_a_step_is_forgotten(end):
    slot = Slot()
    slot.run()
    if end == "fail":
        slot.execution.fail_later(ConnectionError("lost"))
    else:
        slot.runtime.handle(slot.cancel_command())
    slot.run()
    last = slot.metrics_count()
    for _ in range(3):
        slot.loop.advance(2_000_000_000)
        slot.run()
    assert slot.metrics_count() == last
    assert slot.subtask.closed == 1


@pytest.mark.parametrize("is_final", [False, True])
def test_output_is_discarded_where_the_cancellation_is_final(is_final):
    slot = Slot()
    slot.run()
    slot.runtime.handle(slot.cancel_command(is_final))
    assert slot.states[-1] == "CANCELED"
    assert slot.subtask.closed == 1
    assert slot.subtask.is_discarded == is_final


def test_a_slot_with_time_sends_what_is_held_back_at_once():
    slot = Slot()
    slot.run()
    slot.subtask.flushed_at_ns.clear()
    slot.loop.advance(50_000_000)
    slot.subtask.holds_back = True
    slot.execution._schedule()
    slot.run()
    assert slot.subtask.flushed_at_ns == [slot.loop.monotonic_ns()]


def test_a_busy_slot_waits_for_company_but_not_for_long():
    slot = Slot()
    slot.run()
    slot.loop.advance(50_000_000)

    def work():
        slot.loop.advance(4_000_000)
        slot.subtask.holds_back = True
        return Progress.IDLE

    slot.subtask.work = work
    for _ in range(30):
        slot.subtask.flushed_at_ns.clear()
        slot.execution._schedule()
        slot.run()
        if not slot.subtask.flushed_at_ns:
            break
    assert not slot.subtask.flushed_at_ns, "it has worked longer than it was idle"
    held_ms = slot.loop.now_ms()
    assert held_ms < slot.runtime.next_deadline_ms() <= held_ms + 10
    slot.loop.advance(10_000_000)
    slot.run()
    assert slot.subtask.flushed_at_ns == [slot.loop.monotonic_ns()]


def test_what_its_functions_keep_leaves_with_the_attempt_once_it_is_safe():
    slot = Slot()
    slot.subtask.work = lambda: Progress.ENDED
    asked = []

    def take_last_states(when_written):
        asked.append(when_written)

    slot.parts.take_last_states = take_last_states
    slot.run()
    assert slot.states == ["INITIALIZING", "RUNNING"]
    slot.run()
    assert len(asked) == 1
    slot.mailbox.post(lambda: asked[0](None))  # the store does not answer now
    slot.run()
    assert slot.states[-1] == "RUNNING"
    slot.loop.advance(1_000_000_000)
    slot.run()
    assert len(asked) == 2
    kept = [checkpoint_pb2.OperatorSnapshot(operator_uid="items")]
    slot.mailbox.post(lambda: asked[1](kept))
    slot.run()
    assert slot.states[-1] == "FINISHED"
    changed = slot.reports[-1].task_event.state_changed
    assert [state.operator_uid for state in changed.last_states] == ["items"]


def test_a_loaded_side_is_reported_once():
    slot = Slot()
    slot.parts.is_loading = True
    slot.run()
    slot.runtime._schedule(("v0", 0, 0))
    slot.run()
    loaded = [r for r in slot.reports if r.task_event.HasField("side_loaded")]
    assert not loaded
    slot.parts.is_loading = False
    for _ in range(2):
        slot.command(commit_output=internal_pb2.CommitOutput())
        slot.run()
    assert sum(r.task_event.HasField("side_loaded") for r in slot.reports) == 1


def test_what_is_triggered_comes_back_with_the_acknowledgement():
    slot, taken = Slot(), []
    slot.subtask.trigger = taken.append
    slot.run()
    wanted = CheckpointProperties(target="/elsewhere", behind=BehindBarrier.DRAIN)
    slot.command(
        trigger_checkpoint=internal_pb2.TriggerCheckpoint(
            checkpoint_id=9, timestamp_ms=4, leader_epoch=6, properties=properties_message(wanted)
        )
    )
    [barrier] = taken
    assert barrier == CheckpointBarrier(9, 4, 6, wanted)
    slot.execution.acknowledge(barrier, checkpoint_pb2.SubtaskSnapshot())
    slot.execution.decline(barrier, "no \udcff")  # a file name that is no Unicode
    acked, declined = (report.task_event for report in slot.reports[-2:])
    said = acked.checkpoint_acknowledged, declined.checkpoint_declined
    assert [(one.checkpoint_id, one.leader_epoch) for one in said] == [(9, 6), (9, 6)]


def test_checkpoints_that_are_declined_in_a_row_are_told_of_once():
    slot = Slot()
    slot.run()
    with structlog.testing.capture_logs() as logs:
        for number in range(3):
            slot.execution.decline(CheckpointBarrier(number, 0, 0, CheckpointProperties()), "full")
        barrier = CheckpointBarrier(3, 0, 0, CheckpointProperties())
        slot.execution.acknowledge(barrier, checkpoint_pb2.SubtaskSnapshot())
    told = [one["event"] for one in logs if one["log_level"] != "debug"]
    assert told == ["checkpoint.declined", "checkpoint.acknowledged_again"]
    assert sum(r.task_event.HasField("checkpoint_declined") for r in slot.reports) == 3


@pytest.mark.parametrize(("is_awaited", "fails"), [(True, False), (False, False), (True, True)])
def test_who_is_waited_for_says_that_it_has_committed_once_it_has(is_awaited, fails):
    slot, told = Slot(), []

    def committed(_checkpoint_id):
        told.append(any(r.task_event.HasField("checkpoint_committed") for r in slot.reports))
        if fails:
            raise TaskFailure("the directory is gone")

    slot.subtask.checkpoint_completed = committed
    slot.parts.checkpoint_completed = lambda _checkpoint_id: None
    slot.run()
    slot.command(
        checkpoint_completed=internal_pb2.CheckpointCompleted(checkpoint_id=9, awaited=is_awaited)
    )
    events = [r.task_event for r in slot.reports if r.task_event.HasField("checkpoint_committed")]
    said = [event.checkpoint_committed.checkpoint_id for event in events]
    assert told == [False]
    assert said == ([9] if is_awaited and not fails else [])


def test_a_wall_clock_that_is_set_back_stops_no_metrics():
    slot = Slot()
    slot.run()
    reports = slot.metrics_count()
    slot.loop.now_ms = lambda: 3_599_999 - slot.loop.monotonic_ns() // 1_000_000
    for _ in range(3):
        slot.loop.advance(1_000_000_000)
        slot.run()
        assert slot.runtime._seconds_to_next_deadline() <= 1
    assert slot.metrics_count() == reports + 3
