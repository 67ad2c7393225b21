"""The file source: finds the splits, keeps watch where asked to, and opens a reader for each split."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

import pyarrow as pa
import structlog
from typing_extensions import override

from penstock.connectors.listing import EntryRefusedError, ListedFile, is_glob, list_files
from penstock.connectors.messages import os_reason
from penstock.connectors.source import Reader, Source, SourceContext, Split
from penstock.connectors.text_options import TextOptions
from penstock.errors import TaskFailure, Unrecoverable
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes
from penstock.storage.open_store import is_s3
from taskmanager.connectors.arrow_reader import ArrowFileReader
from taskmanager.connectors.columns import ColumnPlan
from taskmanager.connectors.csv_format import CsvFormat
from taskmanager.connectors.file_identity import OpenedFile
from taskmanager.connectors.file_splits import FileSplit, parquet_splits, whole_file_split
from taskmanager.connectors.json_format import open_json_format
from taskmanager.connectors.opened_object import open_file
from taskmanager.connectors.parquet_reader import ParquetReader
from taskmanager.connectors.reading_ahead import AheadReader, OpeningReader
from taskmanager.connectors.taken_files import TakenFiles
from taskmanager.connectors.text_blocks import TextBlocks
from taskmanager.connectors.text_bytes import CompressedText, PlainText, TextBytes
from taskmanager.connectors.text_format import OpenTextFormat
from taskmanager.connectors.text_reader import TextReader
from taskmanager.connectors.text_splits import text_splits

_DISCOVERY_MS = 500
"""After this time what has been found so far is reported, so that reading can begin."""

_NS_PER_MS = 1_000_000

_ONCE = (
    "each file is read once, as it is when it is found: what was added or replaced since is not read; "
    "write to a new file"
)

_log = structlog.get_logger()


class FileSource(Source):
    """Reads Parquet, CSV, JSON and Arrow files.

    Watching takes a file once it has not changed for a whole interval: its last change is that old by
    the clock, or two listings an interval apart show the same size and time. A file moved into place
    keeps its old time, so it is taken at once. An empty one is about to be written. What is done to a file after that is not read, and is
    logged. A listing then gives what is new in it, whereas that of a bounded source gives everything.
    """

    def __init__(self, spec: graph_pb2.FileSource) -> None:
        self._format = spec.format
        self._path = spec.path
        self._watch_ms = spec.watch_interval_ms
        declared = schema_from_bytes(spec.schema)
        columns = list(spec.columns) or declared.names
        self._declared = declared.names
        self._options = TextOptions.decode(spec.text)
        self._schema = pa.schema([declared.field(name) for name in columns])
        self._context: SourceContext | None = None
        self._seen: dict[str, tuple[ListedFile, int]] = {}
        self._taken = TakenFiles()
        self._found: dict[str, list[Split]] = {}
        self._has_more = False
        self._may_be_empty = spec.may_be_empty
        self.bounded = self._watch_ms == 0

    @property
    @override
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    @override
    def has_endless_splits(self) -> bool:
        return False

    @override
    def start(self, ctx: SourceContext) -> None:
        self._context = ctx

    @override
    def discovery_interval_ms(self) -> int | None:
        return 1 if self._has_more else self._watch_ms or None

    @override
    def discover(self, ctx: SourceContext) -> list[Split]:
        started_ms = ctx.now_ms()
        self._has_more = False
        listed = {file.path: file for file in self._list()}
        self._seen = {path: seen for path, seen in self._seen.items() if path in listed}
        found: dict[str, list[Split]] = {}
        versions = {path: file.etag or file.size_bytes for path, file in listed.items()}
        for path in self._taken.new_among(versions):
            if ctx.now_ms() - started_ms > _DISCOVERY_MS:
                self._has_more = True
                break
            if self._is_complete(listed[path], ctx.now_ms()):
                found[path] = self._splits_of(listed[path], ctx)
        if changed := self._taken.changed_among(versions):
            tell = partial(_log.warning, "source.files_changed", reason=_ONCE)
            ctx.post(partial(tell, path=changed[0], files=len(changed)))
        self._taken.add({path: versions[path] for path in found})
        if self.bounded:
            found = self._found = self._found | found
        return [split for path in sorted(found) for split in found[path]]

    def _list(self) -> list[ListedFile]:
        try:
            files = list_files(self._path)
        except EntryRefusedError as error:
            raise TaskFailure(str(error)) from error
        except FileNotFoundError as error:
            raise TaskFailure(
                f"{self._path}: no such file or directory on this TaskManager; every TaskManager must "
                "see the files under the same path"
            ) from error
        except OSError as error:
            raise TaskFailure(f"{self._path}: cannot be read: {os_reason(error)}") from error
        if not files and self.bounded and not self._may_be_empty:
            raise TaskFailure(f"{self._path}: there are no files to read on this TaskManager")
        return files

    def _is_complete(self, file: ListedFile, now_ms: int) -> bool:
        if self.bounded or file.etag:  # an object appears whole
            return True
        if file.size_bytes == 0:
            return False
        before = self._seen.get(file.path)
        if before is None or before[0] != file:
            before = (file, now_ms)
            self._seen[file.path] = before
        still = max(now_ms - before[1], now_ms - file.modified_ns // _NS_PER_MS)
        if still < self._watch_ms:
            return False
        del self._seen[file.path]
        return True

    def _splits_of(self, file: ListedFile, ctx: SourceContext) -> list[Split]:
        """Of a file that others were merged into those of the others, too: who knows one goes on with them."""
        splits = self._splits(file, ctx)
        if not splits or not file.replaces:
            return splits
        others = [whole_file_split(ListedFile(path, size, 0)) for path, size in file.replaces]
        splits[0] = replace(splits[0], replaces=tuple(other.id for other in others))
        return splits + others

    def _splits(self, file: ListedFile, ctx: SourceContext) -> list[Split]:
        if self._format == "parquet":
            return parquet_splits(file, self._event_time_in(file.path, ctx), ctx.now_ms())
        if self._format == "arrow" or self._options.of_file(file.path):
            return [whole_file_split(file)]
        return text_splits(file, self._plan(file.path), self._open_format)

    def _plan(self, path: str) -> ColumnPlan:
        return ColumnPlan(
            self._schema, path, self._base, declared=self._declared, options=self._options
        )

    @cached_property
    def _base(self) -> str:
        """The directory below which names say values of columns."""
        return "" if is_glob(self._path) else self._path

    @override
    def open(self, split: Split, position: bytes | None) -> Reader:
        assert self._context is not None, "start() comes before open()"
        part = FileSplit.decode(split.payload)
        if is_s3(part.path):
            given = position or None  # it may be of a reader that was not open yet
            return OpeningReader(lambda: self._open_part(part, given), self._context, position)
        return self._open_part(part, position)

    def _open_part(self, part: FileSplit, position: bytes | None) -> Reader:
        plan = self._plan(part.path)
        is_in_order = self._format in ("csv", "json")
        end = part.size_bytes if part.end_byte < 0 else part.end_byte
        file = open_file(part.path, range(part.start_byte, end if is_in_order else 0))
        try:
            _check_size(part, file, is_new=position is None)
            return self._open(file, part, plan, position)
        except BaseException:
            file.close()
            raise

    def _open(
        self, file: OpenedFile, part: FileSplit, plan: ColumnPlan, position: bytes | None
    ) -> Reader:
        assert self._context is not None, "start() comes before open()"
        if self._format == "parquet":
            event_time = self._event_time_in(part.path, self._context)
            return self._ahead(
                ParquetReader(file, part, plan, self._context.submit, position, event_time),
            )
        if self._format == "arrow":
            has_positions = self._context.takes_checkpoints or position is not None
            return self._ahead(ArrowFileReader(file, plan, position, has_positions=has_positions))
        text: TextBytes
        if compression := self._options.of_file(part.path):
            text = CompressedText(file, part.size_bytes, compression, part.version)
        else:
            text = PlainText(file, part.size_bytes if part.end_byte < 0 else part.end_byte)
        blocks = TextBlocks(file, text, part, plan, self._open_format)
        return TextReader(blocks, self._context, position)

    def _ahead(self, reader: ParquetReader | ArrowFileReader) -> Reader:
        assert self._context is not None, "start() comes before open()"
        return AheadReader(reader, self._context) if is_s3(self._path) else reader

    @property
    def _open_format(self) -> OpenTextFormat:
        return CsvFormat.open if self._format == "csv" else open_json_format

    def _event_time_in(self, path: str, ctx: SourceContext) -> pa.Field | None:
        """The declared column that event time is taken from; None where a file does not hold it."""
        fields = self._plan(path).file_schema
        index = fields.get_field_index(ctx.event_time_column)
        return fields.field(index) if index >= 0 else None


def _check_size(part: FileSplit, file: OpenedFile, *, is_new: bool) -> None:
    """Refuses a file that has become smaller, or another one that is larger: the same may have grown."""
    size = file.size()
    is_replaced = is_new and size > part.size_bytes and file.is_another_file(part.version)
    if size < part.size_bytes or is_replaced:
        raise Unrecoverable(
            f"{part.path}: was {part.size_bytes} bytes when it was found and is {size} now: it was "
            "cut off or replaced while the job ran"
        )
