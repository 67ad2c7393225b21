"""What may be declared as state, by which functions; everything else is refused where the graph is built."""

from __future__ import annotations

import datetime as dt
import pickle
from collections.abc import Callable
from typing import Any
from zoneinfo import ZoneInfo

import cloudpickle
import pyarrow as pa
import pytest

import penstock as ps
import penstock.testing as pt
from penstock.processing.process_functions import PROCESS_KINDS, process_kind
from penstock.state.declarations import declared_states


def nothing(self: Any, *_: Any) -> None:
    """A method that does nothing."""


METHODS = (
    "process",
    "process_batch",
    "process_broadcast",
    "process_left",
    "process_right",
)


def function_of(base: type, **attributes: Any) -> Any:
    methods = {name: nothing for name in METHODS if hasattr(base, name)}
    return type("Mine", (base,), {**methods, **attributes})()


KEYED = ps.ValueState("keyed", pa.int64())
BERLIN = ZoneInfo("Europe/Berlin")  # on 27 October 2024 the hour from 2 to 3 comes twice
HALF_PAST_TWO = dt.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN)
TWO_AGAIN = dt.datetime(2024, 10, 27, 2, 0, tzinfo=BERLIN, fold=1)
SECOND_HALF_PAST_TWO = HALF_PAST_TWO.replace(fold=1)
OPERATOR = ps.OperatorListState("operator", pa.int64())
BROADCAST = ps.BroadcastState("broadcast", pa.string(), pa.int64())


@pytest.mark.parametrize("info", PROCESS_KINDS, ids=lambda info: info.base.__name__)
def test_which_function_may_have_which_state(info: Any) -> None:
    assert process_kind(function_of(info.base)) is info
    has_broadcast = info.methods[-1] == "process_broadcast"
    for state, is_allowed in ((KEYED, info.is_keyed), (OPERATOR, True), (BROADCAST, has_broadcast)):
        function = function_of(info.base, mine=state)
        if is_allowed:
            assert process_kind(function) is info
        else:
            with pytest.raises(
                ps.JobRejected, match=r"Mine.mine: a function of this kind cannot have"
            ):
                process_kind(function)


def test_names_are_unique() -> None:
    function = function_of(ps.KeyedProcessFunction, one=KEYED, two=ps.ListState("keyed", int))
    with pytest.raises(ps.JobRejected, match="states one and two have the same name 'keyed'"):
        process_kind(function)
    function = function_of(ps.KeyedProcessFunction, one=KEYED)
    function.two = ps.ListState("keyed", int)
    with pytest.raises(ps.JobRejected, match="states one and two have the same name"):
        process_kind(function)


def test_states_of_bases_and_overridden_ones() -> None:
    class Base(ps.KeyedProcessFunction):
        one = ps.ValueState("one", int)
        two = ps.ValueState("two", int)
        three = ps.ValueState("three", int)
        process = nothing

    class Derived(Base):
        two = ps.ListState("two", int)
        three = None

    found = declared_states(Derived())
    assert {name: type(state) for name, state in found.items()} == {
        "one": ps.ValueState,
        "two": ps.ListState,
    }


@pytest.mark.parametrize("given", [ps.KeyedProcessFunction, object(), lambda row: row])
def test_what_is_no_process_function(given: Any) -> None:
    with pytest.raises(ps.JobRejected, match=r"^process: "):
        process_kind(given)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: ps.ValueState(""), "the name of a state is a text"),
        (lambda: ps.ValueState(5), "the name of a state is a text"),  # type: ignore[arg-type]
        (lambda: ps.ValueState("a\n", int), "the name of a state is a text"),
        (lambda: ps.ValueState("timers.event", int), "are Penstock's own"),
        (lambda: ps.ValueState("a", 5), "state 'a': 5 is no type"),
        (lambda: ps.ValueState("a", "int65"), "state 'a': there is no type 'int65'"),
        (
            lambda: ps.ValueState("a", pa.null()),
            "state 'a': a state cannot hold values of type null",
        ),
        (lambda: ps.ValueState("a", codec="json"), "codec='json' is none of msgpack, pickle"),
        (lambda: ps.ValueState("a", int, ttl="1h"), "ttl='1h' is no ps.Ttl"),  # type: ignore[arg-type]
        (lambda: ps.ValueState("a", int, default="x"), "'a': its default holds int64, got 'x'"),
        (lambda: ps.MapState("a", dict, int), "keys of a map have a plain type"),
        (lambda: ps.MapState("a", None, int), "keys of a map have a plain type"),
        (lambda: ps.MapState("a", pa.list_(pa.int64()), int), "keys of a map have a plain type"),
        (lambda: ps.ReducingState("a", int, 5), "5 cannot be called"),  # type: ignore[arg-type]
        (lambda: ps.AggregatingState("a", "median"), "there is no aggregate 'median'"),
        (lambda: ps.AggregatingState("a", object()), "is no aggregate"),
        (lambda: ps.OperatorListState("a", int, "all"), "redistribute='all' is none of"),  # type: ignore[arg-type]
        (lambda: ps.BroadcastState("a", object), "keys of a map have a plain type"),
    ],
)
def test_wrong_declarations(declare: Any, message: str) -> None:
    with pytest.raises(ps.JobRejected, match=message):
        declare()


