"""Rivals of slow attempts in the machine of a job: stories by hand.

There is a spare slot ``x<i>-0`` for whoever asks, each on a TaskManager of its own, unless a story says otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.restart_settings import NO_LIMIT, FixedDelay, RestartSettings
from jobmanager.graph.deployment import Endpoint
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState
from jobmanager.graph.job_plan import JobPlan
from jobmanager.graph.slot import Slot
from jobmanager.job.job_master import JobMaster
from jobmanager.job.job_options import JobOptions
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import JobState
from jobmanager.scheduler.slow_task_detector import SlowTaskSettings
from penstock.connectors.source import Split
from tests.support.drawn_plans import drawn, subtask
from tests.support.job_story import JobStory

CAUSE = FailureCause("TaskFailure", "it broke")
LOST = FailureCause("TaskManagerLost", "it is gone")
FAILED, FINISHED, RUNNING = AttemptState.FAILED, AttemptState.FINISHED, AttemptState.RUNNING
SETTINGS = SlowTaskSettings(check_interval_ms=100, lower_bound_ms=0, ratio=0.5, multiplier=2.0)
TWO_STAGES = drawn("a:4 b:4", "a>b hash blocking")
ONE_STAGE = drawn("a:4")


class Story(JobStory):
    """A job whose vertices may have rivals; seat i has slot ``t<i>-<i>``, on a TaskManager of its own."""

    def __init__(self, plan: JobPlan, *, attempts: int = 0, sources: tuple[str, ...] = ()) -> None:
        vertices = tuple(
            replace(v, allows_rivals=True, source_uids=("src",) if v.id in sources else ())
            for v in plan.vertices
        )
        restart = RestartSettings(FixedDelay(attempts, 500))
        options = JobOptions(restart, speculation=SETTINGS)
        super().__init__(JobPlan(vertices, plan.edges), options)
        self.spare_count = 0
        self.has_spare = self.starts_rivals = True
        self.reserved = 1_000
        self.now_ms = 10_000
        self.do(job_events.JobStarted())

    def answers(self, effect: job_effects.JobEffect) -> list[job_events.JobEvent]:
        match effect:
            case job_effects.ReserveAttempts():
                return [job_events.AttemptsReserved(self.reserved)]
            case job_effects.RequestSpareSlots(wanted) if self.has_spare:
                return [
                    job_events.SpareSlotGranted(subtask, self.spare_slot()) for subtask, _ in wanted
                ]
            case job_effects.StartRival(name, task) if self.starts_rivals:
                return [job_events.RivalStarted(task.attempt, Endpoint("", name))]
        return super().answers(effect)

    def spare_slot(self) -> Slot:
        name = f"x{self.spare_count}"
        self.spare_count += 1
        return Slot(f"{name}-0", name, "1")

    # ------------------------------------------------------------ what happens

    def key(self, text: str) -> AttemptKey:
        """The current attempt of ``a0``, or the rival of ``a0'``."""
        if text.endswith("'"):
            rival = self.master.graph.rival_of(subtask(text[:-1]))
            assert rival is not None
            return rival.key
        return super().key(text)

    def end(self, text: str) -> list[job_effects.JobEffect]:
        """All data has been consumed."""
        return [e for t in text.split() for e in self.do(job_events.EndOfDataReported(self.key(t)))]

    def look(self, after_ms: int) -> list[job_effects.JobEffect]:
        """Time passes until somebody looks for stragglers."""
        self.now_ms += after_ms
        return self.do(job_events.StragglersDue())

    def slow(
        self, others: str, straggler: str, *, ends: bool = False
    ) -> list[job_effects.JobEffect]:
        """All run, the others are done after 100 ms, and the straggler gets a rival after 200."""
        self.report(f"{others} {straggler}")
        self.now_ms += 100
        if ends:
            self.end(others)
        else:
            self.report(others, FINISHED)
        return self.look(100)

    @property
    def rivals(self) -> list[str]:
        return [f"{r.key.vertex}{r.key.subtask_index}" for r in self.master.graph.rivals()]

    def went_wrong(self) -> bool:
        """Whether anything was cancelled or restarted."""
        bad = job_effects.CancelTasks | job_effects.AwaitCancellation
        due = [e for e in self.effects if isinstance(e, job_effects.PostLater)]
        return (
            any(isinstance(e, bad) for e in self.effects)
            or any(isinstance(e.event, job_events.RestartDue) for e in due)
            or self.master.restarts > 0
        )


