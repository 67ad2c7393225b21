"""Writes the golden set of the formats of this version: ``python -m tests.golden``. What is there is never overwritten: it
shows what versions before wrote."""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

import penstock as ps
from penstock.client.client import Client
from penstock.local.local_cluster import LocalCluster
from penstock.storage.entries.file_names import FORMAT_VERSION as ROCKSDB_VERSION
from penstock.storage.run_columns import RUN_VERSION
from tests.support.golden_job import build
from tests.support.jobs import DEADLINE_S, await_details, cancel

RATE = 250


def main() -> None:
    """Writes the set, unless there is one."""
    target = Path(__file__).parent / f"runs-{RUN_VERSION}-rocksdb-{ROCKSDB_VERSION}"
    if target.exists():
        sys.exit(
            f"{target} is there already, and stays as it is: it was written by another version"
        )
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        cluster = LocalCluster(work / "cluster")
        options = {"jobmanager.rpc.port": "0", "taskmanager.numberOfTaskSlots": "4"}
        cluster.start(taskmanagers=1, overrides=options)
        try:
            address = next(one.address for one in cluster.daemons() if one.role == "jobmanager")
            for backend in ("hashmap", "rocksdb"):
                _write(address, backend, work / backend)
        finally:
            cluster.stop()
        target.mkdir()
        for backend in ("hashmap", "rocksdb"):
            for kind in ("checkpoint", "native", "canonical"):
                with tarfile.open(target / f"{backend}-{kind}.tar.gz", "w:gz") as archive:
                    archive.add(work / backend / kind, arcname=".")


def _write(address: str, backend: str, work: Path) -> None:
    config = {
        "execution.checkpointing.dir": str(work / "checkpoints"),
        "execution.checkpointing.interval": "500ms",
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        "state.backend.type": backend,
        "state.storage.fs.memory-threshold": "0b",
    }
    with Client(address), ps.Environment(address, parallelism=2, config=config) as env:
        build(env, work / "out", RATE)
        handle = env.submit(f"golden {backend}")
        await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > 4)
        for kind in ("native", "canonical"):
            path = Path(handle.savepoint(work / "kept", kind, timeout=DEADLINE_S))
            path.rename(work / kind)
        taken = handle.details().last_checkpoint_id
        await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > taken + 1)
        cancel(handle)
        (work / "checkpoints" / handle.job_id).rename(work / "checkpoint")


if __name__ == "__main__":
    main()
