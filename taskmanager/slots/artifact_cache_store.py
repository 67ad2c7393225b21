"""Artifacts of jobs on this machine: downloaded once, verified, shared by all slots.

Invariants: a file under its artifact's name is complete and has the content its id says; a job's
code lies in a directory of that job, which goes with the job; artifacts that no job uses are kept,
up to a limit, the longest unused go first.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.names import require_name
from penstock.errors import JobRejected, StoreCorrupt
from penstock.pb import graph_pb2
from taskmanager.processes.background import Background, BackgroundWork

_ID = re.compile(r"[0-9a-f]{64}")
UNUSED_SIZE_MAX_BYTES = 1 << 30

Download = Callable[[str], AsyncIterator[bytes]]
"""Artifact id -> its content in pieces."""


@dataclass(frozen=True, slots=True)
class JobFiles:
    """What a slot needs of a job's artifacts.

    Attributes:
        code_paths: directories for ``sys.path``, in the job's order.
        artifact_paths: artifact id -> file.
    """

    code_paths: tuple[str, ...]
    artifact_paths: dict[str, str]


class ArtifactCache:
    """The artifacts of one TaskManager.

    Args:
        directory: where they lie; made when needed.
        download: fetches one from the JobManager.
        background: owns downloads.
        unused_size_max_bytes: how much is kept of what no job uses.
    """

    def __init__(
        self,
        directory: Path,
        download: Download,
        background: Background,
        unused_size_max_bytes: int = UNUSED_SIZE_MAX_BYTES,
    ) -> None:
        self._files = directory / "artifacts"
        self._code = directory / "code"
        self._download = download
        self._background = background
        self._unused_size_max_bytes = unused_size_max_bytes
        self._jobs: dict[str, set[str]] = {}
        self._fetches: dict[str, BackgroundWork[Path]] = {}
        self._extractions: dict[tuple[str, str], BackgroundWork[Path]] = {}
        self._sizes: OrderedDict[str, int] = OrderedDict()

    async def prepare(self, job_id: str, artifacts: Sequence[graph_pb2.Artifact]) -> JobFiles:
        """Makes the artifacts of a job available; repeating it costs nothing.

        Raises:
            JobRejected: an id is malformed, or a code archive is none.
            StoreCorrupt: what was downloaded is not what the id says.
            StreamError: the JobManager did not deliver.
        """
        for artifact in artifacts:
            if _ID.fullmatch(artifact.id) is None:
                raise JobRejected(f"artifact id {artifact.id!r} is no sha256 in hex")
        self._jobs.setdefault(job_id, set()).update(artifact.id for artifact in artifacts)
        code_paths: list[str] = []
        artifact_paths: dict[str, str] = {}
        for artifact in artifacts:
            path = await self._fetched(artifact)
            artifact_paths[artifact.id] = str(path)
            if artifact.kind == "code":
                code_paths.append(str(await self._extracted(job_id, artifact, path)))
        return JobFiles(tuple(code_paths), artifact_paths)

    async def release(self, job_id: str) -> None:
        """The job has ended here: its code goes, its artifacts may."""
        if self._jobs.pop(job_id, None) is None:
            return
        for key in [key for key in self._extractions if key[0] == job_id]:
            await self._extractions.pop(key).cancel()
        await asyncio.to_thread(shutil.rmtree, self._code / job_id, ignore_errors=True)
        self._evict()

    # ------------------------------------------------------------ download

    async def _fetched(self, artifact: graph_pb2.Artifact) -> Path:
        if artifact.id in self._sizes:
            self._sizes.move_to_end(artifact.id)
            return self._files / artifact.id
        fetch = self._fetches.get(artifact.id)
        if fetch is None:
            fetch = self._background.start(self._fetch(artifact), f"download of {artifact.name}")
            self._fetches[artifact.id] = fetch
        return await fetch.wait()

    async def _fetch(self, artifact: graph_pb2.Artifact) -> Path:
        path = self._files / artifact.id
        partial = path.with_suffix(".part")
        await asyncio.to_thread(self._files.mkdir, parents=True, exist_ok=True)
        digest = hashlib.sha256()
        size = 0
        try:
            # Pieces of 1 MiB into the page cache do not hold the loop up.
            with partial.open("wb") as file:
                async for piece in self._download(artifact.id):
                    digest.update(piece)
                    size += len(piece)
                    file.write(piece)
            if digest.hexdigest() != artifact.id:
                raise StoreCorrupt(
                    f"artifact {artifact.name} arrived with other content than it was uploaded "
                    f"with ({size} bytes, {artifact.size_bytes} expected); submit the job again"
                )
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
            self._fetches.pop(artifact.id, None)
        self._sizes[artifact.id] = size
        return path

    def _evict(self) -> None:
        used = {artifact_id for ids in self._jobs.values() for artifact_id in ids}
        unused = [artifact_id for artifact_id in self._sizes if artifact_id not in used]
        excess = sum(self._sizes[artifact_id] for artifact_id in unused)
        for artifact_id in unused:
            if excess <= self._unused_size_max_bytes:
                return
            excess -= self._sizes.pop(artifact_id)
            (self._files / artifact_id).unlink(missing_ok=True)

    # ------------------------------------------------------------ code

    async def _extracted(self, job_id: str, artifact: graph_pb2.Artifact, archive: Path) -> Path:
        key = (job_id, artifact.id)
        extraction = self._extractions.get(key)
        if extraction is None:
            target = self._code / require_name("job id", job_id) / artifact.id[:16]
            extraction = self._background.start(
                asyncio.to_thread(_extract, archive, target, artifact.name),
                f"extraction of {artifact.name}",
            )
            self._extractions[key] = extraction
        return await extraction.wait()


def _extract(archive: Path, target: Path, name: str) -> Path:
    partial = target.with_name(f"{target.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as code:
            for member in code.namelist():
                if member.startswith("/") or ".." in Path(member).parts:
                    raise JobRejected(f"{name} has the member {member!r} outside of its directory")
            code.extractall(partial)
    except zipfile.BadZipFile as error:
        raise JobRejected(f"{name} is no zip archive: {error}") from error
    partial.mkdir(parents=True, exist_ok=True)  # an empty archive
    partial.replace(target)
    return target
