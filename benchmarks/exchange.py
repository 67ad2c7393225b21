"""The data exchange alone: throughput and latency between two processes.

    python -m benchmarks.exchange [--tcp | --tls] [--busy] [--caching] [--batches N] [--rows N]

One process sends batches of int64 columns through a result partition, another polls them from an
input gate; both run a plain mailbox loop as a slot does. With ``--tls`` each has a gateway as on two hosts with
``security.ssl.internal.enabled``; with ``--busy`` a thread beside each mailbox never stops computing in Python.
With ``--caching`` the sender keeps what it sends until a checkpoint completes, every ``--checkpoint-batches``.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.gateways import GatewayProcess
from common.clock import SystemClock
from common.elements import CheckpointBarrier, EndOfData
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.pb import graph_pb2
from taskmanager.network.connection_runner import SocketTransport
from taskmanager.network.gateway import Gateway
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.partitions.spill_runner import SpillRunner
from taskmanager.processes.mailbox import Mailbox
from taskmanager.task.exchange import DataExchange, SlotIdentity

COLUMNS = 5
PRODUCER = internal_pb2.AttemptId(job_id="job", vertex="v0")
CONSUMER = internal_pb2.AttemptId(job_id="job", vertex="v1")


class Slot:
    """One process of the measurement."""

    def __init__(
        self, slot_id: str, host_id: str, directory: str, gateway: Gateway | None, *, busy: bool
    ) -> None:
        sys.setswitchinterval(0.0005)
        if busy:
            threading.Thread(target=compute_for_ever, daemon=True).start()
        self.mailbox = Mailbox()
        self.executor = ThreadPoolExecutor(2)
        identity = SlotIdentity("job", slot_id, host_id, 1, "")
        self.exchange = DataExchange(
            Configuration.from_mapping({}),
            identity,
            self.mailbox.post,
            SystemClock(),
            SocketTransport(),
            gateway=gateway,
            spill=SpillRunner(
                Path(directory, "spill"), "job", self.executor.submit, self.mailbox.post
            ),
        )
        self.counters = SubtaskCounters()

    def step(self) -> None:
        """Runs the mail that is there."""
        while (mail := self.mailbox.take()) is not None:
            mail()

    def wait(self) -> None:
        """Waits for mail and runs it."""
        mail = self.mailbox.wait(10)
        if mail is None:
            raise TimeoutError("nothing happened for 10 seconds")
        mail()
        self.step()

    def serve_until_told(self, pipe: Connection) -> None:
        """Runs mail, what waits for credit goes out, until the other process says something."""
        while not pipe.poll():
            mail = self.mailbox.wait(0.0005)
            if mail is not None:
                mail()
        pipe.recv()
        self.step()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Runs mail until the condition holds."""
        self.step()
        while not condition():
            self.wait()


def compute_for_ever() -> None:
    """What user code in Python may do: it gives the interpreter lock up only when it is told to."""
    total = 0
    while True:
        for number in range(1000):
            total ^= number


def fail(error: Exception) -> None:
    """An exchange error ends the process."""
    raise error


def nothing() -> None:
    """The loops here look for themselves."""


def output_edge(*, is_caching: bool) -> internal_pb2.OutputEdge:
    """An edge with one consumer."""
    edge = graph_pb2.Edge(id="e0", partitioning=graph_pb2.PARTITIONING_FORWARD)
    if is_caching:
        edge.partition_type = graph_pb2.RESULT_PARTITION_TYPE_CACHING
    return internal_pb2.OutputEdge(
        edge=edge, subpartition_count=1, target_parallelism=1, target_max_parallelism=128
    )


def input_edge(endpoint: internal_pb2.DataEndpoint) -> internal_pb2.InputEdge:
    """The consumer's view of it."""
    channel = internal_pb2.InputChannel(
        producer=endpoint, producer_attempt=PRODUCER, edge_id="e0", subpartition_index=0
    )
    return internal_pb2.InputEdge(edge_id="e0", channels=[channel])


def batch_of(rows: int) -> pa.RecordBatch:
    """Random int64 columns."""
    generator = np.random.default_rng(1)
    columns = [pa.array(generator.integers(0, 1 << 40, rows)) for _ in range(COLUMNS)]
    return pa.record_batch(columns, names=[f"c{index}" for index in range(COLUMNS)])


