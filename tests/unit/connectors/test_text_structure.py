"""Aim: rows of CSV and elements of JSON arrays are found as a character-by-character reader finds them."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.connectors.csv_structure import last_row_end, row_ends
from penstock.connectors.json_structure import elements_as_lines, scan_array

CELLS = st.text(alphabet='ab",\n\r é', max_size=6)


@given(st.lists(st.lists(CELLS, min_size=2, max_size=3), max_size=6), st.integers(0, 200))
def test_csv_rows_end_where_the_writer_ended_them(rows: list[list[str]], cut: int) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    ends = []
    for row in rows:
        writer.writerow(row)
        ends.append(len(buffer.getvalue().encode()))
    text = buffer.getvalue().encode()
    assert row_ends(text).tolist() == ends
    prefix = text[:cut]
    assert row_ends(prefix).tolist() == [end for end in ends if end <= len(prefix)]


def _oracle(text: bytes) -> list[int]:
    """Row ends by the grammar, one character at a time."""
    ends, quoted, at_start, index = [], False, True, 0
    while index < len(text):
        character = text[index : index + 1]
        if quoted:
            if character == b'"':
                if text[index + 1 : index + 2] == b'"':
                    index += 1
                else:
                    quoted = False
        elif character == b'"' and at_start:
            quoted = True
        elif character == b"\n":
            ends.append(index + 1)
        at_start = not quoted and character in (b",", b"\r", b"\n")
        index += 1
    return ends


@given(st.text(alphabet='a",\r\n', max_size=30).map(str.encode))
@example(b'5" pipe,b\r"x\ny",z\n')  # a quoted line end in a row behind a lone carriage return
def test_csv_rows_of_any_text_end_as_the_grammar_says(text: bytes) -> None:
    assert row_ends(text).tolist() == _oracle(text)
    assert last_row_end(text) == max(_oracle(text), default=0)


@pytest.mark.parametrize("fields", [1, 63, 64, 65, 200])
def test_the_last_end_before_an_unfinished_row_of_quoted_lines(fields: int) -> None:
    row = b",".join([b'"a\n""b""\n"'] * fields)
    assert last_row_end(b"x,1\n" + row) == 4
    assert last_row_end(b"x,1\n" + row + b"\n" + row) == 5 + len(row)
    assert last_row_end(row) == 0


JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(alphabet='a"\\[]{},é', max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=3), max_size=5), st.booleans())
def test_json_array_elements_are_the_values_json_finds(values: list[object], pretty: bool) -> None:
    text = json.dumps(values, indent=1 if pretty else None, ensure_ascii=False).encode()[1:]
    scan = scan_array(text)
    assert scan.end == len(text) - 1
    spans = scan.elements(len(text))
    found = [text[begin:end] for begin, end in spans]
    assert [json.loads(part) for part in found if part.strip()] == values
    lines = elements_as_lines(text, scan).decode()
    decoder, position, streamed = json.JSONDecoder(), 0, []
    while lines[position:].strip():
        position += len(lines[position:]) - len(lines[position:].lstrip())
        value, position = decoder.raw_decode(lines, position)
        streamed.append(value)
    assert streamed == values


def test_however_many_braces_are_stray_elements_are_told_apart() -> None:
    """Of more than a thousand in one block the whole block was one malformed element."""
    text = b",".join([b'{"a":1}}'] * 1_500) + b"]"
    scan = scan_array(text)
    assert len(scan.commas) == 1_499
    assert scan.end == len(text) - 1


def test_a_stray_brace_stays_in_its_element() -> None:
    text = b'{"a":1}},{"a":2}]'
    scan = scan_array(text)
    assert [text[b:e] for b, e in scan.elements(len(text))] == [b'{"a":1}}', b'{"a":2}']
