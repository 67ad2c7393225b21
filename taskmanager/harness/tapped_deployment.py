"""The deployment of a subtask whose operators are listened to.

What an operator yields is noted as the chain takes it, side outputs included that nothing reads; it goes
its way unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from typing_extensions import override

from common.elements import OperatorOutput
from common.pb import internal_pb2
from penstock.pb import graph_pb2
from taskmanager.operators.operator import Operator
from taskmanager.snapshot.subtask_snapshot import SnapshotPart
from taskmanager.task.deployment import Deployment
from taskmanager.task.execution import Execution
from taskmanager.task.slot_services import SlotServices
from taskmanager.task.subtask import Subtask

Tap = Callable[[graph_pb2.Operator, OperatorOutput], None]

_EMITTING = (
    "process",
    "on_watermark",
    "on_stream_status",
    "on_control",
    "on_idle",
    "on_timer",
    "on_pause_over",
    "on_end_of_data",
)


class TappedDeployment(Deployment):
    """One subtask in the making.

    Args:
        tap: called with all that the operators yield, and the specification of the one that did.

    Attributes:
        subtask: once it is built.
        opened: the operators of the chain with their specifications, once they are open.
    """

    def __init__(
        self,
        deployment: internal_pb2.TaskDeployment,
        services: SlotServices,
        schedule: Callable[[], None],
        tap: Tap,
    ) -> None:
        super().__init__(deployment, services, schedule)
        self.subtask: Subtask | None = None
        self.opened: tuple[tuple[graph_pb2.Operator, Operator], ...] = ()
        self._tap = tap

    @override
    def build(self, execution: Execution) -> Subtask:
        self.subtask = super().build(execution)
        return self.subtask

    @override
    def _open(
        self,
        execution: Execution,
        operators: list[Operator],
        specs: list[graph_pb2.Operator],
        parts: list[SnapshotPart],
    ) -> None:
        super()._open(execution, operators, specs, parts)
        self.opened = tuple(zip(specs, operators, strict=True))
        for spec, operator in self.opened:
            for method in _EMITTING:
                setattr(operator, method, self._tapped(spec, getattr(operator, method)))

    def _tapped(
        self, spec: graph_pb2.Operator, call: Callable[..., Iterable[OperatorOutput]]
    ) -> Callable[..., Iterator[OperatorOutput]]:
        def tapped(*arguments: Any) -> Iterator[OperatorOutput]:
            for element in call(*arguments):
                self._tap(spec, element)
                yield element

        return tapped
