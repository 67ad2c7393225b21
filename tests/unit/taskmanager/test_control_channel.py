"""Aim: a slot whose line to its daemon can be used no longer ends, and does not run on deaf."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from taskmanager.processes.control_channel import ControlChannel
from tests.support.jobs import DEADLINE_S


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_command_that_cannot_be_read_ends_the_line() -> None:
    is_closed = threading.Event()
    daemon, slot = socket.socketpair()
    with daemon, slot:
        channel = ControlChannel(slot, lambda _command: None, is_closed.set)
        channel.start()
        nothing = b"\xff" * 8  # no message of ours
        daemon.sendall(struct.pack("<I", len(nothing)) + nothing)
        assert is_closed.wait(DEADLINE_S)
        channel.close(DEADLINE_S)
