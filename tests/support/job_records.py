"""What a JobManager keeps of its jobs in its directory, read and written behind its back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from common.pb import job_record_pb2
from jobmanager.stores.record_store import RECORD_NAME
from jobmanager.stores.stored_job import decode_record, encode_record


class JobRecords:
    """The records of the jobs of one JobManager.

    Args:
        directory: what it is given as ``--dir``.
    """

    def __init__(self, directory: Path) -> None:
        self._jobs = directory / "jobmanager" / "jobs"

    def path(self, job_id: str) -> Path:
        """Of a job's record."""
        return self._jobs / job_id / RECORD_NAME

    def all(self) -> dict[str, job_record_pb2.StoredJob]:
        """By job id."""
        found = {}
        for path in self._jobs.glob(f"*/{RECORD_NAME}"):
            try:
                found[path.parent.name] = decode_record(path.read_bytes(), str(path))
            except FileNotFoundError:
                continue  # just removed
        return found

    def change(self, job_id: str, note: Callable[[job_record_pb2.StoredJob], None]) -> None:
        """While no JobManager runs."""
        path = self.path(job_id)
        record = decode_record(path.read_bytes(), str(path))
        note(record)
        path.write_bytes(encode_record(record))

    def copy(self) -> dict[Path, bytes]:
        """All that is there now, for ``put_back``: what a JobManager has left that is killed now."""
        return {
            path: path.read_bytes()
            for path in self._jobs.glob("*/*")
            if not path.name.startswith(".")
        }

    @staticmethod
    def put_back(copied: dict[Path, bytes]) -> None:
        """While no JobManager runs."""
        for path, content in copied.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)

    @property
    def are_clean(self) -> bool:
        """All jobs have ended, and nothing is to be deleted of any."""
        return all(record.end.is_clean for record in self.all().values())

    async def until_clean(self) -> None:
        """Waits for it."""
        while not self.are_clean:  # noqa: ASYNC110 - a thread writes it
            await asyncio.sleep(0.01)
