"""Where compiled kernels are kept: in ``NUMBA_CACHE_DIR``, else the user's cache, a directory for each version of their code.

numba looks for changes in the file of a kernel alone. What is inlined into it, the constants in it and how it is compiled
may lie in other files, so all of them name the directory: an upgrade in place finds no code of the version before.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import llvmlite  # type: ignore[import-untyped]
import numba

from penstock.loops import checked_code, prefetch
from penstock.loops.kept_code import user_cache
from penstock.storage import key_loops
from penstock.storage.private_directories import make_private

BESIDE: Final = (prefetch, key_loops, checked_code)
"""Modules elsewhere whose functions or constants are compiled into kernels, or which say how they are kept."""

_DIGEST_LENGTH: Final = 16
_UNUSED_MAX_S: Final = 30 * 86_400.0


@functools.cache
def kernel_directory() -> Path | None:
    """The directory of this version, which can be written; None = there is none, and a warning has said so."""
    given = numba.config.CACHE_DIR
    try:
        root = Path(given) if given else user_cache("kernels")
        directory = root / f"version-{_version()}"
        make_private(directory)
        tempfile.TemporaryFile(dir=directory).close()
        os.utime(directory)
        _remove_unused(root, directory.stat().st_mtime)
    except (OSError, RuntimeError) as error:  # or nobody knows the user's home
        warnings.warn(
            f"no directory to keep compiled kernels in ({error}): every process compiles them anew, which "
            "takes seconds; set NUMBA_CACHE_DIR to a writable directory",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return directory


@contextlib.contextmanager
def kept_in(directory: Path) -> Iterator[None]:
    """What numba compiles meanwhile is kept there."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(directory)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def _version() -> str:
    files = [
        *sorted(Path(__file__).parent.glob("*.py")),
        *(Path(str(module.__file__)) for module in BESIDE),
    ]
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:_DIGEST_LENGTH]


def _remove_unused(root: Path, now_s: float) -> None:
    """Other versions that no process has loaded for a month."""
    for directory in root.glob("version-*"):
        with contextlib.suppress(OSError):  # another has removed it, or another user has it
            if now_s - directory.stat().st_mtime > _UNUSED_MAX_S:
                shutil.rmtree(directory)
