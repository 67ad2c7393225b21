"""Entry point of a partition server: serves what finished attempts have left on disk, of every job.

Forked by the forkserver and told by the daemon like a slot process (``SlotConfiguration`` without a
job). Threads: the mailbox (this one), the network's and the control channel's. It holds nothing that
is not on disk, so it may be killed at any time and started again.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from common.clock import SystemClock
from common.log import configure_slot_logging
from common.pb import internal_pb2
from penstock.config import Configuration
from taskmanager.network.connection_pool import ConnectionPool
from taskmanager.network.connection_runner import SocketTransport
from taskmanager.network.gateway import Gateway
from taskmanager.network.slot_identity_runner import identity_of
from taskmanager.partitions.server import PartitionShelf
from taskmanager.processes.control_channel import ControlChannel, read_command
from taskmanager.processes.fork_protocol import PARTITION_SERVER_NAME
from taskmanager.processes.mailbox import Mailbox

_GRACE_S = 1.0
_IDLE_S = 60.0


def run(connection: socket.socket) -> None:
    """Serves until its line to the daemon ends."""
    first = read_command(connection)
    if first is None or first.WhichOneof("command") != "configure":
        return
    configuration = first.configure
    Path("/proc/self/comm").write_text(PARTITION_SERVER_NAME)
    config = Configuration.from_mapping(dict(configuration.config))
    configure_slot_logging(config.log_level)
    clock, mailbox = SystemClock(), Mailbox()
    shelf = PartitionShelf(Path(configuration.spill_directory))
    pool = ConnectionPool(
        config,
        identity_of(configuration),
        shelf,
        mailbox.post,
        clock,
        SocketTransport(),
        gateway=Gateway.of(configuration),
    )
    is_stopping = threading.Event()
    channel = ControlChannel(
        connection,
        # The one command there is: something has been released.
        lambda _command: mailbox.post(shelf.forget),
        lambda: _end_soon(mailbox, is_stopping),
    )
    endpoint = pool.listen(
        configuration.unix_socket_path,
        configuration.tcp_bind_host,
        configuration.tcp_advertised_host,
    )
    channel.start()
    channel.send(internal_pb2.SlotReport(ready=endpoint))
    try:
        while not is_stopping.is_set():
            deadline_ns = pool.next_deadline_ns
            now_ns = clock.monotonic_ns()
            if deadline_ns is not None and deadline_ns <= now_ns:
                pool.tick(now_ns)
                continue
            wait_s = _IDLE_S if deadline_ns is None else (deadline_ns - now_ns) / 1e9
            mail = mailbox.wait(min(wait_s, _IDLE_S))
            if mail is not None:
                mail()
    finally:
        pool.close()
        channel.close(_GRACE_S)


def _end_soon(mailbox: Mailbox, is_stopping: threading.Event) -> None:
    """The daemon is gone, or gives the server up."""
    is_stopping.set()
    mailbox.post(lambda: None)
    timer = threading.Timer(_GRACE_S, os._exit, args=(1,))
    timer.daemon = True
    timer.start()
