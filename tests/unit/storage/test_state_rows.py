"""Aim: tools read every kind of state out of the files of either backend, each row once, as it was when the checkpoint was taken.

Method: stories of many small checkpoints (``CheckpointStory``), in which chains of runs and files of databases come and go;
what is read of each checkpoint that is retained is compared with the plain dicts that the backends are checked against.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.pb import checkpoint_pb2
from penstock.storage.key_groups import key_group_of
from penstock.storage.keyed_state import StoredKeyedState, keyed_states
from penstock.storage.snapshot_files import StoreSnapshotReader
from penstock.storage.state_rows_store import StateRows
from tests.support.backend_history import (
    COLUMNS,
    GAP_MS,
    GROUPS,
    TTL_MS,
    BackendHistory,
    Key,
    Model,
)
from tests.support.backend_job import BACKENDS, MAX_PARALLELISM
from tests.support.checkpoint_story import CheckpointStory

STORIES = int(os.environ.get("PENSTOCK_HISTORIES") or 3)
EVERY = range(MAX_PARALLELISM)


class ReadBack:
    """Reads what checkpoints of a story hold.

    Args:
        history: of the story.
    """

    def __init__(self, history: BackendHistory) -> None:
        self._history = history
        self.checked = 0
        self.kinds: set[str] = set()

    def check(self, key_groups: range) -> None:
        """Each retained checkpoint has what the dicts say, of some key-groups."""
        for checkpoint_id, subtasks in self._history.job.manifests.items():
            manifest = checkpoint_pb2.CheckpointManifest(subtasks=subtasks, vertices=_vertices())
            models = dict(zip(BACKENDS, self._history._copies[checkpoint_id], strict=True))
            states = keyed_states(manifest)
            with StateRows(StoreSnapshotReader(self._history.job.store)) as rows:
                found = {
                    (one.uid.removeprefix("uid-"), one.name): list(_rows(one, rows, key_groups))
                    for one in states
                }
            for one in states:
                assert one.backend == one.uid.removeprefix("uid-")
            self.kinds |= {one.kind for one in states if found[one.backend, one.name]}
            for kind, model in models.items():
                mine = {name: part for (backend, name), part in found.items() if backend == kind}
                self._compare(mine, model, lambda key: self._group(key) in key_groups)
                self.checked += 1

    def _compare(
        self, found: dict[str, list[dict[str, Any]]], model: Model, owns: Callable[[Key], bool]
    ) -> None:
        for rows in found.values():
            for row in rows:
                key = row.get("key", None)
                assert key is None or row["__key_group"] == self._group(key)
        for name in GROUPS:
            expected = {
                (namespace, key): held[:3]
                for namespace, groups in model[name].items()
                for key, held in groups.items()
                if owns(key)
            }
            numbers = {_place(row): _numbers(row) for row in found.get(name, [])}
            assert numbers.keys() == expected.keys(), name
            if name != "only lists":
                assert numbers == expected, name
            assert len(numbers) == len(found.get(name, []))
        timers = [(row["key"], row["time"]) for row in found.get("timers", [])]
        assert sorted(timers, key=repr) == sorted(
            (one for one in model["timers"] if owns(one[0])), key=repr
        )
        sessions = {(row["key"], row["start"]): row["end"] for row in found.get("sessions", [])}
        assert sessions == {
            (key, times[0]): times[-1] + GAP_MS
            for key, held in model["sessions"].items()
            for times in held
            if owns(key)
        }
        counts = {row["key"]: row["window_index"] for row in found.get("counts", [])}
        assert counts == {key: held[0] for key, held in model["counts"].items() if owns(key)}
        self._compare_rows(found, model, owns)
        for descriptor in COLUMNS:
            self._compare_objects(descriptor, found.get(descriptor.name, []), model, owns)

    def _compare_rows(
        self, found: dict[str, list[dict[str, Any]]], model: Model, owns: Callable[[Key], bool]
    ) -> None:
        names = self._history.row_descriptor.schema.names
        rows = sorted(
            (row["__namespace"], row["__sequence"], tuple(row[name] for name in names))
            for row in found.get("rows", [])
        )
        expected = sorted(
            (namespace, number, (*key, number))
            for namespace, held in model["rows"].items()
            for key, number in held
            if owns(key)
        )
        assert [(one[0], one[2]) for one in rows] == [(one[0], one[2]) for one in expected]

    def _compare_objects(
        self,
        descriptor: Any,
        rows: list[dict[str, Any]],
        model: Model,
        owns: Callable[[Key], bool],
    ) -> None:
        kind, cells = descriptor.kind.value, model[descriptor.name]
        found: dict[Any, Any] = {}
        for row in rows:
            last = row["items"] if kind == "list" else row["value"]
            if descriptor.ttl_ms and kind == "list":
                assert len(row["__expires_at_ms"]) == len(last)
            stamps = row.get("__expires_at_ms")
            place = (row["key"], row["map_key"]) if kind == "map" else row["key"]
            assert place not in found, "a row is there twice"
            found[place] = last, stamps
        now_ms = self._history.job.clock.time_ms
        for key, cell in cells.items():
            if not owns(key) or cell is None:
                continue
            entries = (
                {(key, name): one for name, one in cell.items()} if kind == "map" else {key: cell}
            )
            for place, stored in entries.items():
                self._compare_cell(descriptor, found.pop(place, None), stored, now_ms)
        assert not found, f"{descriptor.name}: nothing of that was ever there, or it was removed"

    @staticmethod
    def _compare_cell(descriptor: Any, found: Any, stored: Any, now_ms: int) -> None:
        """Of values that have expired meanwhile any may be gone."""
        if not descriptor.ttl_ms:
            assert found is not None
            assert found[0] == stored
            return
        pairs = stored if descriptor.kind.value == "list" else [stored]
        alive = [(value, stamp + TTL_MS) for value, stamp in pairs if stamp + TTL_MS > now_ms]
        if found is None:
            assert not alive
            return
        both = zip(*found, strict=True) if descriptor.kind.value == "list" else [found]
        seen = list(both)
        assert [one for one in seen if one[1] > now_ms] == alive
        assert set(seen) <= {(value, stamp + TTL_MS) for value, stamp in pairs}

    def _group(self, key: Key) -> int:
        hashes = self._history.keys.batch([key]).hashes
        return int(key_group_of(hashes, MAX_PARALLELISM)[0])


def _vertices() -> list[checkpoint_pb2.VertexFingerprint]:
    """What the job declares: databases do not say how long values live."""
    found = []
    for kind in BACKENDS:
        operator = checkpoint_pb2.OperatorFingerprint(uid=f"uid-{kind}", name=kind)
        for descriptor in COLUMNS:
            operator.declared.process.states.add(name=descriptor.name, ttl_ms=descriptor.ttl_ms)
        found.append(checkpoint_pb2.VertexFingerprint(id=kind, operators=[operator]))
    return found


def _rows(state: StoredKeyedState, rows: StateRows, key_groups: range) -> Iterator[dict[str, Any]]:
    keys = [f"key_{index}" for index in range(len(state.key_types))]
    for piece in state.pieces:
        for _, batches in rows.batches_of(state, piece, key_groups):
            for batch in batches:
                assert batch.schema == state.schema
                for row in batch.to_pylist():
                    yield row | ({"key": tuple(row[name] for name in keys)} if keys else {})


def _place(row: dict[str, Any]) -> tuple[int, Key]:
    return row["__namespace"], row["key"]


def _numbers(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(value for name, value in row.items() if name.startswith("number_"))


@pytest.mark.parametrize("seed", range(STORIES))
def test_what_is_read_is_what_was_there(seed: int) -> None:
    story = CheckpointStory(seed)
    read, restart = ReadBack(story.history), story.history.restart

    def check_and_restart(*args: Any, **options: Any) -> None:
        read.check(EVERY)
        read.check(range(3, 11))
        restart(*args, **options)

    story.history.restart = check_and_restart  # type: ignore[method-assign]
    story.run()
    assert read.checked
    assert read.kinds
