"""How much memory a process has, and how long it has worked, as the kernel tells it."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> int:
    """Memory of a process that is not swapped out, shared parts included; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return 0


def cpu_s(pid: int) -> float:
    """Seconds that a process has had of a CPU; 0 where it has ended and was waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
