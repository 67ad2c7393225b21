"""Aim: an odd entry of an input directory costs nothing but itself, and is called by its name.

Method: directories with links in circles, pipes, sockets, devices and names that are not UTF-8.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.connectors import file_source
from penstock.errors import JobRejected, TaskFailure

SCHEMA = pa.schema([("a", pa.int64())])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "in"
    (directory / "below").mkdir(parents=True)
    (directory / "1.csv").write_text("a\n1\n")
    (directory / "below" / "2.csv").write_text("a\n2\n")
    return directory


@pytest.mark.parametrize(
    "place", ["to itself", "to each other", "up", "to the directory", "far up"]
)
@pytest.mark.parametrize("pattern", ["", "*", "**", "**/*"])
def test_links_in_circles_are_left_out(
    harness: Any, directory: Path, caplog: Any, place: str, pattern: str
) -> None:
    links = {
        "to itself": [("loop", "loop")],
        "to each other": [("loop", "loop2"), ("loop2", "loop")],
        "up": [("below/loop", "..")],
        "to the directory": [("loop", ".")],
        "far up": [("below/loop", "../..")],
    }
    for name, target in links[place]:
        (directory / name).symlink_to(target)
    with caplog.at_level(logging.WARNING):
        opened = file_source("csv", directory / pattern if pattern else directory)
    rows = harness.rows(opened)
    assert sorted(row["a"] for row in rows) == [1, 2]
    if pattern in ("", "*"):
        assert "loop: the link leads round in a circle" in "\n".join(caplog.messages)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("pattern", ["**", "**/*", "**/*.csv", "*/*", "*/loop/*"])
def test_several_links_in_circles_are_no_maze(harness: Any, directory: Path, pattern: str) -> None:
    # Forty levels of three ways each, for who follows them.
    for name in ("x", "y", "z"):
        (directory / name).mkdir()
        (directory / name / "loop").symlink_to("..")
    rows = harness.rows(file_source("csv", directory / pattern)) if "loop" not in pattern else []
    expected = {"*/*": [2], "*/loop/*": []}.get(pattern, [1, 2])
    assert sorted(row["a"] for row in rows) == expected


def test_links_elsewhere_are_followed(harness: Any, directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "3.csv").write_text("a\n3\n")
    (directory / "link").symlink_to(other)
    (directory / "link.csv").symlink_to(other / "3.csv")
    (directory / "gone.csv").symlink_to(other / "gone")
    assert sorted(r["a"] for r in harness.rows(file_source("csv", directory))) == [1, 2, 3, 3]


def make_odd(path: Path, kind: str) -> None:
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(path.parent)
            server.bind(path.name)
    else:
        path.symlink_to("/dev/null")


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device"])
@pytest.mark.parametrize("pattern", ["", "*", "odd"])
def test_what_is_no_file_is_refused_by_name(
    harness: Any, directory: Path, monkeypatch: Any, kind: str, pattern: str
) -> None:
    monkeypatch.chdir(directory)
    path = directory / pattern if pattern else directory
    opened = file_source("csv", directory)
    make_odd(directory / "odd", kind)
    with pytest.raises(JobRejected, match=f"in/odd: is {kind}, not a file; move it away"):
        file_source("csv", path, schema=SCHEMA)
    with pytest.raises(TaskFailure, match=f"in/odd: is {kind}, not a file"):
        harness.discover(harness.start(*opened))


@pytest.mark.parametrize("pattern", ["", "*"])
def test_a_name_that_is_not_utf8_is_refused_by_name(
    harness: Any, directory: Path, pattern: str
) -> None:
    opened = file_source("csv", directory)
    Path(os.fsdecode(os.fsencode(directory) + b"/caf\xe9.csv")).write_text("a\n3\n")
    named = r"caf\\xe9.csv': the name is not valid UTF-8; rename it"
    with pytest.raises(JobRejected, match=named):
        file_source("csv", directory / pattern if pattern else directory)
    with pytest.raises(JobRejected, match=named):
        file_source("csv", os.fsdecode(os.fsencode(directory) + b"/caf\xe9.csv"))
    with pytest.raises(TaskFailure, match=named):
        harness.discover(harness.start(*opened))


@pytest.mark.parametrize("layout", ["lines", "array"])
@pytest.mark.parametrize("kind", ["[", '{"a":'])
def test_json_that_is_nested_too_deep_is_a_bad_record(
    skipping: Any, tmp_path: Path, layout: str, kind: str
) -> None:
    close = "]" if kind == "[" else "}"
    deep = kind * 100_000 + "1" + close * 100_000
    rows = ['{"a":1}', f'{{"a":{deep}}}', '{"a":3}']
    path = tmp_path / "f.json"
    path.write_text("\n".join(rows) if layout == "lines" else f"[{','.join(rows)}]")
    assert skipping.rows(file_source("json", path)) == [{"a": 1}, {"a": 3}]
    ((where, _, error),) = skipping.bad
    assert where.startswith(f"{path}:")
    assert "nested too deep" in error
    path.write_text(rows[1])
    with pytest.raises(JobRejected, match="a value is nested deeper than 250 levels"):
        file_source("json", path)
