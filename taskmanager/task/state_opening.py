"""Opens the state of a subtask on an I/O thread, while other subtasks of the slot run.

Reading and rebuilding what was restored may take long. Invariant: the backends belong to the I/O thread
until ``when_open`` is called, then to the mailbox thread; whoever has them when the attempt ends closes
them.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import structlog

from taskmanager.state.backend import KeyedStateBackend
from taskmanager.state.memory import ManagedMemory
from taskmanager.state.state_sizes import StateSizes

_log = structlog.get_logger()


class StateOpening:
    """The keyed state of one attempt, from its opening to its end.

    Args:
        submit: runs a function on an I/O thread.
        post: runs a function on the mailbox thread.

    Attributes:
        backends: those that are open.
        is_closed: the attempt has ended.
    """

    def __init__(
        self,
        memory: ManagedMemory,
        submit: Callable[[Callable[[], None]], object],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self.backends: list[KeyedStateBackend] = []
        self.is_closed = False
        self._memory = memory
        self._submit = submit
        self._post = post
        self._lock = Lock()
        self._is_opening = False
        self._is_open = False
        """On the mailbox thread: they are its own from then on."""

    def start(
        self,
        open_all: Callable[[], None],
        when_open: Callable[[], None],
        when_failed: Callable[[BaseException], None],
    ) -> None:
        """Begins; nothing is called any more once the attempt has ended.

        Args:
            open_all: adds to ``backends``, on the I/O thread; should end soon after ``is_closed``.
            when_open: called on the mailbox thread.
            when_failed: called on the I/O thread with what ``open_all`` has raised.
        """
        self._is_opening = True
        self._submit(lambda: self._open(open_all, when_open, when_failed))

    def _open(
        self,
        open_all: Callable[[], None],
        when_open: Callable[[], None],
        when_failed: Callable[[BaseException], None],
    ) -> None:
        failure: BaseException | None = None
        with self._memory.apart() as users:
            try:
                if not self.is_closed:
                    open_all()
            except BaseException as error:  # noqa: BLE001 - handed to the task's boundary
                failure = error
            with self._lock:
                self._is_opening = False
                was_closed = self.is_closed
            if was_closed:
                for left in self._close_backends():
                    _log.warning("state.close_failed", reason=repr(left))
                return

        def hand_over() -> None:
            if not self.is_closed:
                self._memory.join(users)
                self._is_open = True
                when_open()

        if failure is not None:
            when_failed(failure)
        else:
            self._post(hand_over)

    def sizes(self) -> list[StateSizes]:
        """What the states take; nothing before they are open, and after that."""
        return [one.sizes() for one in self.backends] if self._is_open else []

    def close(self) -> list[BaseException]:
        """Closes the backends; those that are being opened are closed by the thread that does so.

        Returns:
            What went wrong on the way.
        """
        self._is_open = False
        with self._lock:
            self.is_closed = True
            if self._is_opening:
                return []
        return self._close_backends()

    def _close_backends(self) -> list[BaseException]:
        errors: list[BaseException] = []
        for backend in self.backends:
            try:
                backend.close()
            except BaseException as error:  # noqa: BLE001 - a task's boundary: the others must be closed too
                errors.append(error)
        return errors
