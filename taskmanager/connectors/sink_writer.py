"""What the sink operator runs: a writer whose output becomes visible in two phases.

``prepare_commit`` makes everything written so far safe without showing it and says what ``commit`` will
have to show. ``commit`` may be repeated with the same list, by another process too. Writers whose output
needs no second phase return nothing from ``prepare_commit``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.sink import Sink, SinkContext
from penstock.errors import TaskFailure
from taskmanager.connectors.user_code import calling_user_code


class SinkWriter(ABC):
    """Writes the rows of one subtask. Called on the mailbox thread."""

    def open(self, ctx: SinkContext) -> None:
        """Called once, before the first ``write``."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Takes one batch of at least one row; the event-time column is not output."""

    @abstractmethod
    def flush(self) -> None:
        """Hands over what is buffered where that makes it visible earlier."""

    def prepare_commit(self) -> list[bytes]:
        """Makes all that was written safe; returns what ``commit`` must be given to show it."""
        return []

    def commit(self, committables: list[bytes]) -> None:
        """Shows what was prepared; repeatable."""

    def abort(self, committables: list[bytes]) -> None:
        """Removes what was prepared and will not be committed; repeatable."""

    def close(self) -> None:
        """Called once at the end, whatever the end; removes what has not been committed."""


class DiscardWriter(SinkWriter):
    """Drops its rows."""

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        pass

    @override
    def flush(self) -> None:
        pass


class UserSinkWriter(SinkWriter):
    """Runs a user's ``Sink``; what it raises becomes a TaskFailure with the user's traceback.

    Raises:
        TaskFailure: the user's object is no ``Sink``.
    """

    def __init__(self, sink: object, operator_name: str) -> None:
        if not isinstance(sink, Sink):
            raise TaskFailure(
                f"the user's sink is a {type(sink).__name__}; derive it from penstock.Sink",
                operator=operator_name,
            )
        self._sink = sink
        self._operator = operator_name
        self._name = type(sink).__name__

    @override
    def open(self, ctx: SinkContext) -> None:
        with calling_user_code(f"{self._name}.open", self._operator):
            self._sink.open(ctx)

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        with calling_user_code(f"{self._name}.write", self._operator):
            self._sink.write(batch)

    @override
    def flush(self) -> None:
        with calling_user_code(f"{self._name}.flush", self._operator):
            self._sink.flush()

    @override
    def close(self) -> None:
        with calling_user_code(f"{self._name}.close", self._operator):
            self._sink.close()
