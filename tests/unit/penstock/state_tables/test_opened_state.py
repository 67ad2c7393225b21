"""Aim: every kind of state of a checkpoint or savepoint is read as a table, whatever wrote it.

Method: the golden set holds all of them, of every format. How many rows the job had read says the position of its source;
the rows themselves are in the state of one operator, and what all others hold must follow from them.
"""

from __future__ import annotations

import shutil
import tarfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import StoreCorrupt
from penstock.state_tables.opened_state import StateTables
from penstock.state_tables.state_partitions import asked_state

GOLDEN = Path(__file__).parents[3] / "golden"
SETS = sorted(GOLDEN.glob("runs-*/*.tar.gz"))
NAMES = [f"{path.parent.name}/{path.name.removesuffix('.tar.gz')}" for path in SETS]


def unpacked(path: Path, target: Path) -> Path:
    with tarfile.open(path) as archive:
        archive.extractall(target, filter="data")
    return target


def newest(name: str) -> Path:
    return max(GOLDEN.glob(f"runs-*/{name}.tar.gz"))


def rows_of(state: StateTables, uid: str, name: str) -> list[dict[str, Any]]:
    rows = state.read(uid, name).to_pylist()
    return sorted(
        rows, key=lambda row: str([value for key, value in row.items() if key != "key_group"])
    )


def values(state: StateTables, uid: str, name: str, column: str = "value") -> dict[int, Any]:
    return {row["k"]: row[column] for row in rows_of(state, uid, name)}


@pytest.mark.parametrize("path", SETS, ids=NAMES)
def test_all_that_is_kept_follows_from_the_rows_that_were_read(path: Path, tmp_path: Path) -> None:
    state = ps.open_state(unpacked(path, tmp_path))
    rows = state.read("rows", "slices").to_pylist()
    splits = state.read("numbers", "splits").to_pylist()
    read = sum(int.from_bytes(one["position"], "little") for one in splits)
    assert len(rows) == read > 0
    assert all(
        row["text"] == f"text {row['n'] % 7}" and row["n"] == row["__event_time"] for row in rows
    )
    seen: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        seen[row["k"]].append(row["n"])
    sums = {key: sum(numbers) for key, numbers in seen.items()}
    counts = {key: len(numbers) for key, numbers in seen.items()}
    texts = {key: {f"text {n % 7}" for n in numbers} for key, numbers in seen.items()}
    if state.is_savepoint:  # otherwise some of it may be held back in front of the exchange
        assert values(state, "sums", "slices", "number") == sums
        assert values(state, "sums", "slices", "c") == counts
    assert {k: {*v} for k, v in values(state, "distinct", "slices", "c").items()} == texts
    assert values(state, "sessions", "sessions", "number") == {k: max(v) for k, v in seen.items()}
    assert values(state, "counts", "counts", "filled") == counts
    assert values(state, "counts", "counts", "number") == sums
    assert values(state, "states", "sums") == sums
    assert values(state, "states", "counts") == counts
    assert values(state, "states", "pairs") == {
        k: {"low": min(v), "high": max(v)} for k, v in seen.items()
    }
    assert values(state, "states", "last") == {k: max(v) for k, v in seen.items()}
    halves = {key: Counter(held) for key, held in values(state, "states", "halves").items()}
    assert halves == {k: Counter(n / 2 for n in v) for k, v in seen.items()}
    held = {(row["k"], row["map_key"]) for row in rows_of(state, "states", "texts")}
    assert held == {(key, text) for key, own in texts.items() for text in own}
    fresh = rows_of(state, "states", "fresh")
    assert {(row["k"], row["map_key"]) for row in fresh} == {
        (key, n % 5) for key, numbers in seen.items() for n in numbers
    }
    assert all(row["written_at"] < row["expires_at"] for row in fresh)
    assert values(state, "states", "timers.event", "time_ms") == dict.fromkeys(seen, 10**9)
    windows = {(row["window_start"].timestamp(), row["window_end"].timestamp()) for row in rows}
    assert windows == {(0.0, 86_400.0)}


