"""Process functions are tested on every backend, and on plain dictionaries as the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taskmanager.state.backend import BackendEnvironment, KeyedStateBackend
from taskmanager.state.hashmap.store import HashMapStateBackend
from tests.support.object_backend import ObjectBackend
from tests.support.process_specs import Backend

BACKENDS = ["objects", "hashmap", pytest.param("rocksdb", marks=pytest.mark.slow)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Properties open hundreds of backends: databases are left to the other tests."""
    items[:] = [
        item
        for item in items
        if not (
            getattr(getattr(item, "callspec", None), "params", {}).get("backend") == "rocksdb"
            and hasattr(getattr(item, "obj", None), "hypothesis")
            and Path(__file__).parent in item.path.parents
        )
    ]


@pytest.fixture(params=BACKENDS, scope="module", autouse=True)
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """State is kept in this backend."""
    opened: list[Any] = []

    def rocksdb(environment: BackendEnvironment) -> KeyedStateBackend:
        from taskmanager.state.rocksdb.store import RocksDBStateBackend

        directory = tmp_path_factory.mktemp("rocksdb") / "state"
        environment = dataclasses.replace(environment, work_directory=directory)
        opened.append(RocksDBStateBackend(environment))
        return opened[-1]

    kinds = {"objects": ObjectBackend, "hashmap": HashMapStateBackend, "rocksdb": rocksdb}
    before, Backend.current = Backend.current, kinds[request.param]
    yield
    Backend.current = before
    for state in opened:
        state.close()
