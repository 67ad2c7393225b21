"""Aim: a reader that is opened at any position goes on with exactly the next row, whatever its file ends with.

Method: small files of every format and ending are read row by row; at every position another reader goes on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.connectors import file_source
from taskmanager.connectors import parquet_reader, text_blocks

SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.string())])
ROWS = [{"a": i, "b": f'x{i} "é",\n' if i % 4 == 0 else None} for i in range(7)]
OBJECTS = [json.dumps(row, ensure_ascii=False) for row in ROWS]
LINE_ENDS = ["\n", "\r\n", "\n\n", "\n \t\n", "\r\n\r\n"]
ENDINGS = ["", "\n", "\r\n", "\n\n", " ", " \n", "\t\r\n \n", " " * 300, "\n" * 300]
ROW_COUNTS = [0, 1, 7]


def csv_rows(count: int) -> list[str]:
    cells = [(row["a"], str(row["b"] or "").replace('"', '""')) for row in ROWS[:count]]
    return [f'{a},"{b}"' if b else f"{a}," for a, b in cells]


def texts() -> list[tuple[str, str, int]]:
    """(format, text of the file, rows in it)."""
    found: list[tuple[str, str, int]] = []
    for count in ROW_COUNTS:
        for line_end in LINE_ENDS:
            for ending in ["", *LINE_ENDS]:
                found.append(("json", line_end.join(OBJECTS[:count]) + ending, count))
        for line_end in ("\n", "\r\n", "\n\n"):
            for ending in ("", "\n", "\r\n", "\n\n"):
                found.append(("csv", line_end.join(["a,b", *csv_rows(count)]) + ending, count))
        arrays = [("[", ",", "]", ending) for ending in ENDINGS]
        for comma in (", ", ",\n", "\n,\n", " ,\r\n\t"):
            arrays += [(" [ ", comma, " ]", "\n"), ("\n[\n", comma, "\n]", "")]
        for before, comma, behind, ending in arrays:
            found.append(("json", before + comma.join(OBJECTS[:count]) + behind + ending, count))
    return found


def values(batches: list[pa.RecordBatch]) -> list[int]:
    return [value for batch in batches for value in batch.column("a").to_pylist()]


def check_every_position(harness: Any, opened: Any, count: int, max_rows: int = 1) -> None:
    """Reads to every position, goes on from there, and once more from the position behind that."""
    source = harness.start(*opened)
    (split,) = harness.discover(source)
    for stop in range(count + 3):
        first, position = harness.read_split(source, split, max_rows, stop_after=stop)
        one, next_position = harness.read_split(
            source, split, max_rows, stop_after=1, position=position
        )
        rest, end = harness.read_split(source, split, max_rows, position=next_position)
        assert values(first + one + rest) == list(range(count))
        behind, _ = harness.read_split(source, split, max_rows, position=end)
        assert behind == []


@pytest.mark.parametrize("block_bytes", [16, 96, 1 << 20])
@pytest.mark.parametrize("format", ["csv", "json"])
def test_text_goes_on_from_every_position(
    harness: Any, tmp_path: Path, monkeypatch: Any, format: str, block_bytes: int
) -> None:
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(text_blocks, "SALVAGE_BYTES", block_bytes // 2)
    path = tmp_path / "data"
    for text_format, text, count in texts():
        if text_format == format:
            path.write_bytes(text.encode())
            check_every_position(harness, file_source(format, path, schema=SCHEMA), count)
            assert harness.bad == []


@pytest.mark.parametrize("max_rows", [1, 2])
@pytest.mark.parametrize("count", ROW_COUNTS)
@pytest.mark.parametrize("format", ["parquet", "arrow", "arrow stream"])
def test_binary_files_go_on_from_every_position(
    harness: Any, tmp_path: Path, monkeypatch: Any, format: str, count: int, max_rows: int
) -> None:
    monkeypatch.setattr(parquet_reader, "_DECODE_ROWS", 2)
    path = tmp_path / "data"
    table = pa.Table.from_pylist(ROWS[:count], schema=SCHEMA)
    if format == "parquet":
        pq.write_table(table, path, row_group_size=3)
    else:
        new = pa.ipc.new_stream if format == "arrow stream" else pa.ipc.new_file
        with new(path, SCHEMA) as writer:
            writer.write_table(table, max_chunksize=4)
            writer.write_table(table.slice(0, 0))
    check_every_position(
        harness, file_source(format.split(maxsplit=1)[0], path, schema=SCHEMA), count, max_rows
    )
