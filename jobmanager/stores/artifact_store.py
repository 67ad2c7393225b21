"""Artifacts of jobs, by the hash of their content.

Invariants: an object under its final name is complete and its content has the hash that names it (it is gathered
aside and verified, then stored in one go); an artifact that a known job names, or that somebody asked for within a
day, is not removed.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import tempfile
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Final, TypeVar

import structlog

from penstock.client.protocol import CHUNK_SIZE_BYTES
from penstock.errors import JobRejected, StoreCorrupt, StoreNotFound, StreamError
from penstock.storage.object_store import ObjectStore

_ID: Final = re.compile(r"[0-9a-f]{64}")
_UNUSED_S_MAX: Final = 24 * 3600.0
_READ_BYTES: Final = 8 * CHUNK_SIZE_BYTES
_THREADS: Final = 4
_ResultT = TypeVar("_ResultT")


class ArtifactStore:
    """Objects named by their sha256.

    Args:
        store: has them.
        sweep_pause_s: between two listings of them; the first one comes that much later.
    """

    def __init__(self, store: ObjectStore, sweep_pause_s: float = 0.0) -> None:
        self._store = store
        self._sweep_pause_s = sweep_pause_s
        self._swept_at_s = time.monotonic()
        # The event loop never waits for the store.
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="artifacts")
        self._seen: dict[str, float] = {}
        """Artifacts that are there -> when somebody last asked for them, or brought them."""
        self._log = structlog.get_logger(__name__)

    def close(self) -> None:
        """Ends the threads."""
        self._executor.shutdown(wait=True)

    def missing(self, ids: Iterable[str]) -> list[str]:
        """Which of these are not there, as far as ``find_missing`` and ``upload`` know."""
        return [artifact_id for artifact_id in ids if artifact_id not in self._seen]

    async def find_missing(self, ids: Iterable[str]) -> list[str]:
        """Looks which of these are not there. The others count as used from now on.

        Raises:
            StoreTransient: it cannot be found out now.
        """
        wanted = list(ids)
        for artifact_id in wanted:
            _check(artifact_id)
        # Before the look, so that a sweep that runs beside it spares them.
        unknown = {artifact_id for artifact_id in wanted if artifact_id not in self._seen}
        self._seen.update(dict.fromkeys(wanted, time.monotonic()))
        found: Collection[str] = self._seen.keys() - unknown
        try:
            found = await self._run(self._store.sizes, wanted)
        finally:
            absent = [artifact_id for artifact_id in wanted if artifact_id not in found]
            for artifact_id in absent:
                self._seen.pop(artifact_id, None)
        return absent

    async def upload(self, artifact_id: str, pieces: AsyncIterable[bytes]) -> int:
        """Stores an artifact.

        Returns:
            Its size in bytes.

        Raises:
            StoreCorrupt: the content does not have the hash.
            StoreTransient: it cannot be stored now.
        """
        _check(artifact_id)
        digest = hashlib.sha256()
        with tempfile.TemporaryFile() as file:
            async for piece in pieces:
                await self._run(_append, file, digest, piece)
            size_bytes = file.tell()
            if digest.hexdigest() != artifact_id:
                raise StoreCorrupt(
                    f"artifact {artifact_id} arrived with the hash {digest.hexdigest()} "
                    f"({size_bytes} bytes): it was changed on the way or while it was read; "
                    "upload it again"
                )
            await self._run(self._store.put, artifact_id, _pieces_of(file))
        self._seen[artifact_id] = time.monotonic()
        return size_bytes

    async def download(self, artifact_id: str) -> AsyncIterator[bytes]:
        """The pieces of an artifact.

        Raises:
            StoreNotFound: it is not there.
            StoreTransient: it cannot be read now.
        """
        _check(artifact_id)
        size_bytes = (await self._run(self._store.sizes, [artifact_id])).get(artifact_id)
        if size_bytes is None:
            raise StoreNotFound(f"artifact {artifact_id} is not there: submit the job again")
        for offset in range(0, size_bytes, _READ_BYTES):
            count = min(_READ_BYTES, size_bytes - offset)
            content = await self._run(self._store.read, artifact_id, offset, count)
            for start in range(0, count, CHUNK_SIZE_BYTES):
                yield content[start : start + CHUNK_SIZE_BYTES]

    async def sweep(self, in_use: frozenset[str]) -> None:
        """Removes artifacts that no known job names and nobody asked for during a day.

        What cannot be removed is logged and stays until the next time.
        """
        if time.monotonic() - self._swept_at_s < self._sweep_pause_s:
            return
        self._swept_at_s = time.monotonic()
        try:
            await self._run(self._sweep, in_use)
        except StreamError as error:
            self._log.warning("artifacts.sweep_failed", reason=str(error))

    def _sweep(self, in_use: frozenset[str]) -> None:
        self._store.sweep_temporaries()
        oldest_ms = 1000 * (time.time() - _UNUSED_S_MAX)  # noqa: TID251 - the store's time
        for found in self._store.list(""):
            if (
                _ID.fullmatch(found.path)
                and found.path not in in_use
                and found.modified_at_ms < oldest_ms
                and time.monotonic() - self._seen.get(found.path, -_UNUSED_S_MAX) >= _UNUSED_S_MAX
            ):
                self._seen.pop(found.path, None)
                self._store.delete(found.path)

    async def _run(self, function: Callable[..., _ResultT], *arguments: object) -> _ResultT:
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, function, *arguments
        )


def _check(artifact_id: str) -> None:
    if not _ID.fullmatch(artifact_id):
        raise JobRejected(
            f"{artifact_id[:80]!r} is no artifact id: it must be a sha256 in lower-case hex"
        )


def _append(file: IO[bytes], digest: hashlib._Hash, piece: bytes) -> None:
    digest.update(piece)
    file.write(piece)


def _pieces_of(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(CHUNK_SIZE_BYTES):
        yield piece
