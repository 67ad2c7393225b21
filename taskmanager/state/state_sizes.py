"""What states take, for metrics (pure).

Example: of many states only the largest are told apart.
    >>> kept = largest({f"s{n}": n for n in range(1, 34)})
    >>> len(kept), kept["s33"], kept["others"]
    (32, 33, 3)
    >>> largest({"a": 1, "b": 5})
    {'a': 1, 'b': 5}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Final

from common.pb import internal_pb2

STATES_MAX: Final = 32
"""Labels of one subtask."""
OTHERS: Final = "others"


@dataclass(frozen=True, slots=True)
class DatabaseSizes:
    """What a database of RocksDB says of itself; ``cache_*`` count blocks since it was opened."""

    memtable_bytes: int
    level0_files: int
    pending_compaction_bytes: int
    file_bytes: int
    cache_hits: int
    cache_misses: int


@dataclass(frozen=True, slots=True)
class StateSizes:
    """What the states of one backend take.

    Attributes:
        operator_uid: whose they are.
        memory_bytes: by name; "" = all of them, where nothing is known of each.
        database: None = it has none.
    """

    operator_uid: str
    memory_bytes: Mapping[str, int]
    database: DatabaseSizes | None = None


def largest(sizes: Mapping[str, int]) -> Mapping[str, int]:
    """The sizes, as many of them as there may be, and of the rest the sum."""
    if len(sizes) <= STATES_MAX:
        return sizes
    ranked = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    kept = dict(ranked[: STATES_MAX - 1])
    return kept | {OTHERS: sum(size for _, size in ranked[STATES_MAX - 1 :])}


def note_sizes(gauges: internal_pb2.SubtaskGauges, backends: Iterable[StateSizes]) -> None:
    """Adds what the backends of a subtask take."""
    by_state: dict[str, int] = {}
    databases: list[DatabaseSizes] = []
    for sizes in backends:
        uid = sizes.operator_uid
        for name, memory_bytes in sizes.memory_bytes.items():
            state = f"{uid}/{name}" if name else uid
            by_state[state] = by_state.get(state, 0) + memory_bytes
        if sizes.database is not None:
            databases.append(sizes.database)
    for state, memory_bytes in largest(by_state).items():
        gauges.states.add(state=state, memory_bytes=memory_bytes)
    if databases:
        summed = DatabaseSizes(*map(sum, zip(*map(astuple, databases), strict=True)))
        gauges.database.memtable_bytes = summed.memtable_bytes
        gauges.database.level0_files = summed.level0_files
        gauges.database.pending_compaction_bytes = summed.pending_compaction_bytes
        gauges.database.file_bytes = summed.file_bytes
        gauges.database.cache_hits = summed.cache_hits
        gauges.database.cache_misses = summed.cache_misses
