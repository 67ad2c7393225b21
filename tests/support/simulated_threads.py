"""Work on threads of a simulated process: one thread has its turn at a time, and the simulation says which.

A piece of work runs at a drawn time without a break, until it is done or pauses in a call that does not
answer (``pause``). Real threads hold paused work, nothing else runs on them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, NoReturn, Protocol

from typing_extensions import override

from tests.support.in_memory_network import SimulatedLoop


class ProcessDied(BaseException):
    """The process whose thread this is is no more."""


_local = threading.local()


def die_here() -> NoReturn:
    """The process ends in the midst of what its thread does.

    Raises:
        ProcessDied: always; whoever catches it is not there any more.
    """
    _local.thread.has_killed = True
    raise ProcessDied


def pause(duration_ns: int | None) -> None:
    """Lets the thread that calls stand still.

    Args:
        duration_ns: None = until its process ends.

    Raises:
        ProcessDied: it has ended.
    """
    thread: _Thread | None = getattr(_local, "thread", None)
    assert thread is not None, "only threads of simulated processes pause"
    thread.pause(duration_ns)


class _Thread:
    """One thread and its turns."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._turn = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self.is_done = False
        self.is_doomed = False
        self.has_killed = False
        self.paused_ns: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def run_on(self) -> None:
        """Gives it a turn; returns when it is done or pauses."""
        self._turn.release()
        self._back.acquire()
        if self.is_done:
            self._thread.join()

    def _run(self) -> None:
        _local.thread = self
        self._turn.acquire()
        try:
            self._work()
        finally:
            self.is_done = True
            self._back.release()

    def pause(self, duration_ns: int | None) -> None:
        if not self.is_doomed:
            self.paused_ns = duration_ns
            self._back.release()
            self._turn.acquire()
        if self.is_doomed:
            raise ProcessDied


class ProcessHost(Protocol):
    """What the threads of a process need of the simulation."""

    loop: SimulatedLoop

    def broke(self, error: BaseException) -> None:
        """A check has failed."""

    def background_delay_ns(self, is_snapshot: bool) -> int:
        """How long work waits for a thread."""


class SimulatedThreads(Executor):
    """All threads of one pool of a process.

    Args:
        host: the simulation.
        is_snapshot: they write snapshots.
        is_frozen: whether nothing of the process has a turn now.
        died: the process has died in a store call.

    Attributes:
        count: of pieces of work that wait, run or pause.
    """

    def __init__(
        self,
        host: ProcessHost,
        *,
        is_snapshot: bool = False,
        is_frozen: Callable[[], bool] = lambda: False,
        died: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._is_snapshot = is_snapshot
        self._is_frozen = is_frozen
        self._died = died
        self._is_alive = True
        self._threads: list[_Thread] = []
        self.count = 0

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.run(lambda: fn(*args, **kwargs), future.set_result, future.set_exception)
        return future

    def run(
        self,
        work: Callable[[], Any],
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Does work at some time; what comes of it is told then."""
        self.count += 1
        outcome: list[Callable[[], None]] = []

        def thread_work() -> None:
            try:
                value = work()
            except ProcessDied:
                outcome.append(lambda: None)
            except Exception as error:
                failure = error
                if isinstance(error, AssertionError):
                    self._host.broke(error)
                outcome.append(lambda: failed(failure))
            else:
                outcome.append(lambda: done(value))

        def begin() -> None:
            if self._is_alive:
                thread = _Thread(thread_work)
                self._threads.append(thread)
                go_on(thread)

        def go_on(thread: _Thread) -> None:
            if not self._is_alive:
                return
            if self._is_frozen():
                self._host.loop.call_later(20_000_000, lambda: go_on(thread))
                return
            thread.run_on()
            if thread.has_killed:
                self._died()
            elif thread.is_done:
                self.count -= 1
                self._threads.remove(thread)
                outcome[0]()
            elif thread.paused_ns is not None:
                self._host.loop.call_later(thread.paused_ns, lambda: go_on(thread))

        self._host.loop.call_later(self._host.background_delay_ns(self._is_snapshot), begin)

    def die(self) -> None:
        """Nothing runs any more; what pauses ends without a trace."""
        self._is_alive = False
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.is_doomed = True
            if not thread.is_done:
                thread.run_on()
