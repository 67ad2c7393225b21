"""Which operators keep keyed state, and the backend they keep it behind."""

from __future__ import annotations

from penstock.config import Configuration
from penstock.pb import graph_pb2
from taskmanager.state.backend import BackendEnvironment, KeyedStateBackend
from taskmanager.state.hashmap.store import HashMapStateBackend

_KEYED_PROCESS_KINDS = frozenset(
    {
        graph_pb2.PROCESS_KIND_KEYED,
        graph_pb2.PROCESS_KIND_KEYED_BATCH,
        graph_pb2.PROCESS_KIND_KEYED_BROADCAST,
        graph_pb2.PROCESS_KIND_KEYED_CO,
    }
)


def keeps_keyed_state(spec: graph_pb2.Operator) -> bool:
    """True where the operator uses ``context.state``."""
    match spec.WhichOneof("spec"):
        case "window_aggregate":
            return spec.window_aggregate.phase != graph_pb2.AGGREGATION_PHASE_PARTIAL
        case "running_aggregate":
            return spec.running_aggregate.phase != graph_pb2.AGGREGATION_PHASE_PARTIAL
        case "process":
            return spec.process.kind in _KEYED_PROCESS_KINDS
        case "window_function" | "join":
            return True
        case _:
            return False


def open_backend(config: Configuration, environment: BackendEnvironment) -> KeyedStateBackend:
    """The backend that ``state.backend.type`` names, with what was restored in it.

    Raises:
        StreamError: what was restored cannot be read.
    """
    if config.state_backend_type == "rocksdb":
        # Loads a native library: only for those who use it.
        from taskmanager.state.rocksdb.store import RocksDBStateBackend

        return RocksDBStateBackend(environment)
    return HashMapStateBackend(environment)
