"""Calls that hang give their places up, and those that ended attempts have left are bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from threading import Event

import pytest

from taskmanager.processes.hanging_calls_runner import LEFT_MAX, HangingCalls, OwnedCall
from tests.support.jobs import DEADLINE_S


class Site:
    """Threads with two places, and what hangs until the test ends."""

    def __init__(self, hangs_after_s: float) -> None:
        self.told: list[int] = []
        self.never = Event()
        self.calls = HangingCalls(2, "test", self.told.append, hangs_after_s, hangs_after_s)


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    site = Site(request.param)
    yield site
    site.never.set()
    site.calls.shutdown()


@pytest.mark.parametrize("site", [0.05], indirect=True)
def test_what_hangs_holds_up_nobody_else(site: Site) -> None:
    for _ in range(5):
        site.calls.submit(site.never.wait)
    assert site.calls.submit(lambda: 5).result(DEADLINE_S) == 5


@pytest.mark.parametrize("site", [60.0], indirect=True)
def test_what_does_not_hang_yet_keeps_its_place(site: Site) -> None:
    begun = [Event(), Event()]

    def busy(number: int) -> None:
        begun[number].set()
        site.never.wait()

    two = [site.calls.submit(busy, number) for number in range(2)]
    assert all(event.wait(DEADLINE_S) for event in begun)
    third = site.calls.submit(int)
    assert not third.done()
    assert not third.running()
    site.never.set()
    assert third.result(DEADLINE_S) == 0
    assert [future.result(DEADLINE_S) for future in two] == [None, None]


@pytest.mark.parametrize("site", [0.0], indirect=True)
def test_what_ended_attempts_have_left_is_told_of_before_it_is_too_many(site: Site) -> None:
    gone = False
    begun = [Event() for _ in range(LEFT_MAX + 1)]
    for event in begun:
        call = OwnedCall(lambda event=event: (event.set(), site.never.wait()), lambda: gone)
        site.calls.submit(call)
        assert event.wait(DEADLINE_S)
    assert site.told == []
    gone = True
    site.calls.submit(int).result(DEADLINE_S)
    assert site.told == [LEFT_MAX + 1]


@pytest.mark.parametrize("site", [60.0], indirect=True)
def test_closed_threads_give_up_what_has_not_begun(site: Site) -> None:
    two = [site.calls.submit(site.never.wait) for _ in range(2)]
    third = site.calls.submit(int)
    site.calls.shutdown(cancel_futures=True)
    assert third.cancelled()
    with pytest.raises(RuntimeError):
        site.calls.submit(int)
    del two


@pytest.mark.parametrize("site", [60.0], indirect=True)
def test_where_no_thread_can_be_started_later_calls_are_made(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="start new thread"):
            site.calls.submit(int)
    begun = Event()
    first = site.calls.submit(lambda: (begun.set(), site.never.wait()))
    assert begun.wait(DEADLINE_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        second, third = site.calls.submit(int), site.calls.submit(int)
        site.never.set()
        assert [one.result(DEADLINE_S) for one in (second, third)] == [0, 0]
    assert first.done()


@pytest.mark.parametrize("site", [60.0], indirect=True)
def test_an_error_is_its_futures(site: Site) -> None:
    with pytest.raises(ZeroDivisionError):
        site.calls.submit(lambda: 1 // 0).result(DEADLINE_S)
