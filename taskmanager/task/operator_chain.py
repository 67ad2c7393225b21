"""Runs one chain of operators, element by element, and can stop between any two of them.

Invariants:
- An element is carried to the ends of the chain before the next one of the same operator follows it
  (depth first), so order holds on every path.
- Nothing is emitted while one of the chain's outputs cannot take a batch; what a single operator
  call has already produced waits as an iterator on the stack, it is not queued.
- Handlers of operators are called when their turn comes, not when the element is delivered, so what
  one of them holds back cannot be overtaken by what another one further up emits first.
- The chain never waits and never runs longer than one operator call or time slice beyond its stop.

A record passes here between the input gate (or the source) and the result partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Final, NoReturn, Protocol

import pyarrow as pa
import structlog

from common.elements import (
    ControlElement,
    OperatorOutput,
    OriginEnded,
    Pause,
    SideOutput,
    StreamStatus,
    Watermark,
    WrittenFiles,
)
from taskmanager.operators.operator import Handling, Operator
from taskmanager.user_code.user_failure import failure_of_operator, name_unread_columns

_UNREAD_TOLD_MAX: Final = 16
"""Side outputs that nobody reads and that are told, of a subtask."""

_log = structlog.get_logger()

SOURCE = -1
"""Node that stands for the chain's input."""


_Call = tuple[int, Iterator[OperatorOutput], pa.RecordBatch | None]


class Output(Protocol):
    """Where rows leave the chain: a result partition."""

    def is_available(self) -> bool:
        """False while a batch could not be taken without growing a queue."""

    def emit(self, batch: pa.RecordBatch) -> None:
        """Takes a batch."""

    def emit_control(self, element: ControlElement) -> None:
        """Takes a control element, behind the batches taken before."""

    def takes_files(self, written: WrittenFiles) -> bool:
        """Whether it can have these files in the place of their rows."""

    def emit_files(self, written: WrittenFiles) -> None:
        """Takes files."""


class ChainState(Enum):
    """What ``OperatorChain.run`` came to."""

    DONE = auto()
    PAUSED = auto()
    BLOCKED = auto()


