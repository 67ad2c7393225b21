"""Directories of small files, compactions that stop at a step, and jobs that read meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from common.done_splits import NOTHING_DONE
from jobmanager.scheduler.split_assigner import SplitAssigner
from penstock.connectors import compaction, file_sink
from penstock.connectors.compaction import CompactedDirectory, Plan, compact
from penstock.connectors.files import file_source
from penstock.connectors.source import END, Split
from penstock.storage import open_store as stores
from penstock.storage.local_store import LocalStore
from penstock.storage.object_store import ObjectStore
from penstock.storage.open_store import is_s3
from penstock.storage.s3.s3_store import S3Store
from tests.support.file_sinks import opened, prepare
from tests.support.source_harness import SourceHarness

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.string())])
NOW_MS = 1_700_000_000_000
LATER_MS = 4_000_000_000_000
"""When files that are written now have not changed for long."""
_runs = count()


class Killed(Exception):  # noqa: N818 - named after what happened
    """The process is."""


def write_files(
    directory: str, form: str, rows: Iterable[tuple[int, int]], *, partition_by: Any = None
) -> None:
    """Commits one file for each (first id, row count), or for each of its partitions."""
    writer = opened(file_sink(form, directory, partition_by), attempt=next(_runs))
    for first, number in rows:
        ids = range(first, first + number)
        writer.write(pa.record_batch([ids, [f"k {id % 2}" for id in ids]], schema=SCHEMA))
        writer.commit(prepare(writer))
    writer.close()


def merged(directory: str, now_ms: int = NOW_MS, **options: Any) -> list[CompactedDirectory]:
    """Runs a compaction to its end."""
    return compact(directory, Plan(f"{next(_runs):012x}", now_ms, **options))


def fresh_ids(form: str, path: str, **options: Any) -> list[int]:
    """What a job reads that begins now."""
    rows = SourceHarness().rows(file_source(form, path, schema=SCHEMA, **options))
    return sorted(row["id"] for row in rows)


class Steps:
    """Calls a function before each change that a compaction makes."""

    def __init__(self, before: Callable[[int], None]) -> None:
        self._before = before
        self.number = 0

    def __call__(self) -> None:
        self.number += 1
        self._before(self.number - 1)


@contextmanager
def stepping(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> Iterator[Steps]:
    """Compactions in the block stop before each of their changes."""
    steps = Steps(before)

    def open_stepping(uri: str, *, is_private: bool) -> ObjectStore:
        store: _Stepping
        if is_s3(uri):
            bucket, _, prefix = uri.removeprefix("s3://").partition("/")
            store = _SteppingS3(bucket, prefix, stores._s3())
        else:
            store = _SteppingFiles(Path(uri), is_private=is_private)
        store.steps = steps
        return cast("ObjectStore", store)

    with monkeypatch.context() as patch:
        patch.setattr(compaction, "open_store", open_stepping)
        yield steps


def killing_at(step: int) -> Callable[[int], None]:
    """For ``stepping``: the process is killed before this change."""

    def kill(number: int) -> None:
        if number == step:
            raise Killed

    return kill


class _Stepping:
    steps: Steps

    def put(self, path: str, chunks: Any) -> int:
        self.steps()
        return int(super().put(path, chunks))  # type: ignore[misc]

    def delete(self, path: str) -> None:
        self.steps()
        super().delete(path)  # type: ignore[misc]

    def delete_many(self, paths: Iterable[str]) -> dict[str, Any]:
        for path in paths:
            self.delete(path)
        return {}

    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        self.steps()
        return bool(super().compare_and_swap(path, expected, new))  # type: ignore[misc]

    def copy_from(self, source: Any, paths: Mapping[str, str]) -> None:
        for path, target in paths.items():
            self.steps()
            super().copy_from(source, {path: target})  # type: ignore[misc]


class _SteppingFiles(_Stepping, LocalStore):  # type: ignore[misc]
    pass


class _SteppingS3(_Stepping, S3Store):  # type: ignore[misc]
    pass


class ReadingJob:
    """A job with one source, as the JobManager and a subtask run it: what it has read, and what is left.

    Args:
        watches: the directory is listed again and again.
    """

    def __init__(self, form: str, path: str, *, watches: bool = False) -> None:
        self._opened = file_source(form, path, schema=SCHEMA, watch_ms=1_000 if watches else 0)
        self._watches = watches
        self._done = NOTHING_DONE
        self._left: dict[str, tuple[Split, bytes | None]] = {}
        self.ids: list[int] = []
        self._checkpoint: tuple[Any, dict[str, Any], list[int]] = (NOTHING_DONE, {}, [])
        self._start()

    def _start(self) -> None:
        self._harness = SourceHarness(now=LATER_MS)
        self._source = self._harness.start(*self._opened)
        self._assigner = SplitAssigner(1, self._done)
        for id in self._left:
            self._assigner.seed(id, 0, 1.0)
        self._listed: frozenset[str] | None = None

    def discover(self) -> None:
        """Lists, and is told what is new."""
        splits = self._harness.discover(self._source)
        new = [split for split in splits if split.id not in (self._listed or ())]
        self._listed = frozenset(split.id for split in splits)
        for told in self._assigner.assign(new, not self._watches):
            self._left |= {split.id: (split, None) for split in told.splits}

    def read(self, chance: random.Random, reads: int | None = None, max_rows: int = 3) -> None:
        """Reads one of its splits, from where it is; some batches of it or all of them."""
        if not self._left:
            return
        id = chance.choice(sorted(self._left))
        split, position = self._left[id]
        reader = self._source.open(replace(split, replaces=()), position)
        try:
            while reads is None or reads > 0:
                batch = reader.read(max_rows)
                if batch is END:
                    del self._left[id]
                    self._finished.append(id)
                    return
                assert isinstance(batch, pa.RecordBatch)
                self.ids += batch.column("id").to_pylist()
                reads = None if reads is None else reads - 1
            self._left[id] = split, reader.position()
        finally:
            reader.close()

    @property
    def _finished(self) -> list[str]:
        return self.__dict__.setdefault("_finished_ids", [])

    def checkpoint(self) -> None:
        """A checkpoint is complete."""
        self._done = self._done.with_ids(self._finished)
        self._assigner.complete(self._done, self._finished)
        self._finished.clear()
        self._checkpoint = self._done, dict(self._left), list(self.ids)

    def restart(self) -> None:
        """Goes on from the last checkpoint."""
        self._done, left, ids = self._checkpoint
        self._left, self.ids = dict(left), list(ids)
        self._finished.clear()
        self._start()

    def finish(self) -> list[int]:
        """Lists, and reads all that is left; the ids of all rows."""
        self.discover()
        chance = random.Random(0)
        while self._left:
            self.read(chance)
        return sorted(self.ids)
