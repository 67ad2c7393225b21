"""Aim: signals interrupt the wait for shielded work, and neither the work is torn nor a signal lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from types import FrameType

import pytest

from penstock.client.shielded import shielded


class RungError(Exception):
    """What the handlers of these tests raise."""


def ring(number: int, _: FrameType | None) -> None:
    raise RungError(number)


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal whose handler raises ``RungError``."""
    before = signal.signal(request.param, ring)
    yield request.param
    assert signal.signal(request.param, before) is ring


def test_who_waits_gets_the_result() -> None:
    assert shielded(lambda: 7) == 7


def test_who_waits_gets_the_error() -> None:
    with pytest.raises(ZeroDivisionError):
        shielded(lambda: 1 / 0)


def test_other_threads_do_it_themselves() -> None:
    found: list[tuple[int, int]] = []

    def work() -> None:
        found.append((shielded(threading.get_ident), threading.get_ident()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0][0] == found[0][1]
    assert shielded(threading.get_ident) != threading.get_ident()


def test_a_signal_ends_the_wait_and_not_the_work(number: int) -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    def work() -> None:
        os.kill(os.getpid(), number)
        assert may_end.wait(10)
        has_ended.set()

    with pytest.raises(RungError):
        shielded(work)
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(10)


def test_a_handler_that_does_not_raise_is_called_while_the_wait_goes_on() -> None:
    called = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: called.set())
    try:

        def work() -> str:
            os.kill(os.getpid(), signal.SIGINT)
            assert called.wait(10)
            return "done"

        assert shielded(work) == "done"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        shielded(lambda: os.kill(os.getpid(), signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("seed", range(4))
def test_no_signal_is_lost_wherever_it_comes(number: int, seed: int) -> None:
    chance = random.Random(seed)
    delays: SimpleQueue[float | None] = SimpleQueue()

    def send() -> None:
        while (delay_s := delays.get()) is not None:
            time.sleep(delay_s)
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    for _ in range(100):
        with pytest.raises(RungError):
            work_for_ever(delays, chance.random() * 0.002)
    delays.put(None)
    sender.join()
    for thread in threading.enumerate():
        if thread.name == "shielded":
            thread.join(10)
            assert not thread.is_alive()


def work_for_ever(delays: SimpleQueue[float | None], delay_s: float) -> None:
    delays.put(delay_s)
    while True:
        shielded(int)
