"""What runs in a slot process in these tests: does what the name of a deployed vertex says."""

# ruff: noqa: PTH110, PTH115, PTH208 - descriptors are read as the kernel shows them

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

from common.pb import internal_pb2
from penstock.pb import client_pb2
from taskmanager.processes.fork_protocol import PARTITION_SERVER_NAME

_LENGTH = struct.Struct("<I")
_CHILD = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"


LATE_MODULE = "colorsys"


def run_with_late_module(line: socket.socket) -> None:
    """Succeeds where the module was there before it began."""
    line.recv(1)
    assert LATE_MODULE in sys.modules


class FakeSlot:
    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.configuration = internal_pb2.SlotConfiguration()
        self.results_left: dict[tuple[str, int], int] = {}

    def receive(self) -> internal_pb2.SlotCommand | None:
        header = self.read(_LENGTH.size)
        if header is None:
            return None
        body = self.read(_LENGTH.unpack(header)[0])
        return None if body is None else internal_pb2.SlotCommand.FromString(body)

    def read(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            part = self.line.recv(size - len(data))
            if not part:
                return None
            data += part
        return data

    def send(self, **report: object) -> None:
        body = internal_pb2.SlotReport(**report).SerializeToString()
        self.line.sendall(_LENGTH.pack(len(body)) + body)

    def state(self, attempt: internal_pb2.AttemptId, state: int, message: str = "") -> None:
        failure = client_pb2.FailureCause(message=message) if message else None
        changed = internal_pb2.AttemptStateChanged(state=state, failure=failure)
        self.send(task_event=internal_pb2.TaskEvent(attempt=attempt, state_changed=changed))

    def run(self) -> None:
        first = self.receive()
        if first is None:
            return
        self.configuration = first.configure
        behaviour = os.environ.get("FAKE_SLOT", "")
        if behaviour == "silent":
            self.receive()
            return
        if behaviour == "dies":
            print("the end is near", file=sys.stderr)
            sys.exit(7)
        unix = socket.socket(socket.AF_UNIX)
        if self.configuration.unix_socket_path:
            unix.bind(self.configuration.unix_socket_path)
        self.send(
            ready=internal_pb2.DataEndpoint(
                slot_id=self.configuration.slot_id,
                host_id=self.configuration.host_id,
                unix_path=self.configuration.unix_socket_path,
            )
        )
        while (command := self.receive()) is not None:
            kind = command.WhichOneof("command")
            if kind == "shutdown":
                return
            getattr(self, f"on_{kind}")(getattr(command, kind))

    def on_deploy(self, task: internal_pb2.TaskDeployment) -> None:
        attempt = task.attempt
        self.state(attempt, client_pb2.ATTEMPT_STATE_RUNNING)
        metrics = client_pb2.SubtaskMetrics(records_in=41, records_out=1, busy_ms=1500)
        self.send(
            metrics=internal_pb2.SlotMetrics(
                attempts=[internal_pb2.AttemptMetrics(attempt=attempt, metrics=metrics)]
            )
        )
        name, _, argument = task.vertex.name.partition(":")
        if name == "finish":
            self.state(attempt, client_pb2.ATTEMPT_STATE_FINISHED)
        elif name == "finish-and-die":
            self.state(attempt, client_pb2.ATTEMPT_STATE_FINISHED)
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "litter":
            left = Path(self.configuration.work_directory) / "state" / "db"
            left.mkdir(parents=True)
            (left / "000012.sst").write_bytes(b"much")
            print(f"left {left}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "kill":
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "exit":
            os._exit(int(argument))
        elif name == "raise":
            raise RuntimeError(argument)
        elif name == "leave-child":
            # Inherits the line to the daemon and lives until the daemon closes it.
            subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(self.line.fileno())],
                pass_fds=[self.line.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "hang":
            time.sleep(600)
        elif name == "garbage":
            self.line.sendall(_LENGTH.pack(4) + b"\xff\xff\xff\xff")
        elif name == "results":
            self.results_left[attempt.vertex, attempt.subtask_index] = int(argument)
            self.send_result(attempt, 0)
        elif name == "facts":
            terminal = os.environ.get("PENSTOCK_TERMINAL_FD")
            facts = {
                "fds": sorted(
                    os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
                    for fd in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{fd}")
                ),
                "switch": sys.getswitchinterval(),
                "sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
                "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
                "terminal": terminal,
                "code_paths": list(self.configuration.code_paths),
                "artifacts": dict(self.configuration.artifact_paths),
                "config": dict(self.configuration.config),
                "token": self.configuration.token,
                "log_directory": self.configuration.log_directory,
            }
            if terminal:
                os.write(int(terminal), b"hello terminal\n")
            self.state(attempt, client_pb2.ATTEMPT_STATE_FAILED, repr(facts))

    def on_cancel(self, attempt: internal_pb2.AttemptId, cancel: internal_pb2.CancelTask) -> None:
        if attempt.vertex == "tells":
            self.state(attempt, client_pb2.ATTEMPT_STATE_FAILED, f"is final: {cancel.is_final}")
        elif attempt.vertex != "stubborn":
            self.state(attempt, client_pb2.ATTEMPT_STATE_CANCELED)

    def on_task_command(self, command: internal_pb2.TaskCommand) -> None:
        if command.HasField("cancel"):
            self.on_cancel(command.attempt, command.cancel)
        elif command.HasField("commit_output"):
            self.state(command.attempt, client_pb2.ATTEMPT_STATE_FINISHED)

    def on_release_partitions(self, release: internal_pb2.ReleasePartitions) -> None:
        print("released", release.job_id, [one.edge_id for one in release.partitions], flush=True)

    def on_spill_pressure(self, pressure: internal_pb2.SpillPressure) -> None:
        print("spill pressure", pressure.stop, flush=True)

    def on_results_taken(self, taken: internal_pb2.ResultsTaken) -> None:
        self.send_result(taken.attempt, taken.sequence + 1, stop=taken.satisfied)

    def send_result(
        self, attempt: internal_pb2.AttemptId, sequence: int, stop: bool = False
    ) -> None:
        if stop or sequence == self.results_left[attempt.vertex, attempt.subtask_index]:
            self.state(attempt, client_pb2.ATTEMPT_STATE_FINISHED)
            return
        chunk = client_pb2.ResultChunk(
            subtask_index=attempt.subtask_index, sequence=sequence, arrow=b"rows"
        )
        self.send(results=internal_pb2.SlotResults(attempt=attempt, collect_id="c0", chunk=chunk))


def run(control: socket.socket) -> None:
    FakeSlot(control).run()


def serve_partitions(control: socket.socket) -> None:
    """Takes no connections, so that no test waits for what the real server imports."""
    Path("/proc/self/comm").write_text(PARTITION_SERVER_NAME)
    server = FakeSlot(control)
    first = server.receive()
    if first is not None:
        server.send(ready=internal_pb2.DataEndpoint(slot_id=first.configure.slot_id))
        while server.receive() is not None:
            pass


def warm_up() -> None:
    if os.environ.get("FAKE_WARM_UP") == "hang":
        time.sleep(600)


def warm_up_with_a_thread() -> None:
    import threading

    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
