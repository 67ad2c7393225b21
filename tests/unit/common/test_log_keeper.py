"""Logs stay within a size while they are being written to.

Method: writers that append, as daemons, slots and attempts do; a look at the directory after each burst.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common import log_keeper
from common.log_keeper import LogKeeper

SIZE_MAX = 400_000


def keeper(directory: Path, open_names: set[str]) -> LogKeeper:
    return LogKeeper(lambda: directory.rglob("*.log*"), SIZE_MAX, lambda p: p.name in open_names)


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_a_log_is_cut_under_its_writer_and_keeps_its_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    logs = keeper(tmp_path, {"a.log"})
    with path.open("a", buffering=1) as writer:
        for number in range(20_000):
            writer.write(f"line {number} {'x' * 40}\n")
            if number % 500 == 499:
                logs.look()
                assert size_of(tmp_path) <= SIZE_MAX
        text = (tmp_path / "a.log.1").read_text() + path.read_text()
        assert text.endswith(f"line 19999 {'x' * 40}\n")
        lines = [int(line.split()[1]) for line in text.splitlines()[1:]]
        assert lines == list(range(lines[0], 20_000)), "no hole where nobody wrote in between"


def test_the_oldest_logs_go_first_and_those_in_use_stay(tmp_path: Path) -> None:
    for number in range(20):
        job = tmp_path / f"job{number}"
        job.mkdir()
        path = job / "v0-0-0.log" if number else job / "open.log"
        path.write_bytes(bytes(40_000))
        os.utime(path, (number, number))
    keeper(tmp_path, {"open.log"}).look()
    assert size_of(tmp_path) <= SIZE_MAX
    left = sorted(int(path.name.removeprefix("job")) for path in tmp_path.iterdir())
    assert left == [0, *range(left[1], 20)]
    assert (tmp_path / "job0" / "open.log").stat().st_size == 0


def test_there_are_never_more_than_can_be_looked_at_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_keeper, "FILES_MAX", 10)
    for number in range(30):
        path = tmp_path / f"{number}.log"
        path.write_text("one line\n")
        os.utime(path, (number, number))
    keeper(tmp_path, {"0.log"}).look()
    left = sorted(int(path.stem) for path in tmp_path.iterdir())
    assert left == [0, *range(20, 30)], "the newest, and the one in use"
    assert (tmp_path / "0.log").stat().st_size == 0
