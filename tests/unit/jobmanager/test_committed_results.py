"""Collected rows of jobs that take checkpoints: what leaves, what is taken back, where it lies meanwhile."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pb import internal_pb2
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.graph.execution_attempt import AttemptKey, SubtaskId
from jobmanager.job.collect_sinks import CollectSinks
from jobmanager.job.restored_tasks import restored_tasks
from jobmanager.results.collect_buffer import Chunk, CollectBuffer, Verdict
from jobmanager.results.results_store import ResultsOverflow, ResultsStore
from penstock.errors import Fenced, StoreNotFound
from penstock.pb import checkpoint_pb2, client_pb2, graph_pb2
from penstock.storage.memory_store import MemoryStore
from penstock.storage.spill_store import SpillStore
from tests.support.examples import examples


def ipc(values: list[int]) -> bytes:
    batch = pa.record_batch({"x": pa.array(values, pa.int64())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def chunk(sequence: int, values: list[int]) -> client_pb2.ResultChunk:
    return client_pb2.ResultChunk(subtask_index=0, sequence=sequence, arrow=ipc(values))


def rows(data: bytes) -> list[int]:
    with pa.ipc.open_stream(data) as reader:
        values: list[int] = reader.read_all()["x"].to_pylist()
        return values


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 1), st.integers(1, 12)),
        st.tuples(st.just("commit"), st.integers(0, 1), st.integers(0, 6)),
        st.tuples(st.just("restart"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("pop"), st.just(0), st.integers(1, 4)),
    ),
    max_size=60,
)


@examples(200)
@given(STEPS)
def test_each_committed_chunk_leaves_once_and_no_other(
    steps: list[tuple[str, int, int]],
) -> None:
    """Against a model: per subtask a list of chunks of which a prefix is committed."""
    spill = SpillStore()
    buffer = CollectBuffer(capacity_bytes=20, limit=0, spill=spill, spill_bytes_max=10_000)
    sent: list[list[bytes]] = [[], []]
    committed = [0, 0]
    came: list[list[bytes]] = [[], []]
    serial = 0

    def pop(count: int) -> None:
        for _ in range(count):
            if found := buffer.pop():
                came[found.subtask_index].append(found.data)

    for kind, index, number in steps:
        if kind == "push":
            serial += 1
            data = serial.to_bytes(2, "big") * number
            if buffer.verdict(index, len(sent[index]), len(data)) is Verdict.FULL:
                pop(1_000)
            assert buffer.verdict(index, len(sent[index]), len(data)) is Verdict.TAKEN
            buffer.take(Chunk(index, len(sent[index]), data, 1))
            sent[index].append(data)
        elif kind == "commit":
            committed[index] = max(committed[index], min(number, len(sent[index])))
            buffer.commit(index, committed[index])
        elif kind == "restart":
            del sent[index][committed[index] :]
            buffer.begin_again(index, committed[index])
        else:
            pop(number)
        assert buffer.size_bytes <= 20 + 20 + spill.size_bytes + 24 * 60
    assert not buffer.has_lost_rows
    pop(1_000)
    for index in (0, 1):
        assert came[index] == sent[index][: committed[index]]
    buffer.commit_all()
    pop(1_000)
    assert came == sent
    assert spill.size_bytes == 0


def test_rows_wait_for_their_checkpoint_and_are_taken_back_at_a_restart() -> None:
    async def scenario() -> None:
        store = ResultsStore()
        store.open("j", {"c": 0}, takes_checkpoints=True)
        for sequence in range(3):
            await store.push("j", "c", chunk(sequence, [sequence]), 1)
        fetched = aiter(store.fetch("j", "c"))
        first = asyncio.ensure_future(anext(fetched))
        await asyncio.wait([first], timeout=0)
        assert not first.done()
        store.commit("j", {"c": {0: 1}})
        assert rows((await first).arrow) == [0]
        store.restart("j", 1, {"c": {0: 1}})
        with pytest.raises(Fenced, match="attempt 0"):
            await store.push("j", "c", chunk(3, [3]), 1, attempt=0)
        await store.push("j", "c", chunk(1, [10]), 1, attempt=1)
        store.end("j", is_finished=True)
        assert [rows(one.arrow) async for one in fetched] == [[10]]

    asyncio.run(scenario())


def test_behind_another_jobmanager_rows_wait_until_it_is_known_whose_count() -> None:
    async def scenario() -> None:
        store = ResultsStore()
        store.open("j", {"c": 0}, is_held=True)
        early, late = (
            asyncio.ensure_future(store.push("j", "c", chunk(0, [number]), 60, attempt=number))
            for number in (1, 2)
        )
        done, _ = await asyncio.wait([early, late], timeout=0)
        assert not done
        store.release("j", {"c": {0: 2}})
        with pytest.raises(Fenced, match="attempt 1"):
            await early
        await late
        store.end("j", is_finished=True)
        assert [rows(one.arrow) async for one in store.fetch("j", "c")] == [[2]]

    asyncio.run(scenario())


def test_a_job_that_did_not_finish_shows_committed_rows_only() -> None:
    async def scenario() -> None:
        store = ResultsStore()
        store.open("j", {"c": 0}, takes_checkpoints=True)
        await store.push("j", "c", chunk(0, [0]), 1)
        store.commit("j", {"c": {0: 1}})
        await store.push("j", "c", chunk(1, [1]), 1)
        store.end("j", is_finished=False)
        assert [rows(one.arrow) async for one in store.fetch("j", "c")] == [[0]]

    asyncio.run(scenario())


def test_too_much_that_waits_is_an_error_and_never_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobmanager.results.results_store.BUFFER_BYTES_MAX", 1_000)
    monkeypatch.setattr("jobmanager.results.results_store.SPILL_BYTES_MAX", 3_000)

    async def scenario() -> None:
        store = ResultsStore()
        store.open("j", {"c": 0}, takes_checkpoints=True)

        async def flood() -> None:
            for sequence in range(20):
                await store.push("j", "c", chunk(sequence, [1] * 30), 1)

        with pytest.raises(ResultsOverflow, match=r"execution\.checkpointing\.interval"):
            await flood()
        store.forget("j")

    asyncio.run(scenario())


def test_rows_of_a_jobmanager_that_has_ended_are_missed_aloud() -> None:
    async def scenario() -> None:
        store = ResultsStore()
        store.open("j", {"c": 0}, takes_checkpoints=True)
        store.restart("j", 16, {"c": {0: 4}})
        with pytest.raises(StoreNotFound, match="JobManager"):
            await anext(aiter(store.fetch("j", "c")))

    asyncio.run(scenario())


def test_sinks_that_go_on_keep_their_attempt() -> None:
    async def scenario() -> None:
        store = ResultsStore()
        store.open("j", {"c": 0}, takes_checkpoints=True)
        survivor = client_pb2.ResultChunk(subtask_index=1, sequence=0, arrow=ipc([7]))
        await store.push("j", "c", chunk(0, [1]), 1)
        store.restart("j", 1, {"c": {0: 0}})
        await store.push("j", "c", survivor, 1)
        with pytest.raises(Fenced, match="attempt 0"):
            await store.push("j", "c", chunk(1, [2]), 1)
        await store.push("j", "c", chunk(0, [3]), 1, attempt=1)
        store.end("j", is_finished=True)
        found = [rows(one.arrow) async for one in store.fetch("j", "c")]
        assert sorted(found) == [[3], [7]]

    asyncio.run(scenario())


def test_a_satisfied_sink_has_lost_nothing_at_a_restart() -> None:
    async def scenario() -> None:
        store = ResultsStore()
        store.open("j", {"c": 2}, takes_checkpoints=True)
        for sequence in range(4):
            await store.push("j", "c", chunk(sequence, [sequence]), 1)
        store.commit("j", {"c": {0: 4}})
        store.restart("j", 1, {"c": {0: 4}})
        store.end("j", is_finished=True)
        assert [rows(one.arrow) async for one in store.fetch("j", "c")] == [[0], [1]]

    asyncio.run(scenario())


def test_spilled_bytes_come_back_and_files_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.spill_store.FILE_BYTES", 100)
    spill = SpillStore()
    where = [spill.put(bytes([number]) * 60) for number in range(6)]
    assert spill.size_bytes == 360
    assert spill.take(where[1], 60) == b"\x01" * 60
    spill.drop(where[0])
    assert spill.size_bytes == 240
    assert spill.take(where[5], 60) == b"\x05" * 60
    spill.clear()
    assert spill.size_bytes == 0


def snapshot(index: int, sequence: int, uid: str = "snk") -> checkpoint_pb2.SubtaskSnapshot:
    found = checkpoint_pb2.SubtaskSnapshot(vertex="v1", subtask_index=index)
    state = found.operators.add(operator_uid=uid).lists.add(name="collect")
    state.items.extend(number.to_bytes(8, "little") for number in (sequence, 100))
    return found


def test_sequences_are_read_from_snapshots() -> None:
    vertex = graph_pb2.Vertex(id="v1", parallelism=4)
    vertex.operators.add(uid="snk").sink.collect.collect_id = "c0"
    sinks = CollectSinks(graph_pb2.JobGraph(vertices=[vertex]))
    acked = [(None, snapshot(0, 3)), (None, snapshot(1, 5)), (None, snapshot(2, 9, "other"))]
    assert sinks.committed(acked) == {"c0": {0: 3, 1: 5}}
    operator = internal_pb2.RestoredOperator(
        operator_uid="snk", lists=snapshot(0, 3).operators[0].lists
    )
    tasks = {
        SubtaskId("v1", 0): internal_pb2.RestoredTask(operators=[operator]),
        SubtaskId("v1", 1): internal_pb2.RestoredTask(finished=True),
        SubtaskId("v1", 2): internal_pb2.RestoredTask(),
    }
    assert sinks.restored(tasks) == {"c0": {0: 3, 2: 0, 3: 0}}
    assert sinks.restored({}) == {"c0": dict.fromkeys(range(4), 0)}


def test_what_finished_sinks_had_sent_is_known_after_a_restart_of_the_jobmanager() -> None:
    """Their rows were held by the JobManager that has ended: the client is told, however often it restarts."""
    vertex = graph_pb2.Vertex(id="v1", parallelism=2)
    vertex.operators.add(uid="snk").sink.collect.collect_id = "c0"
    graph = graph_pb2.JobGraph(vertices=[vertex])
    store = MemoryStore(1 << 20)
    sinks = CollectSinks(graph)

    def runner(epoch: int) -> CheckpointStoreRunner:
        return CheckpointStoreRunner(
            "j", graph, store, leader_epoch=epoch, version="1", now_ms=lambda: 7
        )

    def wanted(checkpoint_id: int, acked: list[int], finished: list[int]) -> c.StoreCheckpoint:
        return c.StoreCheckpoint(
            checkpoint_id,
            0,
            tuple((AttemptKey("v1", index, 0), snapshot(index, 3)) for index in acked),
            tuple(AttemptKey("v1", index, 0) for index in finished),
            (),
            (checkpoint_id,),
            checkpoint_id + 1,
            0,
        )

    first = runner(1)
    first.starts.prepare()
    assert isinstance(first.store(wanted(1, [0, 1], [])), c.CheckpointStored)
    sinks.committed([(None, snapshot(0, 3)), (None, snapshot(1, 3))])
    states = sinks.last_states([SubtaskId("v1", 0)])
    assert isinstance(first.store(wanted(2, [1], [0]), (), states), c.CheckpointStored)
    for epoch in (2, 3):
        newest = runner(epoch).starts.prepare().newest
        assert newest is not None
        tasks = restored_tasks(newest, graph)
        assert tasks[SubtaskId("v1", 0)].finished
        sinks = CollectSinks(graph)
        assert sinks.restored(tasks) == {"c0": {0: 3, 1: 3}}
        assert sinks.last_states([SubtaskId("v1", 0)]) == states


def test_a_client_is_told_of_lost_rows_of_a_sink_that_had_finished() -> None:
    async def scenario() -> None:
        store = ResultsStore()
        store.open("j", {"c": 0}, takes_checkpoints=True)
        store.restart("j", 16, {"c": {0: 3, 1: 0}})
        store.end("j", is_finished=True)
        with pytest.raises(StoreNotFound):
            _ = [one async for one in store.fetch("j", "c")]

    asyncio.run(scenario())
