"""Aim: output in doubt is committed by nobody else while the job that it was taken of may still do so itself.

Method: a savepoint on disk whose sink has prepared output; who runs is said by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jobmanager.dispatcher.job_start_runner import prepare_start
from penstock.config import Configuration
from penstock.errors import JobRejected
from penstock.graph.output_in_doubt import COMMITTABLES, IN_DOUBT_KEY
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import encode_manifest
from penstock.storage.restore_point import claim_savepoint, open_restore_point
from penstock.storage.savepoint import MANIFEST_PATH

ORIGINAL, CLAIMER, NEW = "0" * 32, "1" * 32, "2" * 32


def make_savepoint(path: Path) -> None:
    manifest = checkpoint_pb2.CheckpointManifest(job_id=ORIGINAL, checkpoint_id=7)
    manifest.properties.kind = checkpoint_pb2.CHECKPOINT_KIND_SAVEPOINT
    vertex = manifest.vertices.add(id="v0", parallelism=1)
    vertex.operators.add(uid="files", kind="sink")
    held = manifest.subtasks.add(vertex="v0").operators.add(operator_uid="files").lists.add()
    held.name, held.items[:] = COMMITTABLES, [b"a file"]
    LocalStore(path).put(MANIFEST_PATH, [encode_manifest(manifest)])


def start(path: Path, running: str) -> str:
    """What a job that says commit does with the output, while that one runs and all others have ended."""
    graph = graph_pb2.JobGraph(name="job")
    graph.vertices.add(id="v0", parallelism=1).operators.add(uid="files")
    config = Configuration.from_mapping(
        {"execution.state-recovery.path": str(path), IN_DOUBT_KEY: "commit"}
    )
    is_running = running.__eq__
    return prepare_start(
        NEW, graph, config, is_running, lambda job_id: job_id != running
    ).graph.config[IN_DOUBT_KEY]


@pytest.mark.parametrize("is_claimed", [False, True])
def test_output_is_committed_by_another_once_its_own_job_has_ended(
    tmp_path: Path, is_claimed: bool
) -> None:
    make_savepoint(tmp_path)
    if is_claimed:  # by a job that has ended before it had taken it over
        claim_savepoint(open_restore_point(str(tmp_path)), CLAIMER)
    with pytest.raises(JobRejected, match=f"job {ORIGINAL} still runs"):
        start(tmp_path, ORIGINAL)
    assert start(tmp_path, "") == "commit"
