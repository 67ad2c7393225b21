"""Entry point of a slot process: puts the parts of a slot together and runs its mailbox.

Forked by the forkserver, so everything imported here is loaded once for all slots. Threads: the
mailbox (this one), the data exchange's I/O thread, the control channel's, those of ``_Threads``, and with Spark stages
the one that watches their driver.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from common.clock import SystemClock
from common.log import configure_slot_logging
from common.pb import internal_pb2
from penstock.client.own_modules import set_apart
from penstock.config import Configuration
from penstock.storage.open_store import open_store, use_s3
from taskmanager.network.connection_runner import SocketTransport
from taskmanager.network.gateway import Gateway
from taskmanager.network.slot_identity_runner import identity_of
from taskmanager.partitions.shared_calls_runner import SharedCallsRunner
from taskmanager.partitions.spill_runner import SpillRunner
from taskmanager.processes.control_channel import ControlChannel, read_command
from taskmanager.processes.hanging_calls_runner import HangingCalls
from taskmanager.processes.mailbox import Mailbox
from taskmanager.snapshot.local_copies_store import LocalCopies
from taskmanager.spark.driver_runner import SparkDriverRunner, SparkPlace
from taskmanager.state.memory import ManagedMemory
from taskmanager.task.deployment import Deployment
from taskmanager.task.exchange import DataExchange
from taskmanager.task.execution import Execution
from taskmanager.task.slot_runtime import SlotRuntime
from taskmanager.task.slot_services import SlotServices
from taskmanager.user_code.user_output import AttemptOutput, capture, open_log

_log = structlog.get_logger()

_GRACE_S = 2.0


class _Threads:
    """Those of a slot that work for its mailbox.

    Attributes:
        io: read ahead of sources.
        background: for what takes long by itself: listings, users' own sources, what is placed for Spark.
        spill: write and read what exchanges keep.
        snapshots: write snapshots and read them again.
    """

    def __init__(self) -> None:
        self.io = HangingCalls(2, "slot-io", _end_for_left_calls)
        self.background = HangingCalls(16, "slot-background", _end_for_left_calls)
        self.spill = ThreadPoolExecutor(2, "slot-spill")
        self.snapshots = ThreadPoolExecutor(2, "slot-snapshot")

    def close(self) -> None:
        """Gives up what waits for them; what runs ends with the process."""
        for each in (self.io, self.background, self.spill, self.snapshots):
            each.shutdown(wait=False, cancel_futures=True)


def _end_for_left_calls(count: int) -> None:
    """Ends the process, for another to take its place: the log that it leaves says why."""
    _log.error(
        "slot.calls_left",
        count=count,
        reason="so many calls of attempts that have ended hang, of sources whose storage does not answer or whose discover "
        "does not return: the process is replaced",
    )
    sys.stdout.flush()
    os._exit(1)


def run(connection: socket.socket) -> None:
    """Serves one slot until its line to the daemon ends or it is told to shut down."""
    if (configuration := _first_words(connection)) is None:
        return
    _prepare_imports(configuration)
    output = capture()
    clock, mailbox = SystemClock(), Mailbox()
    config = _set_up(configuration)
    threads = _Threads()
    runtime: SlotRuntime

    def peer_unreachable(peer: internal_pb2.DataEndpoint, reason: str) -> None:
        runtime.peer_unreachable(peer, reason)

    exchange = DataExchange(
        config,
        identity_of(configuration),
        mailbox.post,
        clock,
        SocketTransport(),
        gateway=Gateway.of(configuration),
        on_unreachable=peer_unreachable,
        spill=_spill(config, configuration, threads.spill, mailbox),
    )
    channel = ControlChannel(
        connection,
        lambda command: mailbox.post(lambda: runtime.handle(command)),
        lambda: _end_soon(mailbox, runtime),
    )
    spark = SparkDriverRunner(_spark_place(configuration, config), os.environ)
    services = SlotServices(
        config=config,
        clock=clock,
        exchange=exchange,
        executor=threads.io,
        background_executor=threads.background,
        snapshot_executor=threads.snapshots,
        memory=ManagedMemory(config.taskmanager_memory_managed_bytes),
        work_directory=Path(configuration.work_directory),
        post=mailbox.post,
        report=channel.send,
        artifact_paths=dict(configuration.artifact_paths),
        open_store=open_store,
        local_copies=_local_copies(configuration),
        spark=spark,
    )
    builder = _ExecutionBuilder(services, configuration, output)
    runtime = SlotRuntime(clock, mailbox, exchange, builder, channel.send, time.thread_time_ns)
    endpoint = _listen(exchange, configuration)
    channel.start()
    channel.send(internal_pb2.SlotReport(ready=endpoint))
    try:
        runtime.run()
    finally:
        exchange.close()
        spark.close()
        channel.close(_GRACE_S)
        threads.close()


def _set_up(configuration: internal_pb2.SlotConfiguration) -> Configuration:
    """Has the process follow the job's configuration, which it returns."""
    config = Configuration.from_mapping(dict(configuration.config))
    configure_slot_logging(config.log_level)
    use_s3(lambda: config.s3)
    return config