def freed(effects: list[job_effects.JobEffect]) -> list[str]:
    return [
        slot.slot_id for e in effects if isinstance(e, job_effects.FreeSlots) for slot in e.slots
    ]


def asked(effects: list[job_effects.JobEffect]) -> list[tuple[str, str]]:
    """Who asks for a spare slot, and where it must not be."""
    requests = [e for e in effects if isinstance(e, job_effects.RequestSpareSlots)]
    return [(str(subtask), avoided) for e in requests for subtask, avoided in e.wanted]


def fates(effects: list[job_effects.JobEffect]) -> list[job_effects.RivalFate]:
    return [e.fate for e in effects if isinstance(e, job_effects.ReportRival)]


def released(effects: list[job_effects.JobEffect]) -> list[tuple[str, tuple[str, AttemptKey]]]:
    return [
        (e.taskmanager_id, partition)
        for e in effects
        if isinstance(e, job_effects.ReleasePartitions)
        for partition in e.partitions
    ]


def committed(effects: list[job_effects.JobEffect]) -> list[AttemptKey]:
    sent = (e.commands for e in effects if isinstance(e, job_effects.SendCommands))
    return [c.key for own in sent for c in own if isinstance(c, job_effects.CommitOutput)]


# ---------------------------------------------------------------- the beginning


def test_a_rival_begins_when_a_subtask_is_slow_and_not_before() -> None:
    story = Story(TWO_STAGES)
    looks = [e for e in story.effects if isinstance(e, job_effects.PostLater)]
    assert looks == [job_effects.PostLater(100, job_events.StragglersDue())]
    story.report("a0 a1 a2 a3")
    story.now_ms += 100
    story.report("a0 a1 a2", FINISHED)
    assert story.look(99) == [job_effects.PostLater(100, job_events.StragglersDue())], (
        "twice 100 is the baseline"
    )
    effects = story.look(1)
    assert asked(effects) == [("a/3", "t3")]
    (start,) = [e for e in effects if isinstance(e, job_effects.StartRival)]
    assert start.taskmanager_id == "x0"
    assert (start.task.attempt, start.task.slot_id) == (AttemptKey("a", 3, 1), "x0-0")
    assert start.task.beside == 0
    assert fates(effects) == [job_effects.RivalFate.STARTED]
    assert asked(story.look(1_000)) == [], "one at a time"
    assert story.attempts("a3 a3' b0") == [0, 1, 0]


def test_without_a_spare_slot_it_is_tried_again() -> None:
    story = Story(TWO_STAGES)
    story.has_spare = False
    assert asked(story.slow("a0 a1 a2", "a3")) == [("a/3", "t3")]
    assert not story.rivals
    story.has_spare = True
    assert asked(story.look(100)) == [("a/3", "t3")]
    assert story.rivals == ["a3"]


@pytest.mark.parametrize("taskmanager", ["t3", "x0"])
def test_a_slot_that_comes_too_late_or_in_the_wrong_place_goes_back(taskmanager: str) -> None:
    story = Story(TWO_STAGES)
    story.has_spare = False
    story.slow("a0 a1 a2", "a3")
    if taskmanager == "x0":
        story.report("a3", FINISHED)
    late = Slot("late", taskmanager, "1")
    assert story.do(job_events.SpareSlotGranted(subtask("a3"), late)) == [
        job_effects.FreeSlots((late,))
    ]


def test_a_source_has_a_rival_once_all_its_splits_are_known() -> None:
    story = Story(ONE_STAGE, sources=("a",))
    splits = tuple(Split(f"s{number}", size=1) for number in range(8))
    story.report("a0 a1 a2 a3")
    story.do(job_events.SplitsReported(story.key("a0"), "src", splits[:4], False))
    story.now_ms += 100
    story.end("a1 a2 a3")
    assert asked(story.look(1_000)) == []
    story.do(job_events.SplitsReported(story.key("a0"), "src", splits[4:], True))
    (start,) = [e for e in story.look(100) if isinstance(e, job_effects.StartRival)]
    (told,) = start.splits
    given = [
        split.id
        for e in story.effects
        if isinstance(e, job_effects.SendCommands)
        for command in e.commands
        if isinstance(command, job_effects.AddSplits) and command.key == story.key("a0")
        for split in command.splits
    ]
    assert [split.id for split in told.splits] == given
    assert len(given) == 2
    assert (told.key, told.final) == (story.key("a0'"), True)
    # It finds the splits again, which is no news.
    story.report("a0'")
    assert story.do(job_events.SplitsReported(story.key("a0'"), "src", splits, True)) == []


