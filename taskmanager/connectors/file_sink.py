"""The file sink: hidden files while they are written, final names by rename at commit.

Names carry job, sink, subtask and attempt, and attempts are numbered without repetition, so that no two
writers ever share one and an earlier job's output in the directory is left alone.

Every checkpoint ends the open files (rows behind its barrier go to new ones), so what it covers are
whole files: a restored attempt commits those that the checkpoint names and removes the others of its
predecessors. Ending a file between checkpoints (by size or time, or because too many are open) is no more
than taking it out: encoding what is left and syncing it is left to an I/O thread, behind which the next
checkpoint is acknowledged; the mailbox thread does it only where too many files wait for that.

The rows of partitions are held in memory until there are enough for a file to be started, or too many
are held in all: a partition that gets few rows costs no open file until then.

Invariants:
- a name without a leading "." is only ever given by ``commit`` and ``recover``;
- what is committed is complete, and was so before the checkpoint that names it was acknowledged;
- a file that an acknowledged checkpoint names is removed by nobody but ``abort``.
"""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import structlog
from typing_extensions import override

from penstock.connectors.messages import os_reason, shorten
from penstock.connectors.sink import SinkContext
from penstock.errors import TaskFailure
from penstock.pb import graph_pb2
from penstock.rows.schema import user_batch
from taskmanager.connectors.file_encoders import EXTENSIONS, file_encoder
from taskmanager.connectors.hidden_files import held_files, held_path, hidden_files, output_tag
from taskmanager.connectors.hive_partitions import split_by_partition
from taskmanager.connectors.output_files import (
    SLICE_BYTES,
    OutputFile,
    PreparedFiles,
    sync_directory,
)
from taskmanager.connectors.sink_writer import SinkWriter

_log = structlog.get_logger()

OPEN_FILES_MAX = 128
BUFFERED_BYTES_MAX = 64 << 20
START_BYTES = 256 << 10
"""A partition with so many bytes gets its file, where not too many are open."""
WAITING_FILES_MAX = 256
"""Of files that have ended but are still open."""
WAITING_BYTES_MAX = 64 << 20
_CREATE_TRIES = 10


