"""The logs of attempts: ``<logs>/jobs/<job>/<vertex>-<subtask>-<attempt>.log``."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from common.log_keeper import OLDER
from common.names import require_name
from penstock.client.protocol import CHUNK_SIZE_BYTES

_FILE_NAME = re.compile(r"(?P<vertex>.+)-(?P<subtask>\d+)-(?P<attempt>\d+)\.log")
ALL_SUBTASKS = -1


@dataclass(frozen=True, slots=True, order=True)
class TaskLog:
    """The log of one attempt; sorts by vertex, subtask, attempt ("v2" before "v10")."""

    order: tuple[int, str, int, int]
    vertex: str
    subtask_index: int
    attempt: int
    path: Path


def find_logs(job_directory: Path, vertex: str, subtask_index: int) -> list[TaskLog]:
    """The logs of a job on this machine.

    Args:
        vertex: "" = all.
        subtask_index: -1 = all.
    """
    found: list[TaskLog] = []
    if not job_directory.is_dir():
        return found
    for path in job_directory.iterdir():
        match = _FILE_NAME.fullmatch(path.name)
        if match is None or path.name.startswith("slot-"):
            continue
        own_vertex, subtask = match["vertex"], int(match["subtask"])
        if vertex not in ("", own_vertex) or subtask_index not in (ALL_SUBTASKS, subtask):
            continue
        attempt = int(match["attempt"])
        order = (len(own_vertex), own_vertex, subtask, attempt)
        found.append(TaskLog(order, own_vertex, subtask, attempt, path))
    return sorted(found)


async def read_logs(
    logs: Path, job_id: str, vertex: str, subtask_index: int
) -> AsyncIterator[tuple[TaskLog, bytes]]:
    """The content of a job's logs in pieces, one attempt after the other.

    Raises:
        JobRejected: the job id is not usable.
    """
    directory = logs / require_name("job id", job_id)
    for log in await asyncio.to_thread(find_logs, directory, vertex, subtask_index):
        for path in (log.path.with_name(log.path.name + OLDER), log.path):
            offset = 0
            while piece := await asyncio.to_thread(_read, path, offset):
                offset += len(piece)
                yield log, piece


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_SIZE_BYTES)
    except FileNotFoundError:
        return b""  # it has not been cut, or has been removed meanwhile
