"""The file sink: hidden files while they are written, final names at commit.

Where the files go, and what making them safe and giving them names means there, is an ``OutputPlace``'s affair.

Names carry job, sink, subtask and attempt, and attempts are numbered without repetition, so that no two
writers ever share one and an earlier job's output in the directory is left alone.

Every checkpoint ends the open files (rows behind its barrier go to new ones), so what it covers are
whole files: a restored attempt commits those that the checkpoint names and removes the others of its
predecessors. Ending a file between checkpoints (by size or time, or because too many are open) is no more
than taking it out: encoding what is left and syncing it is left to an I/O thread, behind which the next
checkpoint is acknowledged; the mailbox thread does it only where too many files wait for that.

Rows too few for a file are carried on by checkpoints where the user asks for that (see ``carried_rows``).

The rows of partitions are held in memory until there are enough for a file to be started, or too many
are held in all: a partition that gets few rows costs no open file until then.

Invariants:
- a final name is only ever given by ``commit`` and ``recover``;
- what is committed is complete, and was so before the checkpoint that names it was acknowledged;
- a file that an acknowledged checkpoint names is removed by nobody but ``abort``.
"""

from __future__ import annotations

import errno
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import structlog
from typing_extensions import override

from penstock.connectors.messages import os_reason, shorten
from penstock.connectors.sink import SinkContext
from penstock.errors import StoreNotFound, StoreTransient, TaskFailure, Unrecoverable
from penstock.pb import graph_pb2
from penstock.rows.schema import user_batch
from penstock.storage.open_store import is_s3
from taskmanager.connectors.carried_rows import CarriedRows, small_files
from taskmanager.connectors.file_encoders import EXTENSIONS, file_encoder
from taskmanager.connectors.hidden_files import output_tag
from taskmanager.connectors.hive_partitions import split_by_partition
from taskmanager.connectors.local_output import LocalOutput
from taskmanager.connectors.output_files import SLICE_BYTES, OutputFile, PreparedFiles
from taskmanager.connectors.output_place import FileNames, FoundFile, OutputPlace
from taskmanager.connectors.s3_output import S3Output
from taskmanager.connectors.sink_writer import SinkWriter

_log = structlog.get_logger()

OPEN_FILES_MAX = 128
BUFFERED_BYTES_MAX = 64 << 20
START_BYTES = 256 << 10
"""A partition with so many bytes gets its file, where not too many are open."""
WAITING_FILES_MAX = 256
"""Of files that have ended but are still open."""
WAITING_BYTES_MAX = 64 << 20


