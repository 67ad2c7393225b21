"""One subtask under test: its deployment, its execution, and its place among the others."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from common.pb import internal_pb2
from penstock.pb import graph_pb2
from taskmanager.harness.direct_exchange import DirectChannel
from taskmanager.harness.tapped_deployment import Tap, TappedDeployment
from taskmanager.task.execution import Execution
from taskmanager.task.slot_services import SlotServices


class TestedExecution(Execution):
    """An execution that remembers what it has failed of."""

    error: BaseException | None = None

    @override
    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        super().fail(error)


@dataclass(frozen=True, slots=True)
class TestedTask:
    """One subtask.

    Attributes:
        inputs: the harness's own channels into it.
        producers: the vertices that feed it.
        source: the uid of the source at its head, "" where it has none.
    """

    vertex: graph_pb2.Vertex
    execution: TestedExecution
    parts: TappedDeployment
    inputs: tuple[DirectChannel, ...]
    producers: tuple[str, ...]
    source: str

    @property
    def has_ended_outputs(self) -> bool:
        """Nothing comes out any more, barriers neither."""
        subtask = self.parts.subtask
        return self.execution.has_ended or (subtask is not None and subtask.has_ended_outputs)


def deployment_of(
    graph: graph_pb2.JobGraph,
    vertex: graph_pb2.Vertex,
    attempt: internal_pb2.AttemptId,
    inputs: frozenset[str],
) -> internal_pb2.TaskDeployment:
    """The deployment of the one subtask of a vertex that is run.

    Args:
        inputs: uids of the operators that get what is pushed.
    """
    vertices = {each.id: each for each in graph.vertices}
    deployment = internal_pb2.TaskDeployment(
        attempt=attempt,
        vertex=vertex,
        job_name=graph.name,
        takes_checkpoints=True,
        outputs=[
            internal_pb2.OutputEdge(
                edge=edge,
                subpartition_count=1,
                target_parallelism=vertices[edge.target_vertex].parallelism,
                target_max_parallelism=vertices[edge.target_vertex].max_parallelism,
            )
            for edge in graph.edges
            if edge.source_vertex == vertex.id
        ],
    )
    head = vertex.operators[0]
    if head.uid in inputs:
        channel = internal_pb2.InputChannel(edge_id=head.uid)
        deployment.inputs.add(edge_id=head.uid, channels=[channel])
    for edge in graph.edges:
        if edge.target_vertex == vertex.id:
            deployment.inputs.add(
                edge_id=edge.id,
                target_input=edge.target_input,
                load_first=edge.load_first,
                follows=edge.follows,
                channels=[internal_pb2.InputChannel(edge_id=edge.id)],
            )
    return deployment


def make_task(
    deployment: internal_pb2.TaskDeployment,
    services: SlotServices,
    tap: Tap,
    inputs: tuple[DirectChannel, ...],
    producers: tuple[str, ...],
) -> TestedTask:
    """The subtask, not started yet; see ``TestedTask`` for the arguments."""
    parts = TappedDeployment(deployment, services, _nothing, tap)
    execution = TestedExecution(
        deployment,
        parts,
        report=services.report,
        clock=services.clock,
        taskmanager_id="penstock.testing",
        post=services.post,
        schedule=_nothing,
    )
    vertex = deployment.vertex
    head = vertex.operators[0]
    source = head.uid if head.WhichOneof("spec") == "source" else ""
    return TestedTask(vertex, execution, parts, inputs, producers, source)


def _nothing() -> None:
    """There is nobody to be woken: every call of the harness runs to rest."""
