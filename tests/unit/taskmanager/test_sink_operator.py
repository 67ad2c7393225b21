"""The sink operator: output shows exactly once, whatever becomes of checkpoints, attempts and parallelism.

Method: a file sink and user sinks behind the operator, driven through the calls of a task.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from common.elements import CheckpointBarrier
from penstock.connectors import file_sink
from penstock.connectors.sink import Sink, TwoPhaseSink
from penstock.errors import TaskFailure
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.checkpoint_properties import (
    BehindBarrier,
    CheckpointKind,
    CheckpointProperties,
)
from taskmanager.connectors.hidden_files import output_tag, sweep_hidden_files
from taskmanager.operators.operator import Operator
from taskmanager.operators.sink import SinkOperator
from taskmanager.state.operator_state import OperatorStateStore
from tests.support.operator_harness import OperatorHarness

Lists = list[checkpoint_pb2.OperatorStateSnapshot]


def rows(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(numbers, pa.int64())})


def shown(directory: Path) -> list[int]:
    """The numbers that a reader of the directory sees."""
    paths = [p for p in directory.rglob("*.parquet") if not p.name.startswith((".", "_"))]
    return sorted(n for path in paths for n in pq.ParquetFile(path).read()["n"].to_pylist())


_operators: list[SinkOperator] = []


@pytest.fixture(autouse=True)
def _close_all() -> Iterator[None]:
    """Closes the files of those that a test dropped as if they had been killed."""
    yield
    while _operators:
        _operators.pop().close()


class Task:
    """A sink operator in one subtask."""

    def __init__(
        self,
        sink: graph_pb2.SinkSpec,
        *,
        restored: Lists | None = None,
        takes_checkpoints: bool = True,
        subtask_index: int = 0,
        parallelism: int = 1,
        attempt: int = 0,
    ) -> None:
        spec = graph_pb2.Operator(uid="uid", name="out", sink=sink)
        surroundings = OperatorHarness(
            Operator(), subtask_index=subtask_index, parallelism=parallelism
        )
        self.clock, self.pauses = surroundings.clock, surroundings.pauses
        self.state = OperatorStateStore(restored or ())
        self.operator = SinkOperator(spec)
        _operators.append(self.operator)
        self.operator.open(
            dataclasses.replace(
                surroundings.context,
                operator_name="out",
                attempt=attempt,
                operator_state=self.state,
                takes_checkpoints=takes_checkpoints,
            )
        )

    def write(self, *numbers: int) -> None:
        assert list(self.operator.process(rows(*numbers))) == []

    def snapshot(self, checkpoint_id: int, *, finish: bool = True) -> Lists:
        list(self.operator.on_control(object()))  # type: ignore[arg-type]
        self.operator.prepare_snapshot(checkpoint_id)
        work = self.operator.finish_snapshot(checkpoint_id)
        if finish and work is not None:
            work()
        return list(self.state.snapshot())

    def end(self) -> None:
        assert list(self.operator.on_end_of_data()) == []


def union(*lists: Lists) -> Lists:
    """What each subtask gets back of what all subtasks had."""
    found = [one for own in lists for one in own]
    assert all(one.redistribution == checkpoint_pb2.REDISTRIBUTION_UNION for one in found)
    return found


def test_output_shows_when_its_checkpoint_is_complete(tmp_path: Path) -> None:
    task = Task(file_sink("parquet", tmp_path))
    task.write(1, 2)
    task.snapshot(1)
    task.write(3)
    assert shown(tmp_path) == []
    task.operator.on_checkpoint_completed(1)
    assert shown(tmp_path) == [1, 2]
    task.operator.on_checkpoint_completed(1)
    task.snapshot(2)
    task.operator.on_checkpoint_completed(2)
    assert shown(tmp_path) == [1, 2, 3]
    assert task.snapshot(3) == []
    task.operator.close()


def test_what_an_aborted_checkpoint_prepared_goes_into_the_next(tmp_path: Path) -> None:
    task = Task(file_sink("parquet", tmp_path))
    task.write(1)
    task.snapshot(1, finish=False)  # declined before its files were safe
    task.operator.on_checkpoint_aborted(1)
    task.write(2)
    taken = task.snapshot(2)
    assert [len(one.items) for one in taken] == [2]
    assert shown(tmp_path) == []
    # Nobody tells this attempt that the checkpoint is complete: the next one commits.
    task.operator.close()
    Task(file_sink("parquet", tmp_path), restored=taken, attempt=1)
    assert shown(tmp_path) == [1, 2]


@pytest.mark.parametrize("finish", [False, True])
def test_a_job_cancelled_for_good_leaves_only_what_is_committed(
    tmp_path: Path, finish: bool
) -> None:
    task = Task(file_sink("parquet", tmp_path))
    for checkpoint_id in (1, 2, 3):
        task.write(checkpoint_id)
        task.snapshot(checkpoint_id, finish=finish or checkpoint_id == 1)
    task.operator.on_checkpoint_completed(1)
    task.write(4)
    task.operator.discard_output()
    task.operator.close()
    assert shown(tmp_path) == [1]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_restored_sink_commits_once_more_and_forgets(tmp_path: Path) -> None:
    task = Task(file_sink("parquet", tmp_path))
    task.write(1)
    taken = task.snapshot(1)
    task.operator.on_checkpoint_completed(1)
    task.write(2)
    for attempt in (1, 2):
        task = Task(file_sink("parquet", tmp_path), restored=taken, attempt=attempt)
        assert shown(tmp_path) == [1]
        assert task.snapshot(2) == []
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_each_committable_has_one_owner_at_any_parallelism(
    tmp_path: Path, parallelism: int
) -> None:
    """Whoever comes first: no subtask takes for a leftover what another one has to commit."""
    spec = file_sink("parquet", tmp_path)
    before = [Task(spec, subtask_index=index, parallelism=3) for index in range(3)]
    taken = []
    for index, task in enumerate(before):
        task.write(index)
        taken.append(task.snapshot(1))
        task.write(100 + index)
        task.snapshot(2)
    for index in reversed(range(parallelism)):
        Task(
            spec,
            restored=union(*taken),
            subtask_index=index,
            parallelism=parallelism,
            attempt=1,
        )
    assert shown(tmp_path) == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 3


def test_at_the_end_of_the_data_a_last_checkpoint_commits(tmp_path: Path) -> None:
    task = Task(file_sink("parquet", tmp_path))
    assert not task.operator.needs_commit
    task.write(1)
    task.snapshot(1)
    task.end()
    assert task.operator.needs_commit
    task.operator.on_checkpoint_completed(1)
    assert not task.operator.needs_commit
    task.write(2)
    assert task.operator.needs_commit
    task.end()
    task.snapshot(2)
    assert task.operator.needs_commit
    task.operator.on_checkpoint_completed(2)
    assert not task.operator.needs_commit
    task.operator.close()
    assert shown(tmp_path) == [1, 2]


def test_without_checkpoints_there_is_one_commit(tmp_path: Path) -> None:
    task = Task(file_sink("parquet", tmp_path), takes_checkpoints=False)
    task.write(1)
    assert not task.operator.needs_commit
    task.end()
    assert task.operator.needs_commit
    assert shown(tmp_path) == []
    task.operator.commit_output()
    assert not task.operator.needs_commit
    task.operator.close()
    assert shown(tmp_path) == [1]


def test_without_checkpoints_nothing_is_left_of_a_job_that_ends_otherwise(tmp_path: Path) -> None:
    task = Task(file_sink("parquet", tmp_path), takes_checkpoints=False)
    task.write(1)
    task.end()
    task.operator.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", [{"inactivity_ms": 100}, {"roll_interval_ms": 100}])
def test_files_roll_where_the_wall_clock_is_set_back(
    tmp_path: Path, policy: dict[str, int]
) -> None:
    task = Task(file_sink("parquet", tmp_path, **policy))
    task.clock.time_ms = 5_000
    task.write(1)
    task.clock.wall_ahead_ms = -5_000
    for pauses in (1, 2):
        task.clock.time_ms = task.pauses[-1]
        list(task.operator.on_pause_over())
        assert len(task.pauses) <= pauses + 1
    work = task.operator.finish_snapshot(1)
    assert work is not None
    work()
    assert [p.suffix for p in tmp_path.iterdir()] == [".pending"]
    task.operator.close()


def test_files_roll_after_a_while(tmp_path: Path) -> None:
    task = Task(file_sink("parquet", tmp_path, inactivity_ms=100))
    task.clock.time_ms = 5_000
    task.write(1)
    assert task.pauses == [5_100]
    task.clock.time_ms = 5_050
    task.write(2)
    assert task.pauses[-1] == 5_150
    task.clock.time_ms = 5_100
    list(task.operator.on_pause_over())
    assert task.pauses[-1] == 5_150
    assert [p.suffix for p in tmp_path.iterdir()] == [".inprogress"]
    task.clock.time_ms = 5_150
    count = len(task.pauses)
    list(task.operator.on_pause_over())
    assert len(task.pauses) == count
    work = task.operator.finish_snapshot(1)
    assert work is not None
    work()
    assert [p.suffix for p in tmp_path.iterdir()] == [".pending"]
    task.operator.close()


def test_a_sink_that_cannot_be_loaded_can_be_closed() -> None:
    bad = graph_pb2.SinkSpec(custom=graph_pb2.Function(pickled=b"no pickle", display_name="Mine"))
    operator = SinkOperator(graph_pb2.Operator(uid="uid", name="out", sink=bad))
    with pytest.raises(TaskFailure, match="loading Mine raised"):
        operator.open(OperatorHarness(Operator()).context)
    assert operator.is_open
    operator.close()


# ---------------------------------------------------------------- sinks of users

CALLS: list[Any] = []
"""What the sinks were asked to do: a sink in a task is a copy of the user's."""


