"""Where a simulation keeps its files: paths are part of what is written and sent, so theirs are of one length."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_PATH_LENGTH = 64
_RANDOM_LENGTH = 8
"""Of the name that ``tempfile`` appends."""


@contextmanager
def simulated_directory() -> Iterator[str]:
    """A directory whose path is as long whatever ``TMPDIR`` says (up to 55 bytes); temporary files are in it meanwhile."""
    parent = tempfile.gettempdir()
    prefix = "s" * (_PATH_LENGTH - len(parent) - 1 - _RANDOM_LENGTH)
    with tempfile.TemporaryDirectory(prefix=prefix) as directory:
        tempfile.tempdir = directory
        try:
            yield directory
        finally:
            tempfile.tempdir = parent
