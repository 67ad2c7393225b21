"""Work that Ctrl-C must not tear in two.

Signals are handled by the main thread, wherever it is just then. A handler that raises inside of gRPC
leaves a call that never ends, and with it a channel that waits for ever when it is closed or the process
exits (grpc/grpc#19973).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from types import FrameType
from typing import TypeVar

_ResultT = TypeVar("_ResultT")


def shielded(work: Callable[[], _ResultT]) -> _ResultT:
    """Runs something to its end, whatever signals come: they interrupt the wait for it, never itself.

    The main thread leaves it to a thread that ends with it; who waits no longer does not hear of its
    outcome. Other threads, which handle no signals, do it themselves, and so does an interpreter that
    is about to end.
    """
    if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
        return work()
    outcome: Future[_ResultT] = Future()
    signals: list[int] = []
    wake: SimpleQueue[None] = SimpleQueue()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - goes to who waits
            outcome.set_exception(error)
        wake.put(None)

    def note(number: int, _: FrameType | None) -> None:
        signals.append(number)
        wake.put(None)

    with _handled(signal.SIGINT, note), _handled(signal.SIGTERM, note):
        threading.Thread(target=run, name="shielded", daemon=True).start()
    while True:
        with _handled(signal.SIGINT, note), _handled(signal.SIGTERM, note):
            wake.get()
            is_done = outcome.done()
        while signals:
            # A handler may raise, here where nothing is half done.
            signal.raise_signal(signals.pop(0))
        if is_done:
            return outcome.result()


@contextlib.contextmanager
def _handled(number: int, note: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within it a signal that has a handler in Python is only noted."""
    handler = signal.getsignal(number)
    if not callable(handler):
        yield
        return
    signal.signal(number, note)
    try:
        yield
    finally:
        signal.signal(number, handler)
