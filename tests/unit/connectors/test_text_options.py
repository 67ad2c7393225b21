"""Aim: CSV and JSON are read as the options say, compressed or not, whole or in pieces.

Method: the same rows in every spelling; damaged files; pieces against the whole, from every position.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from penstock.connectors import file_source
from penstock.connectors.text_options import text_options
from penstock.errors import JobRejected, TaskFailure, Unrecoverable
from taskmanager.connectors import text_blocks, text_splits
from tests.support.examples import examples

SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.string())])


def zstd(data: bytes) -> bytes:
    compressed: bytes = pa.Codec("zstd").compress(data, asbytes=True)
    return compressed


COMPRESS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": (".gz", gzip.compress),
    "zstd": (".zst", zstd),
    "bz2": (".bz2", bz2.compress),
}


def read(harness: Any, path: Path, text: str | bytes, format: str = "csv", **options: Any) -> Any:
    schema = options.pop("schema", None)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    opened = file_source(format, path, schema=schema, options=text_options(**options))
    return harness.rows(opened)


# ---------------------------------------------------------------- CSV


@pytest.mark.parametrize("delimiter", [";", "\t", "|", " ", "^", "."])
@pytest.mark.usefixtures("small_blocks")
def test_delimiters(harness: Any, tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "f.csv"
    rows = [{"a": i, "b": f'x,{delimiter}"\n{i}' if i % 3 else f"y{i}"} for i in range(60)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["a", "b"])
        writer.writerows(row.values() for row in rows)
    assert read(harness, path, path.read_bytes(), delimiter=delimiter) == rows
    assert harness.bad == []


def test_without_a_header(harness: Any, tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    assert read(harness, path, "1,x\n2,y\n", header=False) == [
        {"f0": 1, "f1": "x"},
        {"f0": 2, "f1": "y"},
    ]
    named = read(harness, path, "1,x\n2,y", header=False, schema=SCHEMA)
    assert named == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    path.write_text("\ufeff7,z\n")
    opened = file_source(
        "csv", path, schema=SCHEMA, columns=["b"], options=text_options(header=False)
    )
    assert harness.rows(opened) == [{"b": "z"}]
    assert read(harness, path, "", header=False, schema=SCHEMA) == []


def test_a_row_of_another_length_than_the_schema_is_bad(skipping: Any, tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    rows = read(skipping, path, "1,x\n2\n3,y\n", header=False, schema=SCHEMA)
    assert rows == [{"a": 1, "b": "x"}, {"a": 3, "b": "y"}]
    assert [where for where, _, _ in skipping.bad] == [f"{path}:2"]


def test_null_texts(harness: Any, tmp_path: Path) -> None:
    text = "a,b\n1,x\nNA,NA\n-,-\n,\n2,null\n"
    found = read(harness, tmp_path / "f.csv", text, nulls=["NA", "-"])
    assert found == [
        {"a": 1, "b": "x"},
        {"a": None, "b": None},
        {"a": None, "b": None},
        {"a": None, "b": ""},
        {"a": 2, "b": "null"},
    ]
    plain = read(harness, tmp_path / "f.csv", "a,b\n,\n1,NA\n", schema=SCHEMA)
    assert plain == [{"a": None, "b": ""}, {"a": 1, "b": "NA"}]
    empty = read(harness, tmp_path / "f.csv", "a,b\n,\n", schema=SCHEMA, nulls=[""])
    assert empty == [{"a": None, "b": None}]


def test_what_no_option_names_is_not_null(skipping: Any, tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    text = "a,f\n1,nan\n2,NaN\nNA,1\nnull,1\nNaN,1\n3,NULL\n4,\n"
    schema = pa.schema([("a", pa.int64()), ("f", pa.float64())])
    found = read(skipping, path, text, schema=schema)
    assert str(found) == str(
        [{"a": 1, "f": float("nan")}, {"a": 2, "f": float("nan")}, {"a": 4, "f": None}]
    )
    assert [bad for _, bad, _ in skipping.bad] == ["NA,1", "null,1", "NaN,1", "3,NULL"]
    _, inferred = file_source("csv", path)
    assert inferred == pa.schema([("a", pa.string()), ("f", pa.string())])


def test_other_null_texts_are_values(skipping: Any, tmp_path: Path) -> None:
    found = read(skipping, tmp_path / "f.csv", "a,b\nNULL,x\n", schema=SCHEMA, nulls=["NA"])
    assert found == []
    assert len(skipping.bad) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"delimiter": ""}, "delimiter is ''"),
        ({"delimiter": ";;"}, "one ASCII character"),
        ({"delimiter": '"'}, "neither a quote nor a line end"),
        ({"delimiter": "é"}, "one ASCII character"),
        ({"header": 0}, "header is 0"),
        ({"compression": "lz4"}, "compression is 'lz4'; known are gzip, zstd, bz2, none"),
        ({"nulls": [1]}, "it takes texts"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], words: str) -> None:
    with pytest.raises(JobRejected, match=words):
        text_options(**options)


# ---------------------------------------------------------------- declared columns


@pytest.mark.parametrize("format", ["csv", "json", "array"])
def test_optional_columns_are_null_where_a_file_has_none(
    harness: Any, tmp_path: Path, format: str
) -> None:
    path = tmp_path / "f"
    text = {"csv": "a\n1\n", "json": '{"a":1}\n', "array": '[{"a":1}]'}[format]
    kind = "csv" if format == "csv" else "json"
    found = read(harness, path, text, kind, schema=SCHEMA, optional=["b"])
    assert found == [{"a": 1, "b": None}]
    with pytest.raises(JobRejected, match=r'optional= names "bb" \(did you mean "b"\?\)'):
        read(harness, path, text, kind, schema=SCHEMA, optional=["bb"])


def test_optional_columns_of_some_files_are_inferred(harness: Any, tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a\n1\n")
    (tmp_path / "2.csv").write_text("b,a\nx,2\n")
    opened = file_source("csv", tmp_path / "*.csv", options=text_options(optional=["b"]))
    assert harness.rows(opened) == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]


@pytest.mark.parametrize("layout", ["lines", "array"])
@pytest.mark.parametrize(
    ("declared", "there"), [("amuont", "amount"), ("Amount", "amount"), ("nmae", "name")]
)
def test_a_misspelt_column_of_json_is_refused(
    tmp_path: Path, layout: str, declared: str, there: str
) -> None:
    rows = [json.dumps({there: 1, "x": 2})] * 3
    path = tmp_path / "f.json"
    path.write_text("\n".join(rows) if layout == "lines" else f"[{','.join(rows)}]")
    schema = pa.schema([(declared, pa.int64()), ("x", pa.int64())])
    with pytest.raises(JobRejected, match=f'column "{declared}".*have "{there}".*optional='):
        file_source("json", path, schema=schema)
    assert file_source("json", path, schema=schema, columns=["x"])
    assert file_source("json", path, schema=schema, options=text_options(optional=[declared]))


def test_a_sparse_column_of_json_is_warned_of(harness: Any, tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "f.json"
    path.write_text('{"first_name":"x"}\n{"first_name":"y","seen":1}\n')
    fields = [("first_name", pa.string()), ("seen", pa.int64()), ("error", pa.string())]
    schema = pa.schema(fields)
    with caplog.at_level(logging.WARNING):
        assert harness.rows(file_source("json", path, schema=schema))[0]["error"] is None
        assert 'has the column "error": it is null until one does' in "\n".join(caplog.messages)
        caplog.clear()
        file_source("json", path, schema=schema, options=text_options(optional=["error"]))
        assert caplog.messages == []


def test_a_column_of_the_directories_is_not_missed(harness: Any, tmp_path: Path) -> None:
    (tmp_path / "day=1").mkdir()
    (tmp_path / "day=1" / "f.json").write_text('{"a":1,"dya":2}\n')
    schema = pa.schema([("a", pa.int64()), ("day", pa.int64())])
    assert harness.rows(file_source("json", tmp_path, schema=schema)) == [{"a": 1, "day": 1}]


# ---------------------------------------------------------------- compression

ROWS = [{"a": i, "b": f'x"{i}\n' if i % 5 else "y"} for i in range(200)]
TEXTS = {
    "csv": "a,b\n" + "".join('{},"{}"\n'.format(r["a"], r["b"].replace('"', '""')) for r in ROWS),  # type: ignore[attr-defined]
    "json": "".join(json.dumps(row) + "\n" for row in ROWS),
    "array": json.dumps(ROWS) + "\n \n",
}


@pytest.mark.parametrize("format", TEXTS)
@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.usefixtures("small_blocks")
def test_compressed_files_by_suffix_and_by_option(
    harness: Any, tmp_path: Path, format: str, compression: str
) -> None:
    suffix, compress = COMPRESS[compression]
    kind = "csv" if format == "csv" else "json"
    data = TEXTS[format].encode()
    middle = len(data) // 2
    members = compress(data[:middle]) + compress(data[middle:])
    assert read(harness, tmp_path / f"f{suffix}", members, kind) == ROWS
    assert read(harness, tmp_path / "f.x", compress(data), kind, compression=compression) == ROWS
    assert read(harness, tmp_path / f"g{suffix}", data, kind, compression="none") == ROWS
    assert read(harness, tmp_path / f"e{suffix}", b"", kind, schema=SCHEMA) == []


@pytest.mark.parametrize("format", TEXTS)
@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.usefixtures("small_blocks")
def test_compressed_files_go_on_from_every_position(
    harness: Any, tmp_path: Path, format: str, compression: str
) -> None:
    suffix, compress = COMPRESS[compression]
    path = tmp_path / f"f{suffix}"
    path.write_bytes(compress(TEXTS[format].encode()))
    kind = "csv" if format == "csv" else "json"
    source = harness.start(*file_source(kind, path, schema=SCHEMA))
    (split,) = harness.discover(source)
    for stop in range(0, 70, 3):
        first, position = harness.read_split(source, split, 3, stop_after=stop)
        rest, _ = harness.read_split(source, split, 7, position=position)
        assert pa.Table.from_batches(first + rest, SCHEMA).to_pylist() == ROWS
    _, position = harness.read_split(source, split, 3, stop_after=9)
    path.write_bytes(compress(TEXTS[format].replace("x", "z").encode()) + b"\0" * 9)
    with pytest.raises(Unrecoverable, match=r"f.*replaced"):
        harness.read_split(source, split, 3, position=position)


@pytest.mark.parametrize("compression", COMPRESS)
def test_damaged_files_are_named(harness: Any, tmp_path: Path, compression: str) -> None:
    suffix, compress = COMPRESS[compression]
    path = tmp_path / f"f.csv{suffix}"
    whole = compress(TEXTS["csv"].encode())
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    damaged = [whole[:-1], whole[: len(whole) // 2], b"a,b\n1,x\n", whole + b"junk"]
    if compression != "zstd":  # whose frames have no checksums here
        damaged.append(bytes(flipped))
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(
            TaskFailure, match=f"{path}: not readable {compression}: it is damaged or cut off"
        ):
            harness.rows(file_source("csv", path, schema=SCHEMA))
        with pytest.raises(JobRejected, match=f"{path}: not readable {compression}"):
            file_source("csv", path)


# ---------------------------------------------------------------- pieces


@pytest.fixture
def tiny_pieces(monkeypatch: Any, small_blocks: None) -> None:
    monkeypatch.setattr(text_splits, "SPLIT_OVER_BYTES", 500)
    monkeypatch.setattr(text_splits, "PIECE_BYTES", 300)
    monkeypatch.setattr(text_splits, "_SCAN_BYTES", 64)


def pieces_of(harness: Any, path: Path, format: str) -> Any:
    source = harness.start(*file_source(format, path, schema=SCHEMA))
    splits = harness.discover(source)
    assert [s.id for s in splits] == [s.id for s in harness.discover(source)]
    assert len({s.id for s in splits}) == len(splits)
    return source, splits


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.usefixtures("tiny_pieces")
def test_pieces_have_the_rows_of_the_file(harness: Any, tmp_path: Path, format: str) -> None:
    path = tmp_path / "f"
    for ending in ("", "\n", "\n\n", "\r\n"):
        path.write_text(TEXTS[format].rstrip("\n") + ending)
        source, splits = pieces_of(harness, path, format)
        assert len(splits) > 5
        for stop in (0, 1, 4):
            found: list[Any] = []
            for split in splits:
                first, position = harness.read_split(source, split, 3, stop_after=stop)
                rest, _ = harness.read_split(source, split, 3, position=position)
                found += pa.Table.from_batches(first + rest, SCHEMA).to_pylist()
            assert found == ROWS


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cells=st.lists(st.text(alphabet='ab",\n\r é5', max_size=30), min_size=40, max_size=60),
    line_end=st.sampled_from(["\n", "\r\n"]),
)
@pytest.mark.usefixtures("tiny_pieces")
def test_pieces_of_any_csv_are_the_whole(
    skipping: Any, tmp_path: Path, cells: list[str], line_end: str
) -> None:
    path = tmp_path / "f.csv"
    skipping.bad = []
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator=line_end)
        writer.writerow(["a", "b"])
        writer.writerows([i if i % 7 else "bad", cell] for i, cell in enumerate(cells))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_splits, "SPLIT_OVER_BYTES", 1 << 20)
        whole = skipping.rows(file_source("csv", path, schema=SCHEMA))
    bad, skipping.bad = skipping.bad, []
    source, splits = pieces_of(skipping, path, "csv")
    found = [
        row for s in splits for b in skipping.read_split(source, s, 9)[0] for row in b.to_pylist()
    ]
    assert found == whole
    assert skipping.bad == bad, "with the same line numbers"


@pytest.mark.usefixtures("tiny_pieces")
def test_arrays_and_compressed_files_stay_whole(harness: Any, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(TEXTS["array"])
    (tmp_path / "g.json.gz").write_bytes(gzip.compress(TEXTS["json"].encode(), compresslevel=0))
    _, splits = pieces_of(harness, tmp_path / "*.json*", "json")
    assert [Path(s.id).name for s in splits] == ["f.json", "g.json.gz"]


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.usefixtures("tiny_pieces")
def test_a_piece_of_another_file_is_refused(harness: Any, tmp_path: Path, format: str) -> None:
    path = tmp_path / "f"
    path.write_text(TEXTS[format])
    source, splits = pieces_of(harness, path, format)
    other = tmp_path / "_o"
    other.write_text(TEXTS[format].replace("199", "991"))
    other.rename(path)
    for split in splits[:-1]:
        assert harness.read_split(source, split)[0]
    with pytest.raises(Unrecoverable, match="f: was replaced or changed while the job read it"):
        harness.read_split(source, splits[-1])


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.usefixtures("small_blocks")
def test_a_row_that_was_still_being_written_is_bad(
    skipping: Any, tmp_path: Path, format: str
) -> None:
    path = tmp_path / "f"
    text = "a,b\n1,x\n23" if format == "csv" else '{"a":1,"b":"x"}\n{"a":23'
    path.write_text(text)
    source = skipping.start(*file_source(format, path, schema=SCHEMA))
    (split,) = skipping.discover(source)
    with path.open("a") as more:
        more.write("45,y\n" if format == "csv" else "45}\n")
    batches, position = skipping.read_split(source, split)
    assert pa.Table.from_batches(batches).to_pylist() == [{"a": 1, "b": "x"}]
    ((_, _, error),) = skipping.bad
    assert "still being written" in error
    assert skipping.read_split(source, split, position=position)[0] == []


def test_what_is_parsed_ahead_is_bounded(harness: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 200)
    path = tmp_path / "f"
    path.write_text(TEXTS["json"])
    source = harness.start(*file_source("json", path, schema=SCHEMA))
    (split,) = harness.discover(source)
    reader = source.open(split, None)
    parsed: list[int] = []
    whole = text_blocks.TextBlocks.next
    monkeypatch.setattr(
        text_blocks.TextBlocks, "next", lambda self: (parsed.append(1), whole(self))[1]
    )
    reader.read(1)
    assert len(parsed) == 1, "one block goes out, one waits"
    reader.close()


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_another_delimiter_is_suspected(tmp_path: Path, caplog: Any, delimiter: str) -> None:
    path = tmp_path / "f.csv"
    path.write_text(f"a{delimiter}b\n1{delimiter}x\n")
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    words = f"give delimiter={delimiter!r}"
    with pytest.raises(JobRejected, match=re.escape(words)):
        file_source("csv", path, schema=schema)
    file_source("csv", path)
    assert words in "\n".join(caplog.messages)
    caplog.clear()
    file_source("csv", path, schema=schema, options=text_options(header=False))
    assert words in "\n".join(caplog.messages)
    caplog.clear()
    file_source("csv", path, schema=schema, options=text_options(delimiter=delimiter))
    assert caplog.messages == []
