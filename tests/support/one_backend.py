"""One state backend of either kind, driven by hand: opened, snapshotted into a store, restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.pb import checkpoint_pb2
from penstock.storage.local_store import LocalStore
from penstock.storage.object_store import ObjectStore
from penstock.storage.snapshot_files import PackedSnapshotWriter, StoreSnapshotReader
from taskmanager.kernels import encode_keys
from taskmanager.state.backend import (
    BackendEnvironment,
    BackendSnapshot,
    KeyedStateBackend,
)
from taskmanager.state.descriptors import ABSENT, StateDescriptor, StateKind
from taskmanager.state.hashmap.key_space import KeySpace
from taskmanager.state.memory import ManagedMemory
from tests.support.backend_history import Inputs
from tests.support.backend_job import MAX_PARALLELISM, open_state
from tests.support.hashmap_backend import SteppedClock

KEYS = (pa.int64(),)

Snapshots = Sequence[checkpoint_pb2.KeyedStateSnapshot]


@dataclass
class OneBackend:
    """Opens backends of one kind on one store.

    Args:
        kind: what ``state.backend.type`` says.
        directory: for databases and checkpoints.
    """

    kind: str
    directory: Path
    clock: SteppedClock = field(default_factory=lambda: SteppedClock(1000))
    opened: list[KeyedStateBackend] = field(default_factory=list)
    _written: int = 0

    def __post_init__(self) -> None:
        self.store: ObjectStore = LocalStore(self.directory / "checkpoints")

    def work_directory(self) -> Path:
        """Of the backend that was opened last."""
        return self.directory / f"work-{len(self.opened)}"

    def open(
        self,
        *restored: checkpoint_pb2.KeyedStateSnapshot,
        subtask_index: int = 0,
        parallelism: int = 1,
        memory_bytes: int = 64 << 20,
        is_incremental: bool = True,
    ) -> Any:
        """A backend with what was restored."""
        number = len(self.opened) + 1
        backend = open_state(
            self.kind,
            BackendEnvironment(
                operator_uid="uid",
                operator_name="operator",
                subtask_index=subtask_index,
                parallelism=parallelism,
                max_parallelism=MAX_PARALLELISM,
                clock=self.clock,
                memory=ManagedMemory(memory_bytes),
                work_directory=self.directory / f"work-{number}",
                is_incremental=is_incremental,
                restored=restored,
                reader=StoreSnapshotReader(self.store),
            ),
        )
        self.opened.append(backend)
        return backend

    def write(self, snapshot: BackendSnapshot) -> checkpoint_pb2.KeyedStateSnapshot:
        """Writes a snapshot to its end; as it would be read back."""
        self._written += 1
        writer = PackedSnapshotWriter(self.store, f"{self._written}-v-0-0-x", 0)
        described = snapshot.describe(writer.write(snapshot.blobs()))
        return checkpoint_pb2.KeyedStateSnapshot.FromString(described.SerializeToString())

    def checkpoint(self, backend: Any, checkpoint_id: int = 1) -> Any:
        """A whole checkpoint, confirmed."""
        written = self.write(backend.snapshot(checkpoint_id))
        backend.checkpoint_completed(checkpoint_id)
        return written

    def keep_only(self, snapshots: Iterable[checkpoint_pb2.KeyedStateSnapshot]) -> None:
        """Deletes the files that these snapshots do not refer to."""
        used = {file.handle.path for snapshot in snapshots for file in snapshot.files}
        for stored in self.store.list(""):
            if stored.path not in used:
                self.store.delete(stored.path)

    def close(self) -> None:
        """Closes all backends."""
        for backend in self.opened:
            backend.close()


def add_counts(
    backend: KeyedStateBackend, descriptor: Any, keys: Iterable[int], namespace: int = 0
) -> None:
    """Counts keys in the state ``counts``; what is collected besides is the key."""
    batch = list(keys)
    columns = [pa.array(batch, pa.int64()) for _ in descriptor.new_columns()]
    inputs = Inputs([None], [None], columns, np.arange(len(batch)))
    table = backend.group_table("counts", namespace, descriptor)
    table.update(encode_keys([pa.array(batch, pa.int64())]), inputs)


def counts_of(backend: KeyedStateBackend, descriptor: Any, namespace: int = 0) -> dict[int, int]:
    """What ``add_counts`` has counted."""
    table = backend.group_table("counts", namespace, descriptor)
    found: dict[int, int] = {}
    for key in range(1000):
        batch = encode_keys([pa.array([key], pa.int64())])
        if len(table.keys(batch)):
            found[key] = int(table.rows(batch).accumulators[0][0])
    return found


class Cells:
    """One column of a key space whose keys are integers."""

    def __init__(self, backend: KeyedStateBackend, descriptor: StateDescriptor) -> None:
        self.space: KeySpace = backend.key_space(KEYS)
        self.kind = descriptor.kind
        self.column: Any = getattr(self.space, f"{descriptor.kind.value}_column")(descriptor)

    def enter(self, *keys: int | None) -> list[int]:
        """The slots of keys."""
        return self.space.enter(encode_keys([pa.array(keys, pa.int64())])).tolist()

    def change(self, change: Callable[[Any, int, int], None], keys: Iterable[int]) -> None:
        """A bundle: calls a function with the column, the slot and the key of each."""
        batch = list(keys)
        for key, slot in zip(batch, self.enter(*batch), strict=True):
            change(self.column, slot, key)
        self.space.leave()

    def set(self, values: dict[int, Any]) -> None:
        """A bundle that assigns cells."""
        slots = self.enter(*values)
        for slot, stored in zip(slots, values.values(), strict=True):
            self.column.values[slot] = stored
            self.column.changed.append(slot)
        self.space.leave()

    def read(self, *keys: int) -> list[Any]:
        """What is in the cells; of a map its items."""
        slots = self.enter(*keys)
        if self.kind is StateKind.MAP:
            found = [self.column.items(slot) for slot in slots]
        else:
            found = [self.column.values[slot] for slot in slots]
            found = [list(held) if isinstance(held, list) else held for held in found]
        self.space.leave()
        return found

    def all(self) -> dict[int, Any]:
        """All cells that hold something."""
        parts = self.space.keys()
        keys = [key for part in parts for key in part.to_arrays()[0].to_pylist()]
        held = zip(keys, self.read(*keys), strict=True) if keys else ()
        return {key: found for key, found in held if found is not ABSENT and found != []}
