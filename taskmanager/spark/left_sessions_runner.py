"""Ends what slots that were killed have left on servers of Spark Connect: the TaskManager outlives them.

Each session is ended by a process of its own, which has a deadline. It may outlive the TaskManager that is told to end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import structlog

from taskmanager.processes.exit_cause import describe_status
from taskmanager.spark.connect_address import INTERRUPT_S
from taskmanager.spark.session_note_store import SLOTS, noted_session

_log = structlog.get_logger()


class LeftSessions:
    """Starts the processes, and says what has become of them.

    Args:
        environment: of the processes; None = as this one has it.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(os.environ if environment is None else environment)
        self._pids: set[int] = set()

    @property
    def pids(self) -> frozenset[int]:
        """Of the processes that are under way; any thread may ask."""
        return frozenset(self._pids)

    def end_of(self, slot: Path) -> None:
        """Ends the session that a slot has left, if any; it takes no longer than the start of a process.

        Args:
            slot: its work directory; there is no process of it any more.
        """
        if not (address := noted_session(slot)):
            return
        try:
            process = start_interrupt(address, self._environment, log=None)
        except OSError as error:
            _log.warning("spark.session_left", slot=slot.name, reason=str(error))
            return
        self._pids.add(process.pid)
        threading.Thread(
            target=self._wait, args=(process, slot.name), name="spark-session-end", daemon=True
        ).start()

    def end_of_taskmanager(self, work: Path) -> None:
        """The same for all slots of a TaskManager that has ended."""
        for slot in sorted((work / SLOTS).glob("*")):
            self.end_of(slot)

    def _wait(self, process: subprocess.Popen[bytes], slot: str) -> None:
        status = end_of_interrupt(process)
        self._pids.discard(process.pid)
        if status:
            _log.warning("spark.session_left", slot=slot, reason=describe_status(status))
        else:
            _log.info("spark.session_ended", slot=slot)


def start_interrupt(
    address: str, environment: Mapping[str, str], log: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """Starts the process that ends what a session has under way on its server.

    Args:
        address: that leads to the session.
        log: takes what it prints; None = as this process has it.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "taskmanager.spark.interrupt_process"],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=dict(environment),
        start_new_session=True,
    )
    assert process.stdin is not None, "it was asked for"
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(address.encode())
    return process


def end_of_interrupt(process: subprocess.Popen[bytes]) -> int:
    """Waits for it, at most as long as it may take; its exit status."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(INTERRUPT_S)
    process.kill()
    return process.wait()
