"""Aim: rows go into sessions as one at a time would. Method: the compiled loop against its twin, and a table against plain intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from taskmanager.kernels import encode_keys
from taskmanager.kernels.compiled import Kernels
from taskmanager.state import session_table
from taskmanager.state.instances import InstanceTable
from taskmanager.state.session_table import SessionTable
from tests.support.examples import examples
from tests.support.kernel_twins.implementations import load

GAP = 5
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 80)), min_size=1, max_size=40)
BATCHES = st.lists(ROWS, min_size=1, max_size=5)
ARRAYS = ["_head", "_start", "_end", "_key", "_earlier", "_later", "_fired", "_changed_in"]


class _Given:
    """Kernels for a table: those of ``process_kernels``, with one loop from elsewhere or with fewer steps."""

    def __init__(self, kernels: Kernels, steps_max: int | None = None) -> None:
        self._kernels = kernels
        self._steps_max = steps_max
        self.calls = 0

    def join_sessions(self, *arguments: Any) -> int:
        self.calls += 1
        given = list(arguments)
        if self._steps_max is not None and self.calls == 1:
            given[6] = self._steps_max
        return self._kernels.join_sessions(*given)


def _table() -> SessionTable:
    return SessionTable([pa.int64()], GAP, InstanceTable([], []))


def _add(table: SessionTable, rows: list[tuple[int, int]], kernels: _Given) -> Any:
    keys, times = np.array(rows, np.int64).T.copy()
    indices = table.key_indices(encode_keys([pa.array(keys)]))
    before = session_table.process_kernels
    session_table.process_kernels = lambda: kernels  # type: ignore[assignment, return-value]
    try:
        return table.add(indices, times)
    finally:
        session_table.process_kernels = before


def _intervals(rows: list[tuple[int, int]]) -> set[tuple[int, int, int]]:
    """(key, start, end) of the sessions of rows, by sorting them."""
    found: list[tuple[int, int, int]] = []
    for key, time in sorted(rows):
        if found and found[-1][0] == key and time <= found[-1][2]:
            found[-1] = (key, found[-1][1], time + GAP)
        else:
            found.append((key, time, time + GAP))
    return set(found)


@examples(200)
@given(batches=BATCHES)
def test_the_compiled_loop_does_what_its_twin_does(batches: list[list[tuple[int, int]]]) -> None:
    tables = [_table(), _table()]
    implementations = [load(compiled=True), load(compiled=False)]
    for rows in batches:
        updates = [
            _add(table, rows, _Given(kernels))
            for table, kernels in zip(tables, implementations, strict=True)
        ]
        for name in ("of_row", "source", "target"):
            assert getattr(updates[0], name).tolist() == getattr(updates[1], name).tolist()
        bound = tables[0].numbers.bound
        for name in ARRAYS:
            assert (getattr(tables[0], name)[:bound] == getattr(tables[1], name)[:bound]).all()
        sealed = [list(table.seal(table._version - 1, 16).batches()) for table in tables]
        assert sealed[0] == sealed[1]


@examples(200)
@given(batches=BATCHES, steps=st.none() | st.integers(0, 3))
def test_sessions_are_those_of_the_sorted_rows(
    batches: list[list[tuple[int, int]]], steps: int | None
) -> None:
    table = _table()
    kept: set[tuple[int, int, int]] = set()
    seen: list[tuple[int, int]] = []
    of_rows: list[int] = []
    for rows in batches:
        update = _add(table, rows, _Given(load(compiled=True), steps))
        into = dict(zip(update.source.tolist(), update.target.tolist(), strict=True))
        of_rows = [into.get(one, one) for one in of_rows] + update.of_row.tolist()
        seen += rows
        living = table._rows()
        names = table.keys(living)[0].to_pylist()
        starts, ends = table.starts(living).tolist(), table.ends(living).tolist()
        assert set(zip(names, starts, ends, strict=True)) == _intervals(seen)
        assert len(living) == len(table)
        held = dict(zip(living.tolist(), zip(names, starts, ends, strict=True), strict=True))
        for (key, time), session in zip(seen, of_rows, strict=True):
            name, start, end = held[session]
            assert name == key
            assert start <= time <= end - GAP
        for batch in table.seal(table._version - 1, 16).batches():
            for _, is_gone, key, start, end, _ in zip(*batch.to_pydict().values(), strict=True):
                kept = {one for one in kept if one[:2] != (key, start)}
                kept |= set() if is_gone else {(key, start, end)}
        assert kept == _intervals(seen), "what snapshots know, one built on the other"


def test_one_key_with_many_sessions_in_any_order_is_not_walked_for_every_row() -> None:
    """Unsorted input of a batch job: as many sessions as rows, all of one key."""
    table = _table()
    times = np.random.default_rng(3).permutation(60_000) * (2 * GAP)
    counted = _Given(load(compiled=True))
    for part in np.array_split(times, 8):
        _add(table, [(0, int(time)) for time in part], counted)
    assert len(table) == 60_000
    assert counted.calls > 8, "the budget of steps has ended, and the rest went along the chain"
