"""Whether a process is still the daemon that has registered under its pid: pids are used again.

A registration says when its process began, which no other process with that pid shares. One that does not is
told by its command line: role and directory, however that is spelled.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Final

_STATE: Final = 0
_START_TICKS: Final = 19
"""Places in ``/proc/<pid>/stat`` behind the name of the program, which may have blanks in it."""


def start_ticks(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None where there is no such, or it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[_STATE] in ("Z", "X") else int(fields[_START_TICKS])


def is_registered_daemon(role: str, pid: int, started: int | None, directory: Path) -> bool:
    """Whether the daemon runs: False only where that is certain.

    Args:
        role: "jobmanager" or "taskmanager".
        started: what ``start_ticks`` said when it registered, None where its registration does not tell.
        directory: the daemon's, resolved.
    """
    now = start_ticks(pid)
    if now is None:
        return False
    if started is not None:
        return now == started
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        pairs = list(itertools.pairwise(command))
        if (b"-m", role.encode()) not in pairs:
            return False
        its_own = Path(f"/proc/{pid}/cwd").readlink()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except PermissionError:
        return True  # another user's, and who knows
    named = [Path(os.fsdecode(value)) for name, value in pairs if name == b"--dir"]
    return any((its_own / path).resolve() == directory for path in named)
