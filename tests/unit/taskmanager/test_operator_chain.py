"""The chain: order on every path, stopping between any two elements, side outputs, the end."""

import pyarrow as pa
import structlog
from hypothesis import given
from hypothesis import strategies as st

from common.elements import PAUSE, EndOfData, OriginEnded, SideOutput, StreamStatus, Watermark
from taskmanager.operators.operator import Operator
from taskmanager.task.operator_chain import SOURCE, ChainState, OperatorChain


class Recorder:
    """An output that takes ``room`` batches until it is emptied."""

    def __init__(self, room=10**9):
        self.elements = []
        self.room = room

    def is_available(self):
        return self.room > 0

    def emit(self, batch):
        self.room -= 1
        self.elements += batch["x"].to_pylist()

    def emit_control(self, element):
        self.elements.append(element)


class Repeat(Operator):
    """Emits each batch n times, with pauses in between."""

    def __init__(self, times, pauses=False):
        self.times, self.pauses = times, pauses

    def process(self, batch):
        for _ in range(self.times):
            yield batch
            if self.pauses:
                yield PAUSE


class Split(Operator):
    """Even numbers to the main output, odd ones to the side output."""

    def process(self, batch):
        values = batch["x"].to_pylist()
        yield SideOutput("odd", rows(*[value for value in values if value % 2]))
        yield rows(*[value for value in values if value % 2 == 0])


class Last(Operator):
    def __init__(self, value):
        self.value = value

    def on_end_of_data(self):
        yield rows(self.value)


class HoldsBack(Operator):
    def on_idle(self):
        yield rows(99)


def rows(*values):
    return pa.record_batch({"x": pa.array(values, pa.int64())})


def feed(chain, *elements):
    for element in elements:
        chain.start(SOURCE, (element,))
        assert chain.run() is ChainState.DONE


def test_elements_keep_their_order_through_a_chain():
    output = Recorder()
    chain = OperatorChain([Repeat(2), Operator()], [(SOURCE, ""), (0, "")], [(1, "", output)])
    feed(chain, rows(1), Watermark(5), rows(2))
    assert output.elements == [1, 1, Watermark(5), 2, 2]


def test_every_branch_of_a_tree_gets_everything():
    left, right = Recorder(), Recorder()
    chain = OperatorChain(
        [Operator(), Repeat(2), Operator()],
        [(SOURCE, ""), (0, ""), (0, "")],
        [(1, "", left), (2, "", right)],
    )
    feed(chain, rows(1), StreamStatus(active=False))
    assert left.elements == [1, 1, StreamStatus(active=False)]
    assert right.elements == [1, StreamStatus(active=False)]


def test_side_outputs_take_their_rows_and_all_control_elements():
    main, side = Recorder(), Recorder()
    chain = OperatorChain(
        [Split(), Operator()], [(SOURCE, ""), (0, "odd")], [(0, "", main), (1, "", side)]
    )
    feed(chain, rows(1, 2, 3), Watermark(1))
    assert main.elements == [2, Watermark(1)]
    assert side.elements == [1, 3, Watermark(1)]


def test_a_side_output_that_nobody_reads_is_told_once():
    """A name that is written otherwise where it is read would be empty without a word."""
    main, side = Recorder(), Recorder()
    chain = OperatorChain(
        [Split()], [(SOURCE, "")], [(0, "", main), (0, "ood", side)], {0: "split"}
    )
    with structlog.testing.capture_logs() as logs:
        chain.start(SOURCE, [rows(2, 4)])
        chain.run()
        assert not logs, "nothing was written to it"
        chain.start(SOURCE, [rows(1, 2), rows(3)])
        chain.run()
    assert (main.elements, side.elements) == ([2, 4, 2], [])
    [told] = logs
    assert (told["event"], told["operator"], told["tag"], told["read"]) == (
        "side_output.unread",
        "split",
        "odd",
        ["ood"],
    )


def test_a_side_output_that_is_read_and_never_written_is_told_at_the_end():
    """But for late rows and bad records, which there need not be any of."""
    outputs = [(0, tag, Recorder()) for tag in ("odd", "ood", "late", "")]
    chain = OperatorChain(
        [Split()], [(SOURCE, "")], outputs, {0: "split"}, known_sides=[("late", "")]
    )
    with structlog.testing.capture_logs() as logs:
        feed(chain, rows(1, 2))
        assert not logs
        chain.start_end_of_data()
        chain.run()
    assert [(one["event"], one["operator"], one["tag"]) for one in logs] == [
        ("side_output.empty", "split", "ood")
    ]


