"""What a reader sees of a sink's directory while the job runs: whole files, which stay as they are.

A file that is not hidden has been committed. So it must be complete, must never change or vanish, and no row
may come a second time; every ``look`` checks that of what is new.
"""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Table:
    """The committed rows of a directory.

    Args:
        directory: of the sink; it may come later.
        identity: what two rows must not have in common; None = repeated rows are allowed.
    """

    def __init__(
        self, directory: str, identity: Callable[[dict[str, Any]], Any] | None = None
    ) -> None:
        self._directory = Path(directory)
        self._identity = identity
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._rows: list[dict[str, Any]] = []
        self._identities: dict[Any, str] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> list[dict[str, Any]]:
        """All rows that were seen, integers for times (ms)."""
        return self._rows

    def look(self) -> int:
        """Takes in what is new; how many rows that is."""
        now = dict(self._visible())
        for path, was in self._seen.items():
            assert path in now, f"{path} was visible and has vanished"
            assert now[path] == was, f"{path} was visible and has changed: {was} {now[path]}"
        before = len(self._rows)
        for path in sorted(now.keys() - self._seen.keys()):
            rows = _read(Path(path))
            if self._identity is not None:
                self._check_new(rows, path)
            self._rows += rows
            self._seen[path] = now[path]
        return len(self._rows) - before

    def _check_new(self, rows: list[dict[str, Any]], path: str) -> None:
        assert self._identity is not None
        for row in rows:
            identity = self._identity(row)
            other = self._identities.setdefault(identity, path)
            assert other is path, f"{row} is in {other} and in {path}"
        distinct = {self._identity(row) for row in rows}
        assert len(distinct) == len(rows), f"{path} has a row twice"

    def _visible(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        for directory, _, names in os.walk(self._directory):
            for name in names:
                if not name.startswith((".", "_")):
                    path = Path(directory, name)
                    status = path.stat()
                    yield str(path), (status.st_ino, status.st_size, status.st_mtime_ns)


def _read(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(content)).to_pylist()
        return rows
    text = content.decode()
    assert text.endswith("\n"), f"{path} ends within a line"
    if path.suffix == ".csv":
        return [
            {name: _number(value) for name, value in row.items()}
            for row in csv.DictReader(io.StringIO(text))
        ]
    return [json.loads(line) for line in text.splitlines()]


def _number(text: str) -> int:
    """A whole number as it is, a time in ms."""
    try:
        return int(text)
    except ValueError:
        at = dt.datetime.fromisoformat(text)
        at = at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC)
        return (at - _EPOCH) // dt.timedelta(milliseconds=1)