def test_the_number_is_reserved_where_another_jobmanager_may_go_on() -> None:
    story = Story(TWO_STAGES, attempts=NO_LIMIT)
    story.reserved = 2
    effects = story.slow("a0 a1", "a2 a3")
    assert [e for e in effects if isinstance(e, job_effects.ReserveAttempts)] == [
        job_effects.ReserveAttempts(1)
    ]
    assert not asked(effects)
    effects = story.look(100)
    assert len(asked(effects)) == 2
    assert freed(effects) == ["x1-0"], "there is no number for a second one"
    assert story.rivals == ["a2"]
    story.reserved = 10
    assert [e for e in story.look(100) if isinstance(e, job_effects.ReserveAttempts)] == [
        job_effects.ReserveAttempts(2)
    ]
    story.look(100)
    assert story.attempts("a2' a3'") == [1, 2]


# ---------------------------------------------------------------- who wins


def test_consumers_read_the_rival_that_was_first() -> None:
    story = Story(TWO_STAGES)
    story.slow("a0 a1 a2", "a3")
    loser = story.key("a3")
    story.report("a3'")
    effects = story.report("a3'", FINISHED)
    tasks = {
        t.attempt: t for e in effects if isinstance(e, job_effects.DeployTasks) for t in e.tasks
    }
    assert len(tasks) == 4
    for task in tasks.values():
        channel = task.inputs[0].channels[3]
        assert channel.producer_attempt == AttemptKey("a", 3, 1)
        assert channel.producer.host_id == "x0"
    assert tasks[AttemptKey("b", 3, 0)].slot_id == "x0-0", "the seat has moved"
    assert freed(effects) == ["t3-3"]
    assert released(effects) == [("t3", ("a>b", loser))]
    assert fates(effects) == [job_effects.RivalFate.WON]
    kinds = [type(e) for e in effects]
    assert kinds.index(job_effects.FreeSlots) < kinds.index(job_effects.ReleasePartitions), (
        "when it writes no more"
    )
    # What the loser still says is nobody's business.
    dropped = story.master.dropped_events
    for event in (
        job_events.EndOfDataReported(loser),
        job_events.AttemptReported(loser, FINISHED),
        job_events.AttemptReported(loser, AttemptState.CANCELED),
    ):
        assert story.do(event) == []
    assert story.master.dropped_events == dropped + 3
    story.report("b0 b1 b2 b3")
    story.report("b0 b1 b2 b3", FINISHED)
    assert story.master.state is JobState.FINISHED
    assert not story.went_wrong()
    assert (story.master.speculation.started, story.master.speculation.won) == (1, 1)


def test_only_the_winner_commits() -> None:
    story = Story(ONE_STAGE)
    story.slow("a0 a1 a2", "a3", ends=True)
    story.report("a3'")
    effects = story.end("a3'")
    assert committed(effects) == [AttemptKey("a", i, 0) for i in range(3)] + [AttemptKey("a", 3, 1)]
    assert freed(effects) == ["t3-3"]
    story.report("a0 a1 a2 a3", FINISHED)
    assert story.master.state is JobState.FINISHED
    assert not story.went_wrong()


def test_a_straggler_that_is_first_after_all_counts() -> None:
    story = Story(ONE_STAGE)
    story.slow("a0 a1 a2", "a3", ends=True)
    story.report("a3'")
    rival = story.key("a3'")
    effects = story.end("a3")
    assert fates(effects) == [job_effects.RivalFate.LOST]
    assert freed(effects) == ["x0-0"]
    assert committed(effects) == [AttemptKey("a", i, 0) for i in range(4)]
    assert story.do(job_events.EndOfDataReported(rival)) == []
    assert (story.master.speculation.started, story.master.speculation.won) == (1, 0)


def test_a_slot_in_which_others_run_goes_back_when_they_are_over() -> None:
    story = Story(drawn("a:4 c:4"))
    story.report("c0 c1 c2 c3")
    story.end("c3")
    effects = story.slow("a0 a1 a2", "a3", ends=True)
    story.report("a3'")
    effects = story.end("a3'")
    assert freed(effects) == [], "c3 waits in it for the commit"
    story.end("c0 c1 c2")
    everyone = "a0 a1 a2 a3 c0 c1 c2"
    story.report(everyone, FINISHED)
    assert freed(story.effects) == []
    effects = story.report("c3", FINISHED)
    assert story.master.state is JobState.FINISHED
    assert sorted(freed(effects)) == ["t0-0", "t1-1", "t2-2", "t3-3", "x0-0"]


