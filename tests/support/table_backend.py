"""The least a backend can be: tables in dictionaries, and chains of the segments they were sealed to.

What tables are tested with by themselves: each snapshot is incremental on the newest confirmed one, every
segment goes through its file format, and a snapshot is the whole chain, inline.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa

from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import Blob
from penstock.storage.key_groups import key_group_range
from penstock.storage.run_columns import within
from penstock.storage.run_reader import read_segment
from penstock.storage.run_writer import write_segment
from taskmanager.state.backend import AggregateDescriptor, BackendEnvironment
from taskmanager.state.count_table import CountTable
from taskmanager.state.group_table import GroupTable
from taskmanager.state.instances import InstanceState
from taskmanager.state.keyed_rows import checked_rows
from taskmanager.state.row_table import RowDescriptor, RowTable
from taskmanager.state.session_table import SessionTable

Place = tuple[str, int]
Chain = list[tuple[int, int, bytes]]
"""(since_version, version, segment)"""


class TableBackend:
    """State of one operator in one subtask."""

    def __init__(self, environment: BackendEnvironment) -> None:
        self.max_parallelism = environment.max_parallelism
        self.key_groups = key_group_range(
            environment.subtask_index, environment.parallelism, environment.max_parallelism
        )
        self._tables: dict[Place, Any] = {}
        self._confirmed: dict[Any, Chain] = {}
        self._pending: dict[int, dict[Any, Chain]] = {}
        self._restored: list[dict[Place, Chain]] = []
        for snapshot in environment.restored:
            assert environment.reader is not None
            (file,) = snapshot.files
            start = max(self.key_groups.start, snapshot.first_key_group)
            groups = range(start, min(self.key_groups.stop, snapshot.last_key_group + 1))
            chains: dict[Place, Chain] = pickle.loads(environment.reader.read(file.handle))
            restored = {
                place: [(0, 0, _within(segment, groups)) for _, _, segment in chain]
                for place, chain in chains.items()
            }
            self._restored.append(restored)

    def group_table(self, name: str, namespace: int, descriptor: AggregateDescriptor) -> GroupTable:
        def create() -> GroupTable:
            columns = descriptor.new_columns()
            kinds = descriptor.kinds
            return GroupTable(descriptor.key_types, kinds, columns, home=name, with_versions=True)

        return self._get(name, namespace, create)

    def row_table(self, name: str, namespace: int, descriptor: RowDescriptor) -> RowTable:
        return self._get(name, namespace, lambda: RowTable(descriptor))

    def session_table(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        gap_ms: int,
        new_contents: Callable[[], InstanceState],
    ) -> SessionTable:
        return self._get(name, 0, lambda: SessionTable(key_types, gap_ms, new_contents()))

    def count_table(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        new_contents: Callable[[], InstanceState],
        ttl_ms: int = 0,
    ) -> CountTable:
        return self._get(name, 0, lambda: CountTable(key_types, new_contents(), ttl_ms))

    def _get(self, name: str, namespace: int, create: Callable[[], Any]) -> Any:
        place = (name, namespace)
        if place not in self._tables:
            table = self._tables[place] = create()
            for chains in self._restored:
                chain = chains.pop(place, [])
                batches = [
                    checked_rows(batch, table.schema())
                    for *_, segment in chain
                    for batch in read_segment(segment)
                ]
                rows = sum(batch.num_rows for batch in batches)
                table.load(iter(batches), rows)
        return self._tables[place]

    def namespaces(self, name: str) -> list[int]:
        places = set(self._tables).union(*self._restored)
        return sorted(namespace for known, namespace in places if known == name)

    def move(self, name: str, namespace: int, to_name: str, to_namespace: int) -> None:
        if (name, namespace) in self._tables:
            self._tables[to_name, to_namespace] = self._tables.pop((name, namespace))
        for chains in self._restored:
            if (name, namespace) in chains:
                chains[to_name, to_namespace] = chains.pop((name, namespace))

    def drop(self, name: str, namespace: int) -> None:
        self._tables.pop((name, namespace), None)
        for chains in self._restored:
            chains.pop((name, namespace), None)

    def memory_bytes(self) -> int:
        return sum(table.memory_bytes() for table in self._tables.values())

    def snapshot(self, checkpoint_id: int) -> TableSnapshot:
        """Seals all tables that have changed since what is confirmed."""
        sealed = []
        unchanged: list[tuple[Any, Chain]] = []
        chains: dict[Place, Chain] = {}
        for restored in self._restored:  # what nobody has asked for yet
            for place, chain in restored.items():
                chains[place] = [*chains.get(place, []), *chain]
        for place, table in self._tables.items():
            chain = self._confirmed.get(table, [])
            since = chain[-1][1] if chain else 0
            if chain and not table.is_changed(since):
                chains[place] = chain
                unchanged.append((table, chain))
                continue
            sealed.append((place, table, chain, table.seal(since, self.max_parallelism)))
        return TableSnapshot(self, checkpoint_id, chains, sealed, unchanged)

    def written(self, checkpoint_id: int, chains: dict[Any, Chain]) -> None:
        """A snapshot has been exported."""
        self._pending[checkpoint_id] = chains

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        self._confirmed = self._pending.pop(checkpoint_id)
        for table in self._tables.values():
            if table in self._confirmed:
                table.forget(self._confirmed[table][-1][1])

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._pending.pop(checkpoint_id, None)

    def close(self) -> None:
        self._tables.clear()


class TableSnapshot:
    """A ``BackendSnapshot`` of a ``TableBackend``; what it has sealed is exported in ``blobs``."""

    def __init__(
        self,
        backend: TableBackend,
        checkpoint_id: int,
        chains: dict[Place, Chain],
        sealed: list[tuple[Place, Any, Chain, Any]],
        unchanged: list[tuple[Any, Chain]],
    ) -> None:
        self._backend = backend
        self._checkpoint_id = checkpoint_id
        self._chains = chains
        self._sealed = sealed
        self._unchanged = unchanged

    def blobs(self) -> Iterable[Blob]:
        """One blob with all chains."""
        by_table: dict[Any, Chain] = dict(self._unchanged)
        for place, table, chain, changes in self._sealed:
            segment = b"".join(write_segment(changes.batches()))
            before = chain if changes.since_version else []
            added = (changes.since_version, changes.version, segment)
            self._chains[place] = by_table[table] = [*before, added]
            changes.release()
        for chain in self._chains.values():
            versions = [(since, version) for since, version, _ in chain if version]
            assert all(a[1] == b[0] for a, b in pairwise(versions)), versions
        self._backend.written(self._checkpoint_id, by_table)
        data = pickle.dumps(self._chains)
        yield Blob("chains", lambda: [data])

    def describe(
        self, handles: Mapping[str, checkpoint_pb2.StateHandle]
    ) -> checkpoint_pb2.KeyedStateSnapshot:
        """The snapshot."""
        file = checkpoint_pb2.StateFile(name="chains", handle=handles["chains"])
        groups = self._backend.key_groups
        return checkpoint_pb2.KeyedStateSnapshot(
            backend="tables",
            first_key_group=groups.start,
            last_key_group=groups.stop - 1,
            max_parallelism=self._backend.max_parallelism,
            files=[file],
        )

    def discard(self) -> None:
        """Gives everything back."""
        for _, _, _, changes in self._sealed:
            changes.release()


def _within(segment: bytes, key_groups: range) -> bytes:
    batches = list(read_segment(segment))
    parts = [within(batch, key_groups) for batch in batches]
    kept = [part for part in parts if part.num_rows]
    return b"".join(write_segment(kept)) if batches else segment