@pytest.mark.parametrize(
    ("type_", "name"),
    [
        (int, "arrow.int64/1"),
        (str, "arrow.string/1"),
        ("timestamp[ms, tz=UTC]", 'arrow.timestamp[ms,"UTC"]/1'),
        (pa.list_(pa.int8()), "arrow.list<int8>/1"),
        (None, "msgpack/1"),
        (dict, "msgpack/1"),
        (ps.MSGPACK, "msgpack/1"),
        (ps.PICKLE, "pickle/1"),
    ],
)
def test_types_name_their_codec(type_: Any, name: str) -> None:
    assert ps.ValueState("a", type_).codec.name == name
    assert ps.ValueState("a", type_, codec="pickle").codec.name == "pickle/1"


@pytest.mark.parametrize(
    "declare",
    [
        lambda: ps.ValueState("hits", int, queryable=True),
        lambda: ps.ListState("hits", int, queryable=True),
        lambda: ps.MapState("hits", str, int, queryable=True),
        lambda: ps.ReducingState("hits", int, max, queryable=True),
        lambda: ps.AggregatingState("hits", ps.sum("x"), queryable=True),
    ],
)
def test_what_nobody_could_ask_for_is_refused(declare: Callable[[], object]) -> None:
    with pytest.raises(ps.JobRejected, match=r"'hits': queryable=True: there are no queries"):
        declare()


def test_declarations_travel() -> None:
    states = [
        ps.ValueState("a", pa.decimal128(10, 2), default=0, ttl=ps.Ttl("1h"), queryable=False),
        ps.MapState("b", str, pa.struct([("x", pa.int64())])),
        ps.ReducingState("c", int, lambda a, b: a + b),
        ps.AggregatingState("d", ps.mean("x")),
        OPERATOR,
        BROADCAST,
    ]
    for state in pickle.loads(cloudpickle.dumps(states)):
        assert not state.is_bound
        assert repr(state).startswith(type(state).__name__)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("count", [1, None, 2], 2),
        ("sum", [1, None, 2], 3),
        ("min", [float("nan"), 2.0, None, 1.0], 1.0),
        ("max", [2.0, float("nan"), 1.0], 2.0),
        ("mean", [1, 2, None], 1.5),
        ("first", [None, 4, 5], 4),
        ("last", [4, 5, None], 5),
        ("min", [SECOND_HALF_PAST_TWO, HALF_PAST_TWO, TWO_AGAIN], HALF_PAST_TWO),
        ("max", [HALF_PAST_TWO, TWO_AGAIN, SECOND_HALF_PAST_TWO], SECOND_HALF_PAST_TWO),
        ("count_distinct", [1, 1, 2, None], 2),
        ("count_distinct", [float("nan"), float("nan"), 0.0, -0.0], 2),
        ("count_distinct", [HALF_PAST_TWO, SECOND_HALF_PAST_TWO, TWO_AGAIN], 3),
        ("collect_list", [1, None, 1], [1, 1]),
    ],
)
def test_built_in_aggregates(name: str, values: list[Any], expected: Any) -> None:
    from penstock.aggregates.state_aggregates import BUILT_IN_ACCUMULATORS

    function = BUILT_IN_ACCUMULATORS[name]
    held = function.create_accumulator()
    empty = function.result(function.add(held, None))
    assert empty == {"count": 0, "count_distinct": 0, "collect_list": []}.get(name)
    held = function.create_accumulator()
    for value in values:
        held = function.add(held, value)
    found = function.result(held)
    assert found == expected
    assert getattr(found, "fold", 0) == getattr(expected, "fold", 0)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_type_and_function_may_come_in_either_order(is_swapped: bool) -> None:
    def order(*given: Any) -> tuple[Any, ...]:
        return given[::-1] if is_swapped else given

    reducing = ps.ReducingState("r", *order(pa.int64(), max))
    aggregating = ps.AggregatingState("a", *order(ps.sum("x"), pa.float64()))
    assert reducing.codec.name == "arrow.int64/1"
    assert aggregating.codec.name == "arrow.float64/1"


class Forgets(ps.KeyedProcessFunction):
    """Takes a state for its value, as a row says."""

    seen = ps.ValueState("seen", pa.int64(), default=0)
    total = ps.ReducingState("total", pa.int64(), lambda a, b: a + b)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        match row.mistake:
            case "truth":
                if not self.seen:
                    out.emit(mistake="seen is empty")
            case "truth of a sum":
                if self.total:
                    out.emit(mistake="there is a total")
            case "comparison":
                if self.seen == 0:
                    out.emit(mistake="seen is 0")
            case "assignment":
                self.seen = 1  # type: ignore[assignment]
            case _:
                out.emit(mistake=str(self.seen is not None and self.seen != self.total))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("truth", r"ValueState\('seen'\) is neither true nor false: ask for what it holds"),
        ("truth of a sum", r"ReducingState\('total'\) is neither true nor false"),
        ("comparison", r"ValueState\('seen'\) is compared with 0: ask for what it holds"),
        ("assignment", r"Forgets\.seen was ValueState\('seen'\) and is now 1.*self\.seen\.update"),
    ],
)
def test_a_state_is_not_taken_for_its_value(mistake: str, message: str) -> None:
    schema = {"mistake": str}
    with pt.harness(Forgets(), keys=["mistake"], schema=schema, output_schema=schema) as h:
        h.push({"mistake": ""})
        assert h.take() == [{"mistake": "True"}]
        with pytest.raises(ps.JobFailed, match=message):
            h.push({"mistake": mistake})
