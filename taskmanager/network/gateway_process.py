"""Entry point of a gateway: speaks TLS with the gateways of other TaskManagers for all slots of its own.

It has a process of its own, since each record of TLS gives the interpreter lock up, and beside a busy thread of user code
waits for it again. Forked by the forkserver and told by the daemon like a slot process. It holds nothing: when it ends, its
connections are lost as if the network had failed, and another one takes its place at the same address.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from common.log import configure_logging
from common.pb import internal_pb2
from common.tls.doors import Entrance, Exit
from common.tls.relay_runner import RelayRunner
from common.tls.tls_files_store import TlsFiles
from penstock.config import Configuration
from penstock.errors import InvariantViolation
from taskmanager.network.connection_runner import tcp_listener, unix_listener
from taskmanager.network.frames import FrameKind, encode_frame
from taskmanager.network.gateway import socket_of
from taskmanager.network.messages import Refused, encode_message
from taskmanager.processes.control_channel import ControlChannel, read_command
from taskmanager.processes.fork_protocol import GATEWAY_NAME

_GRACE_S = 1.0
_BUFFER_BYTES = 256 * 1024


def run(connection: socket.socket) -> None:
    """Serves until its line to the daemon ends."""
    first = read_command(connection)
    if first is None or first.WhichOneof("command") != "configure":
        return
    configuration = first.configure
    Path("/proc/self/comm").write_text(GATEWAY_NAME)
    config = Configuration.from_mapping(dict(configuration.config))
    configure_logging("gateway", None, config.log_level)
    files = TlsFiles.of(config)
    if files is None:
        raise InvariantViolation("a gateway was started where data connections are plain")
    relay = RelayRunner(files, _BUFFER_BYTES)
    directory = str(Path(configuration.unix_socket_path).parent)
    outside = tcp_listener(configuration.tcp_bind_host, config.taskmanager_data_port)
    endpoint = internal_pb2.DataEndpoint(
        slot_id=configuration.slot_id,
        host_id=configuration.host_id,
        unix_path=configuration.unix_socket_path,
        tcp_host=configuration.tcp_advertised_host,
        tcp_port=outside.getsockname()[1],
    )
    entrance = Entrance(
        lambda visitor: socket_of(visitor.name, directory),
        requires_certificate=True,
        reads_name=True,
    )
    relay.let_in(outside, entrance)
    relay.let_out(unix_listener(configuration.unix_socket_path), Exit(apology=_refusal))
    channel = ControlChannel(connection, lambda _command: None, lambda: _end_soon(relay))
    channel.start()
    channel.send(internal_pb2.SlotReport(ready=endpoint))
    try:
        relay.run()
    finally:
        channel.close(_GRACE_S)


def _refusal(reason: str) -> bytes:
    """What a slot reads in place of its peer's answer."""
    return encode_frame(FrameKind.REFUSED, 0, encode_message(Refused(reason)))


def _end_soon(relay: RelayRunner) -> None:
    """The daemon is gone, or gives the gateway up."""
    relay.submit(relay.stop)
    timer = threading.Timer(_GRACE_S, os._exit, args=(1,))
    timer.daemon = True
    timer.start()
