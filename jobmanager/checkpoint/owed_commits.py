"""Which tasks have yet to commit what a complete checkpoint covers of their output.

A checkpoint is complete before anything of it is committed: its tasks are told, and say when they have done so. A task that
ends before that commits as it begins again from that checkpoint, or a later one; gone back behind it the job produces
that output again, and nobody commits it.
"""

from __future__ import annotations

from collections.abc import Iterable

from jobmanager.graph.execution_attempt import SubtaskId


class OwedCommits:
    """Those of the checkpoints that somebody waits for.

    Example: of two tasks one has committed, the other ends before it has, and begins again from there.
        >>> owed, files, table = OwedCommits(), SubtaskId("files", 0), SubtaskId("table", 0)
        >>> owed.expect(7, [files, table]), owed.committed(files, 7)
        (None, None)
        >>> owed.restored(7, [table])
        >>> owed.started()
        7
    """

    def __init__(self) -> None:
        self._owed: dict[int, set[SubtaskId]] = {}
        self._beginning: dict[SubtaskId, int] = {}
        """Tasks that begin again, and have not all done so: from which checkpoint."""

    def expect(self, checkpoint_id: int, subtasks: Iterable[SubtaskId]) -> int | None:
        """These commit what a checkpoint covers that is complete now; all answers are as of ``committed``."""
        self._owed[checkpoint_id] = set(subtasks)
        return self._settled()

    def committed(self, subtask: SubtaskId, checkpoint_id: int) -> int | None:
        """A task has committed all that this checkpoint covers of its output.

        Returns:
            The newest checkpoint of which all is committed, where there is another than before.
        """
        for owing in [id for id in self._owed if id <= checkpoint_id]:
            self._owed[owing].discard(subtask)
        return self._settled()

    def finished(self, subtask: SubtaskId) -> int | None:
        """A task has done all it had to do: it commits before that."""
        return self.committed(subtask, max(self._owed, default=0))

    def restored(self, checkpoint_id: int, subtasks: Iterable[SubtaskId]) -> None:
        """These tasks are about to begin again from a checkpoint; what was behind it is void."""
        for void in [id for id in self._owed if id > checkpoint_id]:
            del self._owed[void]
        self._beginning.update(dict.fromkeys(subtasks, checkpoint_id))

    def started(self) -> int | None:
        """All tasks run: those that have begun again committed before that."""
        begun, self._beginning = self._beginning, {}
        for id, owing in self._owed.items():
            owing -= {subtask for subtask, restored_id in begun.items() if restored_id >= id}
        return self._settled()

    def _settled(self) -> int | None:
        settled = max((id for id, owing in self._owed.items() if not owing), default=None)
        if settled is not None:
            for id in [id for id in self._owed if id <= settled]:
                del self._owed[id]
        return settled