@pytest.mark.parametrize("name", ["hashmap-canonical", "hashmap-checkpoint", "rocksdb-native"])
def test_ranges_of_key_groups_are_the_whole_in_parts(name: str, tmp_path: Path) -> None:
    state = ps.open_state(unpacked(newest(name), tmp_path))
    for operator in state.operators:
        for one in operator.states:
            if "key_group" not in one.schema.names:
                continue
            whole = state.read(operator.uid, one.name)
            parts = [
                state.read(operator.uid, one.name, key_groups=range(start, start + 16))
                for start in range(0, operator.max_parallelism, 16)
            ]
            assert whole.schema == one.schema
            for place, part in enumerate(parts):
                groups = part["key_group"].to_pylist()
                assert all(place * 16 <= group < place * 16 + 16 for group in groups)
            pieces = Counter(str(row) for part in parts for row in part.to_pylist())
            assert pieces == Counter(str(row) for row in whole.to_pylist())


def test_what_there_is_is_listed(tmp_path: Path) -> None:
    state = ps.open_state(unpacked(newest("hashmap-canonical"), tmp_path))
    states = state.operator("states")
    assert (states.kind, states.parallelism, states.max_parallelism) == ("process", 2, 128)
    assert {one.name: one.kind for one in states.states} == {
        "timers.event": "timers",
        "timers.processing": "timers",
        "counts": "value",
        "sums": "value",
        "pairs": "value",
        "texts": "map",
        "halves": "list",
        "fresh": "map",
        "last": "value",
    }
    pair = pa.struct([("low", pa.int64()), ("high", pa.int64())])
    assert state.schema("states", "pairs").field("value").type == pair
    never_set = state.read("states", "timers.processing")
    assert (never_set.num_rows, never_set.schema.names) == (0, ["k", "time_ms", "key_group"])
    assert "pairs (value): k: int64, value: struct<low: int64, high: int64>" in str(state)


def test_wrong_names_are_told_the_right_ones(tmp_path: Path) -> None:
    state = ps.open_state(unpacked(newest("hashmap-canonical"), tmp_path))
    with pytest.raises(ps.StateError, match=r"operator 'sum' is not there.*'sums'"):
        state.read("sum", "slices")
    with pytest.raises(ps.StateError, match=r"operator 'early' has no state"):
        state.read("early", "x")
    with pytest.raises(ps.StateError, match=r"no state 'slice'.*it has 'slices', 'watermark'"):
        state.read("sums", "slice")
    with pytest.raises(ps.StateError, match="no range of key-groups"):
        state.read("sums", "slices", key_groups=5)  # type: ignore[arg-type]
    for none in (range(128, 200), range(-5, 5)):
        with pytest.raises(ps.StateError, match=r"'slices' .* has key-groups 0 to 127: none is in"):
            state.read("sums", "slices", key_groups=none)
    with pytest.raises(ps.StateError, match=r"'splits' .* has no key-groups: leave key_groups="):
        state.read("numbers", "splits", key_groups=range(10))
    with pytest.raises(ps.StateError, match=r"'splits' .* has no key-groups"):
        asked_state({"path": state.path, "uid": "numbers", "state": "splits", "key_groups": "0-9"})
    with pytest.raises(ps.StateError, match="neither a manifest nor a HEAD"):
        ps.open_state(Path(__file__).parent)
    with pytest.raises(ps.StateError, match="cannot be read"):
        ps.open_state(tmp_path / "nothing")
    for nothing in ("", None, 5):
        with pytest.raises(ps.StateError, match="give the path"):
            ps.open_state(nothing)  # type: ignore[arg-type]


def test_a_file_that_was_damaged_is_named(tmp_path: Path) -> None:
    path = unpacked(newest("hashmap-canonical"), tmp_path)
    state = ps.open_state(path)
    for file in (path / "state").iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 3 :: 50] = bytes(len(content[len(content) // 3 :: 50]))
        file.unlink()
        file.write_bytes(content)
    with pytest.raises(StoreCorrupt, match=r"state 'slices' of operator 'rows'.*checksum differs"):
        state.read("rows", "slices")


def test_a_savepoint_that_has_gone_is_said_to_be_no_more(tmp_path: Path) -> None:
    path = unpacked(newest("hashmap-canonical"), tmp_path / "kept")
    state = ps.open_state(path)
    shutil.rmtree(path / "state")
    with pytest.raises(ps.StreamError, match="is not whole any more"):
        state.read("rows", "slices")
