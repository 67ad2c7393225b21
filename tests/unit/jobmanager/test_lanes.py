"""Aim: what is to be done in order is done, or ends the job that it is of: it never stands still unnoticed."""

from __future__ import annotations

import asyncio

import pytest

from jobmanager.job.lanes_runner import LanesRunner
from penstock.errors import InvariantViolation


def test_an_action_that_cancels_itself_ends_what_the_lane_is_of() -> None:
    lanes = LanesRunner("job 1")

    async def cancelled() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async def scenario() -> None:
        async with asyncio.TaskGroup() as lanes.tasks:
            lanes.run("tm1", cancelled)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(scenario())
    assert caught.group_contains(InvariantViolation, match="job 1: .* 'tm1' has cancelled itself")
