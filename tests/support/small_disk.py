"""Disks that are full: small file systems in memory, which need the right to mount."""

from __future__ import annotations

import contextlib
import shutil
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


@contextlib.contextmanager
def filled(directory: Path, leave_bytes: int = 0) -> Iterator[None]:
    """That much room is left for the time of the block, and never less on the way there."""
    path = directory / ".filler"
    try:
        with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while (surplus := shutil.disk_usage(directory).free - leave_bytes) > 0:
                file.write(bytes(min(surplus, 1 << 20)))
        yield
    finally:
        path.unlink()
