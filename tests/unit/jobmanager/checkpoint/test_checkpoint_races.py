"""Aim: files of concurrent, aborted and late checkpoints: which survive, which are deleted, and when.

Method: each rule as a short history of one task with two checkpoints under way.
"""

from __future__ import annotations

from jobmanager.checkpoint import messages as c
from penstock.storage.manifest import StoredRange, StoredReference
from tests.support.checkpoints import (
    CHAIN,
    MIDDLE,
    ONE_TASK,
    SINK,
    SOURCE,
    Driver,
    deletions,
    of_type,
    private,
    shared,
)


def two_under_way(*, retained_max: int = 1) -> tuple[Driver, int, int]:
    driver = Driver(ONE_TASK, max_concurrent=2, retained_max=retained_max)
    return driver, driver.trigger(), driver.trigger()


def test_first_confirmed_copy_wins_and_later_ones_are_rewritten() -> None:
    driver, one, two = two_under_way(retained_max=2)
    driver.ack(one, SOURCE, shared("sst-1", "chk-1/x"))
    [store] = of_type(
        [*driver.ack(two, SOURCE, shared("sst-1", "chk-2/x")), *driver.stored(one)],
        c.StoreCheckpoint,
    )
    kept, copy = shared("sst-1", "chk-1/x"), shared("sst-1", "chk-2/x")
    assert kept.identity is not None
    assert store.checkpoint_id == two
    assert store.replaced == ((kept.identity, kept.location),)
    # The superfluous copy stays until the checkpoint that uploaded it is stored.
    effects = driver.stored(two)
    assert deletions(effects) == {copy.location.path}
    latest = driver.machine.latest_completed
    assert latest is not None
    assert latest.references == (kept,)
    assert driver.machine._files.registry.count(kept.identity) == 2


def test_confirmation_order_decides_not_the_order_of_triggers() -> None:
    driver, one, two = two_under_way()
    driver.ack(two, SOURCE, shared("sst-1", "chk-2/x"))
    effects = driver.stored(two)
    # The later one completes first: it subsumes the earlier, whose ack is then late.
    [report] = of_type(effects, c.ReportAborted)
    assert (report.checkpoint_id, report.reason) == (one, c.AbortReason.SUBSUMED)
    assert report.failed_in_a_row == 0
    late = driver.ack(one, SOURCE, shared("sst-1", "chk-1/x"))
    assert deletions(late) == {"chk-1/x"}
    assert driver.machine.dropped_events == 1
    answers = of_type(effects, c.AnswerRequest)
    # Who asked for the earlier one gets the later one.
    assert [(a.request_id, a.checkpoint_id, a.refused) for a in answers] == [
        ("r2", two, None),
        ("r1", two, None),
    ]


def test_a_reference_by_key_to_a_copy_that_is_gone_leads_to_the_one_that_counts() -> None:
    driver, one, two = two_under_way()
    driver.ack(one, SOURCE, shared("sst-1", "chk-1/x"))
    driver.ack(two, SOURCE, shared("sst-1", "chk-2/x"))
    driver.stored(one)
    assert deletions(driver.stored(two)) == {"chk-1/manifest", "chk-2/x"}
    three = driver.trigger()
    [store] = of_type(driver.ack(three, SOURCE, shared("sst-1", "chk-2/x")), c.StoreCheckpoint)
    assert [location.path for _, location in store.replaced] == ["chk-1/x"]
    driver.stored(three)
    assert deletions(driver.deleted()) == {"chk-2/manifest"}


def test_what_a_key_led_to_when_the_ack_came_stays_until_it_is_stored() -> None:
    driver, one, two = two_under_way()
    driver.ack(one, SOURCE, shared("sst-1", "chk-1/x"))
    driver.ack(two, SOURCE, shared("sst-1", "chk-2/x"))
    driver.stored(one)
    driver.stored(two)
    driver.deleted()
    three, four = driver.trigger(), driver.trigger()
    driver.ack(three, SOURCE)
    driver.ack(four, SOURCE, shared("sst-1", "chk-2/x"))
    # The third one does not name the file, so its key is forgotten; the fourth one still needs it.
    effects = driver.stored(three)
    assert deletions(effects) == {"chk-2/manifest"}
    [store] = of_type(effects, c.StoreCheckpoint)
    assert [location.path for _, location in store.replaced] == ["chk-1/x"]
    driver.stored(four)
    driver.deleted()
    driver.complete()
    assert "chk-1/x" in deletions(driver.deleted())


