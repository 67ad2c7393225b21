"""Aim: a database opens without the files that a subtask does not need, and has all the rest.

Method: databases with files on several levels are written by RocksDB itself; what their manifests say is compared with what
RocksDB says, and files are taken out.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rocksdict import AccessType, DBCompressionType, Options, Rdict

from penstock.storage.entries.database_manifest import DatabaseFile, database_files, without_files
from tests.support.rocksdb_cluster import fast_directory

COUNT = 3_000


def key(number: int) -> bytes:
    return b"%08d" % number


@pytest.fixture
def directory() -> Iterator[Path]:
    with fast_directory() as found:
        yield found


def options() -> Options:
    found = Options(raw_mode=True)
    found.set_target_file_size_base(16 << 10)
    found.set_write_buffer_size(1 << 20)
    found.set_compression_type(DBCompressionType.none())
    found.set_bottommost_compression_type(DBCompressionType.none())
    return found


def database(path: Path, rounds: int = 1) -> list[dict[str, Any]]:
    """A database with files of level 1 and newer ones of level 0; what RocksDB says about them."""
    rocks = Rdict(str(path), options())
    for _ in range(rounds):
        for number in range(COUNT):
            rocks[key(number)] = b"old" * 30
        rocks.compact_range(None, None)
    for start in (0, COUNT // 2):
        for number in range(start, start + 100):
            rocks[key(number)] = b"new"
        rocks.flush()
    rocks.delete_range(key(COUNT - 10), key(COUNT))
    rocks.flush()
    told: list[dict[str, Any]] = rocks.live_files()
    rocks.close()
    return told


def manifest_of(path: Path) -> Path:
    return path / (path / "CURRENT").read_text().strip()


@pytest.mark.parametrize("rounds", [1, 20])
def test_the_manifest_is_read_as_rocksdb_reads_it(directory: Path, rounds: int) -> None:
    told = database(directory / "db", rounds)
    manifest = manifest_of(directory / "db").read_bytes()
    assert rounds == 1 or len(manifest) > 32 << 10, "several blocks"
    found = database_files(manifest)
    assert found is not None
    assert {(file.number, file.level) for file in found} == {
        (int(one["name"].strip("/").removesuffix(".sst")), one["level"]) for one in told
    }
    starts = {file.number: (file.first_key, file.last_key) for file in found}
    for one in told:
        first, last = starts[int(one["name"].strip("/").removesuffix(".sst"))]
        if one["start_key"] is not None:
            assert first <= one["start_key"] <= one["end_key"] <= last
    assert {file.level for file in found} > {0}


@pytest.mark.parametrize("wanted", [(0, 700), (1_400, 1_600), (2_900, 3_000), (5_000, 6_000)])
def test_a_database_opens_without_the_files_of_others(
    directory: Path, wanted: tuple[int, int]
) -> None:
    database(directory / "db", 20)
    shutil.copytree(directory / "db", directory / "all")
    manifest = manifest_of(directory / "db")
    files = database_files(manifest.read_bytes()) or []
    ranges = [(key(wanted[0]), key(wanted[1]))]
    gone = [file for file in files if not file.has_some_of(ranges)]
    assert len(gone) > len(files) // 2
    manifest.write_bytes(without_files(manifest.read_bytes(), gone))
    for file in gone:
        (directory / "db" / f"{file.number:06d}.sst").unlink()
    rest, whole = Rdict(str(directory / "db"), options()), Rdict(str(directory / "all"), options())
    for number in range(*wanted):
        assert rest.get(key(number)) == whole.get(key(number)), number
    rest[key(9_999)] = b"later"
    rest.compact_range(None, None)
    rest.close()
    again = Rdict(str(directory / "db"), options(), access_type=AccessType.read_only(False))
    assert again[key(9_999)] == b"later"
    again.close()
    whole.close()


def test_an_edit_may_span_blocks(directory: Path) -> None:
    database(directory / "db")
    manifest = manifest_of(directory / "db").read_bytes()
    many = [DatabaseFile(number, 1, b"", b"") for number in range(10_000, 40_000)]
    files = database_files(manifest)
    assert database_files(without_files(manifest, many)) == files
    for size in range(32_740, 32_775, 5):
        filled = manifest
        while len(filled) < size - 40:
            filled = without_files(filled, many[: min(1_000, (size - len(filled)) // 8)])
        assert database_files(without_files(filled, many[:3])) == files


def test_what_is_not_understood_is_left_alone() -> None:
    assert database_files(b"\0" * 4 + b"\x02\0\x01" + b"\x07\x01") is None
    assert database_files(b"no manifest at all") is None
