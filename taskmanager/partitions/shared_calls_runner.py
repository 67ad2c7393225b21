"""Calls to shared storage from a slot process: each on a thread of its own, waited for until a deadline.

A mount that hangs cannot be interrupted. A call that is given up on goes on until it returns, and what it returns is
dropped. Invariants: at most ``AT_ONCE_MAX`` calls are waited for at a time, the others wait for their turn; while
``HANGING_MAX`` calls that were given up on have not returned, none is made. All but the calls themselves runs on the
mailbox thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from taskmanager.network.transport import Post

AT_ONCE_MAX: Final = 4
HANGING_MAX: Final = 8
TIMEOUT_MS: Final = 180_000

Mail = Callable[[], None]


@dataclass(eq=False, slots=True)
class _Call:
    work: Callable[[], Mail]
    given_up: Callable[[str], None]
    deadline_ns: int = 0
    is_given_up: bool = False


def start_thread(work: Callable[[], None]) -> None:
    """Runs a call on a thread that keeps no process from ending."""
    threading.Thread(target=work, name="slot-shared-storage", daemon=True).start()


class SharedCallsRunner:
    """Makes the calls of one process.

    Args:
        post: adds mail to the mailbox.
        timeout_ms: how long each may take once it has begun.
        now_ns: monotonic time.
        start: runs a call on a thread.
    """

    def __init__(
        self,
        post: Post,
        timeout_ms: int = TIMEOUT_MS,
        now_ns: Callable[[], int] = time.monotonic_ns,
        start: Callable[[Callable[[], None]], None] = start_thread,
    ) -> None:
        self._post = post
        self._timeout_ms = timeout_ms
        self._now_ns = now_ns
        self._start = start
        self._waiting: deque[_Call] = deque()
        self._running: dict[_Call, None] = {}
        self._hanging = 0

    @property
    def next_deadline_ns(self) -> int | None:
        """Monotonic time at which ``tick`` has something to do; None = nothing is waited for."""
        return min((call.deadline_ns for call in self._running), default=None)

    def call(self, work: Callable[[], Mail], given_up: Callable[[str], None]) -> None:
        """Makes a call, now or in its turn.

        Args:
            work: blocks, on another thread; what it returns becomes mail.
            given_up: called in its place, from the mailbox, with the reason.
        """
        self._waiting.append(_Call(work, given_up))
        self._begin()

    def tick(self, now_ns: int) -> None:
        """Gives up on what has taken too long."""
        for call in [call for call in self._running if now_ns >= call.deadline_ns]:
            del self._running[call]
            call.is_given_up = True
            self._hanging += 1
            call.given_up(
                f"it has not answered for {self._timeout_ms / 1000:g} s (taskmanager.spill.shared-timeout); see whether "
                "its mount hangs, or S3 is out of reach"
            )
        self._begin()

    def _begin(self) -> None:
        while self._waiting and self._hanging >= HANGING_MAX:
            given_up = self._waiting.popleft().given_up
            self._post(
                lambda given_up=given_up: given_up(  # type: ignore[misc]
                    f"{HANGING_MAX} calls to it have not returned: none is made before one of them does; see "
                    "whether its mount hangs"
                )
            )
        while self._waiting and len(self._running) < AT_ONCE_MAX:
            call = self._waiting.popleft()
            call.deadline_ns = self._now_ns() + self._timeout_ms * 1_000_000
            self._running[call] = None
            self._start(lambda call=call: self._run(call))  # type: ignore[misc]

    def _run(self, call: _Call) -> None:
        """On a thread of its own."""
        try:
            mail = call.work()
        except Exception as error:  # noqa: BLE001 - a thread's boundary: it is raised where mail is read
            mail = partial(_raise, error)
        self._post(lambda: self._ended(call, mail))

    def _ended(self, call: _Call, mail: Mail) -> None:
        try:
            if call.is_given_up:
                self._hanging -= 1
            else:
                del self._running[call]
                mail()
        finally:
            self._begin()


def _raise(error: Exception) -> None:
    raise error
