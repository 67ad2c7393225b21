"""Aim: what a start is told of state that is declared otherwise is what becomes of it: refused, or gone on with, value for value.

Method: random types and values are stored by a function, and read by another one that declares them otherwise, on the
backends of a slot; an oracle in plain Python changes the values along with the type.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

import penstock as ps
import penstock.testing as pt
from penstock.storage.codec import Stamped, codec_of
from penstock.storage.codec_migration import MigrationRefusedError, migration
from tests.support.examples import examples

ROWS = pa.schema([("k", pa.int64())])
WIDER = {
    pa.int8(): pa.int32(),
    pa.int16(): pa.int64(),
    pa.uint8(): pa.uint16(),
    pa.float32(): pa.float64(),
}
PLAIN: dict[pa.DataType, Callable[[Random], Any]] = {
    **{one: lambda random: random.randrange(100) for one in WIDER if pa.types.is_integer(one)},
    pa.float32(): lambda random: random.randrange(100) / 4,
    pa.string(): lambda random: random.choice(["", "ü", "x" * 40]),
    pa.bool_(): lambda random: random.random() < 0.5,
    pa.binary(): lambda random: random.choice([b"", b"\0\xff"]),
}  # fmt: skip
Change = tuple[pa.DataType, Callable[[Any], Any]]


def some_type(random: Random, depth: int = 0) -> pa.DataType:
    kind = random.random() if depth < 3 else 1.0
    if kind < 0.35:
        names = [f"f{index}" for index in range(random.randint(1, 3))]
        return pa.struct([(name, some_type(random, depth + 1)) for name in names])
    if kind < 0.5:
        return pa.list_(some_type(random, depth + 1))
    return random.choice(list(PLAIN))


def some_value(random: Random, type: pa.DataType, *, is_top: bool = True) -> Any:
    if not is_top and random.random() < 0.1:
        return None
    if pa.types.is_struct(type):
        return {field.name: some_value(random, field.type, is_top=False) for field in type}
    if pa.types.is_list(type):
        count = random.randrange(3)
        return [some_value(random, type.value_type, is_top=False) for _ in range(count)]
    return PLAIN[type](random)


def changed(random: Random, type: pa.DataType) -> Change:
    """The type otherwise, mostly as it may be, and what becomes of its values then."""
    if pa.types.is_list(type):
        inner, convert = changed(random, type.value_type)
        return pa.list_(inner), lambda items: items and [convert(item) for item in items]
    if not pa.types.is_struct(type):
        if random.random() < 0.05:
            return random.choice(list(PLAIN)), lambda value: value
        return (WIDER.get(type, type) if random.random() < 0.3 else type), lambda value: value
    fields = []
    made: list[tuple[str, str, Callable[[Any], Any]]] = []
    for field in type:
        what, (inner, convert) = random.random(), changed(random, field.type)
        if what < 0.15 and type.num_fields > 1:
            continue
        name = f"{field.name}_now" if what < 0.35 else field.name
        fields.append(ps.field(name, inner, alias=field.name if name != field.name else ""))
        made.append((field.name, name, convert))
    default = random.choice([None, 7])
    fields.append(ps.field("added", pa.int64(), default=default))
    random.shuffle(fields)

    def converted(value: Any) -> Any:
        return value and {"added": default} | {new: conv(value[old]) for old, new, conv in made}

    return pa.struct(fields), converted


def holding(
    kind: str, type: pa.DataType, ttl: ps.Ttl | None, values: list[Any]
) -> ps.KeyedProcessFunction:
    """A function with one state, which gets these values with each key."""

    class Holding(ps.KeyedProcessFunction):
        state: Any = {
            "value": lambda: ps.ValueState("state", type, ttl=ttl),
            "list": lambda: ps.ListState("state", type, ttl=ttl),
            "map": lambda: ps.MapState("state", pa.string(), type, ttl=ttl),
        }[kind]()

        @override
        def process(self, row: Any, ctx: Any, out: Any) -> None:
            for index, value in enumerate(values):
                match kind:
                    case "value":
                        self.state.update(value)
                    case "list":
                        self.state.add(value)
                    case _:
                        self.state.put(str(index), value)

    return Holding()


def plan(old: pa.DataType, new: pa.DataType, was_stamped: bool, is_stamped: bool) -> bool:
    """Whether a start is not refused; as ``check_restore`` decides it."""
    stored, declared = codec_of(old), codec_of(new)
    stored = Stamped(stored) if was_stamped else stored
    declared = Stamped(declared) if is_stamped else declared
    try:
        if stored.name != declared.name:
            migration(codec_of(stored.name), declared)
    except MigrationRefusedError:
        return False
    return True


@examples(80, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_told_of_state_is_what_becomes_of_it(seed: int) -> None:
    random = Random(seed)
    kind = random.choice(["value", "list", "map"])
    old = some_type(random)
    new, convert = changed(random, old)
    was_stamped, is_stamped = random.choice(
        [(False, False), (False, True), (True, True), (True, False)]
    )
    ttl = ps.Ttl("30d")
    values = [some_value(random, old) for _ in range(random.randint(1, 3))]
    backend, then = random.choice([("hashmap",) * 2, ("hashmap", "rocksdb"), ("rocksdb",) * 2])
    common: dict[str, Any] = {"keys": ["k"], "schema": ROWS, "output_schema": {"k": int}}
    stores = holding(kind, old, ttl if was_stamped else None, values)
    with pt.harness(stores, backend=backend, **common) as harness:
        harness.push({"k": 1})
        snapshot = harness.snapshot()
    reads = holding(kind, new, ttl if is_stamped else None, [])
    if not plan(old, new, was_stamped, is_stamped):
        with (
            pytest.raises((ps.JobFailed, ps.JobRejected)),
            pt.harness(reads, backend=then, restore=snapshot, **common),
        ):
            pass
        return
    with pt.harness(reads, backend=then, restore=snapshot, **common) as harness:
        found = harness.state("state", key=1)
    whole = [convert(value) for value in values]
    wanted: dict[str, Any] = {
        "value": whole[-1],
        "list": whole,
        "map": {str(index): value for index, value in enumerate(whole)},
    }
    assert found == wanted[kind]
