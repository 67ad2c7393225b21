"""SIGTERM as an exception, so that jobs are cancelled and clusters ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass


class Terminated(SystemExit):
    """SIGTERM came while a job was being run here."""


@contextlib.contextmanager
def terminates_as_exception() -> Iterator[None]:
    """Within it SIGTERM raises ``Terminated``, so that jobs are cancelled and clusters ended.

    Where the program has its own handler, or this is not the main thread, nothing changes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        if not _termination.is_permanent:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def raise_on_termination() -> None:
    """From now on SIGTERM raises ``Terminated``, unless the program has a handler of its own."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _terminate):
        _termination.is_permanent = True
        signal.signal(signal.SIGTERM, _terminate)


@dataclass(slots=True)
class _Termination:
    """Whether the handler stays for as long as the process lives."""

    is_permanent: bool = False


_termination = _Termination()


def _terminate(number: int, _: object) -> None:
    raise Terminated(128 + number)