class OperatorChain:
    """A tree of operators that share a thread and hand each other batches by reference.

    Args:
        operators: in topological order.
        parents: per operator the index of the one that feeds it (``SOURCE`` for the first) and the
            side output it reads ("" = main).
        outputs: (index of the feeding operator, side tag, where it goes).
        names: of the operators, for failures.
        unread: per operator the columns of its stream that are not read, for failures.
        position_of: of a source's chain: says where rows of the source's last batch stand, given how many
            it had and which of them it is about, None = any of them.

    Example: a chain stops between two batches of one operator where its output is full.
        >>> class Twice(Operator):
        ...     def process(self, batch):
        ...         yield from (batch, batch)
        >>> class Room:
        ...     taken = []
        ...     is_available = lambda self: len(self.taken) < 1
        ...     emit = lambda self, batch: self.taken.append(batch)
        >>> chain = OperatorChain([Twice()], [(SOURCE, "")], [(0, "", Room())])
        >>> chain.start(SOURCE, [pa.record_batch({"n": [1]})])
        >>> chain.run().name, len(Room.taken), chain.is_busy
        ('BLOCKED', 1, True)
    """

    def __init__(
        self,
        operators: Sequence[Operator],
        parents: Sequence[tuple[int, str]],
        outputs: Sequence[tuple[int, str, Output]],
        names: Mapping[int, str] | None = None,
        unread: Sequence[Sequence[str]] = (),
        position_of: Callable[[int, int | None], str] | None = None,
        known_sides: Sequence[Collection[str]] = (),
    ) -> None:
        self._operators = operators
        self._parents = parents
        self._names = names or {}
        self._unread = unread
        self._position_of = position_of
        self._known_sides = known_sides
        nodes = range(SOURCE, len(operators))
        self._children: dict[int, list[int]] = {node: [] for node in nodes}
        self._side_children: dict[tuple[int, str], list[int]] = {}
        for node, (parent, tag) in enumerate(parents):
            if tag:
                self._side_children.setdefault((parent, tag), []).append(node)
            else:
                self._children[parent].append(node)
        self._outputs: dict[int, list[Output]] = {node: [] for node in nodes}
        self._side_outputs: dict[tuple[int, str], list[Output]] = {}
        for node, tag, output in outputs:
            if tag:
                self._side_outputs.setdefault((node, tag), []).append(output)
            else:
                self._outputs[node].append(output)
        self._all_children = {
            node: [child for child, (parent, _) in enumerate(parents) if parent == node]
            for node in nodes
        }
        self._all_outputs_of = {
            node: [output for parent, _, output in outputs if parent == node] for node in nodes
        }
        self._all_outputs = [output for _, _, output in outputs]
        self._bounded_operators = [
            operator for operator in operators if _overrides(operator, "is_available")
        ]
        self._idle_nodes = [
            node for node, operator in enumerate(operators) if _overrides(operator, "on_idle")
        ]
        self._unread_sides: set[tuple[int, str]] = set()
        self._written_sides: set[tuple[int, str]] = set()
        # With the batch that an operator was called with, None where it was called with something else.
        self._stack: list[_Call] = []
        self._later: deque[_Call] = deque()

    @property
    def is_busy(self) -> bool:
        """True while something given to the chain has not reached its ends."""
        return bool(self._stack or self._later)

    def can_emit(self) -> bool:
        """True when every output can take a batch."""
        for output in self._all_outputs:
            if not output.is_available():
                return False
        return all(operator.is_available() for operator in self._bounded_operators)

    def start(self, node: int, elements: Iterable[OperatorOutput]) -> None:
        """Lets ``node`` emit the elements (``SOURCE`` = they enter the chain)."""
        self._stack.append((node, iter(elements), None))

    def start_last(self, node: int, elements: Iterable[OperatorOutput]) -> None:
        """The same behind all that has been started before."""
        self._later.append((node, iter(elements), None))

    def start_timer(self, node: int, now_ms: int) -> None:
        """Lets an operator emit what its timer is due for."""
        self._stack.append((node, _lazily(partial(self._operators[node].on_timer, now_ms)), None))

    def start_pause_over(self, node: int) -> None:
        """Lets an operator emit what it has paused for."""
        self._stack.append((node, _lazily(self._operators[node].on_pause_over), None))

    def start_end_of_data(self) -> None:
        """Lets each operator emit what it still holds, upstream ones first."""
        for node, operator in enumerate(self._operators):
            self._later.append((node, _lazily(operator.on_end_of_data), None))
        self._later.append((SOURCE, _lazily(self._tell_empty), None))

    def start_idle(self) -> None:
        """Lets operators emit what they hold back while more is coming, upstream ones first."""
        for node in self._idle_nodes:
            self._later.append((node, _lazily(self._operators[node].on_idle), None))

    def run(self) -> ChainState:
        """Goes on until all has left the chain, an output is full, or an operator pauses.

        Raises:
            TaskFailure: an operator raised; the failure names it.
        """
        stack = self._stack
        while True:
            if not stack:
                if not self._later:
                    return ChainState.DONE
                stack.append(self._later.popleft())
            if not self.can_emit():
                return ChainState.BLOCKED
            node, iterator, _ = stack[-1]
            try:
                element = next(iterator, None)
            except BaseException as error:  # noqa: BLE001 - raised again, with a name
                self._fail(node, error)
            if element is None:
                stack.pop()
            elif isinstance(element, Pause):
                return ChainState.PAUSED
            else:
                self._deliver(node, element)

    def _deliver(self, node: int, element: OperatorOutput) -> None:
        if isinstance(element, pa.RecordBatch):
            if element.num_rows:
                self._deliver_batch(self._children[node], self._outputs[node], element)
        elif isinstance(element, SideOutput):
            if element.batch.num_rows:
                key = (node, element.tag)
                self._written_sides.add(key)
                children = self._side_children.get(key, ())
                outputs = self._side_outputs.get(key, ())
                if not children and not outputs:
                    self._tell_unread(node, element.tag)
                self._deliver_batch(children, outputs, element.batch)
        elif isinstance(element, WrittenFiles):
            self._deliver_files(node, element)
        elif not isinstance(element, Pause):
            self._deliver_control(node, element)

    def _tell_unread(self, node: int, tag: str) -> None:
        """Rows of a side output that nobody reads are dropped: that is told once."""
        if (node, tag) in self._unread_sides or len(self._unread_sides) == _UNREAD_TOLD_MAX:
            return
        self._unread_sides.add((node, tag))
        read = {of for by, of in (*self._side_children, *self._side_outputs) if by == node}
        _log.warning(
            "side_output.unread", operator=self._names.get(node, ""), tag=tag, read=sorted(read)
        )

    def _tell_empty(self) -> Iterable[OperatorOutput]:
        """A name that is read and that the function never writes: the graph cannot know what functions write."""
        if self._known_sides:
            read = {*self._side_children, *self._side_outputs}
            for node, tag in sorted(read - self._written_sides):
                if node != SOURCE and tag not in self._known_sides[node]:
                    name = self._names.get(node, "")
                    _log.info("side_output.empty", operator=name, tag=tag)
        return ()

    def _deliver_batch(
        self, children: Sequence[int], outputs: Sequence[Output], batch: pa.RecordBatch
    ) -> None:
        for output in outputs:
            output.emit(batch)
        for child in reversed(children):
            process = partial(self._operators[child].process, batch)
            self._stack.append((child, _lazily(process), batch))

    def _deliver_files(self, node: int, element: WrittenFiles) -> None:
        if element.read is None:
            for child in self._children[node]:
                take = partial(self._operators[child].on_files, element)
                self._stack.append((child, _lazily(take), None))
            return
        outputs = self._outputs[node]
        if self._children[node] or not all(output.takes_files(element) for output in outputs):
            self._stack.append((node, element.read(), None))
            return
        for output in outputs:
            output.emit_files(element)

    def _fail(self, node: int, error: BaseException) -> NoReturn:
        failure = failure_of_operator(error, self._names.get(node, ""))
        if node != SOURCE and self._operators[node].handling is not Handling.HOLDS:
            if self._unread:
                name_unread_columns(failure, self._unread[node])
            if not failure.position:
                failure.position = self._position(node, failure.row_index)
        if failure is error:
            raise failure
        raise failure from error

    def _position(self, node: int, row_index: int) -> str:
        """Where the rows stand that an operator failed at, "" where that cannot be said: it must have been
        called with rows of the source's batch, and so must all between it and the source."""
        if self._position_of is None:
            return ""
        batches = {called: batch for called, _, batch in self._stack}
        given = batches.get(node)
        is_known = row_index >= 0
        while given is not None:
            parent, tag = self._parents[node]
            if parent == SOURCE:
                if tag or SOURCE not in batches:
                    return ""
                return self._position_of(given.num_rows, row_index if is_known else None)
            handling, before = self._operators[parent].handling, batches.get(parent)
            if handling is Handling.HOLDS or before is None:
                return ""
            is_whole = handling is Handling.ONE_TO_ONE and before.num_rows == given.num_rows
            is_known = is_known and is_whole
            node, given = parent, before
        return ""

    def _deliver_control(self, node: int, element: ControlElement | OriginEnded) -> None:
        """Control elements take every way: main and side outputs alike."""
        for child in reversed(self._all_children[node]):
            handler = _handler(self._operators[child], element)
            self._stack.append((child, _lazily(handler), None))
        if not isinstance(element, OriginEnded):
            for output in self._all_outputs_of[node]:
                output.emit_control(element)

    def close(self) -> list[BaseException]:
        """Drops what is under way; generators end where they stand. Returns what they raised."""
        errors: list[BaseException] = []
        while self._stack:
            _, iterator, _ = self._stack.pop()
            close = getattr(iterator, "close", None)
            try:
                if close is not None:
                    close()
            except BaseException as error:  # noqa: BLE001 - the others must end as well
                errors.append(error)
        self._later.clear()
        return errors


def _handler(
    operator: Operator, element: ControlElement | OriginEnded
) -> Callable[[], Iterable[OperatorOutput]]:
    if isinstance(element, Watermark):
        return partial(operator.on_watermark, element)
    if isinstance(element, StreamStatus):
        return partial(operator.on_stream_status, element)
    if isinstance(element, OriginEnded):
        return partial(operator.on_origin_ended, element)
    return partial(operator.on_control, element)


def _lazily(handler: Callable[[], Iterable[OperatorOutput]]) -> Iterator[OperatorOutput]:
    yield from handler()


def _overrides(operator: Operator, method: str) -> bool:
    return getattr(type(operator), method) is not getattr(Operator, method)
