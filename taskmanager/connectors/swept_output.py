"""Output of a sink that nobody will ever commit, wherever it is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from penstock.storage.open_store import is_s3
from taskmanager.connectors.hidden_files import sweep_hidden_files
from taskmanager.connectors.s3_output import sweep_objects


def sweep_output(directory: str, tag: str, kept: Collection[str] = ()) -> int:
    """Removes what a sink has not committed.

    Args:
        directory: of the sink.
        tag: see ``output_tag``.
        kept: last parts of the names of files that stay.

    Returns:
        How many files there were.

    Raises:
        OSError: one cannot be removed.
        StoreTransient: one on S3 cannot be removed.
    """
    if is_s3(directory):
        return sweep_objects(directory, tag, kept)
    return sweep_hidden_files(Path(directory), tag, kept)
