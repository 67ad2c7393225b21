"""What the sink operator runs: a writer whose output becomes visible in two phases.

``prepare_commit`` makes everything written so far safe without showing it and says what ``commit`` will
have to show. ``commit`` may be repeated with the same list, by another process too. Writers whose output
needs no second phase return nothing from ``prepare_commit``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.sink import Sink, SinkContext, is_two_phase
from penstock.errors import InvariantViolation, JobRejected, TaskFailure
from penstock.functions.functions import check_has_run
from penstock.rows.column_values import short_repr
from penstock.storage.plain_codecs import MsgpackCodec
from taskmanager.user_code.calls import calling_user_code


class SinkWriter(ABC):
    """Writes the rows of one subtask. Called on the mailbox thread."""

    def open(self, ctx: SinkContext) -> None:
        """Called once, before the first ``write``."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Takes one batch of at least one row; the event-time column is not output."""

    def adopt(self, files: Sequence[str]) -> None:
        """Takes files that have rows already and are safe, on the file system of its own: they are its output.

        Raises:
            InvariantViolation: it writes no files.
        """
        raise InvariantViolation(f"{type(self).__name__} is given files: {files}")

    @abstractmethod
    def flush(self) -> None:
        """Hands over what is buffered where that makes it visible earlier."""

    @property
    def has_unprepared(self) -> bool:
        """True where something was written that only a commit will show."""
        return False

    def roll(self, now_ms: int) -> int | None:
        """Completes what is old enough; returns when to be called again, None = not by time."""
        return None

    def carry(self, now_ms: int) -> list[bytes]:
        """Says which rows the next ``prepare_commit`` does not take leave of: they go on in the checkpoint's state.

        Not called before a savepoint and behind the end of the data, which leave nothing behind.
        """
        return []

    def take_carried(self, items: list[bytes]) -> None:
        """Called once after ``recover``: writes the rows that the restored checkpoint has carried on.

        Args:
            items: of any writers of the sink.
        """
        if items:
            raise TaskFailure(
                "the checkpoint holds rows that a file sink has not written yet, and this sink writes no files; start "
                "from a savepoint, which holds none"
            )

    def prepare_commit(self, checkpoint_id: int) -> list[bytes]:
        """Takes leave of all that was written: it is what the checkpoint covers; must be fast.

        Args:
            checkpoint_id: 0 at the end of a job without checkpoints.

        Returns:
            What ``commit`` must be given to show it.
        """
        return []

    def finish_prepared(self) -> Callable[[], None] | None:
        """Work on an I/O thread after which all that was prepared so far is safe; None = it is already.

        The work may be dropped and asked for again, as a checkpoint is that cannot be taken, and the work
        of two checkpoints may run at the same time. It raises a TaskFailure where what was prepared is lost.
        """
        return None

    def described(self, committables: list[bytes]) -> list[bytes]:
        """What was prepared, as a snapshot names it, once it is safe: with what ``recover`` knows it again by; any
        thread.

        Args:
            committables: of ``prepare_commit`` or ``hold``.
        """
        return committables

    def commit(self, committables: list[bytes]) -> None:
        """Shows what was prepared; repeatable."""

    def hold(self, checkpoint_id: int, committables: list[bytes]) -> list[bytes]:
        """A savepoint names what was prepared: returns how it does, so that nothing that becomes of the job takes
        it away before it is committed. ``keep_held`` is called before the savepoint is complete."""
        return committables

    def keep_held(self, checkpoint_id: int, committables: list[bytes]) -> None:
        """Does what ``hold`` has said, once what was prepared is safe; on an I/O thread.

        Args:
            committables: as they were given to ``hold``.
        """

    def let_go(self, checkpoint_id: int, committables: list[bytes]) -> None:
        """What was held for a savepoint is committed, or the savepoint was aborted; repeatable."""

    def abort(self, committables: list[bytes]) -> None:
        """Removes what was prepared and nobody will ever commit, safe yet or not; repeatable."""

    def recover(self, committables: list[bytes], *, is_speculative: bool = False) -> None:
        """Called once after ``open``: commits what the restored checkpoint covers, and removes what
        earlier attempts left beside it.

        Args:
            committables: that the checkpoint covers.
            is_speculative: another attempt of the subtask is still writing, so nothing is removed.
        """
        if committables:
            self.commit(committables)

    def close(self) -> None:
        """Called once at the end, whatever the end; removes what no checkpoint can cover: what was not
        prepared, or is not safe yet."""


