"""Every field that comes from another process has a bound.

Aim: no small message can make a daemon take gigabytes or seconds, and no field that is added later is forgotten.
Method: a walk over all calls of all services by their descriptors; then messages at and beyond the bounds, also
deep inside of others.
"""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from common.message_bounds import COMPARED, COUNTS, NAMES, NUMBERS, RANGES, TEXTS, check_message
from common.pb import internal_pb2
from penstock.errors import JobRejected
from penstock.pb import client_pb2, graph_pb2


def reachable_fields() -> dict[str, FieldDescriptor]:
    """Of requests and answers of all calls, however deep."""
    found: dict[str, FieldDescriptor] = {}

    def walk(message: Descriptor) -> None:
        for field in message.fields:
            if field.full_name not in found:
                found[field.full_name] = field
                if field.message_type is not None:
                    walk(field.message_type)

    for file in (internal_pb2.DESCRIPTOR, client_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            for method in service.methods:
                walk(method.input_type)
                if file is internal_pb2.DESCRIPTOR:
                    walk(method.output_type)
    return found


def is_bounded(field: FieldDescriptor) -> bool:
    """Whether the tables say of a field what it may hold."""
    if field.is_repeated and field.name not in COUNTS:
        return False
    if field.type == FieldDescriptor.TYPE_STRING:
        return field.is_repeated or field.name in NAMES or field.name in TEXTS
    if field.cpp_type in NUMBERS:
        return field.name in RANGES or field.name in COMPARED
    # The bytes of a message are bounded with it; a truth value and a known constant by themselves.
    return True


def test_every_field_of_every_call_has_a_bound() -> None:
    fields = reachable_fields()
    assert len(fields) > 300, "the walk finds what there is"
    unbounded = [name for name, field in fields.items() if not is_bounded(field)]
    assert not unbounded, "give each a bound in common/message_bounds.py"


def test_the_tables_name_nothing_that_does_not_exist() -> None:
    names = {field.name for field in reachable_fields().values()}
    assert {*NAMES, *TEXTS, *COUNTS, *RANGES, *COMPARED} <= names


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (internal_pb2.RegisterTaskManagerRequest(slots=2**31 - 1), "slots is 2147483647"),
        (client_pb2.MissingArtifactsRequest(ids=["x"] * 10_001), "ids has 10,001 entries"),
        (internal_pb2.HeartbeatRequest(taskmanager_id="x" * 5_000), "taskmanager_id is 5,000"),
        (internal_pb2.FreeSlotsRequest(slot_ids=["x" * 5_000]), "slot_ids is 5,000 characters"),
        (
            internal_pb2.HeartbeatRequest(
                holdings=internal_pb2.Holdings(
                    partitions=[
                        internal_pb2.HeldPartition(
                            partition=internal_pb2.PartitionId(subtask_index=-2)
                        )
                    ]
                )
            ),
            "PartitionId.subtask_index is -2",
        ),
        (
            internal_pb2.ReportTaskEventsRequest(
                events=[
                    internal_pb2.TaskEvent(
                        state_changed=internal_pb2.AttemptStateChanged(state=99)  # type: ignore[arg-type]
                    )
                ]
            ),
            "state has the unknown value 99",
        ),
        (
            client_pb2.SubmitJobRequest(
                graph=graph_pb2.JobGraph(vertices=[graph_pb2.Vertex(parallelism=2**31 - 1)])
            ),
            "Vertex.parallelism is 2147483647",
        ),
        (
            client_pb2.SubmitJobRequest(graph=graph_pb2.JobGraph(config={"k": "v" * (5 << 20)})),
            "config is 5,242,880 characters",
        ),
        (client_pb2.WatchJobRequest(interval_ms=2**62), "interval_ms"),
    ],
)
def test_what_goes_beyond_its_bound_is_refused_by_name(message: object, word: str) -> None:
    with pytest.raises(JobRejected, match=word):
        check_message(message)  # type: ignore[arg-type]


def test_what_keeps_to_the_bounds_is_taken() -> None:
    check_message(
        internal_pb2.RegisterTaskManagerRequest(
            taskmanager_id="tm", slots=1_024, packages=["numpy==1"] * 1_000
        )
    )
    check_message(client_pb2.ReadLogsRequest(subtask_index=-1))
    check_message(client_pb2.MissingArtifactsRequest(ids=["x"] * 10_000))
