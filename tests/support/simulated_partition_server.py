"""The partition server of a TaskManager on simulated time: the real shelf and connections on files.

It can die between any two steps and be started again, and is found at the same address then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from common.pb import internal_pb2
from penstock.config import Configuration
from taskmanager.network.connection_pool import ConnectionPool
from taskmanager.network.exchange import SlotIdentity
from taskmanager.partitions.server import PartitionShelf
from taskmanager.task.mailbox import Mailbox
from tests.support.in_memory_network import InMemoryNetwork, SimulatedLoop


class ServerHost(Protocol):
    """What a partition server needs of the simulation."""

    loop: SimulatedLoop
    network: InMemoryNetwork
    config: Configuration


class SimulatedPartitionServer:
    """Serves what is complete in a spill directory.

    Args:
        name: of its TaskManager's incarnation.
        directory: the spill directory.
    """

    def __init__(self, host: ServerHost, name: str, directory: Path) -> None:
        self._host = host
        self._name = name
        self._directory = directory
        self.start()

    def start(self) -> None:
        """Begins to listen, for the first time or again."""
        self.is_alive = True
        self._mailbox = Mailbox()
        self._shelf = PartitionShelf(self._directory)
        self._transport = self._host.network.transport()
        slot_id = f"partitions-{self._name}"
        self._pool = ConnectionPool(
            self._host.config,
            SlotIdentity(job_id="", slot_id=slot_id, host_id="host", leader_epoch=0, token=""),
            self._shelf,
            self._mailbox.post,
            self._host.loop,
            self._transport,
        )
        self.endpoint: internal_pb2.DataEndpoint = self._pool.listen(
            f"/{self._name}-partitions", "", ""
        )

    def die(self) -> None:
        """Ends like after SIGKILL."""
        self.is_alive = False
        self._transport.close()

    def forget(self) -> None:
        """Something has been removed."""
        self._mailbox.post(self._shelf.forget)

    def run_one(self) -> bool:
        """Does the next piece of work; False when there is none at this time."""
        mail = self._mailbox.take()
        if mail is not None:
            mail()
            return True
        now_ns, deadline_ns = self._host.loop.monotonic_ns(), self._pool.next_deadline_ns
        if deadline_ns is None or deadline_ns > now_ns:
            return False
        self._pool.tick(now_ns)
        return True

    def next_deadline_ms(self) -> int | None:
        """When there is something to do even without mail; None = never."""
        deadline_ns = self._pool.next_deadline_ns
        return None if deadline_ns is None else -(-deadline_ns // 1_000_000)
