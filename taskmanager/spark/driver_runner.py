"""Starts and watches the Spark driver of a slot, on a thread of its own that lives as long as the slot.

The driver is a fresh process with a session of its own (in the sense of Unix): started by this thread, whose end is told
to it by the kernel; on a line, whose end it sees. All that it starts is in its process group, and is killed with it.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.config import Configuration
from penstock.errors import StreamError
from taskmanager.processes.exit_cause import describe_status, likely_cause, log_tail
from taskmanager.spark.connect_address import with_session
from taskmanager.spark.failure_text import without_jvm
from taskmanager.spark.left_sessions_runner import end_of_interrupt, start_interrupt
from taskmanager.spark.session_note_store import forget_session
from taskmanager.spark.session_process import DRIVER_LOG
from taskmanager.spark.session_settings import memory_limit_bytes, memory_problem, session_settings
from taskmanager.spark.stage_messages import (
    CancelStage,
    LineBuffer,
    Message,
    RunStage,
    StageBegun,
    StageDone,
    StageFailed,
    decode,
    encode,
)
from taskmanager.spark.stage_table import EndDriver, Interrupt, OnEnd, StageEnd, StageTable, TellEnd

_log = structlog.get_logger()

_READ_BYTES = 1 << 16
_EXIT_S = 3.0
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class SparkPlace:
    """What a driver knows of its slot.

    Attributes:
        directory: of the slot, for Spark's files and those of stages.
        log_directory: of the job.
        code_paths: directories of the job's modules.
    """

    job_id: str
    directory: Path
    log_directory: Path
    code_paths: Sequence[str]
    config: Configuration

    def stage_directory(self, vertex: str, subtask_index: int, attempt: int) -> Path:
        """Where the files of an attempt of a stage are."""
        shared = self.config.execution_spark_directory
        root = Path(shared) if shared else self.directory / "stages"
        return root.absolute() / self.job_id / f"{vertex}-{subtask_index}-{attempt}"

    def log_file(self, vertex: str, subtask_index: int, attempt: int) -> Path:
        """What the attempt prints to."""
        return self.log_directory / f"{vertex}-{subtask_index}-{attempt}.log"


class SparkDriverRunner:
    """The Spark driver of one slot; there is no process before the first stage."""

    def __init__(self, place: SparkPlace, environment: Mapping[str, str]) -> None:
        self.place = place
        self._environment = environment
        self._stages = StageTable(place.config.execution_spark_start_timeout_ms / 1000)
        self._work: deque[Callable[[], None]] = deque()
        self._waker: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closing = False
        # Of the thread alone.
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._buffer = LineBuffer()
        self._kill_reason = ""
        self._session_id = ""

    # ------------------------------------------------------------ any thread

    def settings(self, job_name: str, cores: int) -> tuple[tuple[str, str], ...]:
        """What a session is started with.

        Args:
            cores: of Spark in local mode, 0 = as many as the TaskManager has slots.
        """
        place = self.place
        count = cores or place.config.taskmanager_slots
        return tuple(session_settings(place.config, job_name, count, self._own_directory).items())

    def run(self, stage: RunStage, timeout_s: float, on_end: OnEnd) -> None:
        """Does a stage.

        Args:
            timeout_s: how long it may take once it has a session; 0 = as long as it likes.
            on_end: called from another thread when it has ended.
        """
        self._post(lambda: self._begin(stage, timeout_s, on_end))

    def cancel(self, stage_id: str) -> None:
        """Ends a stage; one that has ended is left alone."""
        self._post(lambda: self._carry_out(self._stages.cancelled(stage_id, time.monotonic())))

    def close(self) -> None:
        """Ends the session and the process, at most so long as that takes."""
        with self._lock:
            self._is_closing = True
            thread = self._thread
        if thread is not None:
            self._wake()
            thread.join(_CLOSE_S)

    def _post(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._work.append(work)
            if self._thread is None:
                self._waker = socket.socketpair()
                self._thread = threading.Thread(target=self._loop, name="spark-driver", daemon=True)
                self._thread.start()
        self._wake()

    def _wake(self) -> None:
        assert self._waker is not None, "the thread has been started"
        with suppress(OSError):
            self._waker[0].send(b"x")

    # ------------------------------------------------------------ the thread

    @property
    def _own_directory(self) -> Path:
        return self.place.directory / "driver"

    @property
    def _log_file(self) -> Path:
        return self._own_directory / DRIVER_LOG

    def _loop(self) -> None:
        assert self._waker is not None, "made before the thread"
        waked = self._waker[1]
        try:
            while not self._is_closing:
                self._wait(waked)
                while self._work:
                    self._work.popleft()()
                self._carry_out(self._stages.passed(time.monotonic()))
        finally:
            self._end_process()
            for end in self._waker:
                end.close()

    def _wait(self, waked: socket.socket) -> None:
        due_s = self._stages.next_deadline_s
        timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        with selectors.DefaultSelector() as selector:
            selector.register(waked, selectors.EVENT_READ)
            if self._line is not None:
                selector.register(self._line, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(timeout_s)]
        if waked in ready:
            waked.recv(_READ_BYTES)
        if self._line in ready:
            self._receive()

    def _begin(self, stage: RunStage, timeout_s: float, on_end: OnEnd) -> None:
        problem = ""
        if self._process is None:
            problem = memory_problem(self.place.config, memory_limit_bytes())
        if problem:
            message = f"operator {stage.operator!r}: {problem}"
            on_end(StageEnd(message, message))
            return
        try:
            if self._process is None:
                self._start_process()
            self._stages.asked(stage, timeout_s, on_end, time.monotonic())
            self._send(stage)
        except OSError as error:
            self._stages.driver_ended("")
            on_end(
                StageEnd(
                    f"operator {stage.operator!r}: the Spark driver cannot be started: {error}"
                )
            )

    def _start_process(self) -> None:
        self._own_directory.mkdir(parents=True, exist_ok=True)
        own, theirs = socket.socketpair()
        self._session_id = str(uuid.uuid4())
        with theirs, self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "taskmanager.spark.driver_process",
                    f"--line={theirs.fileno()}",
                    f"--parent={os.getpid()}",
                    f"--directory={self._own_directory}",
                    f"--session={self._session_id}",
                    "--",
                    *self.place.code_paths,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=dict(self._environment),
                start_new_session=True,
            )
        self._line, self._buffer, self._kill_reason = own, LineBuffer(), ""
        _log.info("spark.driver_started", job_id=self.place.job_id, pid=self._process.pid)

    def _send(self, message: Message) -> None:
        if self._line is not None:
            # The end of a driver that has gone is seen on the line.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._line.sendall(encode(message))

    def _receive(self) -> None:
        assert self._line is not None, "it is ready"
        try:
            data = self._line.recv(_READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            self._driver_ended()
            return
        try:
            for line in self._buffer.lines(data):
                self._heard(decode(line))
        except StreamError as error:
            self._carry_out([EndDriver(f"it sent {error}")])

    def _heard(self, message: Message) -> None:
        match message:
            case StageBegun():
                self._stages.begun(message, time.monotonic())
            case StageDone() | StageFailed():
                self._carry_out(self._stages.ended(message))
            case _:
                raise StreamError(f"what a driver never says: {type(message).__name__}")

    def _carry_out(self, effects: Sequence[TellEnd | Interrupt | EndDriver]) -> None:
        for effect in effects:
            match effect:
                case TellEnd(on_end=on_end, end=end):
                    on_end(end)
                case Interrupt(stage_id=stage_id):
                    self._send(CancelStage(stage_id))
                case EndDriver(reason=reason):
                    self._kill_reason = self._kill_reason or reason
                    self._driver_ended()

    def _driver_ended(self) -> None:
        """The process is gone, or has to go: nothing of it stays, and its stages hear of it."""
        if self._process is None:
            return
        status = self._end_process(is_gentle=False)
        tail = without_jvm(log_tail(self._log_file)).strip()
        if self._kill_reason:
            reason = f"it was killed, because {self._kill_reason}"
        else:
            likely = likely_cause(status, is_told=False)
            reason = describe_status(status) + (f" ({likely})" if likely else "")
            if status == 0:
                reason += "; did a function of the job end the process?"
        _log.warning("spark.driver_ended", job_id=self.place.job_id, reason=reason)
        told = f"{reason}; its log ends with:\n{tail}" if tail else reason
        self._end_remote_work()
        self._carry_out(self._stages.driver_ended(told))

    def _end_remote_work(self) -> None:
        """A server of Spark Connect would go on with what a killed driver has asked for.

        Nobody hears of the end of the stages before: the slot may be given back then, and what it has started ends with it.
        """
        address = self.place.config.spark_keys.get("spark.remote")
        if not address:
            return
        session = with_session(address, self._session_id)
        try:
            with self._log_file.open("ab") as log:
                status = end_of_interrupt(start_interrupt(session, self._environment, log))
        except OSError as error:  # the stages have ended all the same
            _log.warning("spark.session_left", job_id=self.place.job_id, reason=str(error))
            return
        if status:
            reason = describe_status(status)
            _log.warning("spark.session_left", job_id=self.place.job_id, reason=reason)
        else:
            forget_session(self._own_directory)

    def _end_process(self, *, is_gentle: bool = True) -> int:
        """Ends the driver and its group; returns its exit status."""
        process, line = self._process, self._line
        self._process = self._line = None
        if process is None:
            return 0
        status: int | None = None
        if line is not None:
            line.close()
        if is_gentle:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(_EXIT_S)
        elif not self._kill_reason:
            # Its line has ended, and so will it: by what it ended is told.
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(0.5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait() if status is None else status
