"""Threads for calls that may hang, as those to a mount whose server is gone: each holds up nobody but who asked for it.

Invariants: no more calls run at once than there are places, but for those that have run for ``HANGS_AFTER_S``, which
have given theirs up; a thread stands by wherever a call waits, so that it begins once one of those has hung long enough.
A call that hangs cannot be ended. One of an attempt that has ended, and that has run for ``LEFT_AFTER_S``, is left behind,
and its thread with it: of these there may be ``LEFT_MAX``, then the process has to be replaced.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

from typing_extensions import override

HANGS_AFTER_S: Final = 5.0
LEFT_AFTER_S: Final = 30.0
LEFT_MAX: Final = 16
THREADS_MAX: Final = 64

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OwnedCall:
    """A call, and whether who asked for it is gone."""

    call: Callable[[], Any]
    is_left: Callable[[], bool]

    def __call__(self) -> Any:
        """Makes the call."""
        return self.call()


@dataclass(frozen=True, slots=True)
class _Running:
    work: Callable[..., Any]
    begun_s: float

    def hangs(self, now_s: float, after_s: float) -> bool:
        return now_s - self.begun_s >= after_s


def free_in_s(begun_s: list[float], places: int, now_s: float, hangs_after_s: float) -> float:
    """When another call may begin: 0 = now.

    >>> free_in_s([10.0], 2, 11.0, 5.0)
    0.0
    >>> free_in_s([10.0, 10.5], 2, 11.0, 5.0)
    4.0
    >>> free_in_s([10.0, 10.5], 2, 15.0, 5.0)
    0.0

    Args:
        begun_s: when those began that run.
        places: of those that do not hang.
    """
    counted = [begun for begun in begun_s if now_s - begun < hangs_after_s]
    return 0.0 if len(counted) < places else min(counted) + hangs_after_s - now_s


class HangingCalls(Executor):
    """An executor whose threads may hang.

    Args:
        places: how many calls may run at once that do not hang.
        on_left: is told, once and by who submits a call, how many are left behind that hang: more than ``LEFT_MAX``.
    """

    def __init__(
        self,
        places: int,
        name: str,
        on_left: Callable[[int], None],
        hangs_after_s: float = HANGS_AFTER_S,
        left_after_s: float = LEFT_AFTER_S,
    ) -> None:
        self._places = places
        self._name = name
        self._on_left = on_left
        self._hangs_after_s = hangs_after_s
        self._left_after_s = left_after_s
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[..., Any]]] = deque()
        self._running: dict[int, _Running] = {}
        self._threads = 0
        self._is_closed = False

    @override
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        work = fn if isinstance(fn, OwnedCall) else lambda: fn(*args, **kwargs)
        with self._changed:
            if self._is_closed:
                raise RuntimeError(f"the threads of {self._name} are closed")
            self._waiting.append((future, work))
            try:
                self._have_one_stand_by()
            except RuntimeError:  # no more threads: one of those that there are comes to it
                if not self._threads:
                    self._waiting.pop()
                    raise
            self._changed.notify()
            left = self._left()
        if left > LEFT_MAX:
            self._on_left(left)
        return future

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more; what hangs is not waited for, nor what waits begun."""
        with self._changed:
            self._is_closed = True
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for future, _ in waiting:
            future.cancel()

    def _left(self) -> int:
        now_s = time.monotonic()
        return sum(
            isinstance(running.work, OwnedCall)
            and running.hangs(now_s, self._left_after_s)
            and running.work.is_left()
            for running in self._running.values()
        )

    def _have_one_stand_by(self) -> None:
        if self._waiting and self._threads == len(self._running) < THREADS_MAX:
            name = f"{self._name}-{self._threads + 1}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
            self._threads += 1

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            future, work = taken
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:  # noqa: BLE001 - it is the future's
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            with self._changed:
                del self._running[threading.get_ident()]
                self._changed.notify()
            del taken, future, work

    def _take(self) -> tuple[Future[Any], Callable[..., Any]] | None:
        """The next call, once there is a place for it; None = no more come."""
        with self._changed:
            while not self._is_closed:
                wait_s = None
                if self._waiting:
                    now_s = time.monotonic()
                    begun_s = [running.begun_s for running in self._running.values()]
                    wait_s = free_in_s(begun_s, self._places, now_s, self._hangs_after_s)
                    if wait_s <= 0:
                        taken = self._waiting.popleft()
                        self._running[threading.get_ident()] = _Running(taken[1], now_s)
                        with contextlib.suppress(RuntimeError):  # then this one comes again
                            self._have_one_stand_by()
                        return taken
                self._changed.wait(wait_s)
            self._threads -= 1
            return None
