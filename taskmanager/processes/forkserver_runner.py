"""The daemon's side of the forkserver: starts it, asks it for processes, starts it again.

Invariants: there is at most one forkserver; the future of every process it forked is resolved
exactly once, with its exit status or with the forkserver's end (they die with it); when ``run``
returns, the forkserver process has been waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.log import get_logger
from common.process import adopts_orphans
from penstock.errors import StreamError, TaskFailure
from taskmanager.processes.exit_cause import ProcessExit, describe_status, log_tail
from taskmanager.processes.fork_protocol import (
    MESSAGE_SIZE_MAX_BYTES,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    Kill,
    ProcessKind,
    Ready,
    Request,
    decode,
    encode,
)
from taskmanager.processes.orphans_runner import end_children
from taskmanager.processes.process_usage import cpu_s

_START_LOOK_S, _START_WORK_MIN_S, _START_WORK_MAX_S = 60.0, 1.0, 60.0
"""How often one that starts is looked at, and how much of a CPU it has had if it is to be waited for: so much since the last
look, and no more than that in all. A busy machine makes it slow; what hangs or runs in circles is never ready."""
_END_TIMEOUT_S = 2.0
_BACKOFF_FIRST_S = 0.2
_BACKOFF_MAX_S = 10.0


@dataclass(slots=True)
class ForkedChild:
    """A forked process; ``exited`` is resolved when it has ended."""

    pid: int
    kind: ProcessKind
    exited: asyncio.Future[ProcessExit]

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.kind} {self.pid}"


@dataclass(frozen=True, slots=True)
class _Request:
    """Somebody waits for a process."""

    kind: ProcessKind
    answer: asyncio.Future[ForkedChild]


@dataclass(slots=True)
class _Generation:
    """One forkserver process and what hangs on it."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    ready: asyncio.Future[int]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    requests: dict[int, _Request] = field(default_factory=dict)
    children: dict[int, ForkedChild] = field(default_factory=dict)
    outgoing: deque[tuple[bytes, tuple[int, ...]]] = field(default_factory=deque)


