"""Versions of the records of a table, and exports of what changed between two of them.

Every record has a word with the version in which it was changed last. ``seal`` ends the current version
and touches no record. An export then walks the slots in chunks, on another thread, while the table goes
on changing: a record that is still to be exported and is about to change is copied aside first.

Invariants:
- a record is in an export exactly once or twice with the same content, as it was when it was sealed: the
  walk takes records from its cursor on whose version is in the interval; whoever changes such a record
  copies it aside and stamps it with a version beyond the interval, under the same lock;
- when the table gets other records in place of the old ones (growth, another width, ``clear``), the old
  ones never change again: the export walks them on;
- a removed key leaves a tombstone in the version of its removal, unless no export can hold the key:
  before the first ``seal``, and in the version in which it came where records do not change after that (as long as
  none was stamped again in it: removals move others, and an export that is read has these stamped).

An empty record has version -1, a restored one 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import ByteArray, Int64Array
from taskmanager.kernels.fair_lock import FairLock
from taskmanager.kernels.slot_table import KeyRecords
from taskmanager.kernels.tombstones import FIRST_VERSION, Tombstones

NO_VERSION: Final = -1
RESTORED_VERSION: Final = 0
CHUNK_SLOTS: Final = 1 << 16
READ_AHEAD_BYTES: Final = 64 << 20
"""So much is copied before it is used: as long as an export is open, changes cost its owner more."""
_TOMBSTONES_MIN: Final = 1 << 16
"""That many tombstones are always kept."""
_BATCH_BYTES: Final = 512
"""What a batch of keys takes beside them."""


class ReleasedError(RuntimeError):
    """An export was given back while it was being read."""


@dataclass(frozen=True, slots=True)
class RecordPiece:
    """Copies of some records.

    Attributes:
        slots: int64[n], where they were in a table of ``capacity`` slots.
        matrix: int64[n, width], the records.
        arena: where byte keys lie; their bytes never change.
    """

    slots: Int64Array
    capacity: int
    matrix: Int64Array
    arena: ByteArray | None

    @property
    def size_bytes(self) -> int:
        """Of the copies."""
        return self.matrix.nbytes + self.slots.nbytes


class RecordVersions:
    """The versions of one table. All methods but those of exports are called by the table's owner.

    Attributes:
        lock: held while records change or are exported.
        current: the version that is being written.
        are_written_once: records do not change after they have come.
        gives_up_tombstones: where there are too many, the next export has everything.
    """

    def __init__(self, slots: KeyRecords, column: int) -> None:
        self.lock = FairLock()
        self.current = FIRST_VERSION
        self.are_written_once = False
        self.gives_up_tombstones = True
        self._slots = slots
        self._column = column
        self._changed = 0
        self._restamped = NO_VERSION
        """The last version that records got because others took or left places before them."""
        self._tombstones = Tombstones[KeyBatch]()
        self._tombstone_bytes = 0
        self._exports: list[RecordExport] = []
        slots.before_replacement = self._keep_records

    @property
    def column(self) -> int:
        """Where the version word is."""
        return self._column

    def is_changed(self, since_version: int) -> bool:
        """A record was changed or removed after that version."""
        return self._changed > since_version

    def upsert(self, keys: KeyBatch) -> Int64Array:
        """The slots of keys whose records are about to change (under the lock)."""
        if len(keys):
            self._changed = self.current
        if not self._exports:
            return self._slots.upsert(keys, self._column, self.current)
        slots = self._slots.upsert(keys)
        touched = np.empty(len(slots), dtype=np.int64)
        before = np.empty(len(slots), dtype=np.int64)
        count = self._slots.kernels.touch(
            slots, self._slots.records, self._column, self.current, touched, before
        )
        self._copy_aside(touched[:count], before[:count])
        return slots

    def remove(self, keys: KeyBatch, *, may_be_exported: bool = False) -> None:
        """The keys are about to be removed (under the lock).

        Args:
            may_be_exported: all of them, those that are not in the table as well.
        """
        slots = self._slots.find(keys)
        present = slots >= 0
        if not (may_be_exported or present.any()):
            return
        self._changed = self.current
        told = present | may_be_exported
        if self.are_written_once and not may_be_exported and self._restamped != self.current:
            told &= self._slots.records[slots, self._column] < self.current
        if told.any():
            removed = keys if told.all() else keys.take(np.flatnonzero(told))
            kept_max = max(_TOMBSTONES_MIN, 2 * len(self._slots))
            self._tombstones.bury(
                self.current, removed, len(removed), kept_max if self.gives_up_tombstones else None
            )
            kept_bytes = self._tombstone_bytes + key_bytes(removed)
            self._tombstone_bytes = kept_bytes if self._tombstones.size else 0
        if self._exports:
            self._touch_displaced(slots[present])

    def seal(self, since_version: int) -> RecordExport:
        """Ends the current version; what changed after ``since_version`` is the export's.

        Args:
            since_version: 0 for everything; the export may begin earlier than that.
        """
        since = self._tombstones.since(since_version)
        buried = self._tombstones.after(since) if since else []
        export = RecordExport(self, since, self.current, buried)
        self.current += 1
        with self.lock:
            self._exports.append(export)
        return export

    def forget(self, version: int) -> None:
        """Tombstones up to the version are not needed any more."""
        self._tombstones.forget(version)
        self._tombstone_bytes = sum(map(key_bytes, self._tombstones.after(0)))

    def restart(self) -> None:
        """The table was emptied and begins anew, with the first version."""
        self.current = FIRST_VERSION
        self._changed = 0
        self._restamped = NO_VERSION
        self._tombstones.restart(0)
        self._tombstone_bytes = 0

    def memory_bytes(self) -> int:
        """Size of tombstones and of what is kept for exports."""
        return self._tombstone_bytes + sum(export.memory_bytes() for export in self._exports)

    def _touch_displaced(self, slots: Int64Array) -> None:
        room = len(self._slots) + 2
        touched = np.empty(room, dtype=np.int64)
        before = np.empty(room, dtype=np.int64)
        count = self._slots.kernels.touch_displaced(
            slots,
            self._slots.records,
            self._column,
            self._slots.key_words == 2,
            min(export.after for export in self._exports),
            max(export.version for export in self._exports),
            min(export.cursor for export in self._exports),
            self.current,
            touched,
            before,
        )
        if count:
            self._restamped = self.current
        self._copy_aside(touched[:count], before[:count])

    def _copy_aside(self, slots: Int64Array, before: Int64Array) -> None:
        """Saves records whose versions were ``before`` for the exports that still need them."""
        for export in self._exports:
            needed = (before > export.after) & (before <= export.version) & (slots >= export.cursor)
            if needed.any():
                export.saved.append(self._piece(slots[needed], before[needed]))

    def _piece(self, slots: Int64Array, versions: Int64Array | None = None) -> RecordPiece:
        matrix = self._slots.records[slots]
        if versions is not None:
            matrix[:, self._column] = versions
        return RecordPiece(slots, self._slots.capacity, matrix, self._slots.lend_arena())

    def _keep_records(self) -> bool:
        """The table is about to get other records: leaves the old ones to the exports."""
        for export in self._exports:
            export.keep(self._slots.records, self._slots.lend_arena())
        is_kept = bool(self._exports)
        self._exports = []
        return is_kept


class RecordExport:
    """Records changed in the versions ``since_version + 1 .. version``. Read by one thread, once.

    Attributes:
        tombstones: keys that were removed in these versions; some may be back.
        after: records with versions above it are exported.
        cursor: slots before it are done.
        saved: records that were copied aside.
    """

    def __init__(
        self,
        owner: RecordVersions,
        since_version: int,
        version: int,
        tombstones: list[KeyBatch],
    ) -> None:
        self.since_version = since_version
        self.version = version
        self.tombstones = tombstones
        self.after = since_version or NO_VERSION
        self.cursor = 0
        self.saved: list[RecordPiece] = []
        self._owner = owner
        self._kept: tuple[Int64Array, ByteArray | None] | None = None
        self._ahead: deque[RecordPiece] = deque()
        self._ahead_bytes = 0
        self._is_released = False

    def keep(self, records: Int64Array, arena: ByteArray | None) -> None:
        """Goes on with records that will not change any more."""
        self._kept = (records, arena)

    def pieces(self) -> Iterator[RecordPiece]:
        """The records, chunk by chunk.

        Raises:
            ReleasedError: ``release`` was called before the last one.
        """
        is_done = False
        while not is_done or self._ahead:
            while not is_done and self._ahead_bytes < READ_AHEAD_BYTES:
                is_done = self._read_on()
            self._check()
            if self._ahead:
                piece = self._ahead.popleft()
                self._ahead_bytes -= piece.size_bytes
                yield piece

    def _read_on(self) -> bool:
        """Copies the next chunk; True when it was the last one."""
        owner = self._owner
        with owner.lock:
            pieces, is_done = self._next()
            if is_done and self in owner._exports:
                owner._exports.remove(self)
        pieces = _joined(pieces)
        self._ahead.extend(pieces)
        self._ahead_bytes += sum(piece.size_bytes for piece in pieces)
        return is_done

    def release(self) -> None:
        """Ends the export, read or not; repeatable, from any thread."""
        with self._owner.lock:
            self._is_released = True
            self.saved = []
            self.tombstones = []
            self._kept = None
            if self in self._owner._exports:
                self._owner._exports.remove(self)

    def memory_bytes(self) -> int:
        """Size of what was copied."""
        return sum(piece.size_bytes for piece in self.saved) + self._ahead_bytes

    def _check(self) -> None:
        if self._is_released:
            raise ReleasedError("the snapshot was discarded while it was being written")

    def _next(self) -> tuple[list[RecordPiece], bool]:
        self._check()
        table = self._owner._slots
        records, arena = self._kept or (table.records, table.lend_arena())
        stop = min(self.cursor + CHUNK_SLOTS, len(records))
        found = np.empty(stop - self.cursor, dtype=np.int64)
        copies = np.empty((stop - self.cursor, records.shape[1]), dtype=np.int64)
        count = table.kernels.copy_changed(
            records, self._owner._column, self.after, self.version, self.cursor, stop, found, copies
        )
        room = len(found)
        found, copies = found[:count], copies[:count]
        if 2 * count < room:  # a few records must not keep the room for all
            found, copies = found.copy(), copies.copy()
        pieces, self.saved = self.saved, []
        if count:
            pieces.append(RecordPiece(found, len(records) - 2, copies, arena))
        self.cursor = stop
        return pieces, stop == len(records)


def _joined(pieces: list[RecordPiece]) -> list[RecordPiece]:
    """The same records, those of one arena in one piece: what is copied aside comes in many small ones."""
    by_table: dict[tuple[int, int], list[RecordPiece]] = {}
    for piece in pieces:
        by_table.setdefault((piece.capacity, id(piece.arena)), []).append(piece)
    return [
        RecordPiece(
            np.concatenate([piece.slots for piece in own]),
            own[0].capacity,
            np.concatenate([piece.matrix for piece in own]),
            own[0].arena,
        )
        if len(own) > 1
        else own[0]
        for own in by_table.values()
    ]


def key_bytes(keys: KeyBatch) -> int:
    """Size of a batch of keys, whose hashes are known."""
    own = _BATCH_BYTES + 8 * len(keys)
    if keys.fixed is not None:
        return own + keys.fixed.nbytes
    assert keys.data is not None
    assert keys.offsets is not None
    return own + int(keys.offsets[-1] - keys.offsets[0]) + keys.offsets.nbytes
