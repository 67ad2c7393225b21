"""Aim: a table is filled in linear time by the keys of others in the order of their slots, alone or several at a time.
Method: the same keys in random order take about as long, within one run."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import pytest

from penstock.aggregates.accumulator_kind import AccumulatorKind
from penstock.storage.key_encoding import KeyBatch, encode_keys
from taskmanager.kernels.record_table import RecordTable

KEYS = 300_000
BATCH = 8192


def slot_order(keys: pa.Array) -> pa.Array:
    """The keys as a table without dense indices gives them out."""
    table = RecordTable([keys.type], [])
    fill(table, [keys])
    return table.keys()[0]


def fill(table: RecordTable, sources: list[pa.Array]) -> float:
    batches: list[KeyBatch] = [
        encode_keys([source.slice(start, BATCH)])
        for start in range(0, max(map(len, sources)), BATCH)
        for source in sources
        if start < len(source)
    ]
    begin = time.perf_counter()
    for batch in batches:
        table.accumulate(batch, [], [])
    return time.perf_counter() - begin


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()], ids=str)
@pytest.mark.parametrize("senders", [1, 4])
def test_the_order_of_other_tables_slots_is_as_good_as_any(kind: pa.DataType, senders: int) -> None:
    generator = np.random.default_rng(7)
    keys = pa.array(generator.permutation(KEYS)).cast(kind)
    sources = [slot_order(keys.slice(i * KEYS // senders, KEYS // senders)) for i in range(senders)]
    shuffled = [source.take(generator.permutation(len(source))) for source in sources]
    ordered_s = fill(RecordTable([kind], []), sources)
    random_s = fill(RecordTable([kind], []), shuffled)
    assert ordered_s < 10 * random_s + 0.1, (ordered_s, random_s)


def test_the_same_keys_in_the_same_order_have_the_same_slots() -> None:
    keys = pa.array(np.random.default_rng(3).permutation(5000))
    assert slot_order(keys).equals(slot_order(keys))
    assert not slot_order(keys).equals(slot_order(slot_order(keys)))


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()], ids=str)
@pytest.mark.parametrize("shared", [0, KEYS // 6, KEYS // 3])
def test_tables_of_a_common_order_take_each_other_in_along_their_slots(
    kind: pa.DataType, shared: int
) -> None:
    """Three tables, each with a third of the keys and some of the next one's, put together one after the other."""
    keys = pa.array(np.random.default_rng(5).permutation(KEYS)).cast(kind)
    size = KEYS // 3
    parts = [keys.slice(i * size, size + shared) for i in range(3)]
    tables, merge_s = {}, {}
    for is_common in (False, True):
        sources = []
        for part in parts:
            source = RecordTable([kind], [AccumulatorKind.COUNT])
            if is_common:
                source.use_common_order()
            for start in range(0, len(part), BATCH):
                source.accumulate(encode_keys([part.slice(start, BATCH)]), [None], [None])
            sources.append(source)
        table = tables[is_common] = RecordTable([kind], [AccumulatorKind.COUNT])
        if is_common:
            table.use_common_order()
        begin = time.process_time()
        for source in sources:
            table.make_room_in_order(source)
            table.merge_rows(source.rows())
        merge_s[is_common] = time.process_time() - begin
    assert merge_s[True] < 4 * merge_s[False] + 0.1, merge_s
    counts = {
        is_common: dict(
            zip(table.keys()[0].to_pylist(), table.rows().accumulators[0].tolist(), strict=True)
        )
        for is_common, table in tables.items()
    }
    assert counts[True] == counts[False]
