"""Restarts and checkpoints in the machine of a job whose subtasks begin again together: stories by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint, RestoredSplit
from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.restart_settings import (
    NO_LIMIT,
    FixedDelay,
    NoRestart,
    RestartSettings,
)
from jobmanager.graph.deployment import Endpoint
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState, SubtaskId
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import EdgePlan, JobPlan, Partitioning, VertexPlan
from jobmanager.graph.slot import Slot
from jobmanager.job.job_master import JobMaster
from jobmanager.job.job_options import JobOptions
from jobmanager.job.job_settings import job_settings
from jobmanager.job.source_splits import SourceSplits
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import JobState
from penstock.config import Configuration
from penstock.connectors.source import Split
from penstock.errors import JobRejected

PLAN = JobPlan(
    (VertexPlan("v0", 2, source_uids=("src",)), VertexPlan("v1", 2)),
    (EdgePlan("e0", "v0", "v1", Partitioning.HASH),),
)
CAUSE = FailureCause("TaskFailure", "it broke")
OF_USER = FailureCause("TaskFailure", "division by zero", traceback="Traceback ...")
HOPELESS = FailureCause("Unrecoverable", "no")


def keys(attempt: int) -> list[AttemptKey]:
    return [AttemptKey(v, i, attempt) for v in ("v0", "v1") for i in (0, 1)]


def slots() -> tuple[Slot, ...]:
    return (Slot("a-0", "a", "0"), Slot("b-0", "b", "0"))


def options(
    attempts: int = NO_LIMIT, *, spares: bool = True, checkpoints: bool = False, first: int = 0
) -> JobOptions:
    make = partial(_coordinator, CheckpointSettings(interval_ms=1_000))
    return JobOptions(
        RestartSettings(FixedDelay(attempts, 500), spares_user_failures=spares),
        coordinator=make if checkpoints else None,
        first_attempt=first,
    )


def _coordinator(
    wanted: CheckpointSettings, retained: tuple[CompletedCheckpoint, ...], next_id: int
) -> CheckpointCoordinator:
    return CheckpointCoordinator(wanted, retained=retained, next_checkpoint_id=next_id)


def deploy(
    master: JobMaster, prepared: job_events.StartPrepared | None = None
) -> list[job_effects.JobEffect]:
    """From the prepared start to the deployment, whose effects it returns."""
    effects = master.step(prepared or job_events.StartPrepared(master.attempt))
    match effects:
        case [job_effects.RequestSlots(count, group)]:
            effects = master.step(job_events.SlotsGranted(slots()[-count:], group))
    for effect in effects:
        assert isinstance(effect, job_effects.AllocateSlots)
        endpoints = tuple(map(Endpoint, effect.slot_ids))
        answer = job_events.SlotsAllocated(effect.taskmanager_id, endpoints, effect.call)
        effects = master.step(answer)
    assert job_effects.DeployTasks in {type(effect) for effect in effects}
    return effects


def run_all(master: JobMaster) -> list[job_effects.JobEffect]:
    return [
        effect
        for key in keys(master.attempt)
        for effect in master.step(job_events.AttemptReported(key, AttemptState.RUNNING))
    ]


def running(with_options: JobOptions) -> JobMaster:
    master = JobMaster(PLAN, with_options)
    assert master.step(job_events.JobStarted()) == [
        job_effects.PrepareStart(with_options.first_attempt)
    ]
    deploy(master)
    run_all(master)
    assert master.state is JobState.RUNNING
    return master


def cancel_the_rest(master: JobMaster) -> list[job_effects.JobEffect]:
    return [
        effect
        for key in keys(master.attempt)
        for effect in master.step(job_events.AttemptReported(key, AttemptState.CANCELED))
    ]


def test_a_failure_restarts_the_job_with_new_attempts_after_the_delay() -> None:
    master = running(options())
    effects = master.step(job_events.AttemptReported(keys(0)[0], AttemptState.FAILED, CAUSE))
    assert effects == [
        job_effects.PostLater(500, job_events.RestartDue(1)),
        job_effects.PublishState(JobState.RESTARTING),
        job_effects.CancelTasks("b", (keys(0)[1], keys(0)[3])),
        job_effects.CancelTasks("a", (keys(0)[2],)),
        job_effects.AwaitCancellation(1),
    ]
    # Consequences of it join the same restart.
    lost = job_events.TaskManagerGone("b", FailureCause("TaskManagerLost", "gone"))
    assert master.step(lost) == []
    assert master.step(job_events.AttemptReported(keys(0)[2], AttemptState.CANCELED)) == []
    assert master.restarts == 1
    assert master.step(job_events.FailureRequested(CAUSE)) == []
    assert master.step(job_events.RestartDue(2)) == []
    assert master.step(job_events.RestartDue(1)) == [job_effects.PrepareStart(1)]
    assert master.step(job_events.RestartDue(1)) == []
    assert master.step(job_events.StartPrepared(0)) == []
    deploy(master)
    # Reports, answers and failed calls of the old attempts change nothing.
    for stale in (
        job_events.AttemptReported(keys(0)[1], AttemptState.RUNNING),
        job_events.CallFailed("b", CAUSE, 0),
        job_events.CancellationOverdue(0),
        job_events.SlotsAllocated("a", (), 0),
    ):
        assert master.step(stale) == []
    assert job_effects.PublishState(JobState.RUNNING) in run_all(master)
    assert master.failure == CAUSE
    master.check()


def test_attempts_are_limited_and_the_end_says_so() -> None:
    master = running(options(1))
    master.step(job_events.FailureRequested(CAUSE))
    cancel_the_rest(master)
    lost = job_events.TaskManagerGone("b", FailureCause("TaskManagerLost", "gone"))
    assert master.step(lost) == []
    master.step(job_events.RestartDue(1))
    # Refused slots are a failure like others.
    assert master.step(job_events.StartPrepared(1)) == [job_effects.RequestSlots(1, 1)]
    effects = master.step(job_events.SlotsRefused(2, 1, 1, 1, 100, 1), now_ms=500)
    assert effects == [
        job_effects.PublishState(JobState.FAILING),
        job_effects.PublishState(JobState.FAILED),
        job_effects.FreeSlots(slots()[:1]),
        job_effects.SweepOutput(),
    ]
    assert master.failure is not None
    assert "restarted once before" in master.failure.message


def test_a_start_that_cannot_be_prepared_is_tried_again_or_hopeless() -> None:
    master = running(options())
    master.step(job_events.FailureRequested(CAUSE))
    cancel_the_rest(master)
    master.step(job_events.RestartDue(1))
    effects = master.step(job_events.StartNotPrepared(1, CAUSE))
    assert effects == [job_effects.PostLater(500, job_events.RestartDue(2))]
    master.step(job_events.RestartDue(2))
    master.step(job_events.StartNotPrepared(2, HOPELESS))
    assert master.state is JobState.FAILED


NO_SUCH_FILE = FailureCause("TaskFailure", "no such file", operator="read_csv")


@pytest.mark.parametrize("cause", [OF_USER, FailureCause("BadRecord", "x"), NO_SUCH_FILE, HOPELESS])
def test_causes_that_no_restart_mends_end_the_job(cause: FailureCause) -> None:
    for joins in (False, True):
        master = running(options(spares=False))
        if joins:  # its consequence was reported first
            master.step(job_events.AttemptReported(keys(0)[3], AttemptState.FAILED, CAUSE))
        master.step(job_events.AttemptReported(keys(0)[0], AttemptState.FAILED, cause))
        assert master.state is JobState.FAILING
        cancel_the_rest(master)
        assert master.state is JobState.FAILED
        assert master.failure == cause


def test_a_checkpoint_that_tasks_cannot_restore_is_not_tried_again() -> None:
    master = JobMaster(PLAN, options(checkpoints=True))
    master.step(job_events.JobStarted())
    deploy(master, job_events.StartPrepared(0, RestoredCheckpoint(7), (), 8))
    damaged = FailureCause("StoreCorrupt", "chk-7/x was altered", vertex="v0")
    master.step(job_events.AttemptReported(keys(0)[0], AttemptState.FAILED, damaged))
    cancel_the_rest(master)
    assert master.step(job_events.RestartDue(1)) == [job_effects.PrepareStart(1, (7,))]


def test_what_was_collected_is_sent_again_whether_or_not_the_job_survives_its_jobmanager() -> None:
    """Aim: preparing a restart is what tells the buffers of collected rows that their sinks begin again."""
    master = JobMaster(PLAN, JobOptions(NO_RESTARTS))
    assert master.step(job_events.JobStarted()) == [job_effects.RequestSlots(2)]
    for effect in master.step(job_events.SlotsGranted(slots())):
        assert isinstance(effect, job_effects.AllocateSlots)
        endpoints = tuple(map(Endpoint, effect.slot_ids))
        master.step(job_events.SlotsAllocated(effect.taskmanager_id, endpoints, effect.call))
    run_all(master)
    told_to_end = FailureCause("TaskManagerLost", "tm-1 was told to end")
    master.step(job_events.TaskManagerGone("a", told_to_end, is_planned=True))
    cancel_the_rest(master)
    assert master.step(job_events.RestartDue(1)) == [job_effects.PrepareStart(1)]
    deploy(master)


DAMAGED = FailureCause("StoreCorrupt", "shared/x: its checksum differs", vertex="v0")
NO_RESTARTS = RestartSettings(NoRestart())


def restoring(settings: RestartSettings, checkpoint_id: int = 9) -> JobMaster:
    """A job whose tasks are about to read their state."""
    make = partial(_coordinator, CheckpointSettings(interval_ms=1_000))
    master = JobMaster(PLAN, JobOptions(settings, coordinator=make, is_recovered=True))
    master.step(job_events.JobStarted())
    deploy(master, job_events.StartPrepared(0, RestoredCheckpoint(checkpoint_id), (), 10))
    return master


def fail(
    master: JobMaster, index: int, cause: FailureCause = DAMAGED, now_ms: int = 0
) -> list[job_effects.JobEffect]:
    key = keys(master.attempt)[index]
    return master.step(job_events.AttemptReported(key, AttemptState.FAILED, cause), now_ms)


def restart_from(master: JobMaster, checkpoint_id: int) -> None:
    cancel_the_rest(master)
    master.step(job_events.RestartDue(master.attempt + 1))
    restored = RestoredCheckpoint(checkpoint_id)
    deploy(master, job_events.StartPrepared(master.attempt, restored, (), 10))


def test_damaged_checkpoints_are_skipped_at_once_without_a_restart_of_the_strategy() -> None:
    """Aim: the retained checkpoints bound what damage costs, and no strategy or limit does."""
    master = restoring(NO_RESTARTS)
    for attempt, damaged in enumerate((9, 8, 7)):
        effects = fail(master, 0)
        assert job_effects.PostLater(0, job_events.RestartDue(attempt + 1)) in effects
        restart_from(master, damaged - 1)
    run_all(master)
    assert master.state is JobState.RUNNING
    assert master.restored_checkpoint_id == 6
    assert master.restarts == 1 + 3
    newest, *_ = master.exceptions.entries
    assert (newest.cause.message, newest.delay_ms) == (DAMAGED.message, 0)
    assert len(master.exceptions.entries) == 3
    fail(master, 0, CAUSE)
    assert master.state is JobState.FAILING


def test_what_else_fails_of_a_damaged_checkpoint_joins_its_restart() -> None:
    """Others that read it, those that lose their connection to them, and both after the delay."""
    master = restoring(NO_RESTARTS)
    lost = FailureCause("PartitionUnavailable", "connection lost", vertex="v1")
    fail(master, 0)
    fail(master, 1)
    fail(master, 2, lost)
    master.step(job_events.RestartDue(1))
    assert not any(isinstance(e, job_effects.PostLater) for e in fail(master, 3))
    assert master.attempt == 1
    assert master.restarts == 1 + 1
    (entry,) = master.exceptions.entries
    assert entry.concurrent_count == 3
    assert master.state is JobState.RESTARTING


def test_damage_after_a_counted_failure_uses_up_nothing() -> None:
    limits = RestartSettings(FixedDelay(1, 500), failures_total_max=1)
    master = restoring(limits)
    run_all(master)
    assert job_effects.PostLater(500, job_events.RestartDue(1)) in fail(master, 0, CAUSE)
    restart_from(master, 9)
    assert job_effects.PostLater(0, job_events.RestartDue(2)) in fail(master, 0)
    restart_from(master, 8)
    run_all(master)
    fail(master, 0, CAUSE, now_ms=10_000)
    assert master.failure is not None
    assert "is used up" in master.failure.message


def test_a_job_without_a_checkpoint_that_is_intact_ends() -> None:
    master = restoring(NO_RESTARTS)
    fail(master, 0)
    cancel_the_rest(master)
    assert master.step(job_events.RestartDue(1)) == [job_effects.PrepareStart(1, (9,))]
    none_left = FailureCause("Unrecoverable", "none of the checkpoints can be restored")
    master.step(job_events.StartNotPrepared(1, none_left))
    assert master.state is JobState.FAILED
    assert master.failure is not None
    said = f"{none_left.message} (a task has said of 9: shared/x: its checksum differs)"
    assert master.failure.message == said


def test_what_has_its_state_and_finds_objects_damaged_is_counted() -> None:
    """Aim: tasks that run, take checkpoints and fail so again and again use their restarts up."""
    master = restoring(NO_RESTARTS)
    run_all(master)
    fail(master, 0)
    assert master.state is JobState.FAILING


def test_a_damaged_checkpoint_that_user_code_cannot_go_on_without_ends_the_job() -> None:
    master = restoring(NO_RESTARTS)
    fail(master, 0, replace(DAMAGED, cause_chain=("StoreCorrupt", "Unrecoverable")))
    assert master.state is JobState.FAILING


def test_a_failure_that_no_restart_mends_ends_a_job_that_skips_a_checkpoint() -> None:
    master = restoring(NO_RESTARTS)
    fail(master, 0)
    fail(master, 1, HOPELESS)
    assert master.state is JobState.FAILING


@pytest.mark.parametrize(
    "cause",
    [
        FailureCause("TaskFailure", "slot process 7 was killed by SIGKILL", vertex="v0"),
        FailureCause("PartitionUnavailable", "x", vertex="v0", operator="window"),
        FailureCause("StoreTransient", "x", vertex="v0", operator="window"),
        FailureCause("TaskManagerLost", "x"),
    ],
)
def test_failures_of_the_cluster_restart_every_job(cause: FailureCause) -> None:
    master = running(options(spares=False))
    master.step(job_events.AttemptReported(keys(0)[0], AttemptState.FAILED, cause))
    assert master.state is JobState.RESTARTING


def test_user_failures_restart_a_job_that_asked_for_it() -> None:
    master = running(options())
    master.step(job_events.AttemptReported(keys(0)[0], AttemptState.FAILED, OF_USER))
    assert master.state is JobState.RESTARTING


@pytest.mark.parametrize("when", ["cancelling", "waiting", "preparing", "slots", "deployed"])
@pytest.mark.parametrize(
    ("event", "end"),
    [
        (job_events.CancelRequested(), JobState.CANCELED),
        (job_events.SuspendRequested(), JobState.SUSPENDED),
    ],
)
def test_a_restart_can_be_cancelled_and_suspended(
    when: str, event: job_events.JobEvent, end: JobState
) -> None:
    master = running(options())
    master.step(job_events.FailureRequested(CAUSE))
    if when != "cancelling":
        cancel_the_rest(master)
    if when in ("preparing", "slots", "deployed"):
        master.step(job_events.RestartDue(1))
    if when == "slots":
        master.step(job_events.StartPrepared(1))
    if when == "deployed":
        deploy(master)
    master.step(event)
    cancel_the_rest(master)
    assert master.state is end
    assert master.ended
    assert master.step(job_events.RestartDue(1)) == []
    assert master.step(job_events.StartPrepared(1)) == []
    master.check()


def test_a_recovered_job_begins_with_numbers_that_were_never_used() -> None:
    wanted = JobOptions(
        RestartSettings(FixedDelay(NO_LIMIT)),
        first_attempt=16,
        is_recovered=True,
        taskmanagers={"tm1": "host:1"},
    )
    master = JobMaster(PLAN, wanted)
    assert master.state is JobState.RESTARTING
    assert master.step(job_events.JobStarted()) == [job_effects.PrepareStart(16)]
    deploy(master)
    assert job_effects.PublishState(JobState.RUNNING) in run_all(master)


# ---------------------------------------------------------------- splits


def restored(*finished: SubtaskId) -> RestoredCheckpoint:
    splits = (
        RestoredSplit("v0", "src", 0, "x", 3, done=True),
        RestoredSplit("v0", "src", 1, "y", 3, done=False),
    )
    return RestoredCheckpoint(7, frozenset(finished), splits)


def test_restored_splits_are_not_assigned_again() -> None:
    master = running(options(checkpoints=True))
    master.step(job_events.FailureRequested(CAUSE))
    cancel_the_rest(master)
    master.step(job_events.RestartDue(1))
    deploy(master, job_events.StartPrepared(1, restored(), (), 8))
    found = tuple(Split(id, size=2) for id in "xyz")
    effects = master.step(job_events.SplitsReported(AttemptKey("v0", 0, 1), "src", found, True))
    told = [cmd for e in effects if isinstance(e, job_effects.SendCommands) for cmd in e.commands]
    assert told == [
        job_effects.AddSplits(AttemptKey("v0", 0, 1), "src", (found[2],), True),
        job_effects.AddSplits(AttemptKey("v0", 1, 1), "src", (), True),
    ]


def test_readers_of_a_finished_discovery_are_told_that_nothing_comes() -> None:
    master = running(options(checkpoints=True))
    master.step(job_events.FailureRequested(CAUSE))
    cancel_the_rest(master)
    master.step(job_events.RestartDue(1))
    effects = deploy(master, job_events.StartPrepared(1, restored(SubtaskId("v0", 0)), (), 8))
    final = job_effects.AddSplits(AttemptKey("v0", 1, 1), "src", (), True)
    assert effects[-1] == job_effects.SendCommands("b", (final,))


def test_what_finished_readers_have_read_is_kept() -> None:
    splits = SourceSplits(PLAN)
    found = (Split("x", size=2), Split("y", size=1))
    event = job_events.SplitsReported(AttemptKey("v0", 0, 0), "src", found, True)
    splits.assign(event, ExecutionGraph(PLAN))
    assert splits.done_by(SubtaskId("v0", 1)) == [("src", ("y",))]
    assert splits.done_by(SubtaskId("v1", 0)) == []


# ---------------------------------------------------------------- settings


def test_checkpoints_need_a_place() -> None:
    settings = job_settings(Configuration())
    assert settings.checkpoints is None
    assert "execution.checkpointing.dir" in settings.warning
    none = Configuration.from_mapping({"execution.checkpointing.interval": "none"})
    assert job_settings(none).warning == ""
    on_disk = Configuration.from_mapping({"execution.checkpointing.dir": "/c"})
    assert job_settings(on_disk).checkpoints == CheckpointSettings(interval_ms=10_000)
    assert job_settings(on_disk).begins_again
    in_memory = Configuration.from_mapping({"execution.checkpointing.storage": "jobmanager"})
    assert job_settings(in_memory).checkpoints is not None
    assert not job_settings(in_memory).begins_again
    assert job_settings(in_memory).keeps_in_jobmanager
    unaligned = {
        "execution.checkpointing.dir": "/c",
        "execution.checkpointing.unaligned.enabled": True,
    }
    with pytest.raises(JobRejected, match="not available in this version"):
        job_settings(Configuration.from_mapping(unaligned))
    for bad in (
        {"execution.checkpointing.interval": "1s"},
        {"execution.checkpointing.dir": "relative"},
    ):
        with pytest.raises(JobRejected, match=r"execution\.checkpointing\.dir"):
            job_settings(Configuration.from_mapping(bad))


def test_the_cause_that_comes_after_its_consequence_tells_of_the_restarts_as_well() -> None:
    for attempts in (1, 2):
        master = running(options(attempts=attempts))
        for number in range(attempts):
            failed = job_events.AttemptReported(keys(master.attempt)[0], AttemptState.FAILED, CAUSE)
            master.step(failed, now_ms=500 * number)
            cancel_the_rest(master)
            master.step(job_events.RestartDue(master.attempt + 1))
            deploy(master)
            run_all(master)
        consequence = FailureCause("PartitionUnavailable", "a connection was lost", vertex="v1")
        original = FailureCause("TaskFailure", "the process exited", vertex="v0")
        first, second = keys(master.attempt)[2], keys(master.attempt)[0]
        failed = job_events.AttemptReported(first, AttemptState.FAILED, consequence)
        master.step(failed, now_ms=500 * attempts)
        master.step(job_events.AttemptReported(second, AttemptState.FAILED, original))
        assert master.failure is not None
        assert master.failure.message.startswith("the process exited (restarted")