class FileSinkWriter(SinkWriter):
    """Writes Parquet, CSV or JSON-lines files into a directory."""

    def __init__(self, spec: graph_pb2.FileSink) -> None:
        self._format = spec.format
        self._directory = Path(spec.directory)
        self._partition_by = list(spec.partition_by)
        self._roll_bytes = spec.roll_size_bytes
        self._roll_interval_ms = spec.roll_interval_ms
        self._inactivity_ms = spec.inactivity_interval_ms
        # By directory: started files, the one longest without rows first; those that are not.
        self._open: OrderedDict[str, OutputFile] = OrderedDict()
        self._held: dict[str, OutputFile] = {}
        # Of all batches that held rows were cut out of.
        self._held_bytes = 0
        self._finished: list[OutputFile] = []
        self._prepared = PreparedFiles(self._complete, self._sync)
        self._made: list[Path] = []
        """Directories in which nothing has been committed yet."""
        self._count = 0
        self._has_rival = False
        self._hidden_stem = ""
        self._final_stem = ""
        self._tag = ""

    @override
    def open(self, ctx: SinkContext) -> None:
        self._tag = output_tag(ctx.job_id, ctx.operator_uid)
        self._context = ctx
        self._hidden_stem = f".part-{self._tag}-{ctx.subtask_index}-{ctx.attempt}"
        self._final_stem = f"part-{ctx.subtask_index}-{ctx.attempt}"
        with self._writing(self._directory):
            for made in self._make_directory(self._directory):
                sync_directory(made.parent)
            # Says now, rather than with the first rows, that the directory cannot be written.
            probe = self._directory / f"{self._hidden_stem}.probe"
            probe.touch()
            probe.unlink()

    # -- rows

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        rows = user_batch(batch)
        if not self._partition_by:
            self._write("", rows)
        else:
            slices = split_by_partition(rows, self._partition_by)
            held_slices = sum(self._write(directory, part) for directory, part in slices)
            held_bytes = self._held_bytes + rows.nbytes + held_slices * SLICE_BYTES
            self._held_bytes = held_bytes if self._held else 0
        self._bound_buffers()

    def _write(self, directory: str, rows: pa.RecordBatch) -> bool:
        """Adds rows to the file of a directory; returns whether they are held in memory."""
        file = self._open.get(directory)
        if file is None:
            file = self._held.get(directory) or self._create(directory)
        else:
            self._open.move_to_end(directory)
        file.was_written = True
        with self._writing(file.path):
            file.write(rows)
        if not file.is_started and self._is_due(file):
            self._start(directory)
        if file.size_bytes >= self._roll_bytes:
            self._finish(directory)
        return not file.is_started

    def _create(self, directory: str) -> OutputFile:
        target = self._directory / directory
        extension = EXTENSIONS[self._format]
        stem = f"{self._hidden_stem}-{self._count}.{extension}"
        hidden, pending = target / f"{stem}.inprogress", target / f"{stem}.pending"
        final = target / f"{self._final_stem}-{self._count}-{self._tag}.{extension}"
        self._count += 1
        file = OutputFile(hidden, pending, final, self._up_from(target))
        self._held[directory] = file
        return file

    def _is_due(self, file: OutputFile) -> bool:
        if not self._partition_by:
            return True
        return file.held_bytes >= START_BYTES and len(self._open) < OPEN_FILES_MAX

    def _start(self, directory: str) -> None:
        while len(self._open) >= OPEN_FILES_MAX:
            self._finish(next(iter(self._open)))
        file = self._held[directory]
        self._start_file(file)
        self._open[directory] = file
        del self._held[directory]

    def _start_file(self, file: OutputFile) -> None:
        """Makes a file and writes the rows held to it; any thread."""
        with self._writing(file.path):
            opened = self._open_new(file.path)
            try:
                encoder = file_encoder(self._format, opened, file.held[0].schema)
            except BaseException:
                opened.close()
                file.path.unlink()
                raise
            file.start(opened, encoder)

    def _open_new(self, hidden: Path) -> BinaryIO:
        for left in reversed(range(_CREATE_TRIES)):
            try:
                return hidden.open("xb")
            except FileNotFoundError:
                # The first of its partition; or another writer has just removed the directory, which it
                # had found empty.
                if not left:
                    raise
                self._made += self._make_directory(hidden.parent)
        raise AssertionError("the last try returns or raises")

    def _make_directory(self, target: Path) -> list[Path]:
        """Makes a directory; returns what was missing, the innermost first."""
        missing = [path for path in (target, *target.parents) if not path.exists()]
        target.mkdir(parents=True, exist_ok=True)
        return missing

    def _up_from(self, target: Path) -> set[Path]:
        """A partition's directory and all above it, up to the output directory."""
        depth = len(target.parts) - len(self._directory.parts)
        return {target, *target.parents[:depth]}

    def _bound_buffers(self) -> None:
        while True:
            encoders = sum(file.buffered_bytes for file in self._open.values())
            if encoders + self._held_bytes <= BUFFERED_BYTES_MAX:
                return
            if self._held and self._held_bytes >= encoders:
                self._hold_nothing()
            else:
                largest = max(self._open.values(), key=lambda file: file.buffered_bytes)
                with self._writing(largest.path):
                    largest.encode_buffered()

    def _hold_nothing(self) -> None:
        """Starts the files of the largest partitions held, and ends those of the others."""
        by_size = sorted(self._held, key=lambda one: self._held[one].held_bytes, reverse=True)
        for directory in by_size[OPEN_FILES_MAX:]:
            self._finish(directory)
        for directory in by_size[:OPEN_FILES_MAX]:
            self._start(directory)
        self._held_bytes = 0

    def _finish(self, directory: str) -> None:
        """Ends a file; rows that follow go to another one."""
        file = self._open.pop(directory, None)
        if file is None:
            file = self._held.pop(directory)
            # It may wait for long.
            file.copy_held()
        self._finished.append(file)
        self._prepared.add(file)
        self._prepared.limit(WAITING_FILES_MAX, WAITING_BYTES_MAX)

    def _complete(self, file: OutputFile) -> None:
        if not file.is_started:
            self._start_file(file)
        with self._writing(file.path):
            file.complete()

    def _sync(self, directory: Path) -> None:
        with self._writing(directory):
            sync_directory(directory)

    @override
    def flush(self) -> None:
        """Rows show at commit only."""

    @override
    def roll(self, now_ms: int) -> int | None:
        if not self._roll_interval_ms and not self._inactivity_ms:
            return None
        deadlines = []
        for directory, file in [*self._open.items(), *self._held.items()]:
            if file.was_written:
                file.was_written, file.written_ms = False, now_ms
            if file.created_ms is None:
                file.created_ms = now_ms
            deadline_ms = self._deadline_ms(file.created_ms, file.written_ms)
            if deadline_ms <= now_ms:
                self._finish(directory)
            else:
                deadlines.append(deadline_ms)
        return min(deadlines, default=None)

    def _deadline_ms(self, created_ms: int, written_ms: int) -> int:
        deadlines = []
        if self._roll_interval_ms:
            deadlines.append(created_ms + self._roll_interval_ms)
        if self._inactivity_ms:
            deadlines.append(written_ms + self._inactivity_ms)
        return min(deadlines)

    # -- the two phases

    @property
    @override
    def has_unprepared(self) -> bool:
        return bool(self._open or self._held or self._finished)

    @override
    def prepare_commit(self, checkpoint_id: int) -> list[bytes]:
        current = self._current()
        covered = self._finished + current
        self._finished = []
        for file in current:
            self._prepared.add(file)
        return [_encode(file.pending_path, file.final_path) for file in covered]

    def _current(self) -> list[OutputFile]:
        """Takes out the files that rows were added to."""
        current = [*self._open.values(), *self._held.values()]
        self._open.clear()
        self._held.clear()
        self._held_bytes = 0
        return current

    @override
    def finish_prepared(self) -> Callable[[], None] | None:
        return self._prepared.work

    @override
    def commit(self, committables: list[bytes]) -> None:
        missing = self._commit(committables)
        if missing:
            raise TaskFailure(
                f"{missing[0]}: cannot be committed: neither it nor its hidden predecessor is there any "
                "more; did something clean up the output directory?"
            )
        if self._has_rival:
            # Only now is it certain that nobody commits what the other attempt has left.
            try:
                self._remove_leftovers()
            except OSError as error:
                _log.warning("output.leftovers_not_removed", reason=os_reason(error))

    def _commit(self, committables: list[bytes]) -> list[Path]:
        """Gives files their final names; returns those that are gone under both names."""
        directories: set[Path] = set()
        missing = []
        for pending, final in map(_decode, committables):
            with self._writing(final):
                try:
                    pending.rename(final)
                except FileNotFoundError:
                    if not final.exists():
                        missing.append(final)
                        continue
                # Two names of one file stay two.
                pending.unlink(missing_ok=True)
            directories.add(final.parent)
        for directory in sorted(directories):
            self._sync(directory)
        # They stay, whatever else becomes of the attempt.
        filled = {above for directory in directories for above in (directory, *directory.parents)}
        self._made = [made for made in self._made if made not in filled]
        return missing

    @override
    def hold(self, checkpoint_id: int, committables: list[bytes]) -> list[bytes]:
        """The files get second names, under which neither an end of the job nor a restart looks for leftovers."""
        pairs = map(_decode, committables)
        return [_encode(held_path(pending, checkpoint_id), final) for pending, final in pairs]

    @override
    def keep_held(self, checkpoint_id: int, committables: list[bytes]) -> None:
        for pending, final in map(_decode, committables):
            held = held_path(pending, checkpoint_id)
            with self._writing(held):
                try:
                    _second_name(held, pending)
                except FileNotFoundError:
                    _second_name(held, final)  # it has been committed meanwhile

    @override
    def let_go(self, checkpoint_id: int, committables: list[bytes]) -> None:
        for pending, _ in map(_decode, committables):
            held = held_path(pending, checkpoint_id)
            with self._writing(held):
                held.unlink(missing_ok=True)

    @override
    def abort(self, committables: list[bytes]) -> None:
        paths = [pending for pending, _ in map(_decode, committables)]
        for file in self._prepared.take(set(paths)):
            with self._writing(file.path):
                file.remove()
        for pending in paths:
            with self._writing(pending):
                pending.unlink(missing_ok=True)
        self._remove_made_directories()

    # -- the beginning and the end of an attempt

    @override
    def recover(self, committables: list[bytes], *, is_speculative: bool = False) -> None:
        self._has_rival = is_speculative
        for final in self._commit(committables):
            if self._tag not in final.name:
                raise TaskFailure(
                    f"{final}: the output that the savepoint or checkpoint of another job had prepared cannot be "
                    "committed: it is there neither under this name nor hidden; start with --in-doubt leave "
                    "where it is not wanted any more"
                )
            # It was committed before; whoever reads the output may have taken it away since.
            _log.warning("output.not_found", path=str(final), operator=self._context.operator_name)
        if self._context.attempt > 0 and not is_speculative:
            with self._writing(self._directory):
                self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Removes hidden files of earlier attempts of this subtask, and of those that are no more."""
        own, parallelism = self._context.subtask_index, self._context.parallelism
        parents = set()
        for path, subtask_index, attempt in hidden_files(self._directory, self._tag):
            if subtask_index % parallelism == own and attempt < self._context.attempt:
                path.unlink(missing_ok=True)
                parents.add(path.parent)
        for held, final, subtask_index in held_files(self._directory, self._tag):
            if subtask_index % parallelism == own and final.exists():
                held.unlink(missing_ok=True)  # it has been committed, which ends the doubt
        for parent in parents:
            while parent != self._directory and _remove_if_empty(parent):
                parent = parent.parent

    @override
    def close(self) -> None:
        left = [*self._current(), *self._finished, *self._prepared.close()]
        self._finished = []
        for file in left:
            with self._writing(file.path):
                file.remove()
        self._remove_made_directories()

    def _remove_made_directories(self) -> None:
        for directory in sorted(self._made, key=lambda path: len(path.parts), reverse=True):
            _remove_if_empty(directory)

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


def _second_name(held: Path, file: Path) -> None:
    held.unlink(missing_ok=True)
    try:
        held.hardlink_to(file)
    except FileNotFoundError:
        raise
    except OSError:  # the file system knows no second names
        shutil.copyfile(file, held)


def _encode(pending: Path, final: Path) -> bytes:
    return json.dumps({"pending": str(pending), "final": str(final)}).encode()


def _decode(committable: bytes) -> tuple[Path, Path]:
    fields = json.loads(committable)
    return Path(fields["pending"]), Path(fields["final"])


def _remove_if_empty(directory: Path) -> bool:
    with suppress(OSError):
        # Fails where another writer's or a committed file lies in it: then it stays.
        directory.rmdir()
        return True
    return False
