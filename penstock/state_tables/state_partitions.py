"""State in the parts that tasks of Spark read.

A part is what one old subtask has of a state, cut by key-group where that is much. Keys are spread over key-groups by a
hash, so equal ranges are about equal shares. Timers of a database lie in the order of time over all key-groups, and are not
cut. A task reads so many parts that it has 32 to 128 MB of files: starting one costs what reading many MB does.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import pyarrow as pa

from penstock.errors import StreamError
from penstock.rows.spark_types import spark_json_of_columns
from penstock.state_tables.carried_columns import converted_batch, spark_schema
from penstock.state_tables.opened_state import StateTables, TablePiece, open_state
from penstock.storage.codec import StateError
from penstock.storage.open_store import use_s3
from penstock.storage.s3.settings import S3Settings

TASK_BYTES_MIN: Final = 32 << 20
TASK_BYTES_MAX: Final = 128 << 20
_TASKS: Final = 16
"""So many are made of what is not much, so that many cores can share it."""

HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
"""What Spark's Python looks for in its environment when it tells of an error."""
_OF_SPARK: Final = frozenset({"pyspark.worker", "pyspark.sql.worker.utils"})
"""Modules that only its processes have."""

_OPTIONS: Final = frozenset({"path", "uid", "state", "key_groups"})
_KEY_GROUPS: Final = re.compile(r"(-?\d+)-(-?\d+)")


def installed_version() -> str:
    """Of Penstock; "" where it was not installed, but lies on the path."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return ""


def reach_s3(settings: Mapping[str, Any]) -> None:
    """Says how this process, one of Spark's, reaches S3: with these attributes of ``S3Settings``."""
    told = S3Settings(**settings)
    use_s3(lambda: told)


@dataclass(frozen=True, slots=True)
class StatePartition:
    """A part.

    Attributes:
        place: of the piece among those of the table.
        first_key_group, last_key_group: both inclusive; 0 and -1 where there are no keys.
        size_bytes: about that much is read.
    """

    place: int
    first_key_group: int
    last_key_group: int
    size_bytes: int


@contextmanager
def _cause_first() -> Iterator[None]:
    """Within it an error of ours makes one of Spark's Python processes, which ends with it, say what it says and not which lines
    led there: Spark would begin with these."""
    try:
        yield
    except StreamError:
        if not _OF_SPARK.isdisjoint(sys.modules):
            os.environ[HIDE_TRACEBACK] = "1"
        raise