def produce(
    pipe: Connection, directory: str, args: argparse.Namespace, gateway: Gateway | None
) -> None:
    """The sending process: a warm-up, then all batches, then single small ones."""
    slot = Slot("sender", "host", directory, gateway, busy=args.busy)
    unix_path = "" if args.tcp else f"{directory}/sender.sock"
    endpoint = slot.exchange.listen(unix_path, "127.0.0.1", "127.0.0.1")
    partition = slot.exchange.create_partition(
        PRODUCER, output_edge(is_caching=args.caching), 0, slot.counters, nothing, fail
    )
    pipe.send_bytes(endpoint.SerializeToString())
    batch, small = batch_of(args.rows), batch_of(1)
    partition.emit(small)  # so that the consumer knows when it is connected
    partition.flush()
    for count in (args.batches // 10, args.batches):
        slot.serve_until_told(pipe)
        for number in range(count):
            slot.wait_for(partition.is_available)
            partition.emit(batch)
            partition.flush()
            if args.caching and number % args.checkpoint_batches == 0:
                partition.checkpoint_completed(number)  # the one before this
                partition.emit_control(CheckpointBarrier(number + args.checkpoint_batches, 0))
    for _ in range(args.pings):
        slot.serve_until_told(pipe)
        pipe.send(time.monotonic_ns())
        partition.emit(small)
        partition.flush()
    partition.emit_control(EndOfData())
    partition.finish()
    slot.wait_for(partition.is_drained)
    slot.exchange.close()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pipe.send(usage.ru_utime + usage.ru_stime)


def consume(
    pipe: Connection, directory: str, args: argparse.Namespace, gateway: Gateway | None
) -> dict[str, float]:
    """The receiving process; returns the measurements."""
    host = "other-host" if args.tcp or args.tls else "host"
    slot = Slot("receiver", host, directory, gateway, busy=args.busy)
    endpoint = internal_pb2.DataEndpoint.FromString(pipe.recv_bytes())
    gate = slot.exchange.create_gate(CONSUMER, [input_edge(endpoint)], slot.counters, nothing, fail)

    def read(rows: int) -> None:
        while rows > 0:
            slot.step()
            element = gate.poll()
            if isinstance(element, pa.RecordBatch):
                rows -= element.num_rows
            elif not gate.has_data:
                slot.wait()

    read(1)
    pipe.send(None)
    read(args.batches // 10 * args.rows)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_before_s = usage.ru_utime + usage.ru_stime
    begin_ns = time.monotonic_ns()
    pipe.send(None)
    read(args.batches * args.rows)
    seconds = (time.monotonic_ns() - begin_ns) / 1e9
    usage = resource.getrusage(resource.RUSAGE_SELF)
    receiver_cpu_s = usage.ru_utime + usage.ru_stime - cpu_before_s
    megabytes = args.batches * args.rows * COLUMNS * 8 / 1e6
    latencies_us = []
    for _ in range(args.pings):
        pipe.send(None)
        read(1)
        end_ns = time.monotonic_ns()
        latencies_us.append((end_ns - pipe.recv()) / 1e3)
    while not gate.is_finished:
        slot.step()
        if gate.poll() is None and not gate.has_data and not gate.is_finished:
            slot.wait()
    slot.step()
    sender_cpu_s = pipe.recv()
    slot.exchange.close()
    return {
        "gigabytes_per_s": round(megabytes / 1e3 / seconds, 2),
        "receiver_cpu_ms_per_mb": round(receiver_cpu_s * 1e3 / megabytes, 3),
        "sender_cpu_ms_per_mb": round(sender_cpu_s * 1e3 / (megabytes * 1.1), 3),
        "latency_p50_us": round(statistics.median(latencies_us), 1),
        "latency_p99_us": round(sorted(latencies_us)[int(len(latencies_us) * 0.99)], 1),
    }


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description="throughput and latency of the data exchange")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--tcp", action="store_true", help="TCP instead of a Unix socket")
    way.add_argument("--tls", action="store_true", help="TLS, through two gateways")
    parser.add_argument("--busy", action="store_true", help="Python never rests in either process")
    parser.add_argument("--caching", action="store_true", help="keep rows until a checkpoint")
    parser.add_argument("--checkpoint-batches", type=int, default=100)
    parser.add_argument("--batches", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--pings", type=int, default=1000)
    args = parser.parse_args()
    receiving, sending = Pipe()
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        sender, receiver = f"{root}/sender", f"{root}/receiver"
        gateways = []
        for directory in (sender, receiver):
            Path(directory).mkdir()
            if args.tls:
                gateways.append(stack.enter_context(GatewayProcess(directory, root)))
        here = [process.gateway for process in gateways] or [None, None]
        child = os.fork()
        if child == 0:
            produce(sending, sender, args, here[0])
            os._exit(0)
        result = consume(receiving, receiver, args, here[1])
        os.waitpid(child, 0)
        if gateways:
            sent = args.batches * 1.1 * args.rows * COLUMNS * 8 / 1e6
            names = ("sender_gateway_cpu_ms_per_mb", "receiver_gateway_cpu_ms_per_mb")
            for name, process in zip(names, gateways, strict=True):
                result[name] = round(process.cpu_s() * 1e3 / sent, 3)
    transport = "tls" if args.tls else "tcp" if args.tcp else "unix"
    print(json.dumps({"transport": transport, "busy": args.busy, "rows": args.rows, **result}))


if __name__ == "__main__":
    main()
