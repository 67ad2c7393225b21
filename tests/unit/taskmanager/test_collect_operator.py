"""The collect sink: which chunks leave when. Rows arrive once each and in order, whatever the batches."""

import dataclasses

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from common.elements import CheckpointBarrier
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_to_bytes
from taskmanager.operators.collect_sink import CollectOperator
from taskmanager.operators.operator import Operator
from taskmanager.state.operator_state import OperatorStateStore
from taskmanager.task.operator_chain import SOURCE, ChainState, OperatorChain
from tests.support.operator_harness import OperatorHarness

SCHEMA = pa.schema([("n", pa.int64())])
BATCH_ROWS = 100


class Collect:
    """A collect operator and the chunks it has sent."""

    def __init__(self, limit=0, restored=()):
        sink = graph_pb2.SinkSpec(collect=graph_pb2.CollectSink(collect_id="c", limit=limit))
        schema = schema_to_bytes(SCHEMA)
        spec = graph_pb2.Operator(sink=sink, input_schema=schema, output_schema=schema)
        config = Configuration.from_mapping({"execution.batch-rows": BATCH_ROWS})
        self.operator = CollectOperator(spec)
        self.harness = OperatorHarness(self.operator, now_ms=1_000, config=config)
        self.chunks = []
        self.operator.open(
            dataclasses.replace(
                self.harness.context,
                send_results=lambda _, chunk: self.chunks.append(chunk),
                operator_state=OperatorStateStore(restored),
                takes_checkpoints=True,
            )
        )
        self.next = 0

    def snapshot(self, checkpoint_id):
        list(self.operator.on_control(CheckpointBarrier(checkpoint_id, 0)))
        self.operator.prepare_snapshot(checkpoint_id)
        assert self.operator.finish_snapshot(checkpoint_id) is None
        return self.operator.context.operator_state.snapshot()

    def push(self, rows):
        numbers = range(self.next, self.next + rows)
        self.next += rows
        self.harness.push(pa.RecordBatch.from_pydict({"n": numbers}, schema=SCHEMA))

    def take(self):
        """All chunks sent so far arrive."""
        self.operator.on_results_taken(internal_pb2.ResultsTaken(sequence=len(self.chunks) - 1))

    def sizes(self):
        return [len(numbers) for numbers in self.numbers()]

    def numbers(self):
        found = []
        for chunk in self.chunks:
            with pa.ipc.open_stream(chunk.arrow) as reader:
                found.append(reader.read_all()["n"].to_pylist())
        return found


def test_a_batch_that_comes_alone_leaves_at_once():
    collect = Collect()
    collect.push(3)
    assert collect.sizes() == [3]


def test_small_batches_gather_until_they_are_worth_a_chunk():
    collect = Collect()
    collect.push(1)
    for _ in range(60):
        collect.push(2)
    assert collect.sizes() == [1, 100]
    collect.harness.clock.time_ms += 10
    collect.push(2)
    assert collect.sizes() == [1, 100, 22]


def test_what_has_gathered_leaves_when_the_input_is_idle_or_ends():
    collect = Collect()
    for _ in range(3):
        collect.push(2)
    collect.harness.idle()
    assert collect.sizes() == [2, 4]
    collect.harness.idle()
    collect.push(5)
    assert collect.sizes() == [2, 4]
    assert not collect.operator.is_drained()
    collect.harness.end()
    assert collect.sizes() == [2, 4, 5]
    collect.take()
    assert collect.operator.is_drained()


@given(
    st.integers(0, 300),
    st.lists(st.one_of(st.integers(1, 150), st.sampled_from(["idle", "later", "take"]))),
)
def test_rows_arrive_once_and_in_order(limit, events):
    collect = Collect(limit)
    for event in events:
        if event == "idle":
            collect.harness.idle()
        elif event == "later":
            collect.harness.clock.time_ms += 7
        elif event == "take":
            collect.take()
        else:
            collect.push(event)
    collect.harness.end()
    found = [n for numbers in collect.numbers() for n in numbers]
    assert found == list(range(min(collect.next, limit) if limit else collect.next))
    assert [chunk.sequence for chunk in collect.chunks] == list(range(len(collect.chunks)))
    assert collect.harness.counters.records_out == len(found)


def test_a_barrier_waits_until_the_rows_before_it_have_arrived():
    """A checkpoint must not cover rows that could be lost on their way."""
    collect = Collect()
    passed = []

    class After(Operator):
        def on_control(self, element):
            passed.append(element)
            return (element,)

    chain = OperatorChain([collect.operator, After()], [(SOURCE, ""), (0, "")], [])
    collect.push(3)
    collect.push(2)
    chain.start(SOURCE, (CheckpointBarrier(1, 0),))
    while (state := chain.run()) is ChainState.PAUSED:
        pass
    assert state is ChainState.BLOCKED
    assert collect.sizes() == [3, 2]
    collect.operator.on_results_taken(internal_pb2.ResultsTaken(sequence=0))
    assert chain.run() is ChainState.BLOCKED
    assert passed == []
    collect.take()
    assert chain.run() is ChainState.DONE
    assert passed == [CheckpointBarrier(1, 0)]
    assert collect.operator.is_available()


def test_a_barrier_with_nothing_before_it_does_not_wait():
    collect = Collect()
    chain = OperatorChain([collect.operator], [(SOURCE, "")], [])
    chain.start(SOURCE, (CheckpointBarrier(1, 0),))
    while (state := chain.run()) is ChainState.PAUSED:
        pass
    assert state is ChainState.DONE


def test_a_restored_collect_goes_on_where_the_checkpoint_was():
    collect = Collect(limit=10)
    collect.push(4)
    collect.harness.idle()
    taken = collect.snapshot(1)
    assert int.from_bytes(taken[0].items[0], "little") == 1  # where the JobManager looks
    collect.push(3)
    restored = Collect(limit=10, restored=taken)
    assert not restored.operator.needs_commit
    assert restored.operator.is_drained()
    restored.push(4)
    restored.push(4)
    restored.harness.idle()
    assert [chunk.sequence for chunk in restored.chunks] == [1, 2]
    assert restored.sizes() == [4, 2]


def test_rows_that_no_checkpoint_covers_need_one():
    collect = Collect()
    assert not collect.operator.needs_commit
    collect.push(1)
    collect.snapshot(1)
    collect.snapshot(2)
    assert collect.operator.needs_commit
    collect.operator.on_checkpoint_aborted(2)
    collect.operator.on_checkpoint_completed(1)
    assert not collect.operator.needs_commit
    collect.push(1)
    collect.harness.end()
    assert collect.operator.needs_commit
    collect.snapshot(3)
    collect.operator.on_checkpoint_completed(3)
    assert not collect.operator.needs_commit
