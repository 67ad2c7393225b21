"""Aim: who waits for mail wakes when the time is over, however short that is."""

from __future__ import annotations

import threading

from taskmanager.processes.mailbox import Mailbox
from tests.support.jobs import DEADLINE_S

WAITS = 30_000


def test_a_wait_ends_with_its_time_where_mail_has_come_and_gone() -> None:
    """The first wait of a mailbox is as one behind mail that has come and gone; most are over before they begin."""

    def wait() -> None:
        for _ in range(WAITS):
            assert Mailbox().wait(1e-9) is None
        ended.set()

    ended = threading.Event()
    threading.Thread(target=wait, daemon=True).start()
    assert ended.wait(DEADLINE_S)


def test_mail_is_taken_in_its_order_by_who_waits_and_who_looks() -> None:
    mailbox, done = Mailbox(), list[int]()
    assert mailbox.take() is None
    for number in range(4):
        mailbox.post(lambda number=number: done.append(number))  # type: ignore[misc]
    for taken in (mailbox.wait(0), mailbox.take(), mailbox.wait(1), mailbox.wait(0)):
        assert taken is not None
        taken()
    assert done == [0, 1, 2, 3]
    assert mailbox.wait(0.001) is None