def custom(sink: Sink) -> graph_pb2.SinkSpec:
    CALLS.clear()
    return graph_pb2.SinkSpec(custom=graph_pb2.Function(pickled=pickle.dumps(sink)))


class Idempotent(Sink):
    @override
    def write(self, batch: pa.RecordBatch) -> None:
        CALLS.append(batch["n"].to_pylist())

    @override
    def flush(self) -> None:
        CALLS.append("flush")


class TwoPhase(TwoPhaseSink):
    """Hands out one committable per row; refuses to commit rows that are negative, the first time."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.refused: set[int] = set()

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        self.rows += batch["n"].to_pylist()

    @override
    def prepare_commit(self, checkpoint_id: int) -> list[Any]:
        CALLS.append(("prepare", checkpoint_id))
        rows, self.rows = self.rows, []
        return rows

    @override
    def commit(self, committable: Any) -> None:
        if committable < 0:
            raise ConnectionError("refused")
        CALLS.append(("commit", committable))

    @override
    def abort(self, committable: Any) -> None:
        CALLS.append(("abort", committable))


def test_an_idempotent_sink_is_flushed_before_a_snapshot() -> None:
    task = Task(custom(Idempotent()))
    task.write(1)
    assert task.snapshot(1) == []
    assert CALLS == [[1], "flush"]
    assert task.snapshot(2) == []
    assert CALLS == [[1], "flush"]
    task.write(2)
    task.end()
    assert CALLS == [[1], "flush", [2], "flush"]
    assert not task.operator.needs_commit


def test_a_two_phase_sink_commits_once_per_committable() -> None:
    task = Task(custom(TwoPhase()))
    task.write(1, 2)
    taken = task.snapshot(1)
    task.write(3)
    later = task.snapshot(2)
    task.operator.on_checkpoint_completed(1)
    assert CALLS == [("prepare", 1), ("prepare", 2), ("commit", 1), ("commit", 2)]
    task.operator.on_checkpoint_completed(2)
    assert CALLS[4:] == [("commit", 3)]
    task.operator.close()
    assert len(CALLS) == 5
    CALLS.clear()
    Task(custom(TwoPhase()), restored=taken)
    assert CALLS == [("commit", 1), ("commit", 2)]
    Task(custom(TwoPhase()), restored=later)
    assert CALLS == [("commit", 1), ("commit", 2), ("commit", 3)]


def test_two_phases_without_checkpoints() -> None:
    task = Task(custom(TwoPhase()), takes_checkpoints=False)
    task.write(1)
    task.end()
    assert CALLS == [("prepare", 0)]
    task.operator.commit_output()
    task.operator.close()
    assert CALLS == [("prepare", 0), ("commit", 1)]
    task = Task(custom(TwoPhase()), takes_checkpoints=False)
    task.write(1, 2)
    task.end()
    task.operator.close()
    assert CALLS == [("prepare", 0), ("abort", 1), ("abort", 2)]


@pytest.mark.parametrize("takes_checkpoints", [True, False])
def test_nothing_is_aborted_once_its_commit_has_begun(takes_checkpoints: bool) -> None:
    task = Task(custom(TwoPhase()), takes_checkpoints=takes_checkpoints)
    task.write(1, -1, 2)
    task.end()
    commit: Callable[[], None] = task.operator.commit_output
    if takes_checkpoints:
        task.snapshot(1)
        commit = partial(task.operator.on_checkpoint_completed, 1)
    with pytest.raises(TaskFailure, match=r"TwoPhase\.commit raised ConnectionError: refused"):
        commit()
    task.operator.close()
    assert [call for call in CALLS if call[0] != "prepare"] == [("commit", 1)]


def test_a_sink_class_of_the_users_script_works_too() -> None:
    class Local(Idempotent):
        pass

    spec = graph_pb2.SinkSpec(custom=graph_pb2.Function(pickled=cloudpickle.dumps(Local())))
    Task(spec).write(1)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(1, 3)),
            st.tuples(st.just("snapshot")),
            st.tuples(st.just("complete"), st.integers(0, 3)),
            st.tuples(st.just("abort"), st.integers(0, 3)),
            st.tuples(st.just("restart")),
        )
    )
)
def test_commits_are_what_completed_checkpoints_cover(steps: list[tuple[Any, ...]]) -> None:
    """Random checkpoints, of which several may be under way, and restarts from the newest complete one."""
    spec, next_number = custom(TwoPhase()), 0
    task, written = Task(spec), list[int]()
    under_way: list[tuple[int, Lists, list[int]]] = []
    complete: tuple[Lists, list[int]] = [], []
    checkpoint_id = 0
    for kind, *values in steps:
        if kind == "write":
            numbers = range(next_number, next_number + values[0])
            next_number += values[0]
            task.write(*numbers)
            written += numbers
        elif kind == "snapshot":
            checkpoint_id += 1
            under_way.append((checkpoint_id, task.snapshot(checkpoint_id), list(written)))
        elif kind == "restart":
            task, under_way, written = Task(spec, restored=complete[0]), [], list(complete[1])
        elif under_way:
            id, lists, covered = under_way.pop(values[0] % len(under_way))
            if kind == "abort":
                task.operator.on_checkpoint_aborted(id)
            else:
                complete = lists, covered
                under_way = [one for one in under_way if one[0] > id]
                task.operator.on_checkpoint_completed(id)
        committed = {call[1] for call in CALLS if call[0] == "commit"}
        assert committed == set(complete[1])
    assert not [call for call in CALLS if call[0] == "abort"]


# ---------------------------------------------------------------- savepoints


def begin_save(task: Task, savepoint_id: int) -> Callable[[], object]:
    """Its synchronous part; what it returns is the part on an I/O thread."""
    properties = CheckpointProperties(CheckpointKind.SAVEPOINT, "/kept/s")
    list(task.operator.on_control(CheckpointBarrier(savepoint_id, 0, properties=properties)))
    task.operator.prepare_snapshot(savepoint_id)
    work = task.operator.finish_snapshot(savepoint_id)
    assert work is not None
    return work


def save(task: Task, savepoint_id: int) -> Lists:
    begin_save(task, savepoint_id)()
    return list(task.state.snapshot())


def hidden(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


def test_a_savepoint_commits_nothing_and_the_checkpoint_behind_it_all(tmp_path: Path) -> None:
    task = Task(file_sink("parquet", tmp_path))
    task.write(1)
    save(task, 1)
    task.write(2)
    assert shown(tmp_path) == []
    task.snapshot(2)
    task.operator.on_checkpoint_completed(2)
    assert shown(tmp_path) == [1, 2]
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("end", ["cancelled", "killed", "restarted", "swept"])
def test_what_a_savepoint_names_stays_until_somebody_commits_it(tmp_path: Path, end: str) -> None:
    task = Task(file_sink("parquet", tmp_path))
    task.write(1)
    task.snapshot(1)
    task.operator.on_checkpoint_completed(1)
    task.write(2)
    named = save(task, 2)
    task.write(3)
    if end == "cancelled":
        task.operator.discard_output()
        task.operator.close()
    elif end == "restarted":  # from the older checkpoint, which covers nothing of it
        Task(file_sink("parquet", tmp_path), attempt=1).operator.close()
    elif end == "swept":
        task.operator.close()
        sweep_hidden_files(tmp_path, output_tag(task.operator.context.job_id, "uid"))
    assert shown(tmp_path) == [1]
    for attempt in (0, 1):  # another job, and the same again
        Task(file_sink("parquet", tmp_path), restored=named, attempt=attempt)
        assert shown(tmp_path) == [1, 2]
    assert not [name for name in hidden(tmp_path) if name.startswith(".held")]


@pytest.mark.parametrize("behind", [BehindBarrier.GO_ON, BehindBarrier.HOLD])
def test_one_that_is_made_of_a_checkpoint_is_committed_with_it_and_carries_nothing_on(
    tmp_path: Path, behind: BehindBarrier
) -> None:
    task = Task(file_sink("parquet", tmp_path, min_size_bytes=1 << 20, max_delay_ms=3_600_000))
    task.write(1)
    task.snapshot(1)
    task.operator.on_checkpoint_completed(1)
    assert shown(tmp_path) == []
    properties = CheckpointProperties(target="/kept/s", behind=behind)
    list(task.operator.on_control(CheckpointBarrier(2, 0, properties=properties)))
    task.snapshot(2)
    assert not [name for name in hidden(tmp_path) if name.startswith(".held")]
    task.operator.on_checkpoint_completed(2)
    assert shown(tmp_path) == [1]
    assert hidden(tmp_path) == []


def test_a_savepoint_that_is_aborted_holds_nothing(tmp_path: Path) -> None:
    task = Task(file_sink("parquet", tmp_path))
    task.write(1)
    save(task, 1)
    task.operator.on_checkpoint_aborted(1)
    assert not [name for name in hidden(tmp_path) if name.startswith(".held")]
    task.operator.discard_output()
    task.operator.close()
    assert hidden(tmp_path) == []


def test_one_that_is_aborted_while_it_is_written_holds_nothing(tmp_path: Path) -> None:
    task = Task(file_sink("parquet", tmp_path))
    task.write(1)
    write = begin_save(task, 1)
    task.operator.on_checkpoint_aborted(1)
    write()
    task.snapshot(2)
    task.operator.on_checkpoint_completed(2)
    assert shown(tmp_path) == [1]
    assert hidden(tmp_path) == []


def test_a_restart_from_what_has_committed_it_ends_the_doubt(tmp_path: Path) -> None:
    task = Task(file_sink("parquet", tmp_path))
    task.write(1)
    save(task, 1)
    covered = task.snapshot(2)
    # Killed before it heard that the checkpoint is complete.
    Task(file_sink("parquet", tmp_path), restored=covered, attempt=1)
    assert shown(tmp_path) == [1]
    assert hidden(tmp_path) == []
