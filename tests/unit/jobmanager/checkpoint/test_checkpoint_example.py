"""Aim: the four incremental checkpoints of one subtask, two of them retained, as Flink documents them.

Method: step by step, with the counts of the shared files, and what is deleted, after each completion.
"""

from __future__ import annotations

from penstock.storage.manifest import StoredReference
from tests.support.checkpoints import ONE_TASK, Driver, deletions, shared

FILES = {
    "sst-1": "cp-1/a",
    "sst-2": "cp-1/b",
    "sst-3": "cp-2/a",
    "sst-4": "cp-2/b",
    "sst-1,2,3": "cp-3/a",
    "sst-5": "cp-3/b",
    "sst-4,5,6": "cp-4/a",
}


def references(*names: str) -> list[StoredReference]:
    return [shared(name, FILES[name]) for name in names]


def counts(driver: Driver) -> dict[str, int]:
    keys = {name: reference.identity for name in FILES for reference in references(name)}
    found = {name: driver.machine._files.registry.count(key) for name, key in keys.items() if key}
    return {name: count for name, count in found.items() if count}


def test_four_checkpoints() -> None:
    driver = Driver(ONE_TASK, retained_max=2)

    effects = driver.complete(*references("sst-1", "sst-2"))
    assert counts(driver) == {"sst-1": 1, "sst-2": 1}
    assert deletions(effects) == set()

    effects = driver.complete(*references("sst-1", "sst-2", "sst-3", "sst-4"))
    assert counts(driver) == {"sst-1": 2, "sst-2": 2, "sst-3": 1, "sst-4": 1}
    assert deletions(effects) == set()

    # CP 1 goes; none of its files has reached zero, only its manifest is deleted.
    effects = driver.complete(*references("sst-1,2,3", "sst-4", "sst-5"))
    assert counts(driver) == {
        "sst-1": 1,
        "sst-2": 1,
        "sst-3": 1,
        "sst-4": 2,
        "sst-1,2,3": 1,
        "sst-5": 1,
    }
    assert deletions(effects) == {"chk-1/manifest"}
    driver.deleted()

    # CP 2 goes, and with it three files.
    effects = driver.complete(*references("sst-1,2,3", "sst-4,5,6"))
    assert counts(driver) == {"sst-4": 1, "sst-1,2,3": 2, "sst-5": 1, "sst-4,5,6": 1}
    assert deletions(effects) == {"chk-2/manifest", "cp-1/a", "cp-1/b", "cp-2/a"}
    assert [kept.checkpoint_id for kept in driver.machine.retained] == [3, 4]


def test_counts_are_rebuilt_from_the_retained_checkpoints() -> None:
    driver = Driver(ONE_TASK, retained_max=2)
    driver.complete(*references("sst-1", "sst-2"))
    driver.complete(*references("sst-1", "sst-2", "sst-3", "sst-4"))
    driver.complete(*references("sst-1,2,3", "sst-4", "sst-5"))

    again = Driver(
        ONE_TASK,
        retained_max=2,
        retained=driver.machine.retained,
        next_checkpoint_id=driver.machine.next_checkpoint_id,
    )
    assert counts(again) == counts(driver)
    effects = again.complete(*references("sst-1,2,3", "sst-4,5,6"))
    assert counts(again) == {"sst-4": 1, "sst-1,2,3": 2, "sst-5": 1, "sst-4,5,6": 1}
    assert deletions(effects) == {"chk-2/manifest", "cp-1/a", "cp-1/b", "cp-2/a"}