@_cause_first()
def partitions_of(
    path: str, uid: str, name: str, key_groups: range | None = None
) -> list[list[StatePartition]]:
    """The parts of a state, by the task that reads them.

    Args:
        path: of the savepoint, or of the one checkpoint.
        key_groups: that are wanted; None = all, and what has no key.

    Raises:
        StateError: there is no such state.
    """
    state = open_again(path)
    sizes = {one: state.piece_bytes(uid, name, one) for one in state.pieces(uid, name)}
    limit_bytes = min(TASK_BYTES_MAX, max(TASK_BYTES_MIN, sum(sizes.values()) // _TASKS))
    parts = []
    for piece, size_bytes in sizes.items():
        if piece.last_key_group < piece.first_key_group:
            if key_groups is None:
                parts.append(StatePartition(piece.place, 0, -1, 0))
            continue
        ranges = key_group_ranges(piece, size_bytes, limit_bytes)
        for part in ranges:
            wanted = part if key_groups is None else _common(part, key_groups)
            if wanted:
                share = size_bytes // len(ranges)
                parts.append(StatePartition(piece.place, wanted.start, wanted.stop - 1, share))
    return tasks_of(parts, limit_bytes)


def tasks_of(parts: Sequence[StatePartition], limit_bytes: int) -> list[list[StatePartition]]:
    """Parts together until they are more than a task is to read.

    Example: two small ones and a large one.
        >>> parts = [StatePartition(n, 0, 9, size) for n, size in enumerate((40, 50, 100))]
        >>> [[one.place for one in task] for task in tasks_of(parts, limit_bytes=100)]
        [[0, 1], [2]]
    """
    tasks: list[list[StatePartition]] = []
    size_bytes = 0
    for part in parts:
        if not tasks or size_bytes + part.size_bytes > limit_bytes:
            tasks.append([])
            size_bytes = 0
        tasks[-1].append(part)
        size_bytes += part.size_bytes
    return tasks


def key_group_ranges(piece: TablePiece, size_bytes: int, limit_bytes: int) -> list[range]:
    """The key-groups of a piece in parts of about so many bytes.

    Example: three times what one part may have.
        >>> key_group_ranges(TablePiece(0, 0, 127), 300, limit_bytes=100)
        [range(0, 42), range(42, 85), range(85, 128)]
    """
    groups = piece.last_key_group - piece.first_key_group + 1
    count = max(1, min(groups, -(-size_bytes // limit_bytes)))
    starts = [piece.first_key_group + groups * index // count for index in range(count + 1)]
    return [range(starts[index], starts[index + 1]) for index in range(count)]


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def open_again(path: str) -> StateTables:
    """Opens what was there when Spark was told of its columns.

    Raises:
        StateError: it is not there any more.
    """
    try:
        return open_state(path)
    except StateError as error:
        raise StateError(
            f"{path} is not what it was when Spark was told of it: {error}. A checkpoint that its job retires is gone: read "
            "the newest one, keep more of them (execution.checkpointing.num-retained), or take a savepoint"
        ) from error


def spark_batches(
    path: str, uid: str, name: str, parts: Sequence[StatePartition]
) -> Iterator[pa.RecordBatch]:
    """The rows of some parts, as Spark is given them.

    Args:
        path: of the savepoint, or of the one checkpoint.

    Raises:
        StateError: a value has no equal in Spark, or the job has retired the checkpoint meanwhile.
        StoreCorrupt, StoreNotFound, StoreTransient: a file cannot be read.
    """
    where = f"state {name!r} of operator {uid!r}"
    with _cause_first():
        state = open_again(path)
        pieces = {one.place: one for one in state.pieces(uid, name)}
        schema = spark_schema(state.schema(uid, name), where)
        for part in parts:
            groups = range(part.first_key_group, part.last_key_group + 1)
            for batch in state.piece_batches(uid, name, pieces[part.place], groups):
                yield converted_batch(batch, schema, where)


@dataclass(frozen=True, slots=True)
class AskedState:
    """A state that Spark is to read.

    Attributes:
        path: of the savepoint, or of the one checkpoint.
        uid, name: of the operator and of the state.
        schema: as Spark is given it.
        key_group_column: "" = there is none.
        key_groups: that are wanted; None = all.
    """

    path: str
    uid: str
    name: str
    schema: pa.Schema
    key_groups: range | None

    @property
    def spark_json(self) -> Any:
        """The schema as Spark writes it."""
        return spark_json_of_columns(self.schema)

    @_cause_first()
    def check_schema(self, *, is_own: bool) -> None:
        """Checks that what Spark was told of the columns is what they are.

        Raises:
            StateError: it is something else.
        """
        if not is_own:
            raise StateError(
                f"state {self.name!r} of operator {self.uid!r} is read with a schema that it has not: leave out "
                ".schema(...), and cast columns behind it"
            )


@_cause_first()
def asked_state(options: Mapping[str, str], *, is_known: bool = False) -> AskedState:
    """What options ask for: ``path``, ``uid``, ``state``, and ``key_groups``, as "0-31", both of which are wanted.

    Args:
        is_known: Spark was told of its columns before.

    Raises:
        StateError: one is missing or unknown, there is no such state, or Spark has no type for one of its columns.
    """
    unknown = sorted(one for one in options if one.lower() not in _OPTIONS)
    if unknown:
        raise StateError(
            f"penstock-state has no option {', '.join(unknown)}; there are uid, state and key_groups"
        )
    missing = [one for one in ("path", "uid", "state") if not options.get(one)]
    if missing:
        raise StateError(
            f"penstock-state is read without {' and '.join(missing)}: "
            '.option("uid", ...).option("state", ...).load(path)'
        )
    uid, name = options["uid"], options["state"]
    state = (open_again if is_known else open_state)(options["path"])
    schema = spark_schema(state.schema(uid, name), f"state {name!r} of operator {uid!r}")
    key_groups = _asked_key_groups(options.get("key_groups"))
    state.check_key_groups(uid, name, key_groups)
    return AskedState(state.path, uid, name, schema, key_groups)


def _asked_key_groups(text: str | None) -> range | None:
    if text is None:
        return None
    found = _KEY_GROUPS.fullmatch(text)
    if found is None:
        raise StateError(
            f'penstock-state has the option key_groups={text!r}: it is the first and the last of them, "0-31"'
        )
    return range(int(found[1]), int(found[2]) + 1)