def _spill(
    config: Configuration,
    configuration: internal_pb2.SlotConfiguration,
    executor: ThreadPoolExecutor,
    mailbox: Mailbox,
) -> SpillRunner:
    directory = configuration.spill_directory or f"{configuration.work_directory}/spill"
    shared_calls = SharedCallsRunner(mailbox.post, config.taskmanager_spill_shared_timeout_ms)
    return SpillRunner(
        Path(directory), configuration.job_id, executor.submit, mailbox.post, shared_calls
    )


def _first_words(connection: socket.socket) -> internal_pb2.SlotConfiguration | None:
    first = read_command(connection)
    if first is None or first.WhichOneof("command") != "configure":
        return None
    return first.configure


def _listen(
    exchange: DataExchange, configuration: internal_pb2.SlotConfiguration
) -> internal_pb2.DataEndpoint:
    return exchange.listen(
        configuration.unix_socket_path,
        configuration.tcp_bind_host,
        configuration.tcp_advertised_host,
    )


class _ExecutionBuilder:
    """Builds executions that log to a file of their own."""

    def __init__(
        self,
        services: SlotServices,
        configuration: internal_pb2.SlotConfiguration,
        output: AttemptOutput,
    ) -> None:
        self._services = services
        self._configuration = configuration
        self._output = output

    def __call__(
        self,
        deployment: internal_pb2.TaskDeployment,
        schedule: Callable[[], None],
        deadline_moved: Callable[[], None],
    ) -> Execution:
        attempt = deployment.attempt
        return Execution(
            deployment,
            Deployment(deployment, self._services, schedule),
            report=self._services.report,
            clock=self._services.clock,
            taskmanager_id=self._configuration.taskmanager_id,
            post=self._services.post,
            schedule=schedule,
            deadline_moved=deadline_moved,
            output=self._output,
            open_log=lambda: open_log(
                Path(self._configuration.log_directory),
                attempt.vertex,
                attempt.subtask_index,
                attempt.attempt,
            ),
        )


def _spark_place(
    configuration: internal_pb2.SlotConfiguration, config: Configuration
) -> SparkPlace:
    return SparkPlace(
        configuration.job_id,
        Path(configuration.work_directory) / "spark",
        Path(configuration.log_directory),
        tuple(configuration.code_paths),
        config,
    )


def _local_copies(configuration: internal_pb2.SlotConfiguration) -> LocalCopies | None:
    roots = [Path(root) for root in configuration.local_state_directories]
    return LocalCopies(roots, configuration.job_id) if roots else None


def _prepare_imports(configuration: internal_pb2.SlotConfiguration) -> None:
    """The user's modules come first, and ours stay ours (they are loaded already)."""
    sys.path[:0] = list(configuration.code_paths)
    set_apart()
    Path(configuration.work_directory).mkdir(parents=True, exist_ok=True)


def _end_soon(mailbox: Mailbox, runtime: SlotRuntime) -> None:
    """The daemon is gone: stop, and do not let a function that hangs prevent it."""
    mailbox.post(runtime.stop)
    timer = threading.Timer(_GRACE_S, os._exit, args=(1,))
    timer.daemon = True
    timer.start()
