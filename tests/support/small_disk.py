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


@contextlib.contextmanager
def own_disk(directory: Path, size_mb: int = 64) -> Iterator[Path]:
    """A file system of its own in a file, for the time of the block; skips where nobody may mount one."""
    directory.mkdir()
    image = directory.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(size_mb << 20)
    try:
        for command in (
            ["mkfs.ext4", "-q", str(image)],
            ["mount", "-o", "loop", str(image), str(directory)],
        ):
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to mount a file: {error}")
    try:
        (directory / "lost+found").rmdir()
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextlib.contextmanager
def frozen(directory: Path) -> Iterator[None]:
    """Whoever writes to the file system of ``own_disk`` hangs until the end of the block, and cannot be killed."""
    subprocess.run(["fsfreeze", "-f", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(directory)], check=True)
