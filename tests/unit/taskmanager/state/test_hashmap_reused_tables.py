"""A window's table is dropped and its memory used again while its snapshot is being encoded."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from penstock.storage.key_encoding import KeyBatch
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.kernels.byte_key_records import ByteKeyRecords
from taskmanager.operators.aggregation import AggregateInputs
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.hashmap.store import HashMapStateBackend
from tests.support.hashmap_backend import Files, Writing, environment

DESCRIPTOR = AggregateDescriptor((pa.string(),), (AccumulatorKind.SUM_INT64,), list)
COUNT = 200


def add(backend: HashMapStateBackend, namespace: int, prefix: str) -> None:
    keys = encode_keys([pa.array([f"{prefix}{i:04}" for i in range(COUNT)])])
    ones = np.ones(COUNT, np.int64)
    inputs = AggregateInputs([ones], [None], [], np.empty(0, np.int64))
    backend.group_table("slices", namespace, DESCRIPTOR).update(keys, inputs)


def test_keys_of_a_dropped_window_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files()
    backend = HashMapStateBackend(environment(files))
    add(backend, 1, "old")
    writing = Writing(backend.snapshot(1), files)
    original = ByteKeyRecords.keys_of
    switched = []

    def keys_of(self: ByteKeyRecords, *piece: object) -> KeyBatch:
        if not switched:  # here the interpreter may switch to the mailbox thread
            switched.append(True)
            backend.drop("slices", 1)
            add(backend, 2, "new")
        return original(self, *piece)

    monkeypatch.setattr(ByteKeyRecords, "keys_of", keys_of)
    described = writing.finish()
    monkeypatch.undo()
    assert switched
    restored = HashMapStateBackend(environment(files, [described]))
    (rows,) = restored.group_table("slices", 1, DESCRIPTOR).chunks(1000)
    assert sorted(rows.keys[0].to_pylist()) == [f"old{i:04}" for i in range(COUNT)]
