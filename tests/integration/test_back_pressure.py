"""Aim: a slow sink holds a fast endless source back; memory stays where it is, however long that goes on.

Method: a sink that takes a batch only when the test says so, in a slot process of its own, behind a
source that could fill gigabytes in the meantime. The source notes how far it is in a file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import Any, Self

import psutil
import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import DEADLINE_S, await_details, cancel

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

BATCH_ROWS = 256
ROW_BYTES = 1_024
CREDIT_BYTES = 1 << 20
AHEAD_ROWS_MAX = 3 * CREDIT_BYTES // ROW_BYTES
"""The credit of two channels, and as much as one for batches that are being made, cut and taken."""
GROWTH_BYTES_MAX = 16 << 20


class ProgressFile:
    """The number of rows that a source has made, written by slots, read by the test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(struct.pack("<qq", 0, 0))

    def rows(self) -> int:
        return sum(struct.unpack("<qq", self._path.read_bytes()))

    def maker(self) -> Any:
        """A generator function of wide rows that notes what it is asked for."""
        path = str(self._path)

        def make(start: int, count: int) -> pa.RecordBatch:
            # Blocks of rows are dealt out to two splits in turn: the places of one are those of its
            # batches' number modulo two.
            split = start // BATCH_ROWS % 2
            file = os.open(path, os.O_RDWR)
            try:
                (before,) = struct.unpack("<q", os.pread(file, 8, 8 * split))
                os.pwrite(file, struct.pack("<q", before + count), 8 * split)
            finally:
                os.close(file)
            text = os.urandom(ROW_BYTES // 2).hex()
            return pa.RecordBatch.from_pydict(
                {"n": range(start, start + count), "text": [text] * count}
            )

        return make


class Gate:
    """Lets a ``GatedSink`` take batches one by one."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_S)
        self._connection: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()

    def sink(self) -> GatedSink:
        return GatedSink(int(self._listener.getsockname()[1]))

    def let(self, batches: int) -> int:
        """Lets that many batches in; returns their rows."""
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._connection.settimeout(DEADLINE_S)
        rows = 0
        for _ in range(batches):
            rows += struct.unpack("<q", self._receive(8))[0]
            self._connection.sendall(b"+")
        return rows

    def _receive(self, size: int) -> bytes:
        assert self._connection is not None
        data = b""
        while len(data) < size:
            piece = self._connection.recv(size - len(data))
            assert piece, "the sink is gone"
            data += piece
        return data


class GatedSink(ps.Sink):
    """Says how many rows it has got and waits until it may go on."""

    def __init__(self, port: int) -> None:
        self._port = port

    @override
    def open(self, ctx: ps.SinkContext) -> None:
        self._connection = socket.create_connection(("127.0.0.1", self._port))

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        self._connection.sendall(struct.pack("<q", batch.num_rows))
        if self._connection.recv(1) != b"+":
            raise ConnectionError("the test is over")

    @override
    def flush(self) -> None:
        """Nothing is kept back."""

    @override
    def close(self) -> None:
        self._connection.close()


def memory_of_slots(cluster: LocalCluster) -> dict[int, int]:
    """Process id -> bytes of its own, of all processes below the TaskManagers: forkservers and slots."""
    found = {}
    for daemon in cluster.daemons():
        if daemon.role == "taskmanager":
            for process in psutil.Process(daemon.pid).children(recursive=True):
                # A slot of an earlier job may end while it is looked at.
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[process.pid] = process.memory_full_info().uss
    return found


@pytest.mark.parametrize("route", ["rebalance", "key_by"])
def test_memory_stays_flat_behind_a_slow_sink(
    new_env: NewEnvironment, cluster: LocalCluster, tmp_path: Path, route: str
) -> None:
    env = new_env(
        config={
            "execution.batch-rows": BATCH_ROWS,
            "taskmanager.network.credit-per-channel": CREDIT_BYTES,
            "task.cancellation.timeout": "200ms",
        }
    )
    progress = ProgressFile(tmp_path / "progress")
    with Gate() as gate:
        source = env.generate(progress.maker())
        routed = source.rebalance() if route == "rebalance" else source.key_by("n")
        # A group of its own: not the sink's thread holds the source back, the exchange must.
        routed.map_batches(lambda batch: batch, schema=source.schema).parallelism(1).slot_group(
            "slow"
        ).sink(gate.sink()).parallelism(1)
        handle = env.submit("slow sink")
        taken = gate.let(20)
        await_details(
            handle, lambda metrics, _: metrics["vertices"]["v0"]["back_pressured_ms"] > 200
        )
        before = memory_of_slots(cluster)
        made_before = progress.rows()
        assert taken < made_before <= taken + AHEAD_ROWS_MAX

        peak = dict(before)
        for _ in range(10):
            taken += gate.let(60)
            for pid, size in memory_of_slots(cluster).items():
                peak[pid] = max(peak.get(pid, 0), size)
            assert progress.rows() <= taken + AHEAD_ROWS_MAX
        assert progress.rows() - made_before > 100_000  # 100 MB have gone through
        growth = sum(peak.values()) - sum(before.values())
        assert growth < GROWTH_BYTES_MAX, f"{growth >> 20} MiB more than at first"
        cancel(handle)  # the sink waits and does not hear of it: its slot is killed


@pytest.mark.parametrize("interval", ["none", "200ms"])
def test_a_client_that_takes_no_rows_holds_the_job_back(
    new_env: NewEnvironment, tmp_path: Path, interval: str
) -> None:
    env = new_env(
        config={
            "execution.batch-rows": BATCH_ROWS,
            "execution.checkpointing.interval": interval,
        }
    )
    progress = ProgressFile(tmp_path / "progress")
    env.generate(progress.maker()).collect()
    handle = env.submit("nobody takes")
    # Not ``wait``: that would take the rows.
    with ps.connect(env._address or "") as cluster:
        watching = cluster.job(handle.job_id)
        # With checkpoints the rows that none covers yet are taken as well, until one has released as
        # much as the client may leave.
        made = -1
        for waited_ms in range(1_000, 20_000, 2_000):
            await_details(
                watching,
                lambda metrics, _, waited_ms=waited_ms: (  # type: ignore[misc]
                    metrics["vertices"]["v0"]["back_pressured_ms"] > waited_ms
                ),
            )
            before, made = made, progress.rows()
            if made == before:
                break
            assert before == -1 or interval != "none"
        else:
            raise AssertionError(f"the source goes on: {made} rows")
        cancel(watching)
