"""Runs what is to be done in order: for each TaskManager, store or operation one action after the other, all of these side
by side.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from penstock.errors import InvariantViolation, StreamError

Action = Callable[[], Awaitable[None]]


class LanesRunner:
    """Lanes of actions.

    Args:
        name: whose they are, for messages.

    Attributes:
        tasks: run them, and end with what they raise; None = nothing can be done yet.
    """

    def __init__(self, name: str) -> None:
        self.tasks: asyncio.TaskGroup | None = None
        self._name = name
        self._lanes: dict[str, deque[Action]] = {}

    @property
    def are_empty(self) -> bool:
        """Nothing is under way, and nothing waits."""
        return not self._lanes

    def run(self, lane: str, action: Action) -> None:
        """Runs an action after those that were given for the same lane.

        Raises:
            StreamError: the group ends, and begins nothing any more.
        """
        waiting = self._lanes.get(lane)
        if waiting is not None:
            waiting.append(action)
            return
        assert self.tasks is not None, "effects are performed while the actor runs"
        self._lanes[lane] = deque([action])
        drain = self._drain(lane)
        try:
            self.tasks.create_task(drain)
        except RuntimeError as error:  # it says nothing else
            drain.close()
            raise StreamError(
                f"{self._name} ends here, or is left to another JobManager"
            ) from error

    async def _drain(self, lane: str) -> None:
        waiting = self._lanes[lane]
        while waiting:
            try:
                await waiting[0]()
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # A task group takes no notice of a task that ends so, and the lane would stand still for ever.
                raise InvariantViolation(
                    f"{self._name}: what waited for its turn as {lane!r} has cancelled itself"
                ) from error
            waiting.popleft()
        del self._lanes[lane]
