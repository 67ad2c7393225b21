"""Aim: a malformed row is reported with its place, and every good row around it is kept, once.

Method: CSV and JSON files with bad rows at every place and block border; the policy fails or skips.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from penstock.connectors import file_source
from penstock.errors import BadRecord, JobRejected, TaskFailure
from taskmanager.connectors import text_blocks
from tests.support.examples import examples
from tests.support.source_harness import SourceHarness

SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.string())])


def opened(format: str, path: Path, text: str | bytes) -> Any:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file_source(format, path, schema=SCHEMA)


def reasons(harness: Any) -> list[str]:
    return [error for _, _, error in harness.bad]


def test_csv_rows_that_do_not_fit(skipping: Any, tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    text = 'a,b\n1,x\n2\n3,y,z\nfour,w\n5,"v\nv"\n\n6,\xff\n7,u'.encode("latin-1")
    rows = skipping.rows(opened("csv", path, text))
    assert rows == [{"a": 1, "b": "x"}, {"a": 5, "b": "v\nv"}, {"a": 7, "b": "u"}]
    assert [where for where, _, _ in skipping.bad] == [f"{path}:{line}" for line in (3, 4, 5, 9)]
    assert [text for _, text, _ in skipping.bad] == ["2", "3,y,z", "four,w", "6,\ufffd"]
    assert "Expected 2 columns, got 1" in reasons(skipping)[0]
    assert "Expected 2 columns, got 3" in reasons(skipping)[1]
    assert reasons(skipping)[2] == (
        "column \"a\": CSV conversion error to int64: invalid value 'four'"
    )
    assert reasons(skipping)[3] == (
        'not valid UTF-8 (byte 0xff behind "6,"): save the file as UTF-8 (iconv -f LATIN1 -t UTF-8)'
    )


def test_csv_quote_that_is_never_closed_costs_one_line(skipping: Any, tmp_path: Path) -> None:
    lines = ["a,b", *(f"{i},x{i}" for i in range(50))]
    lines[20] = '19,"open'
    rows = skipping.rows(opened("csv", tmp_path / "f.csv", "\n".join(lines)))
    assert [row["a"] for row in rows] == [i for i in range(50) if i != 19]
    assert [error for _, _, error in skipping.bad] == ["malformed CSV: a quote is not closed"]


def test_json_lines_that_do_not_fit(skipping: Any, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    lines = [
        b'{"a":1,"b":"x"}',
        b'{"a":2,"b":',
        b'{"a":"three"}',
        b"[4]",
        b'{"a":5}{"a":55}',
        b"",
        b'{"b":"\xff"}',
        b'{"a":7.5}',
        b"null",
        b'{"a":9,"a":9}',
        b'{"a":10, "c":{}}',
        b'{"a":11, "c":-1e400}',
    ]
    assert skipping.rows(opened("json", path, b"\n".join(lines))) == [
        {"a": 1, "b": "x"},
        {"a": 10, "b": None},
    ]
    bad_lines = [2, 3, 4, 5, 7, 8, 9, 10, 12]
    assert [where for where, _, _ in skipping.bad] == [f"{path}:{line}" for line in bad_lines]
    found = reasons(skipping)
    assert found[0].startswith("malformed JSON: Expecting value")
    assert found[1] == 'column "a": "three" is not int64'
    assert found[2] == "a JSON array in place of an object"
    assert found[3].startswith("malformed JSON: Extra data")
    assert found[4].startswith("not valid UTF-8 (byte 0x")
    assert found[5] == 'column "a": 7.5 is not int64'
    assert found[6] == "a JSON null in place of an object"
    assert found[7] == "malformed JSON: a key is there twice, or more than one value stands here"
    assert found[8] == "malformed JSON: -1e400 is beyond what a number with fractions holds"


def test_json_numbers_that_float32_does_not_hold(skipping: Any, tmp_path: Path) -> None:
    """The parser makes infinities of them."""
    path = tmp_path / "f.json"
    path.write_text('{"a":1e300,"b":[1]}\n{"a":0.5,"b":[null,-1e39]}\n{"a":-3.4e38,"b":[2]}\n')
    schema = pa.schema([("a", pa.float32()), ("b", pa.list_(pa.float32()))])
    rows = skipping.rows(file_source("json", path, schema=schema))
    assert rows == [{"a": pa.scalar(-3.4e38, pa.float32()).as_py(), "b": [2.0]}]
    assert [error for _, _, error in skipping.bad] == [
        'column "a": 1e+300 is not float',
        'column "b": [null, -1e+39] is not list<item: float>',
    ]


def test_csv_numbers_that_their_type_does_not_hold(skipping: Any, tmp_path: Path) -> None:
    """The parser makes infinities of them; what is written as one stays."""
    path = tmp_path / "f.csv"
    path.write_text('a,b\n1e300,1\n-inf,1e400\n"-Infinity",INF\n1e-60,+inf\n,-1.5e308\n')
    schema = pa.schema([("a", pa.float32()), ("b", pa.float64())])
    rows = skipping.rows(file_source("csv", path, schema=schema))
    infinite = float("inf")
    assert rows == [
        {"a": -infinite, "b": infinite},
        {"a": 0.0, "b": infinite},
        {"a": None, "b": -1.5e308},
    ]
    assert [error for _, _, error in skipping.bad] == [
        "column \"a\": the number '1e300' is beyond float",
        "column \"b\": the number '1e400' is beyond double",
    ]


def test_json_elements_that_do_not_fit(skipping: Any, tmp_path: Path) -> None:
    text = '[{"a":1},\n{"a":"x"}, 3,, {"a":4}},\n{"a" 5},{"a":6}]'
    assert [row["a"] for row in skipping.rows(opened("json", tmp_path / "f.json", text))] == [1, 6]
    places = [where.rpartition("f.json:")[2] for where, _, _ in skipping.bad]
    # A blank one is malformed as well.
    assert places == [
        f"{line} (element {n})" for line, n in ((2, 1), (2, 2), (2, 3), (2, 4), (3, 5))
    ]


@pytest.mark.parametrize(
    ("text", "rows", "reason"),
    [
        ('[{"a":1},{"a":2}', [1, 2], "the array is not closed"),
        ('[{"a":1},', [1], "the array is not closed"),
        ('[{"a":1},{"a":', [1], "malformed JSON"),
        ('[{"a":1},{"a":"', [1], "malformed JSON"),
        ('[{"a":1}] x', [1], "text behind the end of the array"),
        ("[]", [], ""),
        (" [ ] \n", [], ""),
        ('[{"a":1},]', [1], ""),
        ("", [], ""),
        (" \n", [], ""),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_ends_of_arrays(
    skipping: Any, tmp_path: Path, text: str, rows: list[int], reason: str
) -> None:
    found = skipping.rows(opened("json", tmp_path / "f.json", text))
    assert [row["a"] for row in found] == rows
    assert len(skipping.bad) == (1 if reason else 0)
    assert reason in "".join(reasons(skipping))


def test_text_far_behind_an_array(skipping: Any, tmp_path: Path, small_blocks: None) -> None:
    text = '[{"a":1}]' + " " * 1000 + "x"
    assert len(skipping.rows(opened("json", tmp_path / "f.json", text))) == 1
    assert reasons(skipping) == ["text behind the end of the array"]


@pytest.mark.parametrize(
    ("format", "text"), [("csv", "a,b\n1,x\nq,y\n3,z\n"), ("json", '{"a":1}\n{"a":"q"}\n')]
)
def test_fail_raises_at_the_first_bad_row(
    harness: Any, tmp_path: Path, format: str, text: str
) -> None:
    with pytest.raises(BadRecord, match=r"data:\d: column \"a\""):
        harness.rows(opened(format, tmp_path / "data", text))
    assert len(harness.bad) == 1


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bad=st.sets(st.integers(0, 59), max_size=25),
    stop=st.integers(0, 60),
    max_rows=st.integers(1, 9),
    format=st.sampled_from(["csv", "json", "array"]),
)
@pytest.mark.usefixtures("small_blocks")
def test_resuming_neither_loses_nor_repeats_rows_or_reports(
    skipping: Any, tmp_path: Path, bad: set[int], stop: int, max_rows: int, format: str
) -> None:
    if format == "csv":
        lines = ["a,b", *(f"{i},x" if i not in bad else f"{i},x,x" for i in range(60))]
        text = "\n".join(lines)
    else:
        rows = [f'{{"a":{i},"b":"x"}}' if i not in bad else f'{{"a":"{i}"}}' for i in range(60)]
        text = "\n".join(rows) if format == "json" else "[" + ",".join(rows) + "]"
    name = "csv" if format == "csv" else "json"
    skipping.bad.clear()
    source = skipping.start(*opened(name, tmp_path / "f", text))
    (split,) = skipping.discover(source)
    first, position = skipping.read_split(source, split, max_rows, stop_after=stop)
    rest, _ = skipping.read_split(source, split, max_rows, position=position)
    values = [value for batch in first + rest for value in batch.column("a").to_pylist()]
    assert values == [i for i in range(60) if i not in bad]
    assert len(skipping.bad) == len(bad)
    assert sorted(
        int("".join(c for c in text.split(",")[0] if c.isdigit())) for _, text, _ in skipping.bad
    ) == sorted(bad)


PIECES = {
    "csv": [
        *("1,x\n", '2,"a\nb"\n', '3,"c""d"\n', "4,x\r\n", '5,"a\r\nb"\r\n', ",\n", "\n", " \n"),
        *(
            '6,x"y\n',
            '7,"z"w\n',
            '"8",e\n',
            '9,"\n',
            '10,"""\n',
            '11,"open\n',
            '"\n',
            '""\n',
            '12, "s"\n',
        ),
        *("13\n", "14,a,b\n", "x,y\n", "15,\xff\n", "16,r\r17,s\n"),
    ],
    "lines": [
        *('{"a":1,"b":"x"}\n', '{"a":2}\r\n', ' {"a":3} \n', '{"b":"\\""}\n', "\n", " \n", "\r\n"),
        *(
            '{"a":4}{"a":5}\n',
            '{"a":6},\n',
            '{"a":7,"a":7}\n',
            '{"b":"x\n',
            'y"}\n',
            "}\n",
            "{\n",
            '"}\n',
        ),
        *("[4]\n", "null\n", '{"a":"x"}\n', '{"b":"\xff"}\n', '{"a":2,"b":\n'),
    ],
    "array": [
        *(
            '{"a":1,"b":"x"}',
            '\n {"a":2}\n',
            '{"a":\n3}',
            '{"b":"\\""}',
            '{"b":"]"}',
            '{"b":"a,b"}',
        ),
        *("", " ", "\n", '{"a":4}{"a":5}', '{"a":6}\n{"a":7}', '{"a":8,"a":8}', '{"b":"x', 'y"}'),
        *("}", "{", '"', "\\", "[4]", "null", '{"a":"x"}', '{"b":"\xff"}', '{"a":2,"b":', "]"),
    ],
}


