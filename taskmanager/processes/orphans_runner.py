"""What user code has started and left behind: it is found wherever it has gone, and ended.

A process that leaves its session, or whose parent ends, is still a descendant: the kernel hands it to the
nearest ancestor that asked for that (``common.process.adopt_orphans``). A slot asks, so that as long as it lives all
that it started hangs below it; the forkserver asks, so that it gets what a slot leaves, and only that.
Invariant: a child of the forkserver that it has not forked belonged to a slot that has ended. So no slot
that lives can lose anything to the end of another.

A process of another user (one that ran ``sudo``) cannot be ended; it is left alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

_PARENT: Final = 1
"""Place in ``/proc/<pid>/stat`` behind the name of the program."""


def children() -> Iterator[int]:
    """The children of this process, ended ones that were not waited for included."""
    own = str(os.getpid())
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            text = Path(entry.path, "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text.rpartition(")")[2].split()[_PARENT] == own:
            yield int(entry.name)


def kill_children(kept: Collection[int] = ()) -> set[int]:
    """Sends SIGKILL to the children of this process; only its one thread that waits for them may call it.

    Args:
        kept: those that are left alone.

    Returns:
        Those that end now, and are to be waited for: what they have started comes here then.
    """
    ending = set()
    for pid in children():
        if pid not in kept:
            # A child that was not waited for keeps its pid: nobody else can be hit.
            with contextlib.suppress(PermissionError):
                os.kill(pid, signal.SIGKILL)
                ending.add(pid)
    return ending


def end_children(timeout_s: float, kept: Collection[int] = ()) -> bool:
    """Ends the children of this process, with all that comes here when they have ended.

    Args:
        kept: those that are left alone.

    Returns:
        Whether nothing is left that can be ended: one that hangs in the kernel takes longer.
    """
    deadline = time.monotonic() + timeout_s
    while ending := kill_children(kept):
        if not _wait(ending, deadline):
            return False
    return True


def _wait(ending: Collection[int], deadline: float) -> bool:
    for pid in ending:
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        finally:
            os.close(descriptor)
        os.waitpid(pid, 0)
    return True
