"""What a savepoint is on disk: one directory that holds all it needs.

    manifest     as a checkpoint's; written last, and only where there is none: with it the savepoint exists
    state/       the files with its state, by the names that snapshot files have everywhere
    committed    the output that it names as prepared has been committed by the job that it was taken of
    OUTPUT       which job publishes that output instead: one that has gone back behind it, and produces it again, or one
                 that was started from it, and commits it
    taken-back   an earlier version says so that the job has gone back behind it
    OWNER        the job that has claimed it, whose files these are from then on, in its first line; where that is empty, the
                 claim was given back

All paths in its manifest are relative to the directory, so that it may be copied and moved.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final

MANIFEST_PATH: Final = "manifest"
COMMITTED_PATH: Final = "committed"
TAKEN_BACK_PATH: Final = "taken-back"
OUTPUT_PATH: Final = "OUTPUT"
OWNER_PATH: Final = "OWNER"
STATE_DIRECTORY: Final = "state"
GIVEN_UP: Final = b"this savepoint was given up"
"""Stands in the place of a manifest that nobody shall write any more."""

ABOUT_OUTPUT: Final = frozenset({COMMITTED_PATH, TAKEN_BACK_PATH, OUTPUT_PATH})
"""What says there what has become of its output."""
BESIDE_MANIFEST: Final = ABOUT_OUTPUT | {MANIFEST_PATH, OWNER_PATH}
"""What may lie in its directory besides the files with its state."""

_NAME_OF_JOB_LENGTH: Final = 8
_TOKEN_BYTES: Final = 8


def savepoint_name(job_id: str, operation_id: str) -> str:
    """How the directory of a savepoint is called, within the one that the user names."""
    return f"savepoint-{job_id[:_NAME_OF_JOB_LENGTH]}-{operation_id}"


def looks_like_savepoint(first_parts: Collection[str]) -> bool:
    """Whether a directory with such content is one, or is the beginning of one."""
    is_begun = STATE_DIRECTORY in first_parts
    return MANIFEST_PATH in first_parts or (
        is_begun
        and BESIDE_MANIFEST.issuperset(part for part in first_parts if part != STATE_DIRECTORY)
    )


def is_part_of_savepoint(path: str) -> bool:
    """Whether an object in its directory is one of those that a savepoint consists of, and not somebody else's."""
    return path in BESIDE_MANIFEST or is_of_savepoint(path)


def is_of_savepoint(path: str) -> bool:
    """Whether a path that a snapshot refers to lies in the savepoint's directory, and not in the job's."""
    return path.startswith(f"{STATE_DIRECTORY}/")


def owner_of(content: bytes | None) -> str:
    """Which job ``OWNER`` names; "" = none.

    >>> owner_of(b"6f0c"), owner_of(b"\\n9a1b\\n"), owner_of(None)
    ('6f0c', '', '')
    """
    return (content or b"").decode(errors="replace").partition("\n")[0].strip()


def signed(line: bytes) -> bytes:
    """A first line as no other call writes it: a swap that was to replace something else, and is late, does not find that."""
    return line + f"\n{os.urandom(_TOKEN_BYTES).hex()}\n".encode()


def path_in_savepoint(path: str) -> str:
    """Where a snapshot file of the job lies in a savepoint."""
    return f"{STATE_DIRECTORY}/{path.rpartition('/')[2]}"
