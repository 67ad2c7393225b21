"""Names of the files that a file sink has not committed, and their removal when nobody ever will.

Names carry job, sink, subtask and attempt: what other jobs have in the directory is left alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_FOREIGN = "foreign"


def output_tag(job_id: str, operator_uid: str) -> str:
    """Stands for job and sink in names."""
    return f"{job_id[:8]}-{hashlib.sha256(operator_uid.encode()).hexdigest()[:6]}"


def foreign_directory(directory: Path, tag: str, subtask_index: int, attempt: int) -> Path:
    """Where another program writes what a sink is then given as files; ``hidden_files`` finds it as one."""
    return directory / f".part-{tag}-{subtask_index}-{attempt}-{_FOREIGN}.inprogress"


def remove_hidden(path: Path) -> None:
    """Removes what ``hidden_files`` has found; what is gone is gone.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)  # whoever wrote to it may be at it still


def hidden_files(directory: Path, tag: str) -> Iterator[tuple[Path, int, int]]:
    """The hidden files of a sink, and directories of other programs: (path, subtask index, attempt) each.

    Args:
        directory: searched to the bottom; directories that vanish meanwhile are passed over.
        tag: see ``output_tag``.

    Raises:
        OSError: a directory cannot be read.
    """
    pattern = re.compile(
        rf"\.part-{re.escape(tag)}-(\d+)-(\d+)(-.*\.(inprogress|pending)|\.probe)", re.DOTALL
    )
    for parent, below, names in os.walk(directory, onerror=_raise_unless_gone):
        for name in (*names, *below):
            match = pattern.fullmatch(name)
            if match is not None:
                yield Path(parent, name), int(match[1]), int(match[2])


def held_path(pending: Path, savepoint_id: int) -> Path:
    """The second name that a prepared file has for a savepoint; ``hidden_files`` does not find it."""
    return pending.with_name(f".held-{savepoint_id}-{pending.name.lstrip('.')}")


def held_files(directory: Path, tag: str) -> Iterator[tuple[Path, Path, int]]:
    """What a sink holds for savepoints: (path, final name, subtask index) each.

    Args:
        directory: as of ``hidden_files``.
        tag: see ``output_tag``.

    Raises:
        OSError: a directory cannot be read.
    """
    pattern = re.compile(
        rf"\.held-\d+-part-{re.escape(tag)}-(?P<index>\d+)-(?P<attempt>\d+)-(?P<count>\d+)"
        r"\.(?P<extension>.*)\.pending"
    )
    for parent, _, names in os.walk(directory, onerror=_raise_unless_gone):
        for name in names:
            match = pattern.fullmatch(name)
            if match is not None:
                stem = f"part-{match['index']}-{match['attempt']}-{match['count']}-{tag}"
                final = Path(parent, f"{stem}.{match['extension']}")
                yield Path(parent, name), final, int(match["index"])


def sweep_hidden_files(directory: Path, tag: str, kept: Collection[str] = ()) -> int:
    """Removes what a sink has not committed, and what is empty then below its directory.

    Args:
        kept: names of files that stay.

    Returns:
        How many files there were.

    Raises:
        OSError: one cannot be removed.
    """
    found = [path for path, _, _ in hidden_files(directory, tag) if path.name not in kept]
    for path in found:
        remove_hidden(path)
    for parent in {path.parent for path in found}:
        with suppress(OSError):  # not empty: it holds output
            while parent != directory:
                parent.rmdir()
                parent = parent.parent
    return len(found)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