class ForkserverRunner:
    """Keeps one forkserver running.

    Args:
        environment: environment of the forkserver and of what it forks.
        log_file: takes what the forkserver itself prints.
        arguments: further arguments of ``taskmanager.processes.forkserver``.
        user_umask: its umask, and that of what it forks; -1 = as this process has it.
        kept_children: processes of this one that stay when a forkserver has ended.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        log_file: Path,
        arguments: Sequence[str] = (),
        *,
        user_umask: int = -1,
        kept_children: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._kept_children = kept_children
        self._user_umask = user_umask
        self._environment = dict(environment)
        self._log_file = log_file
        self._arguments = list(arguments)
        self._generation: _Generation | None = None
        self._available = asyncio.Event()
        self._next_request_id = 0
        self._log = get_logger(__name__)
        self.restart_count = 0

    @property
    def pid(self) -> int | None:
        """The forkserver's process id, None while there is none."""
        return None if self._generation is None else self._generation.process.pid

    async def start(self) -> None:
        """Starts the first forkserver and waits until its imports are done.

        Raises:
            StreamError: it ended, or was not ready in time; the message has the end of its log.
        """
        await self._start_generation()

    async def run(self) -> None:
        """Keeps a forkserver running, until cancelled. ``start`` comes first."""
        backoff_s = _BACKOFF_FIRST_S
        try:
            while True:
                generation = self._generation
                if generation is not None:
                    await generation.ended.wait()
                    await self._discard()
                    self.restart_count += 1
                try:
                    await self._start_generation()
                    backoff_s = _BACKOFF_FIRST_S
                except StreamError as error:
                    self._log.error("forkserver.failed", reason=str(error))
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Ends the forkserver, and with it whatever it forked; harmless when there is none."""
        if self._generation is not None:
            await self._discard()

    async def fork(
        self,
        descriptors: Sequence[int],
        kind: ProcessKind = ProcessKind.SLOT,
        *,
        preload: str = "",
    ) -> ForkedChild:
        """Forks a process; waits while a forkserver is being started.

        Args:
            preload: a module that the process will need and that is slow to import; "" = none.
            kind: what it is to be.
            descriptors: control socket, log file[, terminal]; the caller closes its own copies.

        Raises:
            TaskFailure: the process could not be forked.
            asyncio.CancelledError: the process, if there was one, has ended.
        """
        await self._available.wait()
        generation = self._generation
        assert generation is not None
        self._next_request_id += 1
        request_id = self._next_request_id
        answer: asyncio.Future[ForkedChild] = asyncio.get_running_loop().create_future()
        generation.requests[request_id] = _Request(kind, answer)
        # The caller may close its descriptors before the message has left.
        copies = tuple(os.dup(descriptor) for descriptor in descriptors)
        self._send(generation, Fork(request_id, kind, preload), copies)
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            # Nobody is told of the process: it has ended before the caller goes on.
            await asyncio.wait([answer], timeout=_END_TIMEOUT_S)
            if answer.done() and answer.exception() is None:
                await self.end(answer.result())
            raise
        return answer.result()

    async def end(self, child: ForkedChild) -> None:
        """Kills a forked process, unless it has ended, and waits for its end."""
        self.kill(child)
        await asyncio.wait([child.exited], timeout=_END_TIMEOUT_S)

    def kill(self, child: ForkedChild) -> None:
        """Sends SIGKILL to a forked process, unless it has ended."""
        generation = self._generation
        if generation is not None and generation.children.get(child.pid) is child:
            self._send(generation, Kill(child.pid), ())

    # ------------------------------------------------------------ one forkserver process

    async def _start_generation(self) -> None:
        await asyncio.to_thread(self._log_file.parent.mkdir, parents=True, exist_ok=True)
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-P", "-m", "taskmanager.processes.forkserver"]
        command += ["--control-fd", str(theirs.fileno()), "--parent-pid", str(os.getpid())]
        with theirs, self._log_file.open("ab") as log:
            # On the main thread, which lives as long as the daemon: see die_with_parent.
            process = subprocess.Popen(  # noqa: ASYNC220 - returns when exec has happened
                [*command, *self._arguments],
                env=self._environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                umask=self._user_umask,
            )
        self._log.info("forkserver.starting", pid=process.pid)
        generation = _Generation(process, ours, loop.create_future())
        self._generation = generation
        loop.add_reader(ours, self._receive, generation)
        try:
            import_ms = await self._await_ready(generation)
        except BaseException:
            await self._discard()
            raise
        self._log.info("forkserver.started", pid=process.pid, duration_ms=import_ms)
        self._available.set()

    async def _await_ready(self, generation: _Generation) -> int:
        """Returns how many milliseconds its imports took.

        Raises:
            StreamError: it has ended, or will not be ready.
        """
        began_s, worked_s = time.monotonic(), 0.0
        while not generation.ready.done():
            before_s = worked_s
            await asyncio.wait([generation.ready], timeout=_START_LOOK_S)
            worked_s = cpu_s(generation.process.pid)
            is_busy = worked_s - before_s >= _START_WORK_MIN_S and worked_s < _START_WORK_MAX_S
            if not generation.ready.done() and not is_busy:
                raise StreamError(
                    f"the forkserver was not ready within {time.monotonic() - began_s:.0f} s, in which it has worked for "
                    f"{worked_s:.1f} s: an import hangs, or the machine gives it no time; see {self._log_file}"
                )
        return await generation.ready

    async def _discard(self) -> None:
        """Ends the current forkserver process, if it has not, and waits for it."""
        generation = self._generation
        assert generation is not None
        self._available.clear()
        self._generation = None
        loop = asyncio.get_running_loop()
        loop.remove_reader(generation.control)
        loop.remove_writer(generation.control)
        generation.control.close()
        for _, descriptors in generation.outgoing:
            _close(descriptors)
        generation.outgoing.clear()
        try:
            await _wait(generation.process, _END_TIMEOUT_S)
        except BaseException:
            generation.process.kill()
            generation.process.wait()
            raise
        # One that was killed could not do that.
        if adopts_orphans() and not await asyncio.to_thread(
            end_children, _END_TIMEOUT_S, self._kept_children()
        ):
            self._log.error("orphans.left", reason="a process that a slot has left does not end")
        self._resolve(generation)

    def _resolve(self, generation: _Generation) -> None:
        """Tells everybody who waits for this forkserver that it has ended."""
        ending = describe_status(generation.process.returncode)
        reason = f"the forkserver (process {generation.process.pid}) {ending}"
        for request in generation.requests.values():
            _fail(request, reason)
        generation.requests.clear()
        for pid, child in generation.children.items():
            if not child.exited.done():
                ending = f"{child.name} died, because {reason}"
                child.exited.set_result(ProcessExit(pid, None, ending))
        generation.children.clear()

    # ------------------------------------------------------------ messages

    def _send(
        self, generation: _Generation, request: Request, descriptors: tuple[int, ...]
    ) -> None:
        generation.outgoing.append((encode(request), descriptors))
        self._flush(generation)

    def _flush(self, generation: _Generation) -> None:
        loop = asyncio.get_running_loop()
        while generation.outgoing:
            datagram, descriptors = generation.outgoing[0]
            try:
                socket.send_fds(generation.control, [datagram], list(descriptors))
            except BlockingIOError:
                loop.add_writer(generation.control, self._flush, generation)
                return
            except (BrokenPipeError, ConnectionResetError):
                # It has ended; the reader is about to notice, and answers those who wait.
                break
            generation.outgoing.popleft()
            _close(descriptors)
        loop.remove_writer(generation.control)

    def _receive(self, generation: _Generation) -> None:
        try:
            datagram = generation.control.recv(MESSAGE_SIZE_MAX_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            datagram = b""
        if not datagram:
            self._ended(generation)
            return
        match decode(datagram):
            case Ready(import_ms):
                generation.ready.set_result(import_ms)
            case Forked(request_id, pid):
                # It is kept until it has ended, also where nobody waits for it any more.
                request = generation.requests.pop(request_id)
                exited = asyncio.get_running_loop().create_future()
                child = ForkedChild(pid, request.kind, exited)
                generation.children[pid] = child
                if not request.answer.done():
                    request.answer.set_result(child)
            case ForkFailed(request_id, reason):
                _fail(generation.requests.pop(request_id), reason)
            case Exited(pid, status):
                child = generation.children.pop(pid)
                child.exited.set_result(
                    ProcessExit(pid, status, f"{child.name} {describe_status(status)}")
                )
            case Fork() | Kill():
                raise ValueError("the forkserver sent a request")

    def _ended(self, generation: _Generation) -> None:
        asyncio.get_running_loop().remove_reader(generation.control)
        self._available.clear()
        if not generation.ready.done():
            with contextlib.suppress(subprocess.TimeoutExpired):
                generation.process.wait(_END_TIMEOUT_S)
            status = generation.process.returncode
            ending = "closed its socket" if status is None else describe_status(status)
            generation.ready.set_exception(
                StreamError(
                    f"the forkserver {ending} before it was ready; {self._log_file} ends with:\n"
                    f"{log_tail(self._log_file)}"
                )
            )
        else:
            self._log.error("forkserver.lost", pid=generation.process.pid)
        generation.ended.set()


def _fail(request: _Request, reason: str) -> None:
    if not request.answer.done():
        request.answer.set_exception(TaskFailure(f"no {request.kind} could be started: {reason}"))


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


async def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Waits for the process without blocking the loop; kills it when it takes too long."""
    loop = asyncio.get_running_loop()
    if process.poll() is not None:
        return
    ended = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    except TimeoutError:
        process.kill()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()