@st.composite
def texts(draw: Any) -> tuple[str, str]:
    """A format, and text in it most rows of which are malformed."""
    format = draw(st.sampled_from(["csv", "lines", "array", "array"]))
    pieces = draw(st.lists(st.sampled_from(PIECES[format]), min_size=1, max_size=7))
    if format == "array":
        end = draw(st.sampled_from(["]", "]\n", "] x", "", " ", ",]"]))
        return "json", "[" + ",".join(pieces) + end
    text = "".join(pieces)[: draw(st.sampled_from([None, -1]))]
    return ("csv", "a,b\n" + text) if format == "csv" else ("json", '{"a":0}\n' + text)


@examples(200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=texts(), sizes=st.sampled_from([(1 << 20, 16), (32, 16), (16, 8), (4, 2)]))
@example(written=("json", '[{"a":4}{"a":5},,{"a":6}]'), sizes=(1 << 20, 16))
@example(written=("json", '[{"a":1},\n,"}'), sizes=(4, 2))
@example(written=("json", '[{"b":"y"},{"a":4}{"a":5}, '), sizes=(1 << 20, 16))
def test_what_is_read_does_not_depend_on_where_blocks_are_cut(
    tmp_path: Path, written: tuple[str, str], sizes: tuple[int, int]
) -> None:
    format, text = written
    spec = opened(format, tmp_path / "f", text.encode("latin-1"))
    found = []
    for block, salvage in [(1 << 20, 64 << 10), sizes]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(text_blocks, "BLOCK_BYTES", block)
            patch.setattr(text_blocks, "SALVAGE_BYTES", salvage)
            harness = SourceHarness(skip_bad=True)
            found.append((harness.rows(spec), harness.bad))
    assert found[0] == found[1]


