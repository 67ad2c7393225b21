"""Aim: who asks for a checkpoint of a job that runs, while some of its tasks begin again, waits for them, and not for ever.

Method: the requests alone; the test answers in the coordinator's place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from common.clock import SystemClock
from jobmanager.checkpoint import messages as c
from jobmanager.job.checkpoint_gauges import CheckpointGauges
from jobmanager.job.checkpoint_requests_runner import (
    CheckpointRequestsRunner,
    JobEndsError,
    TasksNotRunningError,
    TasksStartingError,
)
from jobmanager.job.job_calls_runner import JobCallsRunner
from penstock.storage.checkpoint_properties import PLAIN

TIMEOUT_MS = 600


def asked(
    answer: Callable[[CheckpointRequestsRunner, int], c.RequestRefused | None],
) -> tuple[int | BaseException, int]:
    """What comes of a request, and how often the coordinator has been asked.

    Args:
        answer: why it is not taken, the runner and the number of requests before it given; None = it is, as number 7.
    """

    async def run() -> tuple[int | BaseException, int]:
        times = 0

        def post(event: c.CheckpointRequested) -> None:
            nonlocal times
            refused = answer(requests, times)
            times += 1
            checkpoint_id = 0 if refused else 7
            effect = c.AnswerRequest(event.request_id, checkpoint_id, refused)
            asyncio.get_running_loop().call_soon(requests.answer, effect)

        calls = JobCallsRunner("job", TIMEOUT_MS, CheckpointGauges())
        requests = CheckpointRequestsRunner("job", SystemClock(), calls, post)
        [found] = await asyncio.gather(requests.request("r", PLAIN), return_exceptions=True)
        return found, times

    return asyncio.run(run())


def test_it_is_taken_as_soon_as_all_run() -> None:
    starting = c.RequestRefused.STARTING
    assert asked(lambda _, times: starting if times < 2 else None) == (7, 3)


def test_nobody_waits_longer_than_a_checkpoint_may_take() -> None:
    begun = time.monotonic()
    found, times = asked(lambda *_: c.RequestRefused.STARTING)
    assert isinstance(found, TasksStartingError)
    assert times > 1
    assert time.monotonic() - begun >= TIMEOUT_MS / 1000


@pytest.mark.parametrize("refused", [c.RequestRefused.NOT_RUNNING, c.RequestRefused.LOADING])
def test_nobody_waits_for_a_job_that_is_restarted_or_loads(refused: c.RequestRefused) -> None:
    found, times = asked(lambda *_: refused)
    assert type(found) is TasksNotRunningError
    assert times == 1


def test_who_waits_hears_of_the_end() -> None:
    def answer(requests: CheckpointRequestsRunner, times: int) -> c.RequestRefused:
        if times:
            requests.end()
        return c.RequestRefused.STARTING

    found, _ = asked(answer)
    assert isinstance(found, JobEndsError)
