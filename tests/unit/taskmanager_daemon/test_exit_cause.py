"""Aim: the end of a slot process is told so that the user knows where to look.

Method: statuses and logs as they are left behind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from taskmanager.processes.exit_cause import likely_cause, log_tail


@pytest.mark.parametrize(
    ("status", "is_told", "hint"),
    [
        (3, False, "os._exit"),
        (1, True, ""),  # its log says why
        (0, False, ""),
        (-9, True, "memory ran out"),
        (-11, True, "native code"),
        (-15, False, ""),
        (None, False, ""),  # the forkserver took it along
    ],
)
def test_what_most_often_ends_a_process_like_this(
    status: int | None, is_told: bool, hint: str
) -> None:
    told = likely_cause(status, is_told=is_told)
    assert hint in told
    assert (told == "") == (hint == "")


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "slot.log"
    assert log_tail(log) == ""
    log.write_text("".join(f"line {number}\n" for number in range(5000)))
    assert log_tail(log).splitlines() == [f"line {number}" for number in range(4980, 5000)]


def test_of_a_crash_the_innermost_calls(tmp_path: Path) -> None:
    log = tmp_path / "slot.log"
    frames = "".join(f'  File "job.py", line {line} in call_{line}\n' for line in range(50))
    log.write_text(
        "before\nFatal Python error: Segmentation fault\n\n"
        f"Current thread 0x1 (most recent call first):\n{frames}"
        f"\nExtension modules: {', '.join(f'module_{number}' for number in range(40))}\n"
    )
    lines = log_tail(log).splitlines()
    assert lines[0] == "Fatal Python error: Segmentation fault"
    assert "call_0" in lines[3]
    assert len(lines) == 10
