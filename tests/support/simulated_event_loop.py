"""An asyncio event loop on simulated time: one per simulated daemon, so that the real runners run as they are.

Callbacks run when the simulation says so, all that are ready in one go; timers and threads wait in simulated
time. A loop that dies does nothing any more; one that is frozen goes on later. ``unwind`` ends the
tasks of a dead one when nobody looks any more.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from typing_extensions import override

from tests.support.simulated_threads import ProcessHost, SimulatedThreads

_FROZEN_NS = 5_000_000
_UNWINDING_MAX = 1000


_numbers = itertools.count()


OF_THREAD = threading.local()
"""In a thread that works for an event loop: that."""


class _Numbered:
    """Sets of these, which asyncio has, are in the same order in each process."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls, *args, **kwargs)
        made.number = next(_numbers)
        return made

    number: int

    @override
    def __hash__(self) -> int:
        return self.number


class _Future(_Numbered, asyncio.Future[Any]):
    pass


class _Task(_Numbered, asyncio.Task[Any]):
    pass


class SimulatedEventLoop(asyncio.AbstractEventLoop):
    """The event loop of one daemon.

    Args:
        host: the simulation.
        connect: whether somebody listens at a port: None = nobody answers.
        died: the daemon has died in a store call.

    Attributes:
        owner: the daemon.
        is_frozen: nothing has a turn, for now.
    """

    owner: Any

    def __init__(
        self,
        host: ProcessHost,
        connect: Callable[[str, int], bool | None],
        died: Callable[[], None],
    ) -> None:
        self._host = host
        self._connect = connect
        self._ready: deque[asyncio.Handle] = deque()
        self._is_armed = False
        self._tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], None] = (
            weakref.WeakKeyDictionary()
        )
        self._is_unwinding = False
        self.is_alive = True
        self.is_frozen = False
        self.threads = SimulatedThreads(host, is_frozen=lambda: self.is_frozen, died=died)

    # ------------------------------------------------------------ turns

    @property
    def is_busy(self) -> bool:
        """Whether something has arrived that it has not looked at."""
        return bool(self._ready)

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            self._host.loop.call_later(0, self._turn)

    def _turn(self) -> None:
        self._is_armed = False
        if not self.is_alive:
            return
        if self.is_frozen:
            self._is_armed = True
            self._host.loop.call_later(_FROZEN_NS, self._turn)
            return
        self._run_ready()

    def _run_ready(self) -> None:
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            while self._ready and (self.is_alive or self._is_unwinding):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(outer)

    def die(self) -> None:
        """Nothing of it happens any more."""
        self.is_alive = False
        self.threads.die()

    def unwind(self) -> None:
        """Ends what a dead loop has left, once the simulation is over."""
        self._is_unwinding = True
        for _ in range(_UNWINDING_MAX):
            left = [task for task in self._tasks if not task.done()]
            if not left:
                return
            for task in left:
                task.cancel()
            self._run_ready()

    # ------------------------------------------------------------ what asyncio needs

    @override
    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if self.is_alive:
            self._arm()
        return handle

    @override
    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    @override
    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    @override
    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)

        def due() -> None:
            if self.is_alive and not timer.cancelled():
                self._ready.append(timer)
                self._arm()

        if self.is_alive:
            delay_ns = max(0, round(when * 1e9) - self._host.loop.monotonic_ns())
            self._host.loop.call_later(delay_ns, due)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is passed over when it is due."""

    @override
    def time(self) -> float:
        return self._host.loop.monotonic_ns() / 1e9

    @override
    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    @override
    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = _Task(coro, loop=self, name=name, context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks[task] = None
        return task

    @override
    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        if self._is_unwinding:
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)
            return future

        def tell(outcome: Callable[[Any], None], value: Any) -> None:
            def told() -> None:
                if not future.done():
                    outcome(value)

            self.call_soon(told)

        def work() -> Any:
            OF_THREAD.loop = self
            return func(*args)

        self.threads.run(
            work,
            lambda value: tell(future.set_result, value),
            lambda error: tell(future.set_exception, error),
        )
        return future

    @override
    async def getaddrinfo(  # type: ignore[override]
        self, host: str, port: int, **_: object
    ) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]

    @override
    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        found = self._connect(*address)
        if found is None:
            await self.create_future()  # the host does not answer
        if not found:
            raise ConnectionRefusedError

    def broke(self, error: BaseException) -> None:
        """Something has ended that should not."""
        self._host.broke(error)

    @override
    def get_debug(self) -> bool:
        return False

    @override
    def is_running(self) -> bool:
        return True

    @override
    def is_closed(self) -> bool:
        return False

    @override
    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.is_alive:
            self._host.broke(error or AssertionError(context["message"]))
