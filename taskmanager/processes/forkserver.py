"""The forkserver: a process with everything imported, from which slot processes are forked, and the
partition server and the gateway.

Started by the daemon as ``python -P -m taskmanager.processes.forkserver``. Invariants: it has exactly
one thread at each fork (threads do not survive a fork, the locks they hold do), it never opens a
gRPC channel, and it ends when the daemon does: noticed by the end of the socket, and by the
parent-death signal. Before it goes it ends what it has forked, and all that that has started.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from taskmanager.processes.fork_child import EntryPoint, run_child
from taskmanager.processes.fork_protocol import (
    DESCRIPTORS_MAX,
    MESSAGE_SIZE_MAX_BYTES,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    Kill,
    ProcessKind,
    Ready,
    Report,
    decode,
    encode,
)
from taskmanager.processes.orphans_runner import end_children, kill_children

_END_TIMEOUT_S = 1.0
"""How long ending what it has forked may take."""

PRELOADED_MODULES = (
    "pyarrow",
    "pyarrow.compute",
    "pyarrow.csv",
    "pyarrow.dataset",
    "pyarrow.json",
    "pyarrow.parquet",
    "numpy",
    "numba",
    "cloudpickle",
    "penstock.api",
    "taskmanager.operators.factory",
    "taskmanager.network.gateway_process",
    "taskmanager.partitions.server_process",
)
"""Imported once here, so that no forked process has to."""


class Forkserver:
    """The loop: fork on request, report what ended.

    Args:
        control: the daemon's end of the world, a ``SOCK_SEQPACKET`` socket.
        entries: ``ProcessKind`` -> what such a process runs.
    """

    def __init__(self, control: socket.socket, entries: Mapping[str, EntryPoint]) -> None:
        self._control = control
        self._entries = entries
        self._children: set[int] = set()

    def serve(self, import_ms: int) -> None:
        """Serves until the daemon closes the socket, or ends; then nothing that was forked lives."""
        from common.process import adopt_orphans, die_with_parent

        adopt_orphans()
        daemon_pid = os.getppid()
        # From here on it must not die at once: what slots have started would outlive it.
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        die_with_parent(daemon_pid, signal.SIGTERM)
        try:
            self._report(Ready(import_ms))
            self._serve(wakeup_read, daemon_pid)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the daemon has gone while it was told something
        finally:
            if not end_children(_END_TIMEOUT_S):
                print("forkserver: a process could not be ended", file=sys.stderr)  # noqa: T201

    def _serve(self, wakeup_read: int, daemon_pid: int) -> None:
        while os.getppid() == daemon_pid:
            readable, _, _ = select.select([self._control.fileno(), wakeup_read], [], [])
            if wakeup_read in readable:
                os.read(wakeup_read, 4096)
            self._reap()
            if self._control.fileno() in readable and not self._serve_one():
                return

    def _serve_one(self) -> bool:
        """Serves one request; False when the daemon has gone."""
        datagram, descriptors, _flags, _address = socket.recv_fds(
            self._control, MESSAGE_SIZE_MAX_BYTES, DESCRIPTORS_MAX
        )
        if not datagram:
            return False
        try:
            match decode(datagram):
                case Fork() as request:
                    self._report(self._fork(request, descriptors))
                case Kill(pid) if pid in self._children:
                    # A child that was not waited for keeps its pid: nobody else can be hit.
                    os.kill(pid, signal.SIGKILL)
                case _:
                    pass  # the process to kill has ended already, and that is on its way
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _fork(self, request: Fork, descriptors: Sequence[int]) -> Report:
        if request.preload and request.preload not in sys.modules:
            try:
                importlib.import_module(request.preload)
            except ImportError as error:
                return ForkFailed(request.request_id, f"{request.preload}: {error}")
            gc.freeze()
        threads = thread_count()
        if threads != 1:
            return ForkFailed(
                request.request_id,
                f"the forkserver has {threads} threads, and only a process with one can be forked "
                "safely: a library started threads when it was imported (a sitecustomize, or "
                "OMP_NUM_THREADS and the like changed?)",
            )
        sys.stdout.flush()
        sys.stderr.flush()
        forkserver_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            return ForkFailed(request.request_id, f"fork: {error}")
        if pid == 0:
            run_child(self._entries[request.process], descriptors, forkserver_pid)
        self._children.add(pid)
        return Forked(request.request_id, pid)

    def _reap(self) -> None:
        ended = []
        while (pid := _ended_child()) is not None:
            # What user code has started ends with the slot. Its group before its pid is given back, as
            # nobody else can have a group of that number; below, what has left the group.
            if pid in self._children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            ended.append(Exited(pid, os.waitstatus_to_exitcode(status)))
        if not ended:
            return
        forked = [one for one in ended if one.pid in self._children]
        self._children.difference_update(one.pid for one in forked)
        kill_children(self._children)
        for report in forked:
            self._report(report)

    def _report(self, report: Report) -> None:
        self._control.sendall(encode(report))


def _ended_child() -> int | None:
    """A child that has ended and was not waited for."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def thread_count() -> int:
    """Threads of this process, as the kernel counts them."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _load(name: str) -> Any:
    """The object behind ``module:attribute``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def main(argv: Sequence[str] | None = None) -> int:
    """Imports, warms up, serves.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -P -m taskmanager.processes.forkserver")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--entry", default="taskmanager.task.slot_process:run")
    parser.add_argument("--partition-server", default="taskmanager.partitions.server_process:run")
    parser.add_argument("--gateway", default="taskmanager.network.gateway_process:run")
    parser.add_argument("--warm-up", default="taskmanager.kernels:warm_up")
    parser.add_argument("--preload", default=",".join(PRELOADED_MODULES))
    arguments = parser.parse_args(argv)

    # No collection looks at what is imported: none of it is garbage, here and in what is forked.
    gc.disable()
    from common.process import die_with_parent

    die_with_parent(arguments.parent_pid)
    # A terminal's Ctrl-C and a SIGTERM to the process group are the daemon's to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started_ns = time.monotonic_ns()
    for module in filter(None, arguments.preload.split(",")):
        importlib.import_module(module)

    # Where they were not imported above, their own processes do that.
    def serve_partitions(control: socket.socket) -> None:
        _load(arguments.partition_server)(control)

    def serve_as_gateway(control: socket.socket) -> None:
        _load(arguments.gateway)(control)

    entries: dict[str, EntryPoint] = {
        ProcessKind.SLOT: _load(arguments.entry),
        ProcessKind.PARTITION_SERVER: serve_partitions,
        ProcessKind.GATEWAY: serve_as_gateway,
    }
    if arguments.warm_up:
        warm_up: Callable[[], object] = _load(arguments.warm_up)
        warm_up()
    gc.freeze()
    import_ms = (time.monotonic_ns() - started_ns) // 1_000_000
    with socket.socket(fileno=arguments.control_fd) as control:
        Forkserver(control, entries).serve(import_ms)
    return 0


if __name__ == "__main__":
    sys.exit(main())
