"""Runs jobs in tests: every wait has a deadline, rows are compared whatever their order."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import penstock as ps
from penstock.client.client import Client
from penstock.client.job import TERMINAL_STATES
from penstock.client.job_metrics import job_metrics
from penstock.client.job_result import state_name
from penstock.errors import StreamError
from penstock.pb import checkpoint_pb2, client_pb2

DEADLINE_S = 90.0
"""What takes as long hangs; a slow machine with other work takes a third of it."""


def run(env: ps.Environment, name: str = "job") -> ps.JobResult:
    """Runs the job that has been built to its end."""
    return env.submit(name).wait(DEADLINE_S)


def rows_of(env: ps.Environment, stream: ps.Stream) -> list[dict[str, Any]]:
    """The rows of a stream, in order per subtask; runs the job."""
    rows = stream.collect()
    run(env)
    return [dict(row) for row in rows]


def await_details(
    handle: ps.JobHandle, condition: Callable[[dict[str, Any], str], object]
) -> dict[str, Any]:
    """Waits until ``condition(metrics, state)`` holds; returns these metrics."""
    metrics: dict[str, Any] = {}

    class Held(Exception):  # noqa: N818 - not an error
        pass

    def look(details: client_pb2.JobDetails) -> None:
        nonlocal metrics
        metrics = job_metrics(details)
        if condition(metrics, state_name(details)):
            raise Held
        state = details.summary.state
        assert state not in TERMINAL_STATES, f"the job ended {state_name(details)}: {metrics}"

    try:
        handle.wait(DEADLINE_S, on_progress=look)
    except Held:
        return metrics
    raise AssertionError(f"the job ended: {metrics}")


def started_from(handle: ps.JobHandle) -> checkpoint_pb2.StartedFrom:
    """What a job goes on from, once it has looked: it is accepted before."""
    await_details(handle, lambda _m, _s: handle.details().started_from.path)
    return handle.details().started_from


def cancel(handle: ps.JobHandle) -> None:
    """Cancels a job and waits for its end."""
    handle.cancel()
    try:
        handle.wait(DEADLINE_S)
    except ps.JobCanceled:
        assert handle.status() == "CANCELED"
        return
    raise AssertionError(f"the job ended {handle.status()} instead of CANCELED")


def cancel_all(client: Client) -> None:
    """Ends what a test has left running, where anybody leads who can; the client is closed."""
    with contextlib.suppress(StreamError), client:
        for job in client.jobs():
            if not job.ended_at_ms:
                client.cancel(job.job_id)


def assert_same_rows(
    actual: Iterable[Mapping[str, Any]], expected: Iterable[Mapping[str, Any]]
) -> None:
    """Equal as multisets; NaN equals NaN, and -0.0 is 0.0."""
    found, wanted = Counter(map(canonical, actual)), Counter(map(canonical, expected))
    if found == wanted:
        return
    missing, unexpected = wanted - found, found - wanted
    raise AssertionError(
        f"{missing.total()} of {wanted.total()} rows are missing, for example "
        f"{_first(missing)}; {unexpected.total()} of {found.total()} are unexpected, for example "
        f"{_first(unexpected)}"
    )


def canonical(value: Any) -> Any:
    """A hashable form in which equal means equal for a user."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    if isinstance(value, Mapping):
        return tuple((name, canonical(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(canonical, value))
    return value


def _first(rows: Counter[Any]) -> list[Any]:
    return sorted(rows, key=repr)[:3]