def test_the_end_of_an_origin_stays_in_the_chain():
    output = Recorder()
    chain = OperatorChain([Operator()], [(SOURCE, "")], [(0, "", output)])
    feed(chain, OriginEnded("split"))
    assert output.elements == []


def test_a_full_output_stops_the_chain_between_two_batches():
    output = Recorder(room=1)
    chain = OperatorChain([Repeat(3)], [(SOURCE, "")], [(0, "", output)])
    chain.start(SOURCE, (rows(7),))
    assert chain.run() is ChainState.BLOCKED
    assert output.elements == [7]
    assert chain.is_busy
    output.room = 10
    assert chain.run() is ChainState.DONE
    assert output.elements == [7, 7, 7]


def test_a_pause_gives_the_thread_back():
    output = Recorder()
    chain = OperatorChain([Repeat(2, pauses=True)], [(SOURCE, "")], [(0, "", output)])
    chain.start(SOURCE, (rows(1),))
    assert chain.run() is ChainState.PAUSED
    assert chain.run() is ChainState.PAUSED
    assert chain.run() is ChainState.DONE
    assert output.elements == [1, 1]


def test_at_the_end_upstream_operators_go_first():
    output = Recorder()
    chain = OperatorChain(
        [Last(1), Repeat(2), Last(3)], [(SOURCE, ""), (0, ""), (1, "")], [(2, "", output)]
    )
    chain.start(SOURCE, (EndOfData(),))
    chain.start_end_of_data()
    assert chain.run() is ChainState.DONE
    assert output.elements == [EndOfData(), 1, 1, 3]


def test_what_is_held_back_leaves_when_the_input_is_idle():
    output = Recorder()
    chain = OperatorChain([HoldsBack(), Repeat(2)], [(SOURCE, ""), (0, "")], [(1, "", output)])
    chain.start_idle()
    assert chain.run() is ChainState.DONE
    assert output.elements == [99, 99]


class HoldsRows(Operator):
    """Lets what it holds go ahead of every watermark, and when the input is idle."""

    def __init__(self):
        self.held = [7]

    def process(self, batch):
        self.held += batch["x"].to_pylist()
        return ()

    def release(self):
        held, self.held = self.held, []
        return (rows(*held),)

    def on_idle(self):
        return self.release()

    def on_watermark(self, watermark):
        return (*self.release(), watermark)


class Announces(Operator):
    def on_idle(self):
        yield Watermark(5)


def test_what_is_held_back_is_not_overtaken_when_the_input_is_idle():
    output = Recorder()
    chain = OperatorChain([Announces(), HoldsRows()], [(SOURCE, ""), (0, "")], [(1, "", output)])
    chain.start_idle()
    assert chain.run() is ChainState.DONE
    assert output.elements == [7, Watermark(5)]


def test_closing_goes_on_behind_a_generator_that_raises():
    closed = []

    class Stubborn(Operator):
        def process(self, batch):
            try:
                yield batch
                yield batch
            finally:
                closed.append(self)
                raise RuntimeError("not yet")

    output = Recorder(room=1)
    chain = OperatorChain([Stubborn(), Stubborn()], [(SOURCE, ""), (0, "")], [(1, "", output)])
    chain.start(SOURCE, (rows(1),))
    assert chain.run() is ChainState.BLOCKED
    assert len(chain.close()) == len(closed) == 2


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.lists(st.integers(1, 3), min_size=1, max_size=50),
)
def test_stopping_anywhere_changes_nothing(times, values, rooms):
    """A chain that is blocked at any point emits the same as one that never is."""

    def build(output):
        operators = [Repeat(count) for count in times]
        parents = [(node - 1, "") for node in range(len(operators))]
        return OperatorChain(operators, parents, [(len(operators) - 1, "", output)])

    free, tight = Recorder(), Recorder(room=0)
    feed(build(free), *[rows(value) for value in values])
    chain, room = build(tight), iter([*rooms, *[10**9] * 10_000])
    for value in values:
        chain.start(SOURCE, (rows(value),))
        while chain.run() is not ChainState.DONE:
            tight.room = next(room)
    assert tight.elements == free.elements
