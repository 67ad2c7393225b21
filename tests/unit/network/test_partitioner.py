"""Partitioners against an oracle that looks at one row at a time."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvariantViolation
from penstock.pb import graph_pb2
from penstock.storage.hashing import hash_columns
from penstock.storage.key_groups import key_group_of, owner
from taskmanager.network.partitioner import (
    BroadcastPartitioner,
    ForwardPartitioner,
    HashPartitioner,
    Pieces,
    RoundRobinPartitioner,
    partitioner_of,
)
from tests.support.exchange_slots import numbers, output_edge

MAX_PARALLELISM = 128
ROWS = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(-5, 5)), st.sampled_from(["a", "b", "", None])),
    min_size=1,
    max_size=60,
)


def keyed(rows: list[tuple[int | None, str | None]]) -> pa.RecordBatch:
    return pa.record_batch(
        [
            pa.array([row[0] for row in rows], pa.int64()),
            pa.array([row[1] for row in rows], pa.string()),
            pa.array(range(len(rows)), pa.int64()),
        ],
        names=["k", "s", "row"],
    )


def row_numbers(pieces: Pieces) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, piece in pieces:
        assert piece.num_rows
        piece.validate(full=True)
        found.setdefault(index, []).extend(piece.column(piece.num_columns - 1).to_pylist())
    return found


@settings(deadline=None)
@given(ROWS, st.integers(2, 9), st.sampled_from([["k"], ["s"], ["k", "s"]]))
def test_hash_agrees_with_the_owner_of_each_row(
    rows: list[tuple[int | None, str | None]], parallelism: int, keys: list[str]
) -> None:
    batch = keyed(rows)
    oracle: dict[int, list[int]] = {}
    for number in range(batch.num_rows):
        row = batch.slice(number, 1)
        hashes = hash_columns([row.column(row.schema.get_field_index(key)) for key in keys])
        group = int(key_group_of(hashes, MAX_PARALLELISM)[0])
        oracle.setdefault(owner(group, parallelism, MAX_PARALLELISM), []).append(number)
    partitioner = HashPartitioner("e0", keys, parallelism, MAX_PARALLELISM)
    assert row_numbers(partitioner.partition(batch)) == oracle


def test_partial_batches_go_where_their_rows_go() -> None:
    partitioner = HashPartitioner("e0", ["k"], 4, MAX_PARALLELISM)
    rows = pa.record_batch({"v": list(range(50)), "k": list(range(50))})
    partial = pa.record_batch({"k": list(range(50)), "__acc_0": [1] * 50, "key": list(range(50))})
    partial = partial.replace_schema_metadata({b"penstock.partial": b"1"})
    assert row_numbers(partitioner.partition(rows)) == row_numbers(partitioner.partition(partial))
    for _, piece in partitioner.partition(partial):
        assert piece.schema.metadata == {b"penstock.partial": b"1"}


def test_a_batch_with_one_owner_is_passed_on_untouched() -> None:
    partitioner = HashPartitioner("e0", ["x"], 4, MAX_PARALLELISM)
    batch = pa.record_batch({"x": [7] * 10})
    ((_, piece),) = partitioner.partition(batch)
    assert piece is batch


def test_a_missing_key_column_is_named() -> None:
    with pytest.raises(InvariantViolation, match="'missing'"):
        HashPartitioner("e0", ["missing"], 2, MAX_PARALLELISM).partition(numbers(0, 3))


@given(st.integers(1, 7), st.integers(0, 9), st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_round_robin_spreads_rows_evenly_and_keeps_their_order(
    consumers: int, first: int, sizes: list[int]
) -> None:
    partitioner = RoundRobinPartitioner(consumers, first)
    received: dict[int, list[int]] = {index: [] for index in range(consumers)}
    start = 0
    for size in sizes:
        for index, rows in row_numbers(partitioner.partition(numbers(start, size))).items():
            received[index].extend(rows)
        start += size
        counts = [len(rows) for rows in received.values()]
        assert max(counts) - min(counts) <= 1
    assert Counter(row for rows in received.values() for row in rows) == Counter(range(start))
    assert all(rows == sorted(rows) for rows in received.values())


def test_single_rows_take_turns() -> None:
    partitioner = RoundRobinPartitioner(3, 1)
    turns = [partitioner.partition(numbers(row, 1))[0][0] for row in range(6)]
    assert turns == [1, 2, 0, 1, 2, 0]


def test_broadcast_and_forward_pass_the_batch_untouched() -> None:
    batch = numbers(0, 3)
    assert [(i, b is batch) for i, b in BroadcastPartitioner(3).partition(batch)] == [
        (0, True),
        (1, True),
        (2, True),
    ]
    assert ForwardPartitioner().partition(batch)[0][1] is batch


def test_edges_get_their_partitioners() -> None:
    kinds = {
        graph_pb2.PARTITIONING_HASH: HashPartitioner,
        graph_pb2.PARTITIONING_REBALANCE: RoundRobinPartitioner,
        graph_pb2.PARTITIONING_RESCALE: RoundRobinPartitioner,
        graph_pb2.PARTITIONING_BROADCAST: BroadcastPartitioner,
    }
    for kind, expected in kinds.items():
        assert isinstance(partitioner_of(output_edge(kind, 2, ["x"]), 0), expected)
        assert isinstance(partitioner_of(output_edge(kind, 1, ["x"]), 0), ForwardPartitioner)
    assert isinstance(partitioner_of(output_edge(), 0), ForwardPartitioner)


@pytest.mark.parametrize(
    ("kind", "count", "keys"),
    [
        (graph_pb2.PARTITIONING_FORWARD, 2, []),
        (graph_pb2.PARTITIONING_FORWARD, 0, []),
        (graph_pb2.PARTITIONING_HASH, 2, []),
        (77, 2, []),
    ],
)
def test_deployments_that_contradict_themselves(kind: int, count: int, keys: list[str]) -> None:
    with pytest.raises(InvariantViolation, match="e0"):
        partitioner_of(output_edge(kind, count, keys), 0)
