"""Calls to a store that may hang: each on a thread of its own, waited for until a deadline.

A thread cannot be ended. One that is given up on goes on until its call returns, and what that returns is
dropped. Invariant: at most ``hanging_max`` threads that were given up on are left at a time; while there are
as many, no call is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from penstock.errors import StoreTransient

HANGING_MAX: Final = 8

_ResultT = TypeVar("_ResultT")


class StoreSilent(StoreTransient):
    """A call was given up on: what it does, or will do yet, is not known."""


class StoreCallsRunner:
    """Makes the calls of one owner.

    Args:
        owner: for names of threads and messages.
        timeout_ms: how long each may take.
        changed: called when ``hanging`` or ``given_up`` has changed.
        limit_key: the setting that the limit is of, if any.
        hanging_max: how many may be left that were given up on.
    """

    def __init__(
        self,
        owner: str,
        timeout_ms: int,
        changed: Callable[[], None],
        limit_key: str = "",
        hanging_max: int = HANGING_MAX,
    ) -> None:
        self._owner = owner
        self._limit = f"{limit_key}, " if limit_key else ""
        self._timeout_ms = timeout_ms
        self._changed = changed
        self._hanging_max = hanging_max
        self.hanging = 0
        """Threads that were given up on and whose call has not returned yet."""
        self.given_up = 0
        """Calls that were given up on so far."""
        self._under_way = 0
        self._all_returned = asyncio.Event()
        self._all_returned.set()

    async def wait_for_all(self, timeout_ms: int) -> None:
        """Waits until all calls have returned, those that were given up on as well, so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                await self._all_returned.wait()

    def _note_under_way(self, change: int) -> None:
        self._under_way += change
        if self._under_way:
            self._all_returned.clear()
        else:
            self._all_returned.set()

    def _note_hanging(self, change: int) -> None:
        self.hanging += change
        self._changed()

    async def run(
        self,
        what: str,
        work: Callable[[], _ResultT],
        no_longer: asyncio.Future[None] | None = None,
    ) -> _ResultT:
        """Makes a call.

        Args:
            what: names it in messages: "prepare".
            work: blocks; an exception of it is raised here.
            no_longer: once done, the call is given up on before its time.

        Raises:
            StoreSilent: it is given up on; or it was not made, since too many hang.
        """
        if self.hanging >= self._hanging_max:
            raise StoreSilent(
                f"calls to the storage of {self._owner} have not returned ({self.hanging}): none is made "
                "before one of them does; see whether its disk or its mount hangs"
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_ResultT] = loop.create_future()
        is_given_up = False

        def take(result: _ResultT | None, error: BaseException | None) -> None:
            self._note_under_way(-1)
            if is_given_up:
                self._note_hanging(-1)
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        self._begin(what, work, lambda *told: loop.call_soon_threadsafe(take, *told))
        self._note_under_way(1)
        try:
            waits: set[asyncio.Future[Any]] = {answer}
            if no_longer is not None:
                waits.add(no_longer)
            await asyncio.wait(
                waits, timeout=self._timeout_ms / 1000, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            if not answer.done():
                is_given_up = True
                self.given_up += 1
                self._note_hanging(1)
        if is_given_up:
            raise StoreSilent(
                f"storage has not answered: call {what!r} for {self._owner} was given up on (at the latest "
                f"after {self._limit}{self._timeout_ms} ms); see whether its disk or its mount hangs"
            )
        return answer.result()

    def _begin(
        self,
        what: str,
        work: Callable[[], _ResultT],
        tell: Callable[[_ResultT | None, BaseException | None], object],
    ) -> None:
        def run() -> None:
            result, failure = None, None
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - raised by who waits for it
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                tell(result, failure)

        # A daemon: a call that hangs must not keep the process from ending.
        threading.Thread(target=run, name=f"store-{what}-{self._owner[:8]}", daemon=True).start()
