"""Artifacts of jobs, by the hash of their content.

Invariants: a file under its final name is complete and its content has the hash that names it (it is
written aside, verified, synced, then renamed); an artifact that a known job names is not removed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import tempfile
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

import structlog

from penstock.client.protocol import CHUNK_SIZE_BYTES
from penstock.errors import JobRejected, StoreCorrupt, StoreNotFound

_ID = re.compile(r"[0-9a-f]{64}")
_UNUSED_S_MAX = 24 * 3600.0
_ResultT = TypeVar("_ResultT")


class ArtifactStore:
    """Files named by their sha256.

    Args:
        directory: where they lie; made when missing. What an interrupted upload left is removed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".upload-*"):
            leftover.unlink()
        # File access takes turns on a thread of its own, so that the event loop never waits for it.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="artifacts")
        # Between a look at an artifact's age and its removal nobody is told that it is here.
        self._removal = threading.Lock()
        self._log = structlog.get_logger(__name__)

    def close(self) -> None:
        """Ends the thread."""
        self._executor.shutdown(wait=True)

    def missing(self, ids: Iterable[str]) -> list[str]:
        """Which of these are not here. The others count as used from now on."""
        absent = []
        for artifact_id in ids:
            try:
                with self._removal:
                    os.utime(self._path(artifact_id))
            except FileNotFoundError:
                absent.append(artifact_id)
        return absent

    async def find_missing(self, ids: Iterable[str]) -> list[str]:
        """``missing`` on the thread, for ids of which there may be many."""
        return await self._run(self.missing, tuple(ids))

    async def upload(self, artifact_id: str, pieces: AsyncIterable[bytes]) -> int:
        """Stores an artifact.

        Returns:
            Its size in bytes.

        Raises:
            StoreCorrupt: the content does not have the hash.
        """
        path = self._path(artifact_id)
        digest = hashlib.sha256()
        descriptor, name = tempfile.mkstemp(prefix=".upload-", dir=self._directory)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                async for piece in pieces:
                    await self._run(_append, file, digest, piece)
                await self._run(_sync, file)
                size_bytes = file.tell()
            if digest.hexdigest() != artifact_id:
                raise StoreCorrupt(
                    f"artifact {artifact_id} arrived with the hash {digest.hexdigest()} "
                    f"({size_bytes} bytes): it was changed on the way or while it was read; "
                    "upload it again"
                )
            await self._run(temporary.replace, path)
        finally:
            temporary.unlink(missing_ok=True)  # noqa: ASYNC240 - also when it is cancelled
        return size_bytes

    async def download(self, artifact_id: str) -> AsyncIterator[bytes]:
        """The pieces of an artifact.

        Raises:
            StoreNotFound: it is not here.
        """
        try:
            file = self._path(artifact_id).open("rb")
        except FileNotFoundError as error:
            raise StoreNotFound(
                f"artifact {artifact_id} is not in {self._directory}: submit the job again"
            ) from error
        with file:
            while piece := await self._run(file.read, CHUNK_SIZE_BYTES):
                yield piece

    async def sweep(self, in_use: frozenset[str]) -> None:
        """Removes artifacts that no known job names and nobody asked for during a day.

        What cannot be removed is logged and stays until the next time.
        """
        try:
            await self._run(self._sweep, in_use)
        except OSError as error:
            self._log.warning("artifacts.sweep_failed", reason=str(error))

    def _sweep(self, in_use: frozenset[str]) -> None:
        oldest = time.time() - _UNUSED_S_MAX  # noqa: TID251 - compared with the file system's time
        for path in self._directory.iterdir():
            if _ID.fullmatch(path.name) and path.name not in in_use:
                with self._removal:
                    if path.stat().st_mtime < oldest:
                        path.unlink(missing_ok=True)

    def _path(self, artifact_id: str) -> Path:
        if not _ID.fullmatch(artifact_id):
            raise JobRejected(
                f"{artifact_id[:80]!r} is no artifact id: it must be a sha256 in lower-case hex"
            )
        return self._directory / artifact_id

    async def _run(self, function: Callable[..., _ResultT], *arguments: object) -> _ResultT:
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, function, *arguments
        )


def _append(file: IO[bytes], digest: hashlib._Hash, piece: bytes) -> None:
    digest.update(piece)
    file.write(piece)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
