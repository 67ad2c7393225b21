"""Disks that are full: small file systems in memory, which need the right to mount."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(directory: Path, size: str = "16m") -> Iterator[Path]:
    """A file system of a few megabytes for the time of the block; skips where nobody may mount one."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to mount a tmpfs: {error}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(directory: Path, leave_bytes: int = 0) -> Path:
    """Leaves no more room than that; removing the file makes room again."""
    path = directory / ".filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    with path.open("ab") as file:
        file.truncate(path.stat().st_size - leave_bytes)
    return path
