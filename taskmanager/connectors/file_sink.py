"""The file sink: hidden files while they are written, final names by rename at commit.

A file is ``.part-...inprogress`` while rows are added, ``.part-...pending`` once it is complete and
synced, and gets its final name when it is committed. Names carry job, sink, subtask and attempt, so that
no two writers ever share one and an earlier job's output in the directory is left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.messages import os_reason, shorten
from penstock.connectors.sink import SinkContext
from penstock.errors import TaskFailure
from penstock.pb import graph_pb2
from penstock.schema import user_batch
from taskmanager.connectors.file_encoders import EXTENSIONS, FileEncoder, file_encoder
from taskmanager.connectors.hive_partitions import split_by_partition
from taskmanager.connectors.sink_writer import SinkWriter

OPEN_FILES_MAX = 32
BUFFERED_BYTES_MAX = 64 << 20


@dataclass(slots=True)
class _OpenFile:
    path: Path
    final_path: Path
    file: BinaryIO
    encoder: FileEncoder

    @property
    def size_bytes(self) -> int:
        return self.file.tell() + self.encoder.buffered_bytes


class FileSinkWriter(SinkWriter):
    """Writes Parquet, CSV or JSON-lines files into a directory."""

    def __init__(self, spec: graph_pb2.FileSink) -> None:
        self._format = spec.format
        self._directory = Path(spec.directory)
        self._partition_by = list(spec.partition_by)
        self._roll_bytes = spec.roll_size_bytes
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._finished: list[tuple[Path, Path]] = []
        self._prepared: set[Path] = set()
        self._made: list[Path] = []
        self._count = 0
        self._hidden_stem = ""
        self._final_stem = ""
        self._tag = ""

    @override
    def open(self, ctx: SinkContext) -> None:
        job, sink = ctx.job_id[:8], hashlib.sha256(ctx.operator_uid.encode()).hexdigest()[:6]
        self._tag = f"{job}-{sink}"
        stem = f"part-{self._tag}-{ctx.subtask_index}"
        self._hidden_stem = f".{stem}-{ctx.attempt}"
        self._final_stem = f"part-{ctx.subtask_index}-{ctx.attempt}"
        with self._writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            # Says now, rather than with the first rows, that the directory cannot be written.
            probe = self._directory / f"{self._hidden_stem}.probe"
            probe.touch()
            probe.unlink()
            if ctx.attempt > 0:
                for leftover in self._directory.rglob(f".{stem}-*.inprogress"):
                    leftover.unlink(missing_ok=True)

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        rows = user_batch(batch)
        if not self._partition_by:
            self._write("", rows)
        else:
            for directory, part in split_by_partition(rows, self._partition_by):
                self._write(directory, part)
        self._bound_buffers()

    def _write(self, directory: str, rows: pa.RecordBatch) -> None:
        file = self._open.get(directory) or self._create(directory, rows.schema)
        self._open.move_to_end(directory)
        with self._writing(file.path):
            file.encoder.write(rows)
            full = file.size_bytes >= self._roll_bytes
        if full:
            self._finish(directory)

    def _create(self, directory: str, schema: pa.Schema) -> _OpenFile:
        while len(self._open) >= OPEN_FILES_MAX:
            self._finish(next(iter(self._open)))
        target = self._directory / directory
        extension = EXTENSIONS[self._format]
        hidden = target / f"{self._hidden_stem}-{self._count}.{extension}.inprogress"
        final = target / f"{self._final_stem}-{self._count}-{self._tag}.{extension}"
        self._count += 1
        with self._writing(hidden):
            self._make_directory(target)
            file = hidden.open("xb")
            try:
                encoder = file_encoder(self._format, file, schema)
            except BaseException:
                file.close()
                hidden.unlink()
                raise
        opened = _OpenFile(hidden, final, file, encoder)
        self._open[directory] = opened
        return opened

    def _make_directory(self, target: Path) -> None:
        missing = [path for path in (target, *target.parents) if not path.exists()]
        target.mkdir(parents=True, exist_ok=True)
        self._made.extend(missing)

    def _bound_buffers(self) -> None:
        while sum(file.encoder.buffered_bytes for file in self._open.values()) > BUFFERED_BYTES_MAX:
            largest = max(self._open.values(), key=lambda file: file.encoder.buffered_bytes)
            with self._writing(largest.path):
                largest.encoder.encode_buffered()

    def _finish(self, directory: str) -> None:
        """Completes the file and makes it safe; it stays hidden."""
        file = self._open[directory]
        pending = file.path.with_name(f"{file.path.stem}.pending")
        with self._writing(file.path):
            file.encoder.finish()
            file.file.flush()
            os.fsync(file.file.fileno())
            file.file.close()
            file.path.rename(pending)
        del self._open[directory]
        self._finished.append((pending, file.final_path))

    @override
    def flush(self) -> None:
        """Rows show at commit only."""

    @override
    def prepare_commit(self) -> list[bytes]:
        for directory in list(self._open):
            self._finish(directory)
        committables = [
            json.dumps({"pending": str(pending), "final": str(final)}).encode()
            for pending, final in self._finished
        ]
        self._prepared.update(pending for pending, _ in self._finished)
        self._finished.clear()
        return committables

    @override
    def commit(self, committables: list[bytes]) -> None:
        directories: set[Path] = set()
        for pending, final in map(_decode, committables):
            with self._writing(final):
                try:
                    pending.rename(final)
                except FileNotFoundError:
                    if not final.exists():
                        raise TaskFailure(
                            f"{final}: cannot be committed: neither it nor {pending.name} is there any "
                            "more; did something clean up the output directory?"
                        ) from None
            self._prepared.discard(pending)
            directories.update((final.parent, self._directory))
        for directory in sorted(directories):
            with self._writing(directory):
                _sync_directory(directory)

    @override
    def abort(self, committables: list[bytes]) -> None:
        for pending, _ in map(_decode, committables):
            with self._writing(pending):
                pending.unlink(missing_ok=True)
            self._prepared.discard(pending)

    @override
    def close(self) -> None:
        for file in self._open.values():
            with suppress(OSError):
                # Its content is given up; a full disk must not stand in the way of removing it.
                file.file.close()
        leftovers = [file.path for file in self._open.values()]
        leftovers += [pending for pending, _ in self._finished]
        leftovers += sorted(self._prepared)
        self._open.clear()
        self._finished.clear()
        self._prepared.clear()
        for path in leftovers:
            with self._writing(path):
                path.unlink(missing_ok=True)
        for directory in sorted(self._made, key=lambda path: len(path.parts), reverse=True):
            with suppress(OSError):
                # Fails where another writer's or a committed file lies in it: then it stays.
                directory.rmdir()

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TaskFailure(
                f"{path}: cannot be written: {os_reason(error)}; check the output directory "
                f"{self._directory} (space, permissions) on this TaskManager"
            ) from error
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise TaskFailure(
                f"{path}: the rows cannot be written as {self._format}: {shorten(str(error))}"
            ) from error


def _decode(committable: bytes) -> tuple[Path, Path]:
    fields = json.loads(committable)
    return Path(fields["pending"]), Path(fields["final"])


def _sync_directory(directory: Path) -> None:
    """Makes renames in a directory survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