# ---------------------------------------------------------------- what goes wrong


def test_a_rival_goes_on_where_its_straggler_fails() -> None:
    story = Story(ONE_STAGE)
    story.slow("a0 a1 a2", "a3", ends=True)
    effects = story.report("a3", FAILED)
    assert fates(effects) == [job_effects.RivalFate.WON]
    assert freed(effects) == ["t3-3"]
    assert story.attempts("a3") == [1]
    assert story.master.state is JobState.RUNNING
    story.report("a3")
    assert len(committed(story.end("a3"))) == 4
    assert not story.went_wrong()


def test_what_a_straggler_misses_is_made_again() -> None:
    """The rival would not find it either, and others that have not begun never would."""
    story = Story(TWO_STAGES, attempts=1)
    story.report("a0 a1 a2 a3")
    story.report("a0 a1 a2 a3", FINISHED)
    story.slow("b0 b1 b2", "b3", ends=True)
    story.look(100)
    missing = job_events.MissingPartition("a>b", story.key("a0"))
    story.do(job_events.AttemptReported(story.key("b3"), FAILED, CAUSE, missing))
    assert not story.rivals
    assert "x0-0" in freed(story.effects)
    story.due()
    assert story.attempts("a0 a1 b3") == [2, 0, 2]


@pytest.mark.parametrize("end", ["failed", "missing", "cancelled", "lost", "call", "not started"])
def test_nothing_that_becomes_of_a_rival_matters(end: str) -> None:
    story = Story(TWO_STAGES)
    story.starts_rivals = end != "not started"
    story.slow("a0 a1 a2", "a3")
    key = story.key("a3'")
    missing = job_events.MissingPartition("a>b", AttemptKey("a", 0, 0))
    event: job_events.JobEvent = {
        "failed": job_events.AttemptReported(key, FAILED, CAUSE),
        "missing": job_events.AttemptReported(key, FAILED, CAUSE, missing),
        "cancelled": job_events.AttemptReported(key, AttemptState.CANCELED),
        "lost": job_events.TaskManagerGone("x0", LOST),
        "call": job_events.CallFailed("x0", CAUSE, story.master.attempt),
        "not started": job_events.RivalNotStarted(key, CAUSE),
    }[end]
    effects = story.do(event)
    assert fates(effects) == [job_effects.RivalFate.FAILED]
    assert freed(effects) == ([] if end == "lost" else ["x0-0"])
    assert story.attempts("a3") == [0]
    assert story.do(event) == [], "it has been dropped already"
    story.starts_rivals = True
    assert asked(story.look(100)) == [("a/3", "t3")], "there may be another one"
    story.report("a3'")
    story.report("a3'", FINISHED)
    assert story.attempts("a3") == [2]
    assert not story.went_wrong()


def test_a_rival_that_replaced_its_straggler_and_was_never_deployed_is_a_failure() -> None:
    story = Story(ONE_STAGE, attempts=1)
    story.slow("a0 a1 a2", "a3", ends=True)
    story.look(100)
    story.report("a3", FAILED)
    assert story.attempts("a3") == [1]
    assert not story.went_wrong()
    effects = story.do(job_events.RivalNotStarted(story.key("a3"), CAUSE))
    assert freed(effects) == ["x0-0"]
    assert story.went_wrong()
    story.due()
    assert story.attempts("a0 a3") == [0, 2]
    assert story.do(job_events.RivalNotStarted(AttemptKey("a", 3, 1), CAUSE)) == []


def test_a_rival_that_has_won_was_started_whatever_its_calls_say() -> None:
    story = Story(drawn("a:4 c:4"))
    story.report("c0 c1 c2 c3")
    story.slow("a0 a1 a2", "a3", ends=True)
    story.report("a3'")
    story.end("a3'")
    assert story.do(job_events.RivalNotStarted(AttemptKey("a", 3, 1), CAUSE)) == []
    assert not story.went_wrong()


