"""What a daemon is made of: parts that start one after the other and stop in the reverse order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from penstock.errors import StreamError


@dataclass(frozen=True, slots=True)
class DaemonPart:
    """One thing that starts and stops.

    Attributes:
        start: returns when later parts may rely on this one.
        stop: undoes ``start``, also where that has failed.
    """

    name: str
    start: Callable[[], Awaitable[object]] | None = None
    stop: Callable[[], Awaitable[object]] | None = None


async def start_in_order(parts: Iterable[DaemonPart], stack: AsyncExitStack) -> None:
    """Starts the parts one after the other; ``stack`` stops those that it came to, the last one first."""
    for part in parts:
        if part.stop is not None:
            stack.push_async_callback(part.stop)
        if part.start is not None:
            await part.start()


class Loops:
    """Loops of a daemon as its parts.

    Attributes:
        failed: resolved with the first error that ends a loop: the daemon cannot go on.
    """

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def part(self, name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> DaemonPart:
        """The loop as a part: it runs in the group until it is stopped."""
        tasks: list[asyncio.Task[None]] = []

        async def start() -> None:
            tasks.append(self._group.create_task(self._until_failed(loop()), name=name))

        async def stop() -> None:
            for task in tasks:
                task.cancel()
                await asyncio.wait([task])

        return DaemonPart(name, start, stop)

    async def _until_failed(self, loop: Coroutine[Any, Any, None]) -> None:
        try:
            await loop
        except StreamError as error:
            if not self.failed.done():
                self.failed.set_result(error)
