"""Aim: the line of progress says what a job does, and why it does not.

Method: details in, lines out, as they are written where there is no terminal.
"""

from __future__ import annotations

import io

from penstock.client.progress import ProgressDisplay
from penstock.pb import client_pb2

NOON_MS = 1_767_268_800_000  # 2026-01-01 12:00:00
NO_SLOTS = client_pb2.FailureCause(
    error_class="NoResourceAvailable",
    message="the job needs 8 slots,\nbut within 60 s (slot.request.timeout) only 2 of 4 slots on "
    "2 TaskManagers were free: start more TaskManagers",
    timestamp_ms=NOON_MS,
)


def line(details: client_pb2.JobDetails) -> str:
    written = io.StringIO()
    with ProgressDisplay(written) as display:
        display(details)
    first, _, rest = written.getvalue().partition("\n")
    assert first == "hot: job 0123", "so that one can follow it from elsewhere"
    return rest


def with_rows(count: int, job_id: str = "0123", restarts: int = 3) -> client_pb2.JobDetails:
    details = details_of(client_pb2.JOB_STATE_RUNNING)
    details.summary.job_id, details.summary.restarts = job_id, restarts
    details.vertices.add(is_source=True).subtasks.add().metrics.records_in = count
    return details


def shown(written: io.StringIO) -> list[tuple[int, int]]:
    """Rows and thousands of rows per second of each line."""
    found = [
        line.split(": RUNNING  ")[1] for line in written.getvalue().splitlines() if "RUN" in line
    ]
    parts = [line.replace(",", "").split("  ") for line in found]
    return [(int(one[0].split()[0]), round(int(one[1].split()[0]), -3) // 1000) for one in parts]


def test_only_what_was_read_meanwhile_has_a_rate() -> None:
    """Not what was there at first; what another JobManager has not heard of yet has been read all the same."""
    written = io.StringIO()
    with ProgressDisplay(written) as display:
        for count in (50_000, 51_000, 0, 20_000, 54_000, 55_000):
            display._last_at_s -= 1.0
            display._last_line_at_s = 0.0
            display(with_rows(count))
    assert [rows for rows, _ in shown(written)] == [50_000, 51_000, 51_000, 51_000, 54_000, 55_000]
    assert [rate for _, rate in shown(written)] == [0, 1, 1, 1, 1, 1]


def test_rows_that_are_read_again_are_shown_as_they_are() -> None:
    """Behind a restart at once, and else when whoever leads must have heard of all."""
    written = io.StringIO()
    with ProgressDisplay(written) as display:
        for count, restarts, later_s in ((50_000, 3, 0), (10, 4, 0), (5, 4, 0), (7, 4, 6)):
            display._known_at_s -= later_s
            display._last_line_at_s = 0.0
            display(with_rows(count, restarts=restarts))
    assert [rows for rows, _ in shown(written)] == [50_000, 10, 10, 7]


def test_each_job_of_a_script_is_shown_from_its_id_to_its_end() -> None:
    written = io.StringIO()
    with ProgressDisplay(written) as display:
        for job_id in ("0123", "4567"):
            done = details_of(client_pb2.JOB_STATE_FINISHED)
            done.summary.job_id = job_id
            display(done)
    lines = written.getvalue().splitlines()
    assert [line for line in lines if "job " in line] == ["hot: job 0123", "hot: job 4567"]
    assert len([line for line in lines if "FINISHED" in line]) == 2


def details_of(state: client_pb2.JobState.ValueType, **fields: object) -> client_pb2.JobDetails:
    summary = client_pb2.JobSummary(job_id="0123", name="hot", state=state, restarts=3)
    return client_pb2.JobDetails(summary=summary, **fields)  # type: ignore[arg-type]


def test_a_job_that_runs_well() -> None:
    details = details_of(
        client_pb2.JOB_STATE_RUNNING, last_checkpoint_id=7, last_checkpoint_at_ms=NOON_MS
    )
    assert line(details) == (
        "hot: RUNNING  0 rows read  0 rows/s  checkpoint 7 at 12:00:00  3 restarts\n"
    )


def test_a_job_that_is_restarted_again_and_again_says_why_in_one_line() -> None:
    shown = line(details_of(client_pb2.JOB_STATE_RESTARTING, failure=NO_SLOTS))
    before, _, cause = shown.partition("  last failure at 12:00:00: ")
    assert before.endswith("3 restarts")
    assert cause.startswith("NoResourceAvailable: the job needs 8 slots, but within 60 s (slot.")
    assert len(cause) == 121
    assert cause.endswith("...\n")


def test_a_job_that_waits_for_slots_says_for_how_many_and_how_long() -> None:
    wait = client_pb2.SlotWait(needed=8, free=2, total=4, waited_ms=12_345, timeout_ms=60_000)
    shown = line(details_of(client_pb2.JOB_STATE_CREATED, slot_wait=wait))
    assert shown.endswith("  waits for 8 slots, 2 of 4 are free (12 s of 60 s)\n")
    wait.drained_taskmanagers = 1
    shown = line(details_of(client_pb2.JOB_STATE_CREATED, slot_wait=wait))
    assert shown.endswith(" 2 of 4 are free, 1 TaskManager is drained (12 s of 60 s)\n")


def test_the_failure_that_ended_a_job_is_left_to_the_error_that_follows() -> None:
    assert "last failure" not in line(details_of(client_pb2.JOB_STATE_FAILED, failure=NO_SLOTS))
