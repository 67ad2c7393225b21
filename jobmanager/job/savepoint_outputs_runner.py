"""What becomes of the output that savepoints of one job cover: committed by the job, taken back by it, or in doubt.

A savepoint is complete before that is known. It is committed when all tasks have committed a checkpoint that is not older,
or the job is FINISHED; taken back when tasks have begun again from an older checkpoint before that, and a further one is
complete, which has some of that output; in doubt when the job has ended in another way before either.

Invariant: what was found out of a savepoint stays so.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum


class OutputFate(Enum):
    """What has become of it."""

    BEHIND = "may be produced again"
    """The job has gone back behind it, which is said once; what becomes of it is not known yet."""
    COMMITTED = "committed"
    TAKEN_BACK = "taken back"
    IN_DOUBT = "in doubt"


@dataclass(slots=True)
class _Savepoint:
    id: int
    fate: asyncio.Future[OutputFate]
    behind: asyncio.Future[OutputFate]
    """Done = the job has gone back behind it: who commits what comes then commits that output once more."""
    is_told: bool = False
    """That it has gone back was said."""


class SavepointOutputsRunner:
    """The savepoints of one job that somebody waits for, by their paths.

    Example: the job is cancelled when its tasks have committed the first of two savepoints.
        >>> async def fates():
        ...     outputs = SavepointOutputsRunner()
        ...     outputs.expect("first", 4)
        ...     outputs.expect("second", 6)
        ...     outputs.note_committed(5)
        ...     outputs.end(is_finished=False)
        ...     return [(await outputs.fate(path)).value for path in ("first", "second")]
        >>> asyncio.run(fates())
        ['committed', 'in doubt']
    """

    def __init__(self) -> None:
        self._savepoints: dict[str, _Savepoint] = {}
        self._committed_id = self._completed_id = 0
        self._at_end: OutputFate | None = None

    def expect(self, path: str, savepoint_id: int, *, is_behind: bool = False) -> None:
        """One is being stored, or complete; harmless to repeat.

        Args:
            path: of the savepoint.
            savepoint_id: its id.
            is_behind: the job has gone back behind it already.
        """
        if path not in self._savepoints:
            loop = asyncio.get_running_loop()
            self._savepoints[path] = one = _Savepoint(
                savepoint_id, loop.create_future(), loop.create_future()
            )
            if is_behind:
                one.behind.set_result(OutputFate.BEHIND)
            self._settle()

    def forget(self, path: str) -> None:
        """Nobody waits for it any more."""
        self._savepoints.pop(path, None)

    def note_completed(self, checkpoint_id: int) -> None:
        """A checkpoint is complete."""
        self._completed_id = max(self._completed_id, checkpoint_id)
        self._settle()

    def note_committed(self, checkpoint_id: int) -> None:
        """Tasks have committed all output up to this checkpoint."""
        self._committed_id = max(self._committed_id, checkpoint_id)
        self._settle()

    def note_restored(self, checkpoint_id: int) -> dict[str, int]:
        """Tasks go on from this checkpoint: what savepoints behind it cover will be produced again.

        Returns:
            Their ids by their paths, as far as nobody has committed that output.
        """
        behind = {path: one for path, one in self._open().items() if one.id > checkpoint_id}
        for one in behind.values():
            if not one.behind.done():
                one.behind.set_result(OutputFate.BEHIND)
        self.note_completed(checkpoint_id)
        return {path: one.id for path, one in behind.items()}

    def end(self, *, is_finished: bool) -> None:
        """The job has ended; FINISHED it has committed all."""
        at_end = OutputFate.COMMITTED if is_finished else OutputFate.IN_DOUBT
        self._at_end = self._at_end or at_end
        self._settle()

    async def fate(self, path: str, limit_s: float | None = None) -> OutputFate | None:
        """Waits until it is known of an expected savepoint, at the latest when the job has ended.

        Args:
            path: of the savepoint.
            limit_s: no longer than that.

        Returns:
            What has become of it; None = that is not known in this time.
        """
        one = self._savepoints[path]
        awaited = {one.fate} if one.is_told else {one.fate, one.behind}
        await asyncio.wait(awaited, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if one.behind.done() and not one.is_told:
            one.is_told = True
            return OutputFate.BEHIND
        return one.fate.result() if one.fate.done() else None

    def _settle(self) -> None:
        for one in self._open().values():
            if (fate := self._fate_of(one)) is not None:
                one.fate.set_result(fate)

    def _fate_of(self, one: _Savepoint) -> OutputFate | None:
        is_again = one.id < self._completed_id or self._at_end is OutputFate.COMMITTED
        if one.behind.done() and is_again:
            return OutputFate.TAKEN_BACK
        if not one.behind.done() and one.id <= self._committed_id:
            return OutputFate.COMMITTED
        return self._at_end

    def _open(self) -> dict[str, _Savepoint]:
        return {path: one for path, one in self._savepoints.items() if not one.fate.done()}
