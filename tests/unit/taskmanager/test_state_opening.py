"""Aim: state is opened off the mailbox, belongs to one thread at a time, and is closed by whoever has it at the end.

Method: the I/O thread and the mailbox are lists of functions that the test runs when it wants to.
"""

from types import SimpleNamespace

import pytest

from penstock.errors import Unrecoverable
from taskmanager.state.memory import ManagedMemory
from taskmanager.task.state_opening import StateOpening


class Story:
    """An opening with one backend."""

    def __init__(self, error: Exception | None = None) -> None:
        self.io, self.mail, self.events = [], [], []
        self.memory = ManagedMemory(100)
        self.opening = StateOpening(self.memory, self.io.append, self.mail.append)
        self._error = error
        self.opening.start(
            self._open_all,
            lambda: self.events.append("open"),
            self.events.append,
        )

    def _open_all(self) -> None:
        self.memory.register("table", lambda: 60)
        self.opening.backends.append(SimpleNamespace(close=lambda: self.events.append("closed")))
        if self._error is not None:
            raise self._error

    def run(self, work: list) -> None:
        while work:
            work.pop(0)()


def test_it_is_open_when_the_mailbox_hears_of_it() -> None:
    story = Story()
    story.run(story.io)
    assert story.events == []
    assert story.memory.used_bytes() == 0
    story.run(story.mail)
    assert story.events == ["open"]
    assert story.memory.used_bytes() == 60
    assert story.opening.close() == []
    assert story.events == ["open", "closed"]


def test_an_attempt_that_ends_before_the_thread_begins_opens_nothing() -> None:
    story = Story()
    assert story.opening.close() == []
    story.run(story.io)
    story.run(story.mail)
    assert story.events == []
    assert story.opening.backends == []


def test_what_is_being_opened_when_the_attempt_ends_is_closed_by_its_thread() -> None:
    story = Story()
    opening = story.opening

    class Backends(list):
        def append(self, backend: object) -> None:
            super().append(backend)
            assert opening.close() == []  # the mailbox, meanwhile
            assert story.events == []

    opening.backends = Backends()
    story.run(story.io)
    story.run(story.mail)
    assert story.events == ["closed"]
    assert story.memory.used_bytes() == 0


def test_an_attempt_that_ends_before_its_mail_comes_closes_what_is_open() -> None:
    story = Story()
    story.run(story.io)
    assert story.opening.close() == []
    story.run(story.mail)
    assert story.events == ["closed"]


def test_what_cannot_be_opened_fails_the_attempt() -> None:
    error = OSError("gone")
    story = Story(error)
    story.run(story.io)
    assert story.events == [error]
    assert story.opening.close() == []
    assert story.events == [error, "closed"]


def test_a_state_that_does_not_fit_fails_while_it_is_opened() -> None:
    memory = ManagedMemory(100)
    memory.register("running", lambda: 70)
    memory.check()
    with memory.apart():
        memory.register("restored", lambda: 40)
        with pytest.raises(Unrecoverable, match="restored"):
            memory.check()
    memory.check()
