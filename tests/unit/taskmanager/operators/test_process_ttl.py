"""Time to live: every kind of state, update policy and visibility against a small model and a manual clock."""

from __future__ import annotations

from itertools import product
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from tests.support.examples import examples
from tests.support.object_backend import ObjectBackend
from tests.support.process_specs import rows, run_process

LIFE = 100
ASKS = -2
"""What is asked for one entry, and for how many there are, reads no other."""
UPDATES = ("write", "read_and_write")
VISIBILITIES = ("never_return_expired", "return_if_not_cleaned_up")
MATRIX = list(product(UPDATES, VISIBILITIES, (pa.int64(), ps.MSGPACK)))


def total(a: int, b: int) -> int:
    return a + b


class Living(ps.KeyedProcessFunction):
    def __init__(self, ttl: ps.Ttl, type_: Any) -> None:
        self.value = ps.ValueState("value", type_, ttl=ttl)
        self.items = ps.ListState("items", type_, ttl=ttl)
        self.entries = ps.MapState("entries", pa.string(), type_, ttl=ttl)
        self.sum = ps.ReducingState("sum", type_, total, ttl=ttl)

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        result: Any
        if row.n == ASKS:
            entries, items = self.entries, self.items
            result = ["1" in entries, bool(entries), len(entries), bool(items), len(items)]
        elif row.n < 0:
            result = [self.value.value(), self.items.get(), self.entries.items(), self.sum.get()]
        else:
            self.value.update(row.n)
            self.items.add(row.n)
            self.entries.put(str(row.n), row.n)
            result = self.sum.add(row.n)
        out.emit(user=row.user, text=repr(result))


class Model:
    """What ``Living`` is to do, by one key."""

    def __init__(self, update: str, visibility: str) -> None:
        self.renews = update == "read_and_write"
        self.shows = visibility == "return_if_not_cleaned_up"
        self.cells: dict[str, list[list[Any]]] = {
            "value": [],
            "items": [],
            "entries": [],
            "sum": [],
        }

    def asks(self, now: int) -> list[Any]:
        entries, items = (
            [cell for cell in self.cells[name] if self.shows or cell[1] + LIFE > now]
            for name in ("entries", "items")
        )
        for cell in entries:
            if cell[0] == 1 and self.renews and cell[1] + LIFE > now:
                cell[1] = now
        has_one = any(cell[0] == 1 for cell in entries)
        return [has_one, len(entries) > 0, len(entries), len(items) > 0, len(items)]

    def _read(self, name: str, now: int) -> list[Any]:
        cells = self.cells[name]
        seen = [cell[0] for cell in cells if self.shows or cell[1] + LIFE > now]
        if not self.shows:
            cells[:] = [cell for cell in cells if cell[1] + LIFE > now]
        if self.renews:
            for cell in cells:
                if cell[1] + LIFE > now:
                    cell[1] = now
        return seen

    def read(self, now: int) -> list[Any]:
        values = {name: self._read(name, now) for name in self.cells}
        return [
            values["value"][0] if values["value"] else None,
            values["items"],
            sorted((str(n), n) for n in values["entries"]),
            values["sum"][0] if values["sum"] else None,
        ]

    def write(self, n: int, now: int) -> None:
        self.cells["value"] = [[n, now]]
        self.cells["items"].append([n, now])
        self.cells["entries"] = [c for c in self.cells["entries"] if c[0] != n] + [[n, now]]
        before = self._read("sum", now)
        self.cells["sum"] = [[sum(before) + n, now]]


@examples(15)
@given(steps=st.lists(st.tuples(st.integers(ASKS, 3), st.integers(0, 60)), max_size=12))
@pytest.mark.parametrize(("update", "visibility", "type_"), MATRIX)
def test_every_policy(update: Any, visibility: Any, type_: Any, steps: list[Any]) -> None:
    ttl = ps.Ttl(LIFE, update=update, visibility=visibility)
    # When a backend cleans up is its own business: what is still there is known of dictionaries only.
    kept = {"backend": ObjectBackend} if visibility == "return_if_not_cleaned_up" else {}
    harness = run_process(Living(ttl, type_), harness=kept)
    model, now = Model(update, visibility), 0
    for n, wait in steps:
        now += wait
        harness.clock.time_ms = now
        harness.push(rows((1, n, 0)))
        (found,) = harness.take_rows()
        if n == ASKS:
            assert found["text"] == repr(model.asks(now))
        elif n < 0:
            assert found["text"] == repr(model.read(now))
        else:
            model.write(n, now)


def test_items_that_live_are_renewed_beside_expired_ones_that_are_shown() -> None:
    ttl = ps.Ttl(LIFE, update="read_and_write", visibility="return_if_not_cleaned_up")
    harness = run_process(Living(ttl, pa.int64()), harness={"backend": ObjectBackend})
    for now, n in ((0, 1), (LIFE - 20, 2), (LIFE + 10, -1)):
        harness.clock.time_ms = now
        harness.push(rows((1, n, 0)))
    (items,) = (c for c in harness.state.space.columns if c.descriptor.name == "items")
    assert list(items.held.values()) == [[(1, 0), (2, LIFE + 10)]]


@pytest.mark.parametrize(("update", "visibility", "type_"), MATRIX)
def test_stamps_survive_a_restore(update: Any, visibility: Any, type_: Any) -> None:
    function = Living(ps.Ttl(LIFE, update=update, visibility=visibility), type_)
    kept = {"backend": ObjectBackend} if visibility == "return_if_not_cleaned_up" else {}
    harness = run_process(function, harness=kept)
    harness.push(rows((1, 5, 0)))
    taken = harness.snapshot()
    for now, is_there in ((LIFE - 1, True), (LIFE, visibility == VISIBILITIES[1])):
        again = run_process(function, harness={**kept, "restored": [taken], "now_ms": now})
        again.push(rows((1, -1, 0)))
        (found,) = again.take_rows()
        expected = [5, [5], [("5", 5)], 5] if is_there else [None, [], [], None]
        assert found["text"] == repr(expected)


def test_expired_state_is_removed_as_it_is_met() -> None:
    harness = run_process(Living(ps.Ttl("100ms"), pa.int64()), harness={"backend": ObjectBackend})
    harness.push(rows((1, 5, 0)))
    harness.clock.time_ms = 100
    harness.push(rows((1, -1, 0)))
    assert all(not column.held for column in harness.state.space.columns)


def test_sweeps_are_asked_for_after_bundles_and_when_idle() -> None:
    harness = run_process(Living(ps.Ttl("100ms"), pa.int64()), harness={"backend": ObjectBackend})
    harness.push(rows((1, 5, 0)))
    assert harness.state.space.swept == 1
    harness.idle()
    assert harness.state.space.swept == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("0s",), "longer than 0 ms"),
        (("1h", "read"), "update='read' is none of write, read_and_write"),
        (("1h", "write", "never"), "visibility='never' is none of"),
        (("soon",), "not a duration"),
    ],
)
def test_wrong_times_to_live(arguments: Any, message: str) -> None:
    with pytest.raises(ps.JobRejected, match=message):
        ps.Ttl(*arguments)