def test_an_aborted_checkpoint_deletes_its_own_uploads_only() -> None:
    driver = Driver(CHAIN)
    driver.complete(shared("sst-1", "chk-1/x"), private("chk-1/p"))
    two = driver.trigger()
    driver.ack(two, SOURCE, shared("sst-1", "chk-1/x"), shared("sst-2", "chk-2/x"))
    driver.ack(two, MIDDLE, private("chk-2/p"))
    effects = driver.step(c.DeclineReceived(SINK, two, "no memory", driver.now_ms))
    assert deletions(effects) == {"chk-2/x", "chk-2/p"}
    [report] = of_type(effects, c.ReportAborted)
    assert report.reason is c.AbortReason.DECLINED
    assert "no memory" in report.detail
    [notify] = of_type(effects, c.NotifyAborted)
    assert notify.keys == (SOURCE, MIDDLE, SINK)
    # The ack of the sink comes all the same: what it has uploaded goes, what is shared stays.
    driver.deleted()
    late = driver.ack(two, SINK, private("chk-2/s"), shared("sst-1", "chk-1/x"))
    assert deletions(late) == {"chk-2/s"}


def test_a_checkpoint_under_way_may_still_name_files_of_a_released_one() -> None:
    driver = Driver(ONE_TASK, max_concurrent=2)
    driver.complete(shared("run-1", "chk-1/x"), private("chk-1/p"))
    two, three = driver.trigger(), driver.trigger()
    # The second one merges its runs; the third began before it was confirmed and builds on the first.
    driver.ack(two, SOURCE, shared("run-1+2", "chk-2/x"))
    assert deletions(driver.stored(two)) == {"chk-1/manifest", "chk-1/p"}
    driver.deleted()
    driver.ack(three, SOURCE, shared("run-1", "chk-1/x"), shared("run-3", "chk-3/x"))
    effects = driver.stored(three)
    assert deletions(effects) == {"chk-2/manifest", "chk-2/x"}
    latest = driver.machine.latest_completed
    assert latest is not None
    assert {r.location.path for r in latest.references} == {"chk-1/x", "chk-3/x"}


def test_what_was_held_for_a_checkpoint_under_way_goes_when_that_ends() -> None:
    driver = Driver(ONE_TASK, max_concurrent=2, timeout_ms=500, interval_ms=None)
    driver.complete(shared("run-1", "chk-1/x"))
    two = driver.trigger()
    driver.trigger()
    driver.ack(two, SOURCE, shared("run-1+2", "chk-2/x"))
    assert deletions(driver.stored(two)) == {"chk-1/manifest"}
    driver.deleted()
    assert deletions(driver.at(500)) == {"chk-1/x"}


def test_an_ack_that_names_a_released_file_aborts_its_checkpoint() -> None:
    driver = Driver(ONE_TASK)
    driver.complete(shared("run-1", "chk-1/x"))
    assert "chk-1/x" in deletions(driver.complete(shared("run-1+2", "chk-2/x")))
    driver.deleted()
    three = driver.trigger()
    effects = driver.ack(three, SOURCE, shared("run-1", "chk-1/x"), shared("run-3", "chk-3/x"))
    [report] = of_type(effects, c.ReportAborted)
    assert "chk-1/x" in report.detail
    assert deletions(effects) == {"chk-3/x"}
    assert not of_type(effects, c.StoreCheckpoint)