class FileSinkWriter(SinkWriter):
    """Writes Parquet, CSV or JSON-lines files into a directory."""

    def __init__(self, spec: graph_pb2.FileSink) -> None:
        self._format = spec.format
        self._directory = spec.directory
        self._place: OutputPlace = (
            S3Output(spec.directory) if is_s3(spec.directory) else LocalOutput(spec.directory)
        )
        self._partition_by = list(spec.partition_by)
        self._roll_bytes = spec.roll_size_bytes
        self._roll_interval_ms = spec.roll_interval_ms
        self._inactivity_ms = spec.inactivity_interval_ms
        self._min_bytes = spec.min_size_bytes
        self._max_delay_ms = spec.max_delay_ms
        # By directory: started files, the one longest without rows first; those that are not.
        self._open: OrderedDict[str, OutputFile] = OrderedDict()
        self._held: dict[str, OutputFile] = {}
        # Of all batches that held rows were cut out of, and of those that rows in started files may be parts of still.
        self._held_bytes = self._cut_bytes = 0
        self._carried: dict[str, OutputFile] = {}
        """Of those held, what the checkpoint that is being taken does not end."""
        self._finished: list[OutputFile] = []
        self._adopted: list[FileNames] = []
        self._facts: dict[str, dict[str, Any]] = {}
        """By pending name, what a restore finds again of files that are safe and not committed; any thread."""
        self._prepared = PreparedFiles(self._complete, self._sync)
        self._count = 0
        self._has_rival = False
        self._tag = ""

    @override
    def open(self, ctx: SinkContext) -> None:
        self._tag = output_tag(ctx.job_id, ctx.operator_uid)
        self._context = ctx
        with self._writing(self._directory):
            self._place.open(ctx)

    # -- rows

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        rows = user_batch(batch)
        if not self._partition_by:
            self._write("", rows)
        else:
            with self._writing(self._directory):
                slices = split_by_partition(rows, self._partition_by)
            held_slices = sum(self._write(directory, part) for directory, part in slices)
            held_bytes = self._held_bytes + rows.nbytes + held_slices * SLICE_BYTES
            self._held_bytes = held_bytes if self._held else 0
            self._cut_bytes += rows.nbytes
        self._bound_buffers()

    def _write(self, directory: str, rows: pa.RecordBatch) -> bool:
        """Adds rows to the file of a directory; returns whether they are held in memory."""
        file = self._open.get(directory)
        if file is None:
            file = self._held_file(directory, rows.schema)
        else:
            self._open.move_to_end(directory)
        file.was_written = True
        with self._writing(file.names.hidden):
            file.write(rows)
        if not file.is_started and self._is_due(file):
            self._start(directory)
        if file.size_bytes >= self._roll_bytes:
            self._finish(directory)
        return not file.is_started

    def _held_file(self, directory: str, schema: pa.Schema) -> OutputFile:
        file = self._held.get(directory)
        if file is not None and file.held and not file.held[0].schema.equals(schema):
            self._finish(directory)  # carried on from a job whose rows were others
            file = None
        return file or self._create(directory)

    def _create(self, directory: str) -> OutputFile:
        names = self._place.names(directory, self._count, EXTENSIONS[self._format])
        self._count += 1
        file = self._held[directory] = OutputFile(names)
        return file

    def _is_due(self, file: OutputFile) -> bool:
        if not self._partition_by:
            return file.held_bytes >= self._min_bytes
        enough = max(START_BYTES, self._min_bytes)
        return file.held_bytes >= enough and len(self._open) < OPEN_FILES_MAX

    def _start(self, directory: str) -> None:
        while len(self._open) >= OPEN_FILES_MAX:
            self._finish(next(iter(self._open)))
        file = self._held[directory]
        self._start_file(file)
        self._open[directory] = file
        del self._held[directory]

    def _start_file(self, file: OutputFile) -> None:
        """Makes a file and writes the rows held to it; any thread."""
        with self._writing(file.names.hidden):
            opened = self._place.create(file.names)
            try:
                encoder = file_encoder(self._format, opened.stream, file.held[0].schema)
            except BaseException:
                opened.remove()
                raise
            file.start(opened, encoder)

    def _bound_buffers(self) -> None:
        if self._cut_bytes > BUFFERED_BYTES_MAX:
            # A partition that gets few rows of each batch would keep all batches in memory.
            self._cut_bytes = 0
            for file in self._open.values():
                file.let_go()
        while True:
            encoders = sum(file.buffered_bytes for file in self._open.values())
            if encoders + self._held_bytes <= BUFFERED_BYTES_MAX:
                return
            if self._held and self._held_bytes >= encoders:
                self._hold_nothing()
            else:
                directory, largest = max(self._open.items(), key=lambda one: one[1].buffered_bytes)
                with self._writing(largest.names.hidden):
                    is_less = largest.shrink()
                if not is_less:
                    self._finish(directory)

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
        file = self._open.pop(directory, None) or self._held.pop(directory)
        if self._partition_by or not file.is_started:
            file.let_go()  # it may wait for long
        self._finished.append(file)
        self._prepared.add(file)
        self._prepared.limit(WAITING_FILES_MAX, WAITING_BYTES_MAX)

    def _complete(self, file: OutputFile) -> None:
        if not file.is_started:
            self._start_file(file)
        with self._writing(file.names.hidden):
            file.complete()
        facts: dict[str, Any] = {"size_bytes": file.complete_bytes, "crc32": file.checksum}
        self._facts[file.names.pending] = facts | ({"etag": file.etag} if file.etag else {})

    def _sync(self, directory: Path) -> None:
        with self._writing(str(directory)):
            self._place.sync(directory)

    @override
    def flush(self) -> None:
        """Rows show at commit only."""

    @override
    def roll(self, now_ms: int) -> int | None:
        has_deadlines = bool(self._roll_interval_ms or self._inactivity_ms)
        if not has_deadlines and not self._min_bytes:
            return None
        deadlines = []
        for directory, file in [*self._open.items(), *self._held.items()]:
            if file.was_written:
                file.was_written, file.written_ms = False, now_ms
            if file.created_ms is None or file.created_ms > now_ms:  # the clock was set back
                file.created_ms = now_ms
            file.written_ms = min(file.written_ms, now_ms)
            if not has_deadlines:
                continue
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

    # -- files that are there already

    @override
    def adopt(self, files: Sequence[str]) -> None:
        directories: set[Path] = set()
        for path in files:
            names = self._place.names("", self._count, EXTENSIONS[self._format])
            self._count += 1
            with self._writing(path):
                Path(path).rename(names.pending)
                found = self._place.found([names.pending])[names.pending]
                self._facts[names.pending] = {"size_bytes": found.size_bytes}
            self._adopted.append(names)
            directories |= names.directories
        for directory in directories:
            self._sync(directory)

    # -- the two phases

    @property
    @override
    def has_unprepared(self) -> bool:
        return bool(self._open or self._held or self._finished or self._adopted)

    @override
    def carry(self, now_ms: int) -> list[bytes]:
        oldest_ms = now_ms - self._max_delay_ms
        self._carried = small_files(self._held, self._min_bytes, oldest_ms)
        return [
            CarriedRows(directory, file.created_ms or now_ms, tuple(file.held)).encode()
            for directory, file in self._carried.items()
        ]

    @override
    def take_carried(self, items: list[bytes]) -> None:
        for carried in map(CarriedRows.decode, items):
            for rows in carried.rows:
                self._write(carried.directory, rows)
            file = self._held.get(carried.directory)
            if file is not None:
                created_ms = file.created_ms or carried.created_ms
                file.created_ms = min(created_ms, carried.created_ms)
        self._held_bytes = sum(file.held_bytes for file in self._held.values())
        self._bound_buffers()

    @override
    def prepare_commit(self, checkpoint_id: int) -> list[bytes]:
        current = self._current()
        covered = self._finished + current
        self._finished = []
        for file in current:
            self._prepared.add(file)
        names = [file.names for file in covered] + self._adopted
        self._adopted = []
        return [_encode(one.pending, one.final) for one in names]

    def _current(self) -> list[OutputFile]:
        """Takes out the files that rows were added to, but for those that are carried on."""
        carried, self._carried = self._carried, {}
        held = [file for directory, file in self._held.items() if directory not in carried]
        current = [*self._open.values(), *held]
        self._open.clear()
        self._held = carried
        for file in carried.values():
            file.let_go()
        self._held_bytes = sum(file.held_bytes for file in carried.values())
        return current

    @override
    def finish_prepared(self) -> Callable[[], None] | None:
        return self._prepared.work

    @override
    def described(self, committables: list[bytes]) -> list[bytes]:
        found = []
        for fields in map(json.loads, committables):
            facts = self._facts.get(fields.get("held_of", fields["pending"]), {})
            found.append(json.dumps(fields | facts).encode())
        return found

    @override
    def commit(self, committables: list[bytes]) -> None:
        missing = self._commit(committables, is_repeated=False)
        if missing:
            raise TaskFailure(
                f"{missing[0]}: cannot be committed: neither it nor its hidden predecessor is there any "
                "more; did something clean up the output directory?"
            )
        if self._has_rival:
            # Only now is it certain that nobody commits what the other attempt has left.
            try:
                self._place.remove_leftovers()
            except OSError as error:
                _log.warning("output.leftovers_not_removed", reason=os_reason(error))
            except StoreTransient as error:
                _log.warning("output.leftovers_not_removed", reason=str(error))

    def _commit(self, committables: list[bytes], *, is_repeated: bool) -> list[str]:
        """Gives files their final names; returns those that are gone under both names."""
        if not committables:
            return []
        pairs = [*map(_decode, committables)]
        with self._writing(self._directory):
            missing = self._place.commit(pairs, is_repeated=is_repeated)
        for pending, _ in pairs:
            self._facts.pop(pending, None)
        return missing

    @override
    def hold(self, checkpoint_id: int, committables: list[bytes]) -> list[bytes]:
        """The files get second names, under which neither an end of the job nor a restart looks for leftovers."""
        return [
            _encode(self._place.held_name(pending, final, checkpoint_id), final, held_of=pending)
            for pending, final in map(_decode, committables)
        ]

    @override
    def keep_held(self, checkpoint_id: int, committables: list[bytes]) -> None:
        for pending, final in map(_decode, committables):
            with self._writing(final):
                self._place.keep_held(pending, final, checkpoint_id)

    @override
    def let_go(self, checkpoint_id: int, committables: list[bytes]) -> None:
        for pending, final in map(_decode, committables):
            with self._writing(final):
                self._place.let_go(pending, final, checkpoint_id)

    @override
    def abort(self, committables: list[bytes]) -> None:
        names = [pending for pending, _ in map(_decode, committables)]
        for file in self._prepared.take(set(names)):
            with self._writing(file.names.hidden):
                file.remove()
        with self._writing(self._directory):
            self._place.remove_pending(names)
        for name in names:
            self._facts.pop(name, None)
        self._place.remove_made()

    # -- the beginning and the end of an attempt

    @override
    def recover(self, committables: list[bytes], *, is_speculative: bool = False) -> None:
        self._has_rival = is_speculative
        self._check_whole(committables)
        for final in self._commit(committables, is_repeated=True):
            if self._tag not in final.rpartition("/")[2]:
                raise Unrecoverable(
                    f"{final}: the output that the savepoint or checkpoint of another job had prepared cannot be "
                    "committed: it is there neither under this name nor hidden; start with --in-doubt leave "
                    "where it is not wanted any more"
                )
            # It was committed before; whoever reads the output may have taken it away since.
            _log.warning("output.not_found", path=final, operator=self._context.operator_name)
        if self._context.attempt > 0 and not is_speculative:
            with self._writing(self._directory):
                self._place.remove_leftovers()

    def _check_whole(self, committables: list[bytes]) -> None:
        """What is still to be committed must be what was prepared: readers would see a part of it for good."""
        named = {fields["pending"]: fields for fields in map(json.loads, committables)}
        with self._writing(self._directory):
            found = self._place.found([one for one in named if "size_bytes" in named[one]])
        for pending, file in found.items():
            expected = named[pending]["size_bytes"]
            wrong = (
                f"{file.size_bytes} are there"
                if file.size_bytes != expected
                else self._altered(named[pending], file)
            )
            if wrong:
                raise Unrecoverable(
                    f"{pending}: {expected} bytes of output were prepared under this name, {wrong}: it "
                    f"cannot be committed as {named[pending]['final']}; put the file back as it was, or start from "
                    "another checkpoint or savepoint (from another job's also with --in-doubt leave)"
                )

    def _altered(self, fields: dict[str, Any], file: FoundFile) -> str:
        """What is wrong with a file of the right size; "" = nothing. Few are there: most have been committed."""
        if "crc32" not in fields or (file.etag and file.etag == fields.get("etag")):
            return ""
        # A copy of an object, made by whomever, may have another etag.
        with self._writing(fields["pending"]):
            found = self._place.checksum(fields["pending"])
        return "" if found == fields["crc32"] else "which have been altered"

    @override
    def close(self) -> None:
        left = [*self._current(), *self._finished, *self._prepared.close()]
        self._finished = []
        for file in left:
            with self._writing(file.names.hidden):
                file.remove()
        if self._adopted:
            self._place.remove_pending([names.pending for names in self._adopted])
        self._place.remove_made()

    def _too_long(self, path: str) -> str:
        advice = "use a directory with a shorter name"
        if self._partition_by:
            columns = ", ".join(self._partition_by)
            advice = (
                f"the values of {columns} become names of directories (partition_by), in which most characters but "
                "letters and digits of ASCII take three bytes for each of theirs: shorten them in front of the sink"
            )
        return f"{shorten(path, 400)}: the name is too long for the file system: {advice}"

    @contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise Unrecoverable(self._too_long(path)) from error
            raise TaskFailure(
                f"{path}: cannot be written: {os_reason(error)}; check the output directory "
                f"{self._directory} (space, permissions) on this TaskManager"
            ) from error
        except (StoreTransient, StoreNotFound) as error:
            raise TaskFailure(f"{path}: cannot be written: {error}") from error
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise TaskFailure(
                f"{path}: the rows cannot be written as {self._format}: {shorten(str(error))}"
            ) from error


def _encode(pending: str, final: str, **others: str) -> bytes:
    return json.dumps({"pending": pending, "final": final, **others}).encode()


def _decode(committable: bytes) -> tuple[str, str]:
    fields = json.loads(committable)
    return fields["pending"], fields["final"]
