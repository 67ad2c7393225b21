"""Aim: on S3 a place inside of a savepoint is told by its name as well, however it is spelt; on disk see where savepoints are made."""

from __future__ import annotations

import pytest

from penstock.errors import JobRejected
from penstock.pb import checkpoint_pb2
from penstock.storage.manifest import encode_manifest
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import ObjectStore
from penstock.storage.savepoint import GIVEN_UP, MANIFEST_PATH
from penstock.storage.savepoint_places import check_is_outside

MANIFEST = encode_manifest(checkpoint_pb2.CheckpointManifest())


class Bucket:
    """Holds a savepoint at one prefix, and nothing else."""

    def __init__(self, at: str, content: bytes) -> None:
        self.store = MemoryStore(1 << 20)
        self.store.put(MANIFEST_PATH, [content])
        self.at = at
        self.asked: list[str] = []

    def open(self, uri: str) -> ObjectStore:
        self.asked.append(uri)
        return self.store if uri == self.at else MemoryStore(1 << 20)


@pytest.mark.parametrize("content", [MANIFEST, GIVEN_UP])
@pytest.mark.parametrize("at", ["s3://bucket", "s3://bucket/kept", "s3://bucket/kept/one"])
@pytest.mark.parametrize("spelt", ["s3://bucket/kept/one/new", "S3://bucket//kept/one/new//"])
def test_prefixes_inside_of_a_savepoint(spelt: str, at: str, content: bytes) -> None:
    with pytest.raises(JobRejected, match=f"inside of the savepoint.* {at}: "):
        check_is_outside(spelt, Bucket(at, content).open)


def test_neighbours_are_no_reason() -> None:
    bucket = Bucket("s3://bucket/kept/on", MANIFEST)
    check_is_outside("s3://bucket/kept/one/new", bucket.open)
    assert bucket.asked == ["s3://bucket/kept/one", "s3://bucket/kept", "s3://bucket"]
