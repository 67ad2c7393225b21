"""Work that outlives the call that asked for it, owned by the daemon's task group.

A call may be abandoned by its caller while a slot is being started for it; the work goes on, and a
repeated call waits for the same result. What fails, fails the waiters, never the daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from common.log import get_logger
from penstock.errors import StreamError, TaskFailure

_T = TypeVar("_T")


class Background:
    """Starts tasks in a group and hands out their results."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._log = get_logger(__name__)

    def start(self, work: Coroutine[Any, Any, _T], name: str) -> BackgroundWork[_T]:
        """Starts the work."""
        result: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        result.add_done_callback(_retrieve)
        task = self._group.create_task(self._run(work, result, name), name=name)

        def finish(_task: asyncio.Task[None]) -> None:
            # A task that is cancelled before its first step has run nothing.
            work.close()
            if not result.done():
                result.cancel()

        task.add_done_callback(finish)
        return BackgroundWork(task, result)

    async def _run(
        self, work: Coroutine[Any, Any, _T], result: asyncio.Future[_T], name: str
    ) -> None:
        try:
            value = await work
        except asyncio.CancelledError:
            result.cancel()
            raise
        except StreamError as error:
            if not result.done():
                result.set_exception(error)
        except Exception as error:  # noqa: BLE001 - the boundary of a task
            self._log.error("work.crashed", work=name, exc_info=error)
            if not result.done():
                result.set_exception(error)
        else:
            if not result.done():
                result.set_result(value)


class BackgroundWork(Generic[_T]):
    """A piece of work under way."""

    def __init__(self, task: asyncio.Task[None], result: asyncio.Future[_T]) -> None:
        self._task = task
        self._result = result

    async def wait(self) -> _T:
        """Its result; a waiter that is cancelled does not cancel the work.

        Raises:
            TaskFailure: the work itself was cancelled.
        """
        await asyncio.wait([self._result])
        if self._result.cancelled():
            raise TaskFailure(f"{self._task.get_name()} was given up: what it was for has ended")
        return self._result.result()

    async def cancel(self) -> None:
        """Ends the work and waits until it has cleaned up."""
        self._task.cancel()
        await asyncio.wait([self._task])


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Nobody may be waiting any more when it fails: that is no warning."""
    if not future.cancelled():
        future.exception()
