"""Aim: count windows whose index is read, or that a function looks at, do not keep keys for ever: with a TTL a key without
rows goes, and begins anew where it comes back.

Method: through the harness, with both backends and each way of looking at a window: sizes of snapshots, and random rows, pauses and
restores against a model.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from typing_extensions import override

import penstock as ps
import penstock.testing as pt
from penstock.errors import JobRejected, StreamError

pytestmark = pytest.mark.sampled(2)

SCHEMA = {"k": int, "v": int}
TTL_MS = 60_000


class Summed(ps.WindowFunction):
    @override
    def process(self, key: Any, window: Any, rows: Any, out: Any) -> None:
        out.emit(k=key, window_index=window.index, total=sum(row.v for row in rows))


def _window(stream: Any, ttl: ps.Ttl | None) -> Any:
    return stream.key_by("k").window(ps.count_window(3, ttl=ttl))


def aggregated(stream: Any) -> Any:
    return _window(stream, ps.Ttl(TTL_MS)).aggregate(total=ps.sum("v")).uid("windows")


def reduced(stream: Any) -> Any:
    window = _window(stream, ps.Ttl(TTL_MS))
    summed = window.reduce(lambda a, b: {"k": a.k, "v": a.v + b.v}).uid("windows")
    return summed.select("k", "window_index", total=ps.col("v"))


def processed(stream: Any) -> Any:
    schema = {"k": int, "window_index": int, "total": int}
    return _window(stream, ps.Ttl(TTL_MS)).process(Summed(), schema=schema).uid("windows")


def unnumbered(stream: Any) -> Any:
    return aggregated(stream).select("k", "total")


def without_ttl(stream: Any) -> Any:
    return _window(stream, None).aggregate(total=ps.sum("v")).uid("windows")


Build = Callable[[Any], Any]
BACKENDS = pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
BUILDS = pytest.mark.parametrize("build", [aggregated, reduced, processed])


def _push(h: pt.Harness, keys: range, rows_each: int) -> None:
    for _ in range(rows_each):
        h.push_many([{"k": k, "v": 1} for k in keys])


@BACKENDS
@pytest.mark.parametrize("rows_each", [1, 3, 4])
@pytest.mark.parametrize("build", [aggregated, reduced, processed, unnumbered])
def test_keys_that_have_expired_are_not_in_snapshots(
    build: Build, backend: Any, rows_each: int
) -> None:
    sizes = []
    for count in (10, 3000):
        with pt.harness(build, schema=SCHEMA, backend=backend) as h:
            _push(h, range(count), rows_each)
            h.advance(2 * TTL_MS)
            sizes.append(len(h.snapshot()))
    assert sizes[1] < sizes[0] + 5_000


@BACKENDS
def test_restored_keys_expire_without_a_row_of_theirs(backend: Any) -> None:
    sizes = []
    for count in (10, 3000):
        with pt.harness(aggregated, schema=SCHEMA, backend=backend) as h:
            _push(h, range(count), 4)
            snapshot = h.snapshot()
        with pt.harness(aggregated, schema=SCHEMA, backend=backend, restore=snapshot) as h:
            h.advance(2 * TTL_MS)
            for _ in range(20):  # the chain of changes is written anew
                h.push({"k": -1, "v": 1})
                sizes.append(len(h.snapshot()))
    assert sizes[-1] < sizes[19] + 5_000


@BACKENDS
@BUILDS
def test_a_key_lives_for_the_ttl_after_its_last_row(build: Build, backend: Any) -> None:
    with pt.harness(build, schema=SCHEMA, backend=backend) as h:
        for v in (1, 2, 4, 8):
            h.advance(TTL_MS - 1)
            h.push({"k": 7, "v": v})
        assert h.take() == [{"k": 7, "window_index": 0, "total": 7}]
        h.advance(TTL_MS)
        for v in (16, 32, 64):
            h.push({"k": 7, "v": v})
        assert h.take() == [{"k": 7, "window_index": 0, "total": 112}]


@BACKENDS
@BUILDS
def test_windows_are_those_of_a_model_over_pauses_and_restores(build: Build, backend: Any) -> None:
    numbers = random.Random(11)
    now_ms = 0
    known: dict[int, tuple[int, int, list[int]]] = {}
    snapshot = None
    for _ in range(6):
        found: Counter[tuple[int, int, int]] = Counter()
        expected: Counter[tuple[int, int, int]] = Counter()
        with pt.harness(build, schema=SCHEMA, backend=backend, restore=snapshot) as h:
            h.advance(max(0, now_ms - h.now))  # the clock of a harness begins anew
            for _ in range(15):
                h.advance(numbers.choice([1, TTL_MS // 3, TTL_MS - 1, TTL_MS, TTL_MS + 1]))
                now_ms = h.now
                rows = [
                    {"k": numbers.randrange(12), "v": numbers.randrange(1, 100)}
                    for _ in range(numbers.randrange(1, 15))
                ]
                h.push_many(rows)
                for row in rows:
                    _given(known, row["k"], row["v"], now_ms, expected)
                if numbers.random() < 0.4:
                    h.snapshot(complete=numbers.random() < 0.5)
            found.update((row["k"], row["window_index"], row["total"]) for row in h.take())
            snapshot = h.snapshot()
        assert found == expected


def _given(
    known: dict[int, tuple[int, int, list[int]]],
    key: int,
    value: int,
    now_ms: int,
    expected: Counter[tuple[int, int, int]],
) -> None:
    touched_ms, index, rows = known.get(key, (now_ms, 0, []))
    if now_ms - touched_ms >= TTL_MS:
        index, rows = 0, []
    rows = [*rows, value]
    if len(rows) == 3:
        expected[key, index, sum(rows)] += 1
        index, rows = index + 1, []
    known[key] = (now_ms, index, rows)


@BACKENDS
def test_a_ttl_that_comes_with_a_restore_is_refused_by_name(backend: Any) -> None:
    with pt.harness(without_ttl, schema=SCHEMA, backend=backend) as h:
        h.push({"k": 1, "v": 1})
        snapshot = h.snapshot()
    with (
        pytest.raises(StreamError, match="was stored as counts"),
        pt.harness(aggregated, schema=SCHEMA, backend=backend, restore=snapshot) as h,
    ):
        h.push({"k": 1, "v": 1})


def test_what_is_no_ttl_is_refused() -> None:
    with pytest.raises(JobRejected, match=r"ttl is '7d'; it must be a ps\.Ttl"):
        ps.count_window(3, ttl="7d")  # type: ignore[arg-type]
    with pytest.raises(JobRejected, match="visibility='return_if_not_cleaned_up'"):
        ps.count_window(3, ttl=ps.Ttl("1d", visibility="return_if_not_cleaned_up"))


def test_windows_with_a_ttl_cannot_be_declared_deterministic() -> None:
    with pytest.raises(JobRejected, match="forgotten by the machine's clock"):
        pt.harness(lambda stream: aggregated(stream).deterministic(True), schema=SCHEMA)


@BACKENDS
def test_another_length_holds_from_the_restore_on(backend: Any) -> None:
    def longer(stream: Any) -> Any:
        return _window(stream, ps.Ttl("1d")).aggregate(total=ps.sum("v")).uid("windows")

    with pt.harness(aggregated, schema=SCHEMA, backend=backend) as h:
        for v in (1, 2, 4, 8):
            h.push({"k": 7, "v": v})
        snapshot = h.snapshot()
    with pt.harness(longer, schema=SCHEMA, backend=backend, restore=snapshot) as h:
        h.advance(2 * TTL_MS)
        for v in (16, 32):
            h.push({"k": 7, "v": v})
        assert h.take() == [{"k": 7, "window_index": 1, "total": 56}]
