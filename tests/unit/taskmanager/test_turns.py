"""Subtasks that a checkpoint waits for go first in their slot; nobody stands still because of it."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from common.pb import internal_pb2
from taskmanager.processes.mailbox import Mailbox
from taskmanager.task.slot_runtime import SlotRuntime
from taskmanager.task.subtask import Progress
from taskmanager.task.turns import PREFERRED_IN_A_ROW, Turns
from tests.support.in_memory_network import SimulatedLoop


class Busy:
    """An execution with something to do for ever; the barrier passes it in the step of that number."""

    has_ended = False

    def __init__(self, attempt: internal_pb2.AttemptId, barrier_at: int) -> None:
        self.attempt = attempt
        self.steps = self.passed_checkpoint_id = 0
        self._barrier_at = barrier_at

    def start(self) -> None:
        pass

    def handle(self, command: internal_pb2.TaskCommand) -> None:
        pass

    def step(self, turn_ns: int) -> Progress:
        self.steps += 1
        if self.steps == self._barrier_at:
            self.passed_checkpoint_id = 1
        return Progress.MORE

    def deadline_ns(self, now_ms: int, now_ns: int) -> None:
        return None


def slot_of(**barriers: int) -> tuple[SlotRuntime, dict[str, Busy]]:
    """A slot with subtasks by these names."""
    loop, executions = SimulatedLoop(), {}

    def build(deployment: internal_pb2.TaskDeployment, *callbacks: object) -> Busy:
        name = deployment.attempt.vertex
        executions[name] = Busy(deployment.attempt, barriers[name])
        return executions[name]

    runtime = SlotRuntime(
        loop,
        Mailbox(),
        SimpleNamespace(next_deadline_ns=None),  # type: ignore[arg-type]
        build,  # type: ignore[arg-type]
        lambda report: None,
        loop.monotonic_ns,
    )
    for name in barriers:
        deployment = internal_pb2.TaskDeployment(attempt=internal_pb2.AttemptId(vertex=name))
        runtime.handle(internal_pb2.SlotCommand(deploy=deployment))
    return runtime, executions


def test_a_slot_works_at_what_a_barrier_waits_behind_before_it_makes_more() -> None:
    slot, executions = slot_of(source=1, function=40)
    while not executions["function"].passed_checkpoint_id:
        slot.run_one()
    assert executions["source"].steps <= 1 + 40 / PREFERRED_IN_A_ROW


def test_a_checkpoint_that_has_ended_gives_nobody_more_turns() -> None:
    slot, executions = slot_of(source=1, function=10**9)
    for _ in range(100):
        slot.run_one()
    aborted = internal_pb2.CheckpointAborted(checkpoint_id=1)
    command = internal_pb2.TaskCommand(
        attempt=executions["source"].attempt, checkpoint_aborted=aborted
    )
    slot.handle(internal_pb2.SlotCommand(task_command=command))
    before = {name: one.steps for name, one in executions.items()}
    for _ in range(100):
        slot.run_one()
    assert {name: one.steps - before[name] for name, one in executions.items()} == {
        "source": 50,
        "function": 50,
    }


def test_what_is_told_of_an_older_checkpoint_changes_nothing() -> None:
    turns = Turns[str]()
    turns.passed("source", 7)
    turns.ended(6)
    turns.add("source")
    turns.add("sink")
    assert turns.take() == "sink"


EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 4)),
    st.tuples(st.just("take"), st.just(0)),
    st.tuples(st.just("passed"), st.integers(0, 4)),
    st.tuples(st.just("ended"), st.just(0)),
)


@given(st.lists(EVENTS, max_size=200))
def test_everybody_who_stands_in_the_line_has_a_turn_before_long(
    events: list[tuple[str, int]],
) -> None:
    """Five subtasks, barriers in the order of their checkpoints: who comes waits for at most so many turns."""
    turns, waiting, checkpoint_ids = Turns[int](), dict[int, int](), [0] * 5
    for event, subtask in events:
        if event == "add":
            turns.add(subtask)
            waiting.setdefault(subtask, 0)
        elif event == "passed":
            checkpoint_ids[subtask] += 1
            turns.passed(subtask, checkpoint_ids[subtask])
        elif event == "ended":
            turns.ended(max(checkpoint_ids))
        elif turns:
            taken = turns.take()
            del waiting[taken]  # it stood in the line, and only once
            waiting = {key: turns_waited + 1 for key, turns_waited in waiting.items()}
        assert bool(turns) == bool(waiting)
        assert all((key in turns) == (key in waiting) for key in range(5))
        assert all(waited < 5 * (PREFERRED_IN_A_ROW + 1) for waited in waiting.values())


def test_a_round_goes_down_the_pipeline_whoever_came_first() -> None:
    """Ten vertices; what one has done gives the next one something to do, as its rows and barriers do."""
    slot, executions = slot_of(**{f"v{number}": 10**9 for number in range(10, -1, -1)})
    for number in range(11):
        slot.run_one()
        assert [name for name, one in executions.items() if one.steps] == [
            f"v{stepped}" for stepped in range(number, -1, -1)
        ]


def test_the_barrier_goes_on_where_it_is() -> None:
    turns = Turns[int]()
    for vertex in (4, 3, 2, 1):
        turns.add(vertex)
    turns.passed(1, 7)
    assert turns.take() == 2
    turns.passed(2, 7)
    turns.add(2)
    assert turns.take() == 3


def test_what_has_ended_has_nobody_preferred_to_what_takes_its_place() -> None:
    turns = Turns[str]()
    turns.passed("1 map", 7)
    turns.gone("1 map")
    for name in ("1 map", "2 sink", "0 source"):
        turns.add(name)
    assert [turns.take() for _ in range(2)] == ["0 source", "1 map"]
    turns.add("0 source")
    assert turns.take() == "2 sink", "the round goes on"
