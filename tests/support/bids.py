"""Generated rows of many types, out of order, with nulls and NaN; and files of them."""

from __future__ import annotations

import datetime as dt
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
START_MS = 1_700_000_000_000
DISORDER_MS = 5_000

SCHEMA = pa.schema(
    [
        ("n", pa.int64()),
        ("auction", pa.int64()),
        ("bidder", pa.string()),
        ("price", pa.int64()),
        ("score", pa.float64()),
        ("ts", pa.int64()),
        ("at", pa.timestamp("ms", tz="UTC")),
        ("open", pa.bool_()),
    ]
)

Row = dict[str, Any]


def make_bids(count: int, *, seed: int = 7, step_ms: int = 100, auctions: int = 11) -> list[Row]:
    """Rows whose times advance by ``step_ms`` on average and are up to ``DISORDER_MS`` out of order."""
    numbers = random.Random(seed)
    rows = []
    for n in range(count):
        ts = START_MS + n * step_ms + numbers.randrange(-DISORDER_MS, 1)
        rows.append(
            {
                "n": n,
                "auction": numbers.randrange(auctions),
                "bidder": numbers.choice(["ada", "bob", "", "zoë", "a long name " * 3, None]),
                "price": None if numbers.random() < 0.05 else numbers.randrange(-50, 1000),
                "score": numbers.choice(
                    [None, float("nan"), -0.0, 0.0, *(i / 4 for i in range(20))]
                ),
                "ts": ts,
                "at": EPOCH + dt.timedelta(milliseconds=ts),
                "open": numbers.random() < 0.5,
            }
        )
    return rows


def to_table(rows: list[Row], schema: pa.Schema = SCHEMA) -> pa.Table:
    """The rows as a table."""
    return pa.Table.from_pylist(rows, schema=schema)


def cut(rows: list[Row], parts: int) -> list[list[Row]]:
    """The rows in as many pieces, in order."""
    size = -(-len(rows) // parts)
    return [rows[i * size : (i + 1) * size] for i in range(parts)]


def write_table(table: pa.Table, path: Path, *, row_group_size: int | None = None) -> None:
    """One file, in the format that the extension says (json: lines; jsonarray: one array)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".parquet":
            pa.parquet.write_table(table, path, row_group_size=row_group_size)
        case ".csv":
            pa.csv.write_csv(table, path)
        case ".arrow":
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=row_group_size)
        case ".jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
        case ".json":
            path.write_text(json.dumps(table.to_pylist(), indent=1))
        case _:
            raise ValueError(path.suffix)