def test_a_key_with_other_bytes_aborts_with_a_clear_detail() -> None:
    driver = Driver(ONE_TASK)
    driver.complete(shared("sst-1", "chk-1/x", checksum=1))
    two = driver.trigger()
    effects = driver.ack(two, SOURCE, shared("sst-1", "chk-2/x", checksum=2))
    [report] = of_type(effects, c.ReportAborted)
    assert report.reason is c.AbortReason.STORE_FAILED
    for word in ("sst-1", "operator-2", "instance-1", "chk-1/x", "chk-2/x", "0x00000002"):
        assert word in report.detail
    assert deletions(effects) == {"chk-2/x"}


def test_a_key_with_another_size_from_a_concurrent_checkpoint_is_found_at_registration() -> None:
    driver, one, two = two_under_way()
    driver.ack(one, SOURCE, shared("sst-1", "chk-1/x", size=10))
    driver.ack(two, SOURCE, shared("sst-1", "chk-2/x", size=11))
    effects = driver.stored(one)
    [report] = of_type(effects, c.ReportAborted)
    assert (report.checkpoint_id, report.reason) == (two, c.AbortReason.STORE_FAILED)
    assert "11 bytes" in report.detail
    assert not of_type(effects, c.StoreCheckpoint)
    assert deletions(effects) == {"chk-2/x"}


def test_ranges_of_one_file_go_with_the_last_of_them() -> None:
    packed = [
        StoredReference(shared(name, "").identity, StoredRange("chk-1/pack", offset, 10, 1))
        for offset, name in ((0, "run-1"), (10, "run-2"))
    ]
    driver = Driver(ONE_TASK)
    driver.complete(*packed)
    driver.complete(packed[0])
    assert [driver.machine._files.registry.count(r.identity) for r in packed if r.identity] == [
        1,
        0,
    ]
    driver.deleted()
    assert deletions(driver.complete(private("chk-3/p"))) == {"chk-2/manifest", "chk-1/pack"}


def test_register_new_before_release_of_the_old() -> None:
    """A file that only the old and the new one name never reaches zero in between."""
    driver = Driver(ONE_TASK, retained_max=1)
    file = shared("sst-1", "chk-1/x")
    driver.complete(file)
    assert deletions(driver.complete(file)) == {"chk-1/manifest"}
    assert file.identity is not None
    assert driver.machine._files.registry.count(file.identity) == 1


def test_two_subtasks_that_share_a_file_after_rescaling_count_once() -> None:
    driver = Driver(CHAIN)
    one = driver.trigger()
    file = shared("sst-1", "chk-0/x")
    driver.ack(one, SOURCE, file)
    driver.ack(one, MIDDLE, file)
    driver.ack(one, SINK)
    driver.stored(one)
    assert file.identity is not None
    assert driver.machine._files.registry.count(file.identity) == 1


def test_who_asked_is_told_where_a_checkpoint_cannot_be_taken_again_yet() -> None:
    """A task ends before it has acknowledged the second one, while nobody knows whether the first is stored."""
    driver = Driver(CHAIN, max_concurrent=2)
    one, two = driver.trigger(), driver.trigger()
    for task in (SOURCE, MIDDLE, SINK):
        driver.ack(one, task)
    driver.step(c.StoreOutcomeUnknown(one, "no answer", driver.now_ms))
    effects = driver.step(c.TaskFinished(SOURCE, driver.now_ms))
    [report] = of_type(effects, c.ReportAborted)
    assert (report.checkpoint_id, report.reason) == (two, c.AbortReason.TASK_FINISHED)
    [answer] = of_type(effects, c.AnswerRequest)
    assert (answer.request_id, answer.refused) == ("r2", c.RequestRefused.UNSETTLED)


def test_the_next_one_begins_at_once_when_the_store_says_that_one_is_not_stored() -> None:
    """An outage: some fail, of the last nobody knows; the pause after failures would last half a minute more."""
    driver = Driver(ONE_TASK)
    for _ in range(5):
        one = driver.trigger()
        driver.ack(one)
        assert not of_type(driver.not_stored(one), c.TriggerTasks)
    last = driver.trigger()
    driver.ack(last)
    driver.step(c.StoreOutcomeUnknown(last, "no answer", driver.now_ms))
    assert not of_type(driver.at(20_000), c.TriggerTasks)
    assert of_type(driver.not_stored(last), c.TriggerTasks)
