"""Reads what memory the container of this process may take."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from taskmanager.state.rocksdb.memory_shares import parse_cgroup_limit

_ROOT: Final = Path("/sys/fs/cgroup")
_SELF: Final = Path("/proc/self/cgroup")


def cgroup_memory_limit(root: Path = _ROOT, own: Path = _SELF) -> int | None:
    """The smallest limit of this process's group and those above it; None = no limit is known.

    Args:
        root: where cgroups are mounted.
        own: the file that names the groups of this process.
    """
    limits: list[int] = []
    for directory, name in _groups(root, own):
        while True:
            file = directory / name
            if file.is_file():
                limit = parse_cgroup_limit(file.read_text(encoding="ascii"))
                if limit is not None:
                    limits.append(limit)
            if directory == root or root not in directory.parents:
                break
            directory = directory.parent
    return min(limits, default=None)


def _groups(root: Path, own: Path) -> list[tuple[Path, str]]:
    """Directories of the memory groups of this process, and the name of the limit's file there."""
    if not own.is_file():
        return []
    groups: list[tuple[Path, str]] = []
    for line in own.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if not controllers:
            groups.append((root / relative, "memory.max"))
        elif "memory" in controllers.split(","):
            groups.append((root / "memory" / relative, "memory.limit_in_bytes"))
    return groups
