"""Rows come back from Parquet as from Arrow files: batch by batch, with the same types, exactly.

The oracle is the batch that was written. Batches are drawn from all types that Arrow has for columns, one
within the other; what Parquet cannot hold has to be found by its schema, before a row is written.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import Configuration
from penstock.errors import StoreCorrupt
from penstock.partition_id import PartitionId
from penstock.pb import graph_pb2
from penstock.storage.parquet_types import parquet_misfit
from taskmanager.partitions.retention import Retention
from taskmanager.partitions.sealed_partition import SealedPartition
from taskmanager.partitions.sealed_store import SealedStore, write_index
from taskmanager.partitions.spill_files import read_spill_file, write_spill_files
from taskmanager.partitions.spill_format import (
    ARROW_FILES,
    FormatChoice,
    SpillFormat,
    format_choice,
)
from taskmanager.partitions.spill_layout import (
    PartitionIndex,
    SpillFailed,
    SubpartitionIndex,
    decode_index,
    encode_index,
    partition_directory,
    subpartition_directory,
)
from tests.support.exchange_slots import numbers
from tests.support.small_disk import filled, small_disk

PARQUET = FormatChoice(SpillFormat.PARQUET)
PARQUET_ONLY = FormatChoice(SpillFormat.PARQUET, is_required=True)
ID = PartitionId("e0", "v0", 2, 7)

_SIGNED = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
_UNSIGNED = {8: pa.uint8(), 16: pa.uint16(), 32: pa.uint32(), 64: pa.uint64()}
_INT64 = st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(max_size=20)
_BYTES = st.binary(max_size=20)
_UNITS = ("ms", "us", "ns")
LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    **{
        kind: st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits, kind in _SIGNED.items()
    },
    **{kind: st.integers(0, 2**bits - 1) for bits, kind in _UNSIGNED.items()},
    pa.float16(): st.floats(width=16),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    **dict.fromkeys((pa.string(), pa.large_string()), _TEXT),
    **dict.fromkeys((pa.binary(), pa.large_binary()), _BYTES),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.date32(): st.integers(-700_000, 2_000_000),
    pa.time32("ms"): st.integers(0, 86_399_999),
    pa.time64("us"): st.integers(0, 86_399_999_999),
    pa.time64("ns"): st.integers(0, 86_399_999_999_999),
    **{
        pa.timestamp(unit, zone): _INT64
        for unit in _UNITS
        for zone in (None, "UTC", "Europe/Berlin")
    },
    **{pa.duration(unit): _INT64 for unit in ("s", *_UNITS)},
    pa.decimal128(38, 9): st.decimals(-(10**28), 10**28, places=9),
    pa.decimal256(70, 2): st.decimals(-(10**20), 10**20, places=2),
    pa.decimal128(5, 5): st.decimals(Decimal("-0.99999"), Decimal("0.99999"), places=5),
}
"""Each with its values as ``pa.array`` takes them."""


@st.composite
def _columns(draw: st.DrawFn, depth: int = 2) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    """A type, and its values but null."""
    shape = (
        draw(st.sampled_from(("leaf", "leaf", "list", "fixed", "struct", "map")))
        if depth
        else "leaf"
    )
    if shape == "leaf":
        kind = draw(st.sampled_from(sorted(LEAVES, key=str)))
        return kind, LEAVES[kind]
    name = draw(st.sampled_from(("item", "element", "x")))
    inner, values = draw(_fields(name, depth - 1))
    if shape == "struct":
        other, other_values = draw(_fields("b.c", depth - 1))
        given = {name: values, "b.c": other_values}
        fields = [
            field.with_nullable(field.nullable or pa.types.is_fixed_size_list(field.type))
            for field in (inner, other)
        ]
        return pa.struct(fields), st.fixed_dictionaries(given)
    if shape == "map":
        pairs = st.lists(st.tuples(_TEXT, values), max_size=3)
        return pa.map_(pa.string(), inner.with_name("value")), pairs
    if shape == "fixed":
        return pa.list_(inner, 2), st.lists(values, min_size=2, max_size=2)
    of = draw(st.sampled_from((pa.list_, pa.large_list)))
    return of(inner), st.lists(values, max_size=3)


@st.composite
def _fields(draw: st.DrawFn, name: str, depth: int = 2) -> tuple[pa.Field, st.SearchStrategy[Any]]:
    """A column of any nullability, and its values."""
    kind, values = draw(_columns(depth))
    is_nullable = pa.types.is_null(kind) or draw(st.booleans())
    return pa.field(name, kind, is_nullable), st.none() | values if is_nullable else values


@st.composite
def _writes(draw: st.DrawFn) -> list[pa.RecordBatch]:
    """Batches of one schema, some of them slices of larger ones."""
    names = st.text(string.printable, max_size=5)
    count = draw(st.integers(1, 4))
    drawn = [draw(_fields(f"{draw(names)}{number}")) for number in range(count)]
    schema = pa.schema(
        [
            field.with_metadata({"about": "it"}) if number % 2 else field
            for number, (field, _) in enumerate(drawn)
        ],
        metadata=draw(st.none() | st.just({"penstock.slice_ms": "10"})),
    )
    batches = []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 5))
        columns = [
            pa.array(draw(st.lists(values, min_size=rows + 1, max_size=rows + 1)), field.type)
            for field, values in drawn
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        batches.append(batch.slice(1) if draw(st.booleans()) else batch)
    return batches


def is_same(after: pa.Array, before: pa.Array) -> bool:
    """Equal, where NaN is NaN and -0.0 is not 0.0."""
    if after.type != before.type:
        return False
    return after.equals(before) or repr(after.to_pylist()) == repr(before.to_pylist())


@given(batches=_writes())
@settings(max_examples=60, deadline=None)
def test_batches_come_back_from_parquet_as_from_arrow(
    batches: list[pa.RecordBatch], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("formats")
    assert parquet_misfit(batches[0].schema) is None
    for choice in (PARQUET_ONLY, ARROW_FILES):
        written = write_spill_files(directory, 0, 100, batches, choice)
        assert [(file.format, file.first_row) for file, _ in written] == [(choice.wanted, 100)]
        back = read_spill_file(directory / written[0][0].name, written[0][0])
        assert len(back) == written[0][1] == len(batches)
        for after, before in zip(back, batches, strict=True):
            after.validate(full=True)
            assert after.schema.equals(before.schema, check_metadata=True)
            assert all(map(is_same, after.columns, before.columns))


def test_the_bits_of_floats_come_back(tmp_path: Path) -> None:
    bits = [0, 1 << 63, 0x7FF8000000000000, 0x7FF8000000000001, 0xFFF0000000000123, 1]
    batch = pa.record_batch({"x": pa.array(bits, pa.uint64()).view(pa.float64())})
    ((file, _),) = write_spill_files(tmp_path, 0, 0, [batch], PARQUET_ONLY)
    (back,) = read_spill_file(tmp_path / file.name, file)
    assert back.column(0).view(pa.uint64()).to_pylist() == bits


MISFITS = {
    "seconds": (pa.array([2**62, None], pa.timestamp("s")), "column c: .*seconds"),
    "seconds of the day": (pa.array([1, None], pa.time32("s")), "column c: .*seconds"),
    "date64": (pa.array([1, None], pa.int64()).view(pa.date64()), "column c: .*days"),
    "interval": (pa.array([(1, 2, 3), None], pa.month_day_nano_interval()), "column c: .*no such type"),
    "dictionary": (pa.array(["a", None]).dictionary_encode(), "column c: .*indices"),
    "nested": (
        pa.array([{"a": [{"b": 1}]}, None], pa.struct([("a", pa.list_(pa.struct([("b", pa.timestamp("s"))])))])),
        r"column c\.a\[\]\.b: .*seconds",
    ),
    "map": (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.time32("s"))), r"column c\.value: "),
    "no fields": (pa.array([{}, None], pa.struct([])), "column c: .*without fields"),
    "no bytes": (pa.array([b"", None], pa.binary(0)), "column c: .*no bytes"),
    "no values": (pa.array([[], None], pa.list_(pa.int64(), 0)), "column c: .*no values"),
    "a list that is never null in a struct that is": (
        pa.array([None, {"a": [1, 2]}], pa.struct([pa.field("a", pa.list_(pa.int64(), 2), nullable=False)])),
        r"column c\.a: .*are not read from Parquet",
    ),
    "scale": (pa.array([Decimal(100), None], pa.decimal128(10, -2)), "column c: .*negative scale"),
    "view": (pa.array(["a", None], pa.string_view()), "column c: .*no such type"),
    "extension": (pa.array([b"0123456789abcdef"], pa.uuid()), "column c: .*no such type"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_what_parquet_cannot_hold_is_written_as_arrow_or_refused(name: str, tmp_path: Path) -> None:
    column, message = MISFITS[name]
    fits = pa.record_batch({"c": [1, 2]})
    batches = [fits, pa.record_batch({"c": column}), fits]
    written = write_spill_files(tmp_path / "any", 0, 0, batches, PARQUET)
    assert [file.format.value for file, _ in written] == ["parquet", "arrow", "parquet"]
    back = [read_spill_file(tmp_path / "any" / file.name, file) for file, _ in written]
    assert [batch for (batch,) in back] == batches
    with pytest.raises(SpillFailed, match=f"needs Parquet files: {message}"):
        write_spill_files(tmp_path / "parquet", 0, 0, batches, PARQUET_ONLY)
    assert list((tmp_path / "parquet").iterdir()) == []


def test_rows_without_columns_are_arrow(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_struct_array(pa.array([{}, {}], pa.struct([])))
    ((file, _),) = write_spill_files(tmp_path, 0, 0, [batch], PARQUET)
    assert [batch.num_rows for batch in read_spill_file(tmp_path / file.name, file)] == [2]


def _sealed(root: Path, batches: Sequence[pa.RecordBatch], choice: FormatChoice) -> SealedPartition:
    directory = subpartition_directory(partition_directory(root, "job", ID), 0)
    files = [file for file, _ in write_spill_files(directory, 0, 0, batches, choice)]
    part = SubpartitionIndex(0, tuple(files), ())
    write_index(root, PartitionIndex("job", ID, (part, SubpartitionIndex(0, (), ()))))
    found = SealedStore(root).find("job", ID)
    assert found is not None
    return found


def test_who_reads_in_place_finds_the_files_of_its_rows_and_nothing_else(tmp_path: Path) -> None:
    other = numbers(5, 3).replace_schema_metadata({"a": "b"})
    partition = _sealed(tmp_path, [numbers(0, 2), numbers(2, 3), other], PARQUET_ONLY)
    files = partition.files(0)
    assert [file.rows for file in files] == [5, 3]
    assert [file.size_bytes for file in files] == [file.path.stat().st_size for file in files]
    assert {file.format for file in files} == {SpillFormat.PARQUET}
    rows = [row for file in files for row in pq.ParquetFile(file.path).read().to_pylist()]
    assert rows == [{"x": number} for number in range(8)]
    assert pq.read_metadata(files[0].path).num_row_groups == 1
    assert partition.files(1) == []


@pytest.mark.parametrize("choice", [ARROW_FILES, PARQUET_ONLY], ids=["arrow", "parquet"])
def test_rows_are_read_from_any_row_on(choice: FormatChoice, tmp_path: Path) -> None:
    batches = [numbers(start, 3) for start in range(0, 12, 3)]
    partition = _sealed(tmp_path, batches, choice)
    for first_row in range(13):
        elements = list(partition.elements(0, first_row))
        got = [
            n
            for _, batch in elements
            if isinstance(batch, pa.RecordBatch)
            for n in batch["x"].to_pylist()
        ]
        assert got == list(range(first_row, 12))


def test_every_flipped_byte_of_a_parquet_file_is_found(tmp_path: Path) -> None:
    ((file, _),) = write_spill_files(tmp_path, 0, 0, [numbers(0, 4)], PARQUET_ONLY)
    path = tmp_path / file.name
    content = path.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        with pytest.raises(StoreCorrupt, match="is altered"):
            read_spill_file(path, file)
    path.write_bytes(content[:-1])
    with pytest.raises(StoreCorrupt, match="bytes"):
        read_spill_file(path, file)


@pytest.mark.parametrize("choice", [ARROW_FILES, PARQUET_ONLY], ids=["arrow", "parquet"])
def test_a_disk_that_fills_up_leaves_no_half_file(choice: FormatChoice, tmp_path: Path) -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 62, 100_000)  # does not compress
    batches = [pa.record_batch({"x": bits}), pa.record_batch({"x": bits}, metadata={"a": "b"})]
    with small_disk(tmp_path / "small", "1m") as disk:
        for given, leave_bytes in ((batches[:1], 300 << 10), (batches, 900 << 10)):
            with (
                filled(disk, leave_bytes),
                pytest.raises(SpillFailed, match=r"No space left.*free space"),
            ):
                write_spill_files(disk / "sub=0", 0, 0, given, choice)
            assert list((disk / "sub=0").iterdir()) == []
        ((file, _),) = write_spill_files(disk / "sub=0", 0, 0, batches[:1], choice)
        assert read_spill_file(disk / "sub=0" / file.name, file) == batches[:1]


def test_an_index_says_the_format_of_every_file(tmp_path: Path) -> None:
    index = _sealed(tmp_path, [numbers(0, 2)], PARQUET).index
    assert decode_index(encode_index(index), Path("i")) == index
    assert [file.name for file in index.subpartitions[0].files] == ["00000000.parquet"]


@pytest.mark.parametrize(
    ("keys", "of_edge", "blocking", "caching"),
    [
        ({}, "UNSPECIFIED", "arrow", "arrow"),
        ({"taskmanager.spill.format": "parquet"}, "UNSPECIFIED", "parquet", "parquet"),
        ({"taskmanager.spill.blocking-format": "parquet"}, "UNSPECIFIED", "parquet", "arrow"),
        (
            {"taskmanager.spill.format": "parquet", "taskmanager.spill.caching-format": "arrow"},
            "UNSPECIFIED",
            "parquet",
            "arrow",
        ),
        ({"taskmanager.spill.format": "parquet"}, "ARROW", "arrow only", "arrow only"),
        ({}, "PARQUET", "parquet only", "parquet only"),
    ],
)
def test_the_edge_says_the_format_or_the_taskmanager_does(
    keys: dict[str, str], of_edge: str, blocking: str, caching: str
) -> None:
    config = Configuration.from_mapping(keys)
    said = graph_pb2.SpillFormat.Value(f"SPILL_FORMAT_{of_edge}")
    for retention, expected in ((Retention.BLOCKING, blocking), (Retention.CACHING, caching)):
        choice = format_choice(retention, said, config)
        assert choice.wanted.value + " only" * choice.is_required == expected
