"""The Spark driver of one slot: ``python -P -m taskmanager.spark.driver_process``.

It does the stages that its slot tells it, each in a thread of its own, in one session. Its life hangs on the line to the
slot: when that ends, the session is stopped, and after a moment the whole process group, the JVM among it, is killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from common.process import die_with_parent
from penstock.client.own_modules import set_apart
from penstock.errors import StreamError
from taskmanager.spark.session_process import SparkSessions
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
from taskmanager.spark.stage_process import do_stage, failure_of

_STOP_S = 2.0
_INTERRUPT_AGAIN_S = 0.2
_READ_BYTES = 1 << 16


class StageOutput:
    """A text stream of the process: what a stage's thread prints goes to the log of its attempt."""

    def __init__(self, fallback: TextIO) -> None:
        self._fallback = fallback
        self._of_thread = threading.local()

    @contextmanager
    def printed_to(self, path: Path) -> Iterator[None]:
        """Within it, what this thread prints goes to a file, else to the driver's own log."""
        with path.open("a", buffering=1, encoding="utf-8") as log:
            self._of_thread.log = log
            try:
                yield
            finally:
                self._of_thread.log = None

    def _current(self) -> TextIO:
        return getattr(self._of_thread, "log", None) or self._fallback

    def write(self, text: str) -> int:
        """As of a stream."""
        return self._current().write(text)

    def flush(self) -> None:
        """As of a stream."""
        self._current().flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._fallback, name)


class SparkDriverProcess:
    """Takes messages of the slot, and answers.

    Args:
        line: to the slot.
        directory: of the driver's own files.
        code_paths: directories of the job's modules.
        session_id: of the session, where that is of Spark Connect.
    """

    def __init__(
        self,
        line: socket.socket,
        directory: Path,
        code_paths: list[str],
        session_id: str,
        output: StageOutput,
    ) -> None:
        self._line = line
        self.sessions = SparkSessions(directory, code_paths, session_id, self._jvm_ended)
        self._output = output
        self._sending = threading.Lock()
        self._running: dict[str, tuple[RunStage, threading.Event]] = {}
        """The stages, and what is set when they have ended."""

    def serve(self) -> None:
        """Handles messages until the line ends."""
        buffer = LineBuffer()
        while data := self._line.recv(_READ_BYTES):
            for text in buffer.lines(data):
                self._handle(decode(text))

    def _handle(self, message: Message) -> None:
        match message:
            case RunStage():
                self._running[message.stage_id] = message, threading.Event()
                self._start(lambda: self._run(message), f"stage {message.stage_id}")
            case CancelStage():
                self._start(lambda: self._cancel(message.stage_id), f"cancel {message.stage_id}")
            case _:
                raise StreamError(f"a driver is not told {type(message).__name__}")

    def _cancel(self, stage_id: str) -> None:
        """Interrupts what Spark does for a stage, again and again: the function may only be about to start it."""
        if stage_id not in self._running:
            return
        _, ended = self._running[stage_id]
        while not ended.is_set():
            self.sessions.interrupt(stage_id)
            ended.wait(_INTERRUPT_AGAIN_S)

    def _jvm_ended(self) -> None:
        for stage, _ in list(self._running.values()):
            self._send(_without_jvm(stage))

    def _start(self, work: Callable[[], None], name: str) -> None:
        # A thread that hangs ends with the process, which ends with its line.
        threading.Thread(target=work, name=name, daemon=True).start()

    def _run(self, stage: RunStage) -> None:
        failure: StageFailed | None = None
        try:
            with self._output.printed_to(Path(stage.log_file)):
                session = self.sessions.get(dict(stage.settings))
                self._send(StageBegun(stage.stage_id))
                with self.sessions.tagged(stage.stage_id):
                    do_stage(session, stage)
        except BaseException as error:  # noqa: BLE001 - a task's boundary: the slot hears of it
            failure = self._failure(error, stage)
        self._send(failure or self._end(stage))
        self._running.pop(stage.stage_id)[1].set()
        if failure is not None:
            self.sessions.release()

    def _end(self, stage: RunStage) -> Message:
        return self._stopped(stage) or StageDone(stage.stage_id)

    def _failure(self, error: BaseException, stage: RunStage) -> StageFailed:
        if self.sessions.has_lost_jvm(error):
            return _without_jvm(stage)
        try:
            failure = self._stopped(stage) or failure_of(error, stage)
            # What a start that failed leaves behind, as a line to a JVM that has ended, fails the next one as well.
            return failure if self.sessions.is_started else replace(failure, ends_driver=True)
        except Exception as second:  # noqa: BLE001 - Spark does not even say what it is: away with it
            message = f"operator {stage.operator!r}: {stage.function_name} failed on Spark: {error!r}; {second!r}"
            return StageFailed(stage.stage_id, message, ends_driver=True)

    def _stopped(self, stage: RunStage) -> StageFailed | None:
        if not self.sessions.is_stopped():
            return None
        message = (
            f"operator {stage.operator!r}: {stage.function_name}, or another stage of the job, has stopped the session "
            "of Spark, which belongs to the job: leave spark.stop() out"
        )
        return StageFailed(stage.stage_id, message, message, ends_driver=True)

    def _send(self, message: Message) -> None:
        with self._sending:
            try:
                self._line.sendall(encode(message))
            except OSError:
                end_group()  # there is nobody to tell


def _without_jvm(stage: RunStage) -> StageFailed:
    return StageFailed(
        stage.stage_id,
        f"operator {stage.operator!r}: the JVM of Spark has ended while {stage.function_name} ran; did memory run out? "
        "execution.spark.driver-memory is its heap",
        ends_driver=True,
    )


def end_group() -> None:
    """Ends this process and all that it has started, at once."""
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    """Serves a slot to the end of its line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--line", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--session", required=True)
    parser.add_argument("code_paths", nargs="*")
    options = parser.parse_args()
    die_with_parent(options.parent)
    sys.path[:0] = options.code_paths
    set_apart()
    output = StageOutput(sys.stdout)
    sys.stdout = sys.stderr = output
    line = socket.socket(fileno=options.line)
    driver = SparkDriverProcess(
        line, Path(options.directory), options.code_paths, options.session, output
    )
    try:
        driver.serve()
        timer = threading.Timer(_STOP_S, end_group)
        timer.daemon = True
        timer.start()
        driver.sessions.stop()
    except BaseException:  # noqa: BLE001 - the log of the driver has it
        traceback.print_exc()
        output.flush()
    finally:
        end_group()


if __name__ == "__main__":
    main()
