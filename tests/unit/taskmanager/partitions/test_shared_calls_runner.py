"""Aim: a call to shared storage that fails in a way that nobody has thought of is told, and is no call that hangs.

Method: threads and mail are lists, run by hand.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from taskmanager.partitions.shared_calls_runner import AT_ONCE_MAX, SharedCallsRunner


def test_what_a_call_raises_is_raised_where_mail_is_read_and_the_next_one_has_its_turn() -> None:
    mail: list[Callable[[], None]] = []
    threads: list[Callable[[], None]] = []
    runner = SharedCallsRunner(mail.append, 1_000, lambda: 0, threads.append)

    def fail() -> Callable[[], None]:
        raise KeyError("unthought of")

    for _ in range(AT_ONCE_MAX + 1):
        runner.call(fail, lambda _: pytest.fail("it has answered"))
    for thread in list(threads):
        thread()
    for told in list(mail):
        with pytest.raises(KeyError, match="unthought of"):
            told()
    assert len(threads) == AT_ONCE_MAX + 1
