"""A job that reads what a benchmark lets into it, and that is watched meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path

import penstock as ps
from benchmarks.gated_source import CountingSink, Gate, GatedSource
from benchmarks.measure import JobSettings, await_free_slots, slots_cpu_s
from penstock.client.client import Client
from penstock.client.job import JobHandle
from penstock.client.job_checkpoints import Checkpoint
from penstock.errors import JobCanceled
from penstock.local.local_cluster import LocalCluster
from penstock.pb import client_pb2

TIMEOUT_S = 600.0
ENDLESS = 1 << 61
_POLL_S = 0.005
_ASK_S = 0.2
"""Between two questions to the JobManager whether the job has failed: each takes CPU time from what is measured."""
_FEED_S = 0.02
"""Between two portions of rows; a portion of a reader is a batch or less."""


class GatedJob:
    """A running job behind a gate.

    Args:
        directory: for the gate.
        settings: of the job; its parallelism is the number of parts of the gate.
        keys: different ones, over all subtasks.
        config: besides that of ``settings``.
        build: the job from its input stream to the stream that its sink takes.
        sink: None = one that counts at the gate.
        touched: a file of keys (``GatedSource``), "" = none.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        directory: Path,
        settings: JobSettings,
        keys: int,
        config: Mapping[str, str],
        build: Callable[[ps.Stream], ps.Stream],
        *,
        sink: ps.Sink | None = None,
        touched: str = "",
    ) -> None:
        self.cluster = cluster
        parts = settings.parallelism
        self.parts = parts
        self.gate = Gate.create(directory / "gate", parts)
        path = str(directory / "gate")
        env = ps.Environment(
            cluster.address, parallelism=parts, config={**settings.config(), **config}
        )
        rows = env.source(GatedSource(parts, path, keys, touched)).uid("gate")
        build(rows).sink(sink or CountingSink(path)).uid("counting")
        self._cpu_before = slots_cpu_s(cluster)
        self.handle: JobHandle = env.submit("state")
        self.client = Client(cluster.address)
        self._asked_at = time.monotonic()

    def let(self, rows: int) -> None:
        """Lets the job go on to a row, and waits until it is read."""
        rows -= rows % self.parts
        self.gate.limit = rows
        deadline = time.monotonic() + TIMEOUT_S
        while self.gate.rows_read < rows:
            self.check(deadline)

    def check(self, deadline: float) -> None:
        """Waits a moment.

        Raises:
            JobFailed: the job has failed.
            TimeoutError: the deadline has passed.
        """
        time.sleep(_POLL_S)
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError("the job makes no progress")
        if now > self._asked_at + _ASK_S:
            self._asked_at = now
            if self.details().summary.ended_at_ms:
                self.handle.wait(1.0)

    def details(self) -> client_pb2.JobDetails:
        """The job as the JobManager sees it."""
        return self.client.job(self.handle.job_id)

    def checkpoint(self) -> Checkpoint:
        """Takes one."""
        taken = self.handle.checkpoint(TIMEOUT_S)
        return next(one for one in self.handle.checkpoints() if one.id == taken)

    def rate(self, seconds: float) -> float:
        """Rows per second that are read."""
        started, before = time.monotonic(), self.gate.rows_read
        time.sleep(seconds)
        return (self.gate.rows_read - before) / (time.monotonic() - started)

    def feed(self, rate: float, seconds: float) -> None:
        """Moves the limit steadily, by ``rate`` rows per second."""
        started, first = time.monotonic(), self.gate.limit
        while (passed := time.monotonic() - started) < seconds:
            self.gate.limit = first + int(rate * passed)
            time.sleep(_FEED_S)

    def close(self) -> float:
        """Cancels the job; CPU seconds that its slot processes took."""
        self.handle.cancel()
        with suppress(JobCanceled):
            self.handle.wait(TIMEOUT_S)
        with closing(self.client) as client:
            await_free_slots(client)
        return slots_cpu_s(self.cluster) - self._cpu_before
