"""A two-phase sink that keeps a file per checkpoint, and is trapped behind a savepoint."""

from __future__ import annotations

import json
import uuid
from abc import abstractmethod
from pathlib import Path
from typing import Any

import pyarrow as pa
from typing_extensions import override

import penstock as ps


class TrappedLedger(ps.TwoPhaseSink):
    """Rows as JSON; a file without a dot in front is committed.

    Args:
        directory: of the files.
        kept: of savepoints.
        trap: while it is there, the first checkpoint behind a savepoint meets ``spring``.
    """

    def __init__(self, directory: Path, kept: Path, trap: Path) -> None:
        self.directory, self.kept, self.trap = directory, kept, trap
        self.rows: list[dict[str, Any]] = []

    @abstractmethod
    def spring(self) -> None:
        """What happens in the trap."""

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.to_pylist()

    @override
    def prepare_commit(self, checkpoint_id: int) -> list[bytes]:
        if self.trap.exists() and list(self.kept.glob("*/manifest")):
            self.spring()
        if not self.rows:
            return []
        self.directory.mkdir(parents=True, exist_ok=True)
        hidden = self.directory / f".{uuid.uuid4().hex}"
        hidden.write_text(json.dumps(self.rows))
        self.rows = []
        return [str(hidden).encode()]

    @override
    def commit(self, committable: bytes) -> None:
        hidden = Path(committable.decode())
        final = hidden.with_name(hidden.name[1:])
        if hidden.exists():
            hidden.rename(final)
        assert final.exists()

    @override
    def abort(self, committable: bytes) -> None:
        Path(committable.decode()).unlink(missing_ok=True)
