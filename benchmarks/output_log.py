"""When the subtasks of a job give out rows, seen from outside: a sink that notes it, and what its notes tell."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

import penstock as ps

NOTE = np.dtype([("time_ns", np.int64), ("attempt", np.int64), ("pid", np.int64)])
"""One batch of output; the time is monotonic, which is one clock for all processes of a machine."""

Notes = npt.NDArray[Any]
"""NOTE[n], in the order of time."""


class NotingSink(ps.Sink):
    """Notes every batch as it comes, and the last value of ``rows`` of each key.

    Args:
        directory: for one file of notes per subtask, and for the file ``rows``.
        keys: from 0 on.
    """

    def __init__(self, directory: str, keys: int) -> None:
        self._directory = directory
        self._keys = keys

    @staticmethod
    def prepare(directory: Path, keys: int) -> None:
        """Makes the files; keys that are never written take no space."""
        with (directory / "rows").open("wb") as file:
            file.truncate(keys * np.dtype(np.int32).itemsize)

    @override
    def open(self, ctx: ps.SinkContext) -> None:
        """Opens the files."""
        directory = Path(self._directory)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._notes = os.open(directory / f"notes-{ctx.subtask_index}", flags, 0o600)
        self._rows = np.memmap(directory / "rows", np.int32, "r+", shape=self._keys)
        self._of_attempt = (ctx.attempt, os.getpid())

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        """Takes note."""
        self._rows[batch["key"].to_numpy()] = batch["rows"].to_numpy()
        note = np.array((time.monotonic_ns(), *self._of_attempt), NOTE)
        os.write(self._notes, note.tobytes())

    @override
    def flush(self) -> None:
        """Nothing is held back."""

    @override
    def close(self) -> None:
        """Closes the file of notes."""
        os.close(self._notes)


def read_notes(directory: Path) -> dict[int, Notes]:
    """Subtask -> what it has noted."""
    return {
        int(path.name.removeprefix("notes-")): np.fromfile(path, NOTE)
        for path in sorted(directory.glob("notes-*"))
    }


def read_rows(directory: Path) -> npt.NDArray[np.int32]:
    """The last value of ``rows`` of each key, 0 where there was none."""
    return np.fromfile(directory / "rows", np.int32)


def first_outputs(notes: Mapping[int, Notes], killed_at_ns: int) -> dict[int, int]:
    """Restarted subtask -> when its first attempt that began after the kill gave out rows first."""
    found = {}
    for subtask, own in notes.items():
        attempt_before = own["attempt"][own["time_ns"] < killed_at_ns].max()
        of_new = own["time_ns"][own["attempt"] > attempt_before]
        if len(of_new):
            found[subtask] = int(of_new[0])
    return found


def largest_pause_ns(own: Notes, start_ns: int, stop_ns: int) -> int:
    """Of a subtask, within an interval; it also counts from its start and to its end."""
    times = own["time_ns"]
    within = times[(times >= start_ns) & (times <= stop_ns)]
    return int(np.diff(within, prepend=start_ns, append=stop_ns).max())
