"""The partition server of a TaskManager on simulated time: the real shelf and connections on files.

It can die between any two steps; its daemon starts the next, which is found at the same address.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from common.pb import internal_pb2
from penstock.config import Configuration
from taskmanager.network.connection_pool import ConnectionPool
from taskmanager.partitions.server import PartitionShelf
from taskmanager.processes.mailbox import Mailbox
from taskmanager.task.exchange import SlotIdentity
from tests.support.in_memory_network import InMemoryNetwork, SimulatedLoop
from tests.support.simulated_forkserver import KILLED, SimulatedForkserver, SimulatedSlotChannel


class ServerHost(Protocol):
    """What a partition server needs of the simulation."""

    loop: SimulatedLoop
    network: InMemoryNetwork


class SimulatedPartitionServer:
    """Serves what is complete in a spill directory.

    Args:
        channel: its line to the daemon.
        forkserver: hears of its end.
    """

    def __init__(
        self, host: ServerHost, channel: SimulatedSlotChannel, forkserver: SimulatedForkserver
    ) -> None:
        self._host = host
        self._channel = channel
        self._forkserver = forkserver
        self.is_alive = True
        self.is_frozen = False
        self._mailbox = Mailbox()
        self._shelf: PartitionShelf | None = None
        self._transport = host.network.transport()

    def handle(self, command: internal_pb2.SlotCommand) -> None:
        """A command arrives."""
        if not self.is_alive:
            return
        if self._shelf is not None:
            self._mailbox.post(self._shelf.forget)
            return
        configuration = command.configure
        self._shelf = PartitionShelf(Path(configuration.spill_directory))
        self._pool = ConnectionPool(
            Configuration.from_mapping(dict(configuration.config)),
            SlotIdentity(
                configuration.job_id,
                configuration.slot_id,
                configuration.host_id,
                configuration.leader_epoch,
                configuration.token,
            ),
            self._shelf,
            self._mailbox.post,
            self._host.loop,
            self._transport,
        )
        endpoint = self._pool.listen(
            configuration.unix_socket_path,
            configuration.tcp_bind_host,
            configuration.tcp_advertised_host,
        )
        self._channel.report(internal_pb2.SlotReport(ready=endpoint))

    def line_ended(self) -> None:
        """The daemon has closed its end, or is gone."""
        self.die()

    def die(self) -> None:
        """Ends like after SIGKILL."""
        if self.is_alive:
            self.is_alive = False
            self._transport.close()
            self._forkserver.exited(self._channel, KILLED)

    def run_one(self) -> bool:
        """Does the next piece of work; False when there is none at this time."""
        mail = self._mailbox.take()
        if mail is not None:
            mail()
            return True
        if self._shelf is None:
            return False
        now_ns, deadline_ns = self._host.loop.monotonic_ns(), self._pool.next_deadline_ns
        if deadline_ns is None or deadline_ns > now_ns:
            return False
        self._pool.tick(now_ns)
        return True

    def next_deadline_ms(self) -> int | None:
        """When there is something to do even without mail; None = never."""
        deadline_ns = None if self._shelf is None else self._pool.next_deadline_ns
        return None if deadline_ns is None else -(-deadline_ns // 1_000_000)
