"""Aim: no call reaches a TaskManager that was meant for another registration of it, whatever the call is.

Method: every call of the service, by its descriptor, at a real daemon: with nothing to tell which registration it
is for, with an earlier one, with the leader of an earlier one; and calls about slots without their number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.pb import internal_pb2
from penstock.client.grpc_errors import error_from_rpc
from penstock.errors import Fenced
from tests.support.jobs import DEADLINE_S

SERVICE = internal_pb2.DESCRIPTOR.services_by_name["TaskManagerInternal"]
UNFENCED = {"HearOfLeader"}
"""Comes from who is no leader here yet, and changes nothing: who says that it leads is asked, and its answer has the fence."""
METHODS = [method.name for method in SERVICE.methods if method.name not in UNFENCED]


def request_of(method: str, **fields: Any) -> Any:
    name = SERVICE.methods_by_name[method].input_type.name
    return getattr(internal_pb2, name)(**fields)


async def answer(c: Any, method: str, request: Any) -> None:
    """Makes the call and reads its answer to the end."""
    try:
        call = getattr(c.stub, method)(request, timeout=DEADLINE_S)
        if SERVICE.methods_by_name[method].server_streaming:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None


def test_every_call_carries_the_fences() -> None:
    for method in METHODS:
        fields = request_of(method).DESCRIPTOR.fields_by_name
        assert {"leader_epoch", "incarnation"} <= set(fields), method


def test_what_is_for_another_registration_is_refused(
    tmp_path: Path, cluster: Any, go: Callable[..., None]
) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            earlier = c.incarnation
            c.jobmanager.epoch = 2
            await c.jobmanager.until_registered_again()
            assert c.incarnation != earlier
            cases = [
                ("names no incarnation", {"leader_epoch": 2}),
                (f"for incarnation {earlier}", {"leader_epoch": 2, "incarnation": earlier}),
                ("leader epoch 1 is over", {"leader_epoch": 1, "incarnation": c.incarnation}),
                ("leader epoch 0 is over", {"incarnation": c.incarnation}),
            ]
            for method in METHODS:
                numbered = "allocation_id" in request_of(method).DESCRIPTOR.fields_by_name
                number = {"allocation_id": 1} if numbered else {}
                for word, fences in cases:
                    with pytest.raises(Fenced, match=word):
                        await answer(c, method, request_of(method, **fences, **number))

    go(work)


def test_calls_about_slots_are_refused_without_their_number(
    tmp_path: Path, cluster: Any, go: Callable[..., None]
) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            fences = {"leader_epoch": 1, "incarnation": c.incarnation}
            task = internal_pb2.TaskDeployment(
                slot_id="s0", attempt=internal_pb2.AttemptId(job_id="job", vertex="v0")
            )
            slots = {"job_id": "job", "slot_ids": ["s0"]}
            for method, about in (
                ("AllocateSlots", slots),
                ("DeployTasks", {"tasks": [task]}),
                ("FreeSlots", slots),
                ("FreeSlots", {"job_id": "job"}),
            ):
                with pytest.raises(Fenced, match="has no allocation_id"):
                    await answer(c, method, request_of(method, **fences, **about))
            beats = len(c.jobmanager.heartbeats)
            await c.jobmanager.until(lambda: len(c.jobmanager.heartbeats) > beats + 1)
            assert [slot.slot_id for slot in c.jobmanager.heartbeats[-1].held_slots] == ["s0"]
            await c.free()

    go(work)
