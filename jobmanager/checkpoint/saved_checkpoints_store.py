"""Savepoints that are made of the job's own checkpoints, which so are written once.

all tasks have acknowledged it -> its files get second names in the savepoint's directory -> HEAD names the checkpoint
-> the savepoint's manifest is written

Invariant: a savepoint is there only once HEAD has named the checkpoint with the same content: whoever goes on with
the job commits what it covers, as often as need be. Its files have names of their own before that, so that it needs
nothing of the job when the checkpoint is subsumed.

Every call blocks, and may be made again.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from jobmanager.checkpoint.savepoint_store_runner import SavepointStoreRunner
from penstock.errors import StoreNotFound, StoreTransient, StreamError
from penstock.pb import checkpoint_pb2


class SavedCheckpoints:
    """Those of one job; one at a time is under way.

    Args:
        open: the directory of a savepoint, by its name.
    """

    def __init__(self, job_id: str, open: Callable[[str], SavepointStoreRunner]) -> None:
        self._open = open
        self._under_way: checkpoint_pb2.CheckpointManifest | None = None
        self._written: tuple[int, int] = (0, 0)
        """The checkpoint whose savepoint was written last, and the id of that."""
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    def bring(self, saved: checkpoint_pb2.CheckpointManifest) -> None:
        """Brings the files of a savepoint together.

        Args:
            saved: its manifest, with the paths of the job's files; is changed.

        Raises:
            StoreNotFound: a file is not there.
            StoreTransient: they cannot be brought now.
        """
        self._open(saved.properties.target).bring(saved)
        self._under_way = saved

    def is_written(self, checkpoint_id: int) -> bool:
        """Whether the savepoint of a checkpoint is there."""
        return self._written[0] == checkpoint_id

    def write(self, checkpoint_id: int) -> int:
        """Writes its manifest: HEAD names the checkpoint that it is made of.

        Returns:
            The id of the savepoint.

        Raises:
            StoreNotFound: its files have been removed.
            StoreTransient: it cannot be written now.
        """
        saved = self._under_way  # first: a call that was given up on may write it meanwhile
        if self.is_written(checkpoint_id):
            return self._written[1]
        if saved is None or saved.checkpoint_id != checkpoint_id:
            raise StoreNotFound(f"no savepoint of checkpoint {checkpoint_id} is under way")
        written_id = self._open(saved.properties.target).write(saved)
        self._written = checkpoint_id, written_id
        self._under_way = None
        return written_id

    def try_to_write(self, checkpoint_id: int) -> None:
        """The same; where it cannot be done now, who waits for the savepoint tries again."""
        try:
            self.write(checkpoint_id)
        except StoreTransient as error:
            self._log.warning(
                "savepoint.not_written", checkpoint_id=checkpoint_id, reason=str(error)
            )
        except StreamError as error:
            self._log.error("savepoint.not_written", checkpoint_id=checkpoint_id, reason=str(error))
