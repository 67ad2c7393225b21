"""Aim: a few channels that come through gateways have larger windows, and an only one, at both ends; all others have the configured one.

Method: gates of an exchange with a gateway and of one without, on the network in memory.
"""

from __future__ import annotations

import pytest

from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.pb import graph_pb2
from taskmanager.network.credit import far_windows
from taskmanager.network.gateway import Gateway
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.task.exchange import DataExchange, SlotIdentity
from tests.support.in_memory_network import InMemoryNetwork, SimulatedLoop

WINDOW = 2 << 20


def windows_of(hosts: list[str], gateway: Gateway | None) -> list[int]:
    """The window of each channel, in windows, of a gate that reads from these hosts."""
    loop = SimulatedLoop()
    network = InMemoryNetwork(loop.call_later, loop.monotonic_ns, 0)
    exchange = DataExchange(
        Configuration.from_mapping({"taskmanager.network.credit-per-channel": WINDOW}),
        SlotIdentity("job", "consumer", "here", 1, ""),
        loop.post,
        loop,
        network.transport(),
        gateway=gateway,
    )
    exchange.listen("/consumer.sock", "", "")
    channels = [
        internal_pb2.InputChannel(
            producer=internal_pb2.DataEndpoint(
                slot_id=f"p{index}",
                host_id=host,
                unix_path=f"/p{index}.sock",
                tcp_host=host,
                tcp_port=1000 + index,
            ),
            producer_attempt=internal_pb2.AttemptId(job_id="job", vertex="v0", subtask_index=index),
            edge_id="e0",
        )
        for index, host in enumerate(hosts)
    ]
    edge = internal_pb2.InputEdge(
        edge_id="e0",
        channels=channels,
        partition_type=graph_pb2.RESULT_PARTITION_TYPE_PIPELINED,
    )
    gate = exchange.create_gate(
        internal_pb2.AttemptId(job_id="job", vertex="v1"),
        [edge],
        SubtaskCounters(),
        lambda: None,
        lambda error: None,
    )
    return [channel.credit.window // WINDOW for channel in gate.channels]


GATEWAY = Gateway("/gateway.sock", 999)


@pytest.mark.parametrize(
    ("hosts", "gateway", "expected"),
    [
        (["there"], GATEWAY, [8]),
        (["here", "there", "elsewhere"], GATEWAY, [1, 8, 8]),
        (["there"] * 16, GATEWAY, [2] * 16),
        (["there"] * 40, GATEWAY, [1] * 40),
        (["here", "there"], None, [1, 1]),
        (["there"], None, [2]),
    ],
)
def test_windows(hosts: list[str], gateway: Gateway | None, expected: list[int]) -> None:
    assert windows_of(hosts, gateway) == expected


def test_all_together_stay_within_32_windows_unless_each_has_one() -> None:
    for count in range(1, 200):
        assert far_windows(count) * count <= max(32, count)