def test_a_block_without_a_good_row_does_not_block(
    skipping: Any, tmp_path: Path, small_blocks: None
) -> None:
    text = "\n".join('{"a":"x"}' for _ in range(100)) + '\n{"a":1}'
    source = skipping.start(*opened("json", tmp_path / "f", text))
    (split,) = skipping.discover(source)
    reader = source.open(split, None)
    assert reader.read(10) is None
    assert reader.next_read_at_ms() == 0
    assert 0 < len(skipping.bad) < 100
    reader.close()
    assert skipping.read_split(source, split)[0][0].num_rows == 1


def test_rows_that_are_too_long(skipping: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 64)
    monkeypatch.setattr(text_blocks, "ROW_BYTES_MAX", 256)
    for format, text in (
        ("json", '{"a":1}\n{"b":"' + "x" * 2000 + '"}\n'),
        ("json", '[{"a":1},{"b":"' + "x" * 2000 + '"}]'),
        ("csv", "a,b\n1," + "x" * 2000 + "\n"),
    ):
        with pytest.raises(TaskFailure, match="a row is longer than 256 bytes"):
            skipping.rows(opened(format, tmp_path / "f", text))


def test_an_open_quote_in_a_long_file_costs_one_line(
    skipping: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 64)
    monkeypatch.setattr(text_blocks, "SALVAGE_BYTES", 32)
    monkeypatch.setattr(text_blocks, "ROW_BYTES_MAX", 256)
    lines = ["a,b", '0,"open', *(f"{i},x" for i in range(1, 300))]
    rows = skipping.rows(opened("csv", tmp_path / "f", "\n".join(lines)))
    assert [row["a"] for row in rows] == list(range(1, 300))
    assert len(skipping.bad) == 1


