"""What the states of the golden job hold, told by the rows that it had read: the oracle of those who look into it."""

from __future__ import annotations

import ast
import json
import tarfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from penstock.cli.main import main
from tests.support.golden_job import KEYS, ROWS, numbers

GOLDEN = Path(__file__).parents[1] / "golden"
ARCHIVES = sorted(GOLDEN.glob("runs-*/*.tar.gz"))
_FAR_MS = 10**9


def unpacked(archive: Path, directory: Path) -> Path:
    """One of the golden set on disk."""
    with tarfile.open(archive) as content:
        content.extractall(directory, filter="data")
    return directory


def told(*command: str) -> Any:
    """What ``penstock state`` says."""
    result = CliRunner().invoke(main, ["state", *command, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def check_all_states(path: str) -> None:
    """``penstock state`` lists all states of the golden job that lie there, and shows all their rows once."""
    states = {(one["uid"], one["name"]): one for one in told(path)["states"]}

    def rows(uid: str, name: str) -> list[dict[str, Any]]:
        found = told(path, uid, name, "--limit", "1000000")["rows"]
        assert states[uid, name]["rows"] == len(found), (uid, name)
        for row in found:
            assert set(row) == {"subtask", *states[uid, name]["columns"]}
        return list(found)

    held = rows("rows", "slices")
    expected = {row["n"]: row for row in numbers(0, ROWS).to_pylist()}
    positions = [ast.literal_eval(one["position"]) for one in rows("numbers", "splits")]
    assert len(held) == sum(int.from_bytes(position, "little") for position in positions)
    read = {row["n"]: row for row in held}
    assert len(read) == len(held), "a row is there twice"
    assert all(
        (row["k"], row["text"]) == (expected[n]["k"], expected[n]["text"])
        for n, row in read.items()
    )
    of_key: dict[int, list[int]] = defaultdict(list)
    for n in read:
        of_key[n % KEYS].append(n)
    check_states_of_function(rows, of_key)
    by_key = {key: sum(held) for key, held in of_key.items()}
    sums = _by_key(rows("sums", "slices"), "number_0_sum_int64")
    if any(
        name == "bundle" for _, name in states
    ):  # what pre-aggregation had not sent on at a checkpoint
        assert sums.keys() == by_key.keys()
        assert all(sums[key] <= by_key[key] for key in by_key)
    else:
        assert sums == by_key
    assert _by_key(rows("counts", "counts"), "number_0_sum_int64") == by_key
    assert _by_key(rows("counts", "counts"), "filled") == {k: len(v) for k, v in of_key.items()}
    assert _by_key(rows("sessions", "sessions"), "number_0_max_int64") == {
        key: max(held) for key, held in of_key.items()
    }
    texts = _by_key(rows("distinct", "slices"), "column_c_count_distinct")
    assert {key: sorted(found) for key, found in texts.items()} == {
        key: sorted({f"text {n % 7}" for n in held}) for key, held in of_key.items()
    }
    early = sorted(n for n in read if n < 2 * KEYS)
    assert sorted(row["low"] for row in rows("within", "left")) == early
    assert sorted(row["k"] for row in rows("joined", "left_slices")) == sorted(
        n % KEYS for n in early
    )


def check_states_of_function(
    rows: Callable[[str, str], list[dict[str, Any]]], of_key: dict[int, list[int]]
) -> None:
    """What the function has declared."""

    def declared(name: str, column: str = "value") -> dict[int, Any]:
        return _by_key(rows("states", name), column)

    assert declared("counts") == {key: len(held) for key, held in of_key.items()}
    assert declared("sums") == {key: sum(held) for key, held in of_key.items()}
    assert declared("last") == {key: max(held) for key, held in of_key.items()}
    assert declared("pairs") == {
        key: {"low": min(held), "high": max(held)} for key, held in of_key.items()
    }
    assert {key: sorted(found) for key, found in declared("halves", "items").items()} == {
        key: sorted(n / 2 for n in held) for key, held in of_key.items()
    }
    assert all(row["expires_at_ms"] > 10**12 for row in rows("states", "last"))
    for name, part in (("texts", lambda n: f"text {n % 7}"), ("fresh", lambda n: n % 5)):
        entries = [(row["key_0"], row["map_key"]) for row in rows("states", name)]
        assert len(entries) == len(set(entries))
        assert set(entries) == {(key, part(n)) for key, held in of_key.items() for n in held}
        assert all(row["value"] in of_key[row["key_0"]] for row in rows("states", name))
    timers = [(row["key_0"], row["time"]) for row in rows("states", "timers.event")]
    assert sorted(timers) == [(key, _FAR_MS) for key in sorted(of_key)]


def _by_key(rows: list[dict[str, Any]], column: str) -> dict[int, Any]:
    found = {row["key_0"]: row[column] for row in rows}
    assert len(found) == len(rows), "a key is there twice"
    return found
