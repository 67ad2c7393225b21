"""A ledger job that a test steers: checkpoints on demand, damage to its store, its end compared.

It does not end before the test says so (``finish``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.client.client import Client
from penstock.client.job import TERMINAL_STATES, JobHandle
from penstock.client.job_checkpoints import Checkpoint
from penstock.client.job_result import state_name
from penstock.pb import client_pb2
from penstock.storage.head import decode_head
from penstock.storage.manifest import decode_manifest, references
from tests.support.committed_files import Table
from tests.support.ledger import Ledger, check_exactly_once
from tests.support.processes import DaemonCluster, Deadline, wait_ended

DEADLINE_S = 90.0
ON_DEMAND = "1h"
"""An interval at which no checkpoint comes by itself."""


def check_tables(ledger: Ledger, output: Path) -> None:
    """Compares all of the output of a ledger job, which is in a directory of this machine."""
    tables = [
        Table(str(output / "bookings"), lambda row: (row["kind"], row["account"], row["n"])),
        Table(str(output / "transfers"), lambda row: row["id"]),
        Table(str(output / "totals"), lambda row: (row["target"], row["window_start"])),
    ]
    for table in tables:
        table.look()
    check_exactly_once(ledger, *tables)


class LedgerJob:
    """One ledger job.

    Args:
        directory: for its output, and for its checkpoints where the test says so.
    """

    def __init__(self, cluster: DaemonCluster, client: Client, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.ledger = Ledger(6_000, 2_000, directory / "out", str(directory / "gate"))
        self._client = client
        self._handle: JobHandle | None = None
        self._commits: list[set[str]] = []
        """Files that became visible with each checkpoint for which ``await_commits`` was called."""

    def submit(self, interval: str = ON_DEMAND, **config: Any) -> None:
        """Submits the job; configuration with ``__`` for ``.`` and ``_`` for ``-``."""
        options = {
            "execution.checkpointing.interval": interval,
            "execution.checkpointing.num-retained": "3",
            "state.storage.fs.memory-threshold": "1",
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.attempts": "infinite",
            "restart-strategy.fixed-delay.delay": "100ms",
        }
        for key, value in config.items():
            options[key.replace("__", ".").replace("_", "-")] = str(value)
        with ps.Environment(self.cluster.jobmanager, parallelism=2, config=options) as env:
            self.ledger.build(env)
            job_id = env.submit("ledger").job_id
        self._handle = JobHandle(self._client, job_id)
        self.await_that(lambda details: state_name(details) == "RUNNING")

    def attach(self, client: Client) -> None:
        """Goes on with a client of the JobManager that leads now."""
        self._client = client
        self._handle = JobHandle(client, self.handle.job_id)

    @property
    def handle(self) -> JobHandle:
        assert self._handle is not None, "submit it first"
        return self._handle

    @property
    def store(self) -> Path:
        """Directory of its checkpoints, where the cluster keeps those."""
        return self.cluster.directory / "checkpoints" / self.handle.job_id

    # ------------------------------------------------------------ waiting

    def await_that(
        self, condition: Callable[[client_pb2.JobDetails], object]
    ) -> client_pb2.JobDetails:
        """Waits until this is so of the job."""
        deadline = Deadline("what the test waits for", DEADLINE_S)
        for details in self._client.watch(self.handle.job_id, 50):
            if condition(details):
                return details
            deadline.left()
            assert details.summary.state not in TERMINAL_STATES, details
        raise AssertionError("the JobManager stopped reporting")

    def await_restart(self, checkpoint_id: int) -> list[str]:
        """Waits until the job runs again, from this checkpoint; what it failed of until then."""
        failures: list[str] = []

        def look(details: client_pb2.JobDetails) -> bool:
            failures.append(details.failure.message)
            return state_name(details) == "RUNNING" and self.restored == checkpoint_id

        self.await_that(look)
        return list(dict.fromkeys(failures))

    def await_commits(self) -> None:
        """Waits until the newest checkpoint's output has been committed; remembers what that was."""
        self.await_that(lambda _: not list(self.ledger.output.glob("*/.*.pending")))
        visible = {str(path) for path in self.ledger.output.glob("*/[!.]*")}
        self._commits.append(visible.difference(*self._commits))

    @property
    def restored(self) -> int | None:
        """The checkpoint that the newest attempts began with."""
        listed = self._client.checkpoints(self.handle.job_id)
        return listed.restored_checkpoint_id or None

    def await_checkpoints(self, condition: Callable[[Checkpoint], object]) -> Checkpoint:
        """Waits for a checkpoint of which this is so; the newest."""
        found: list[Checkpoint] = []

        def look(_details: client_pb2.JobDetails) -> bool:
            found[:] = [one for one in self.handle.checkpoints() if condition(one)]
            return bool(found)

        self.await_that(look)
        return found[0]

    def finish(self, *, is_last_commit_repeated: bool = False) -> None:
        """Lets the job end, and compares all of its output.

        Args:
            is_last_commit_repeated: what ``await_commits`` saw last has been committed once more.
        """
        Path(self.ledger.gate).touch()
        assert self.handle.wait(DEADLINE_S).status == "FINISHED"
        if is_last_commit_repeated:
            for path in self._commits[-1]:
                Path(path).unlink()
        self.check()

    def check(self) -> None:
        """Compares all of the output."""
        check_tables(self.ledger, self.ledger.output)

    def cancel(self) -> None:
        """Cancels it where it runs, and waits for its end."""
        if self._handle is not None:
            self._handle.cancel()
            for details in self._client.watch(self._handle.job_id, 100):
                if details.summary.state in TERMINAL_STATES:
                    return

    # ------------------------------------------------------------ failures

    def kill_a_slot(self) -> None:
        """SIGKILL to one of its slot processes."""
        os.kill(self.slots()[0], signal.SIGKILL)

    def kill_the_jobmanager(self) -> None:
        """SIGKILL to the JobManager; returns when it is gone."""
        pid = self.cluster.pid("jobmanager")
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)

    def slots(self) -> list[int]:
        """The slot processes."""
        return [
            pid
            for daemon in self.cluster.daemons("taskmanager")
            for pid in self.cluster.slot_pids(daemon["pid"])
        ]

    def manifests(self) -> list[Path]:
        """The manifests that HEAD names, newest last."""
        head = decode_head((self.store / "HEAD").read_bytes())
        return [self.store / retained.manifest_path for retained in head.retained]

    def own_files(self) -> list[Path]:
        """Files that only the newest checkpoint refers to, the largest first."""
        named = [
            {
                self.store / reference.location.path
                for reference in references(decode_manifest(manifest.read_bytes()))
            }
            for manifest in self.manifests()
        ]
        own = named[-1].difference(*named[:-1])
        return sorted(own, key=lambda path: path.stat().st_size, reverse=True)

    def content(self) -> dict[str, bytes]:
        """Every file in the store."""
        return {str(path): path.read_bytes() for path in self.store.rglob("*") if path.is_file()}