def test_a_subtask_has_three_rivals_at_most_until_it_is_restarted() -> None:
    """Else a subtask that always fails, slowly, would never fail the job."""
    story = Story(ONE_STAGE, attempts=1)
    story.look(0)
    story.slow("a0 a1 a2", "a3", ends=True)
    story.look(100)
    for number in (1, 2, 3):
        assert story.attempts("a3'") == [number]
        story.report("a3'")
        story.report("a3", FAILED)
        assert story.attempts("a3") == [number], "the rival goes on"
        story.look(10_000)
    assert not story.rivals
    assert not story.went_wrong()
    story.report("a3", FAILED)
    assert story.went_wrong()
    story.due()
    story.report("a3")
    story.look(10_000)
    assert story.rivals == ["a3"]


def test_of_a_lost_taskmanager_only_what_has_no_rival_is_restarted() -> None:
    story = Story(drawn("a:4 c:4"), attempts=1)
    story.report("c0 c1 c2 c3")
    story.slow("a0 a1 a2", "a3", ends=True)
    story.look(100)
    effects = story.do(job_events.TaskManagerGone("t3", LOST))
    assert fates(effects) == [job_effects.RivalFate.WON]
    assert story.attempts("a3") == [1]
    assert story.master.graph.current_of(subtask("c3")).state is FAILED
    effects = story.due()
    assert story.attempts("a3 c3 c0") == [1, 2, 0]
    assert not [e for e in effects if isinstance(e, job_effects.RequestSlots)], (
        "the rival's slot is the seat"
    )


@pytest.mark.parametrize("end", ["cancelled", "failed", "restarted"])
def test_a_rival_ends_with_its_subtask(end: str) -> None:
    story = Story(TWO_STAGES, attempts=1 if end == "restarted" else 0)
    story.report("a0 a1 a2 a3")
    story.report("a0 a1 a2 a3", FINISHED)
    story.slow("b0 b1", "b2 b3", ends=True)
    story.look(100)
    if end == "cancelled":
        effects = story.do(job_events.CancelRequested())
    else:
        missing = job_events.MissingPartition("a>b", story.key("a0"))
        effects = story.do(job_events.AttemptReported(story.key("b2"), FAILED, CAUSE, missing))
    assert fates(effects) == [job_effects.RivalFate.ENDED] * 2
    assert {"x0-0", "x1-0"} <= set(freed(effects))
    if end == "restarted":
        assert freed(effects) == ["x0-0", "x1-0"]
        story.do(job_events.SpareSlotGranted(subtask("b3"), Slot("late", "x9", "1")))
        assert freed(story.effects)[-1] == "late", "no rival begins while subtasks stop"
        story.due()
        assert story.attempts("a0") == [3], "nothing has taken the number away"
    else:
        ended = JobState.CANCELED if end == "cancelled" else JobState.FAILED
        assert story.master.state is ended
        assert len(freed(story.effects)) == len(set(freed(story.effects))) == 6
        assert story.do(job_events.StragglersDue()) == [], "nobody looks any more"


def test_rivals_yield_to_what_the_job_itself_needs() -> None:
    story = Story(drawn("a:2 b:2 c:3", "b>c hash blocking"))
    story.report("b0 b1")
    story.slow("a0", "a1", ends=True)
    assert story.rivals == ["a1"]
    effects = story.report("b0 b1", FINISHED)
    assert fates(effects) == [job_effects.RivalFate.ENDED]
    kinds = [type(e) for e in effects]
    assert kinds.index(job_effects.FreeSlots) < kinds.index(job_effects.RequestSlots)
    story.report("c0 c1 c2")
    story.look(100)
    assert story.rivals == ["a1"], "there is room again"


def test_jobs_that_do_not_ask_for_it_never_look() -> None:
    master = JobMaster(TWO_STAGES, JobOptions(speculation=SETTINGS))
    assert not master.plan.vertices[0].allows_rivals
    [request] = master.step(job_events.JobStarted())
    assert isinstance(request, job_effects.RequestSlots)
    slots = tuple(Slot(f"t{i}-0", f"t{i}", "1") for i in range(request.count))
    effects = master.step(job_events.SlotsGranted(slots, request.group))
    for effect in effects:
        assert isinstance(effect, job_effects.AllocateSlots)
        found = tuple(map(Endpoint, effect.slot_ids))
        effects = master.step(job_events.SlotsAllocated(effect.taskmanager_id, found, effect.call))
    assert [type(effect) for effect in effects] == [job_effects.DeployTasks] * 4
