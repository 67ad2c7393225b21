"""What a slot process does between its fork and its entry point.

It keeps three or four descriptors (null, its log as stdout and stderr, the control socket, the
terminal) and closes all others, so that no slot holds another's sockets open; it leads a process
group of its own and keeps the orphans of what it starts, all of which the forkserver ends with it; it dies
with the forkserver; it never returns into the forkserver's loop.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

TERMINAL_VARIABLE = "PENSTOCK_TERMINAL_FD"
"""In a slot process: number of the descriptor that print sinks write to besides their log."""

_SWITCH_INTERVAL_S = 0.0005
_GC_THRESHOLD = (100_000, 50, 100)

EntryPoint = Callable[[socket.socket], None]


def run_child(entry: EntryPoint, descriptors: Sequence[int], forkserver_pid: int) -> NoReturn:
    """Turns the freshly forked process into a slot process and runs its entry point.

    Args:
        entry: runs the slot until its control socket ends.
        descriptors: control socket, log file and, optionally, the terminal.
        forkserver_pid: the process that must still be the parent.
    """
    status = 1
    try:
        _become_slot(descriptors, forkserver_pid)
        with socket.socket(fileno=descriptors[0]) as control:
            entry(control)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - the end of the process: its log says why
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # No exit handlers: they belong to the forkserver.
            os._exit(status)


def _become_slot(descriptors: Sequence[int], forkserver_pid: int) -> None:
    # Imported by the forkserver already.
    from common.process import adopt_orphans, die_with_parent

    die_with_parent(forkserver_pid)
    # What user code starts belongs to the slot, and ends with it: also what leaves its group.
    os.setpgid(0, 0)
    adopt_orphans()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # Ctrl-C reaches every process of a terminal; what becomes of a slot is the daemon's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    control, log, *terminal = descriptors
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _close_all_but({0, 1, 2, control, *terminal})
    # A crash in native code: the Python stack goes to the log, whose end the user is shown.
    faulthandler.enable(file=2, all_threads=False)
    # Line by line, so that a crash loses nothing that was printed.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if terminal:
        os.environ[TERMINAL_VARIABLE] = str(terminal[0])
    else:
        os.environ.pop(TERMINAL_VARIABLE, None)

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.set_threshold(*_GC_THRESHOLD)
    gc.enable()
    if "numpy" in sys.modules:
        # Every slot would draw the same numbers: unlike random's, numpy's state is copied by a fork.
        sys.modules["numpy"].random.seed()


def _close_all_but(kept: set[int]) -> None:
    for descriptor in sorted(int(name) for name in os.listdir("/proc/self/fd")):  # noqa: PTH208
        if descriptor not in kept:
            try:
                os.close(descriptor)
            except OSError as error:
                # The listing held its own descriptor, closed by now.
                if error.errno != 9:
                    raise
