"""Aim: ``penstock state`` shows every kind of state of either backend, native and canonical, of savepoints and checkpoints.

Method: the golden set, which has all of them, as every version has written it; the oracle is what the source had read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli.main import main
from penstock.errors import JobRejected
from penstock.storage.content_check import check_content
from penstock.storage.manifest import references
from penstock.storage.restore_point import open_restore_point
from penstock.storage.snapshot_files import StoreSnapshotReader
from tests.support.golden_state import ARCHIVES, check_all_states, told, unpacked

LEFT_OUT = 4
"""References of five: each is read in the same way."""


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda one: f"{one.parent.name}/{one.name}")
def test_each_row_of_every_state_is_shown_once(tmp_path: Path, archive: Path) -> None:
    path = unpacked(archive, tmp_path)
    check_all_states(str(path))
    if "checkpoint" in archive.name:
        check_all_states(told(str(path))["path"])  # one chk-<n> of it


def test_what_is_large_need_not_be_counted(tmp_path: Path) -> None:
    archive = next(one for one in ARCHIVES if one.name == "rocksdb-native.tar.gz")
    path = str(unpacked(archive, tmp_path))
    states = {(one["uid"], one["name"]): one for one in told(path, "--no-count")["states"]}
    assert states["states", "counts"]["rows"] is None
    assert states["states", "counts"]["columns"] == {"key_0": "int64", "value": "int64"}
    assert states["states", "pairs"]["columns"]["value"] == "struct<low: int64, high: int64>"
    assert states["numbers", "splits"]["rows"] == 2
    assert len(told(path, "states", "texts", "--limit", "3")["rows"]) == 3


class Anything(ps.KeyedProcessFunction):
    """Keeps plain Python values."""

    held = ps.ValueState("held")
    day = ps.ValueState("day", pa.date32())
    at = ps.ValueState("at", pa.timestamp("s"))
    clock = ps.ValueState("clock", pa.time64("ns"))

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        """Nothing."""


def test_what_json_does_not_know_is_shown_as_text(tmp_path: Path) -> None:
    env = ps.Environment()
    keyed = env.from_rows([{"k": "a"}]).key_by("k")
    keyed.process(Anything(), schema={"n": "int64"}).uid("anything").discard()
    held = {
        "a": ('{"$map":[[{"$tuple":[1,2]},3],[{"$bytes":"AAE="},4]]}', {"(1, 2)": 3, "b'\\x00\\x01'": 4}),
        "b": ('{"$float":"nan"}', "nan"),
        "c": ('[1.5,{"$float":"-inf"}]', [1.5, "-inf"]),
        "d": ('{"$map":[[2,true],[null,{"$tuple":[]}]]}', {"2": True, "null": "()"}),
    }  # fmt: skip
    texts = pa.table({"k": list(held), "value": [text for text, _ in held.values()]})
    path = str(tmp_path / "savepoint")
    ps.write_savepoint(path, {"anything": {"held": texts}}, job=env)
    rows = told(path, "anything", "held")["rows"]
    assert {row["key_0"]: row["value"] for row in rows} == {
        k: shown for k, (_, shown) in held.items()
    }


def test_times_that_python_has_not_are_shown(tmp_path: Path) -> None:
    env = ps.Environment()
    keyed = env.from_rows([{"k": "a"}]).key_by("k")
    keyed.process(Anything(), schema={"n": "int64"}).uid("anything").discard()
    states = {
        "day": pa.array([10**8, 0], pa.int32()).cast(pa.date32()),
        "at": pa.array([10**14, 0], pa.timestamp("s")),
        "clock": pa.array([1, 0], pa.time64("ns")),
    }
    path = str(tmp_path / "savepoint")
    tables = {name: pa.table({"k": ["a", "b"], "value": held}) for name, held in states.items()}
    ps.write_savepoint(path, {"anything": tables}, job=env)
    shown = {
        name: {row["key_0"]: row["value"] for row in told(path, "anything", name)["rows"]}
        for name in states
    }
    assert shown["day"] == {"a": "<value out of range: 100000000>", "b": "1970-01-01"}
    assert "100000000000000" in shown["at"]["a"]
    assert shown["at"]["b"] == "1970-01-01 00:00:00"
    assert shown["clock"] == {"a": "00:00:00.000000001", "b": "00:00:00.000000000"}


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    archive = next(one for one in ARCHIVES if one.name == "rocksdb-native.tar.gz")
    path = unpacked(archive, tmp_path)
    for file in (path / "state").iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    result = CliRunner().invoke(main, ["state", str(path)])
    assert result.exit_code == 1, result.output
    assert "checksum" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", ["hashmap-native", "rocksdb-native"])
def test_what_is_altered_is_found_before_anything_starts(tmp_path: Path, name: str) -> None:
    directory = unpacked(ARCHIVES[-1].parent / f"{name}.tar.gz", tmp_path)
    point = open_restore_point(str(directory))
    reader = StoreSnapshotReader(point.store)
    assert check_content(point, reader)
    for reference in references(point.manifest)[:: 1 + LEFT_OUT]:
        file = directory / reference.location.path
        content = file.read_bytes()
        middle = reference.location.offset + reference.location.size_bytes // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(JobRejected, match=file.name):
            check_content(point, reader)
        file.write_bytes(content)
    assert check_content(point, reader)


def test_of_a_large_savepoint_nothing_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = open_restore_point(str(unpacked(ARCHIVES[-1], tmp_path)))
    monkeypatch.setattr("penstock.storage.content_check.READ_BYTES_MAX", 10)
    assert not check_content(point, StoreSnapshotReader(None))