# ---------------------------------------------------------------- shapes that have no rows


GEOJSON = json.dumps({"type": "FeatureCollection", "features": [{"type": "Feature"}]})
EARTHQUAKES = Path(__file__).parents[4] / "shared" / "data" / "earthquakes.json"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GEOJSON, "GeoJSON FeatureCollection"),
        ('{\n "a": 1\n}\n', "its first object goes over several lines"),
        ("a,b\n1,2\n", "it starts with 'a,b"),
        ("\x1f\x8b\x08", "it starts with"),
    ],
)
def test_json_of_another_shape(harness: Any, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(JobRejected, match=words) as rejected:
        file_source("json", path)
    assert str(path) in str(rejected.value)
    with pytest.raises(TaskFailure, match=words):
        harness.rows(file_source("json", path, schema=SCHEMA))


@pytest.mark.skipif(not EARTHQUAKES.exists(), reason="no earthquakes data on this machine")
def test_earthquakes_are_no_array() -> None:
    with pytest.raises(JobRejected, match=r"jq -c '.features\[\]'"):
        file_source("json", EARTHQUAKES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,a\n1,2\n", 'names the column "a" twice'),
        ("a,,b\n1,2,3\n", "a column without a name"),
        ("a,b\r1,2\r3,4\r", "its lines end in carriage returns alone"),
    ],
)
def test_csv_headers_that_do_not_name_columns(
    harness: Any, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "f.csv").write_bytes(text.encode())
    with pytest.raises(JobRejected, match=words):
        file_source("csv", tmp_path / "f.csv")
    with pytest.raises(TaskFailure, match=words):
        harness.rows(file_source("csv", tmp_path / "f.csv", schema=SCHEMA))
