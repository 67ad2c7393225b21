"""Aim: no id is used that another leader of the job may have used, and what one says of another's is not taken.

Method: a coordinator alone, then two leaders one after the other on one HEAD.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_ids import IDS_RESERVED_AT_ONCE
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.completed_checkpoint import SnapshotSummary
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.checkpoint.settings import CheckpointSettings
from penstock.errors import Fenced
from penstock.pb import graph_pb2
from penstock.storage.checkpoint_properties import (
    BehindBarrier,
    CheckpointKind,
    CheckpointProperties,
)
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import decode_manifest, properties_of
from tests.support.checkpoints import ONE_TASK, SOURCE, Driver, of_type, private

JOB = "ab" * 16


def declined(driver: Driver, count: int) -> list[int]:
    """Takes checkpoints that all fail; their ids."""
    ids = []
    for _ in range(count):
        ids.append(driver.trigger())
        driver.step(c.DeclineReceived(SOURCE, ids[-1], "no", driver.now_ms))
    return ids


# ---------------------------------------------------------------- properties


def test_what_a_checkpoint_is_taken_as_goes_with_its_trigger_and_into_the_store() -> None:
    driver = Driver(ONE_TASK, start=False)
    driver.machine = CheckpointCoordinator(
        CheckpointSettings(None, is_incremental=False), retained=(), next_checkpoint_id=1
    )
    driver.step(c.TasksStarted(ONE_TASK, driver.now_ms))
    wanted = CheckpointProperties(CheckpointKind.SAVEPOINT, "/sp", behind=BehindBarrier.DRAIN)
    request = c.CheckpointRequested("r", driver.now_ms, wanted)
    [trigger] = of_type(driver.step(request), c.TriggerTasks)
    expected = CheckpointProperties(CheckpointKind.SAVEPOINT, "/sp", True, BehindBarrier.DRAIN)
    assert trigger.properties == expected
    [store] = of_type(driver.ack(trigger.checkpoint_id), c.StoreCheckpoint)
    assert store.properties == expected


def test_who_waits_for_the_end_goes_ahead_of_others() -> None:
    driver = Driver(ONE_TASK, interval_ms=None)
    first = driver.trigger()
    driver.request()
    driver.request(is_final=True)
    driver.ack(first)
    [trigger] = of_type(driver.stored(first), c.TriggerTasks)
    assert trigger.properties.behind is BehindBarrier.END


# ---------------------------------------------------------------- leaders


@pytest.mark.parametrize(("epoch", "is_deleted"), [(6, True), (8, False), (0, True)])
def test_an_ack_of_what_another_leader_has_triggered_is_refused_and_counted(
    epoch: int, is_deleted: bool
) -> None:
    """Files of an earlier leader's checkpoint are orphans; those of a later one are that leader's."""
    driver = Driver(ONE_TASK, start=False)
    driver.machine = CheckpointCoordinator(
        CheckpointSettings(None), retained=(), next_checkpoint_id=1, leader_epoch=7
    )
    driver.step(c.TasksStarted(ONE_TASK, driver.now_ms))
    [trigger] = of_type(driver.step(c.CheckpointRequested("r", driver.now_ms)), c.TriggerTasks)
    uploaded = (private("shared/x"),)

    def ack(leader_epoch: int) -> list[c.CoordinatorEffect]:
        summary = SnapshotSummary()
        id_ = trigger.checkpoint_id
        received = c.AckReceived(
            SOURCE, id_, "s", uploaded, summary, driver.now_ms, leader_epoch=leader_epoch
        )
        return driver.step(received)

    effects = ack(epoch)
    assert not of_type(effects, c.StoreCheckpoint)
    assert bool(of_type(effects, c.DeleteFiles)) == is_deleted
    late = c.DeclineReceived(SOURCE, trigger.checkpoint_id, "no", driver.now_ms, leader_epoch=epoch)
    assert not of_type(driver.step(late), c.ReportAborted)
    assert driver.machine.fenced_events == 2
    assert driver.machine.dropped_events == 0
    uploaded = ()
    assert of_type(ack(7), c.StoreCheckpoint)


# ---------------------------------------------------------------- ids


def test_when_all_of_a_block_have_failed_the_next_is_asked_for_before_it_is_used() -> None:
    driver = Driver(ONE_TASK, interval_ms=None)
    driver.reserves_ids = False
    assert declined(driver, IDS_RESERVED_AT_ONCE) == list(range(1, 17))
    effects = driver.request()
    assert not of_type(effects, c.TriggerTasks)
    assert not of_type(driver.at(60_000), c.ReserveIds), "it is asked for once"
    effects = driver.step(c.IdsReserved(49, driver.now_ms))
    assert [trigger.checkpoint_id for trigger in of_type(effects, c.TriggerTasks)] == [17]


def test_who_asks_hears_why_there_is_no_id_and_it_is_tried_again() -> None:
    driver = Driver(ONE_TASK, interval_ms=None)
    driver.reserves_ids = False
    declined(driver, IDS_RESERVED_AT_ONCE)
    driver.request()
    effects = driver.step(c.IdsNotReserved("disk full", driver.now_ms))
    [answer] = of_type(effects, c.AnswerRequest)
    assert (answer.refused, answer.detail) == (c.RequestRefused.NO_ID, "disk full")
    [call] = of_type(effects, c.CallAt)
    assert of_type(driver.step(c.TimeReached(call.at_ms)), c.ReserveIds)
    driver.step(c.IdsReserved(33, call.at_ms))
    driver.now_ms = call.at_ms
    assert driver.trigger() == 17


def test_each_checkpoint_that_is_stored_reserves_the_next_block() -> None:
    driver = Driver(ONE_TASK, interval_ms=None)
    driver.reserves_ids = False
    for expected in range(1, 50):
        checkpoint_id = driver.trigger()
        assert checkpoint_id == expected
        [store] = of_type(driver.ack(checkpoint_id), c.StoreCheckpoint)
        assert store.next_checkpoint_id == checkpoint_id + 1 + IDS_RESERVED_AT_ONCE
        driver.stored(checkpoint_id)


def test_no_successor_uses_an_id_that_its_predecessor_may_have_triggered(tmp_path: Path) -> None:
    """Whatever became of the predecessor's checkpoints: all of them failed, some are still on their way."""

    def leader(epoch: int) -> CheckpointStoreRunner:
        graph = graph_pb2.JobGraph(name="job")
        return CheckpointStoreRunner(
            JOB, graph, LocalStore(tmp_path), leader_epoch=epoch, version="1", now_ms=lambda: 1
        )

    def begin(store: CheckpointStoreRunner) -> Driver:
        found = store.starts.prepare()
        assert found.next_checkpoint_id == store.starts.prepare().next_checkpoint_id
        driver = Driver(
            ONE_TASK,
            retained=found.retained,
            next_checkpoint_id=found.next_checkpoint_id,
            interval_ms=None,
        )
        driver.reserves_ids = False
        return driver

    def answer(driver: Driver, store: CheckpointStoreRunner) -> list[int]:
        """A request, with HEAD where it is needed; the ids that were triggered."""
        effects = driver.request()
        return [trigger.checkpoint_id for trigger in of_type(effects, c.TriggerTasks)]

    used: set[int] = set()
    epoch = 0
    for failures in (0, 3, 16, 20, 40):
        epoch += 1
        store = leader(epoch)
        driver = begin(store)
        for _ in range(failures):
            ids = answer(driver, store)
            if not ids:
                effects = driver.step(c.IdsReserved(store.reserve_ids(), driver.now_ms))
                ids = [trigger.checkpoint_id for trigger in of_type(effects, c.TriggerTasks)]
            assert len(ids) == 1
            assert not used & set(ids)
            used |= set(ids)
            driver.step(c.DeclineReceived(SOURCE, ids[0], "no", driver.now_ms))
        if failures % 2:
            ids = answer(driver, store)
            assert not used & set(ids)
            used |= set(ids)
            snapshot = of_type(driver.ack(ids[0]), c.StoreCheckpoint)
            stored = store.store(
                c.StoreCheckpoint(
                    ids[0], 1, (), (), (), (ids[0],), snapshot[0].next_checkpoint_id, 0
                )
            )
            assert isinstance(stored, c.CheckpointStored)
            manifest = decode_manifest(LocalStore(tmp_path).get(stored.manifest_path))
            assert properties_of(manifest.properties) == CheckpointProperties()
    deposed = leader(epoch - 1)
    with pytest.raises(Fenced):
        deposed.starts.prepare()
