"""Aim: a manifest that decodes is the one that was encoded, and what does not says why.

Method: every byte flipped, every length cut; a frame of another kind and of a newer version.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreCorrupt
from penstock.pb import checkpoint_pb2 as pb
from penstock.storage.framing import FrameFormat, decode_frame, encode_frame
from penstock.storage.manifest import (
    FORMAT,
    SharedIdentity,
    StoredRange,
    StoredReference,
    decode_manifest,
    done_splits_path,
    encode_manifest,
    manifest_path,
    parse_done_splits_path,
    parse_manifest_path,
    references,
)
from penstock.storage.snapshot_files import parse_snapshot_file_name
from tests.support.examples import examples


def manifest() -> pb.CheckpointManifest:
    return pb.CheckpointManifest(
        job_id="j1",
        checkpoint_id=7,
        leader_epoch=3,
        subtasks=[
            pb.SubtaskSnapshot(
                vertex="v1",
                subtask_index=2,
                operators=[
                    pb.OperatorSnapshot(
                        operator_uid="counts",
                        keyed=pb.KeyedStateSnapshot(
                            instance="i1",
                            files=[
                                pb.StateFile(
                                    name="run-1",
                                    shared=True,
                                    handle=pb.StateHandle(
                                        path="shared/a", offset=4, size_bytes=6, checksum=99
                                    ),
                                ),
                                pb.StateFile(
                                    name="meta",
                                    handle=pb.StateHandle(path="shared/a", size_bytes=4),
                                ),
                                pb.StateFile(
                                    name="tiny", shared=True, handle=pb.StateHandle(inline=b"x")
                                ),
                            ],
                        ),
                        lists=[
                            pb.OperatorStateSnapshot(name="small", items=[b"1"]),
                            pb.OperatorStateSnapshot(
                                name="large",
                                handle=pb.StateHandle(path="shared/b", size_bytes=1),
                            ),
                        ],
                    )
                ],
            ),
            pb.SubtaskSnapshot(vertex="v1", subtask_index=3, finished=True),
        ],
    )


def test_it_comes_back() -> None:
    original = manifest()
    back = decode_manifest(encode_manifest(original))
    assert original.format_version == 0  # not changed
    assert back.format_version == FORMAT.version
    original.format_version = FORMAT.version
    assert back == original


def test_its_bytes_are_fixed() -> None:
    content = encode_manifest(pb.CheckpointManifest(job_id="j", checkpoint_id=1))
    header = "5053544b4d414e49 02000000 0700000000000000"
    payload = "0802 12016a 2001"
    digest = "94758fa7a19c8a8fb0ab8ba00c81ecef"
    assert content == bytes.fromhex(f"{header} {payload} {digest}")


def test_version_1_is_read() -> None:
    header = "5053544b4d414e49 01000000 0700000000000000"
    payload = "0801 12016a 2001"
    digest = "c1888cc55d03e14805db3aaddf7126bb"
    back = decode_manifest(bytes.fromhex(f"{header} {payload} {digest}"))
    assert (back.job_id, back.checkpoint_id) == ("j", 1)


def test_done_splits_are_referred_to_by_source_and_place() -> None:
    handle = pb.StateHandle(path="shared/done-splits-7-2", offset=16, size_bytes=32, checksum=5)
    done = pb.DoneSplits(operator_uid="src", chunks=[handle], loose=b"x" * 16)
    identity = SharedIdentity("src", 0, "done splits", "shared/done-splits-7-2/16")
    assert references(pb.CheckpointManifest(done_splits=[done])) == (
        StoredReference(identity, StoredRange("shared/done-splits-7-2", 16, 32, 5)),
    )
    assert parse_done_splits_path(done_splits_path(7, 2)) == 7
    assert parse_done_splits_path(manifest_path(7, 2)) is None
    assert parse_snapshot_file_name(done_splits_path(7, 2)) is None


def test_every_flipped_bit_is_seen() -> None:
    content = bytearray(encode_manifest(manifest()))
    for position in range(len(content)):
        for bit in range(8):
            content[position] ^= 1 << bit
            with pytest.raises(StoreCorrupt, match=r"chk-7/manifest is (not|truncated|altered)"):
                decode_manifest(bytes(content), "chk-7/manifest")
            content[position] ^= 1 << bit


def test_every_cut_is_seen() -> None:
    content = encode_manifest(manifest())
    for size in range(len(content)):
        with pytest.raises(StoreCorrupt, match="x is truncated"):
            decode_manifest(content[:size], "x")
    with pytest.raises(StoreCorrupt, match="altered"):
        decode_manifest(content + b"\0")


@examples(200)
@given(st.binary(max_size=100), st.booleans())
def test_foreign_bytes_are_no_manifest(content: bytes, with_magic: bool) -> None:
    with pytest.raises(StoreCorrupt):
        decode_manifest(FORMAT.magic + content if with_magic else content)


def test_other_kinds_and_newer_formats() -> None:
    head = encode_frame(FrameFormat("HEAD", b"PSTKHEAD", 1), b"payload")
    with pytest.raises(
        StoreCorrupt, match=r"is not a checkpoint manifest: it begins with b'PSTKHEAD"
    ):
        decode_manifest(head)
    newer = encode_frame(FrameFormat("", FORMAT.magic, 5), b"payload")
    with pytest.raises(StoreCorrupt, match=r"format version 5.*reads up to version 2"):
        decode_manifest(newer)
    with pytest.raises(StoreCorrupt, match="format version 0"):
        decode_manifest(encode_frame(FrameFormat("", FORMAT.magic, 0), b""))
    with pytest.raises(StoreCorrupt, match="is not a checkpoint manifest"):
        decode_manifest(encode_frame(FORMAT, b"\xff\xff"))


@given(st.binary(max_size=50), st.integers(1, 9))
def test_frames_carry_any_payload(payload: bytes, version: int) -> None:
    kind = FrameFormat("a thing", b"12345678", 9)
    written = encode_frame(FrameFormat("a thing", b"12345678", version), payload)
    assert decode_frame(kind, written, "x") == (version, payload)


def test_references_are_all_ranges_of_files() -> None:
    run = SharedIdentity("counts", 2, "i1", "run-1")
    assert references(manifest()) == (
        StoredReference(run, StoredRange("shared/a", 4, 6, 99)),
        StoredReference(None, StoredRange("shared/a", 0, 4, 0)),
        StoredReference(None, StoredRange("shared/b", 0, 1, 0)),
    )


def test_paths() -> None:
    assert manifest_path(7) == "chk-7/manifest"
    assert manifest_path(7, 12) == "chk-7/manifest-12"
    assert parse_manifest_path("chk-7/manifest") == (7, 0)
    assert parse_manifest_path("chk-7/manifest-12") == (7, 12)
    for path in ("chk-7/manifest-", "chk-x/manifest", "chk-7/other", "a/chk-7/manifest", "HEAD"):
        assert parse_manifest_path(path) is None
