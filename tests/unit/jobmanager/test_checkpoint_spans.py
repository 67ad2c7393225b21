"""Aim: a checkpoint that comes to nothing is traced with its reason, and what is followed has a bound.

Method: the events and effects of one job, as its machine hears and wants them.
"""

from __future__ import annotations

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.completed_checkpoint import SnapshotSummary
from jobmanager.graph.execution_attempt import AttemptKey
from jobmanager.job.checkpoint_spans import PENDING_MAX, CheckpointSpans
from jobmanager.job.groups import GroupPhase
from jobmanager.job.recovery_spans import PARTS_MAX, RecoverySpans
from jobmanager.messages import job_effects, job_events

KEYS = (AttemptKey("v0", 0, 0), AttemptKey("v0", 1, 0))
NOTHING = job_events.JobStarted()


def trigger(checkpoint_id: int, at_ms: int) -> job_effects.SendCommands:
    return job_effects.SendCommands("tm", (c.TriggerTasks(checkpoint_id, at_ms, KEYS),))


def test_an_aborted_checkpoint_has_its_reason_and_what_was_acknowledged() -> None:
    spans = CheckpointSpans()
    assert spans.step(NOTHING, [trigger(7, 100), trigger(7, 100)], 100) == []
    summary = SnapshotSummary(alignment_ms=30, uploaded_bytes=5)
    assert spans.step(c.AckReceived(KEYS[1], 7, None, (), summary, 150), [], 150) == []
    aborted = c.ReportAborted(7, c.AbortReason.EXPIRED, "v0/0 is missing", 1, 900)
    [span] = spans.step(NOTHING, [aborted], 400)
    assert (span.name, span.start_ms, span.end_ms) == ("checkpoint", 100, 400)
    assert span.error == f"{c.AbortReason.EXPIRED.value}: v0/0 is missing"
    assert span.attributes["penstock.alignment_ms"] == 30
    [part] = span.children
    assert (part.name, part.end_ms) == ("snapshot v0", 150)
    assert part.attributes["penstock.slowest_subtask"] == 1
    assert spans.step(NOTHING, [aborted], 500) == [], "it is told once"
    assert spans.step(c.CheckpointStored(7, "m", 500), [], 500) == []


def test_what_is_followed_is_bounded() -> None:
    spans = CheckpointSpans()
    for number in range(2 * PENDING_MAX):
        spans.step(NOTHING, [trigger(number, number)], number)
    assert spans.step(c.CheckpointStored(0, "m", 1000), [], 1000) == [], "the oldest is forgotten"
    assert len(spans.step(c.CheckpointStored(2 * PENDING_MAX - 1, "m", 1000), [], 1000)) == 1


def test_a_restart_that_fails_again_and_again_is_one_span_with_a_bound() -> None:
    spans = RecoverySpans("start")
    for number in range(200):
        phase = (GroupPhase.STOPPING, GroupPhase.RESTORE)[number % 2]
        assert spans.look([phase], number, 0, {}) is None
    span = spans.end(200, {}, "the job ended FAILED")
    assert span is not None
    assert span.error == "the job ended FAILED"
    assert len(span.children) == PARTS_MAX
    assert span.children[-1].end_ms == 200
    assert spans.end(300, {}, "again") is None