class DiscardWriter(SinkWriter):
    """Drops its rows."""

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        pass

    @override
    def flush(self) -> None:
        pass


class UserSinkWriter(SinkWriter):
    """Runs a user's ``Sink``, idempotent or two-phase; what it raises becomes a TaskFailure with the user's
    traceback.

    Committables are kept as msgpack, so that each comes back as what it was.

    Raises:
        TaskFailure: the user's object is no ``Sink``, or neither of the two.
    """

    def __init__(self, sink: object, operator_name: str) -> None:
        if not isinstance(sink, Sink):
            raise TaskFailure(
                f"the user's sink is a {type(sink).__name__}; derive it from penstock.Sink",
                operator=operator_name,
            )
        try:
            self._is_two_phase = is_two_phase(sink)
        except JobRejected as error:
            raise TaskFailure(str(error), operator=operator_name) from error
        self._sink = sink
        self._operator = operator_name
        self._name = type(sink).__name__
        self._codec = MsgpackCodec()
        self._has_unprepared = False

    @override
    def open(self, ctx: SinkContext) -> None:
        with calling_user_code(f"{self._name}.open", self._operator):
            check_has_run(self._sink.open(ctx), "open")  # type: ignore[func-returns-value]

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        self._has_unprepared = self._is_two_phase
        with calling_user_code(f"{self._name}.write", self._operator):
            check_has_run(self._sink.write(batch), "write")

    @override
    def flush(self) -> None:
        with calling_user_code(f"{self._name}.flush", self._operator):
            check_has_run(self._sink.flush(), "flush")  # type: ignore[func-returns-value]

    @property
    @override
    def has_unprepared(self) -> bool:
        return self._has_unprepared

    @override
    def prepare_commit(self, checkpoint_id: int) -> list[bytes]:
        if not self._is_two_phase:
            return []
        with calling_user_code(f"{self._name}.prepare_commit", self._operator):
            committables: object = self._sink.prepare_commit(checkpoint_id)
        if not isinstance(committables, list | tuple):
            raise TaskFailure(
                f"{self._name}.prepare_commit returned a {type(committables).__name__} in the place of a "
                "list of committables: return [] where there is nothing to commit",
                operator=self._operator,
            )
        encoded = [self._encoded(committable) for committable in committables]
        self._has_unprepared = False
        return encoded

    def _encoded(self, committable: object) -> bytes:
        try:
            return self._codec.to_stored(committable)
        except ValueError as error:
            raise TaskFailure(
                f"{self._name}.prepare_commit returned a committable that a checkpoint cannot hold: "
                f"{short_repr(committable)} ({type(committable).__name__}); return bytes, or plain Python "
                "values (numbers, text, dates, lists, tuples, dicts)",
                operator=self._operator,
            ) from error

    @override
    def commit(self, committables: list[bytes]) -> None:
        for committable in map(self._codec.to_value, committables):
            with calling_user_code(f"{self._name}.commit", self._operator):
                check_has_run(self._sink.commit(committable), "commit")  # type: ignore[func-returns-value]

    @override
    def abort(self, committables: list[bytes]) -> None:
        for committable in map(self._codec.to_value, committables):
            with calling_user_code(f"{self._name}.abort", self._operator):
                check_has_run(self._sink.abort(committable), "abort")  # type: ignore[func-returns-value]

    @override
    def close(self) -> None:
        with calling_user_code(f"{self._name}.close", self._operator):
            check_has_run(self._sink.close(), "close")  # type: ignore[func-returns-value]
