"""What others have named does nothing to the terminal of who lists it."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.context import echo, print_table
from penstock.client.progress import ProgressDisplay
from penstock.pb import client_pb2
from penstock.printable import in_one_line, printable

HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]\u202egnp.exe\x9b1mname\r\x08"


@given(st.text())
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    assert all(char.isprintable() or char in "\n\t " or char.isspace() for char in printable(text))
    assert "\x1b" not in printable(text)
    assert "\n" not in in_one_line(text)
    if text.isprintable():
        assert printable(text) == text


def assert_harmless(text: str) -> None:
    for char in ("\x1b", "\x07", "\x9b", "\u202e", "\r", "\x08"):
        assert char not in text
    assert "[red]" in text, "nor is it markup"
    assert "\\x1b[2J" in text


def test_lines_and_tables_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    echo(HOSTILE)
    print_table(["name"], [[HOSTILE], ["two\nlines"]])
    text = capsys.readouterr().out
    assert_harmless(text)
    assert "two\\nlines" in text


def test_progress() -> None:
    stream = io.StringIO()
    details = client_pb2.JobDetails(summary=client_pb2.JobSummary(name=HOSTILE))
    with ProgressDisplay(stream) as display:
        display(details)
    assert_harmless(stream.getvalue())
