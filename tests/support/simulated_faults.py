"""What goes wrong in one simulated run, drawn from its seed."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field

from jobmanager.job.groups import GroupPhase
from tests.support.simulated_groups import group_point
from tests.support.simulated_store import CALM, StoreWeather


class Fault(enum.Enum):
    """Something that happens once."""

    SLOT_DIES = "a slot process dies"
    REGIONS_FAIL = "several slots die, or several functions raise, at once"
    ALL_FAIL = "something fails of which the whole job is to begin again"
    TASKMANAGER_LOST = "a TaskManager dies with all its slots"
    JOBMANAGER_DIES = "the JobManager dies, and a successor takes over"
    JOBMANAGER_DIES_IN_STORE = "the JobManager dies in the midst of a store call"
    CALL_FAILS = "a TaskManager does not answer a call"
    CHECKPOINT_REQUESTED = "a user asks for a checkpoint"
    SAVEPOINT_REQUESTED = "a user asks for a savepoint"
    STOP_REQUESTED = "a user stops the job with a savepoint"
    DRAIN_REQUESTED = "a user stops the job with a savepoint, and ends event time"
    COMMIT_FAILS = "the system that a sink writes to fails a commit"
    TASK_RAISES = "a function raises"
    PARTITION_SERVER_DIES = "a partition server dies, and comes back"
    CONNECTION_BREAKS = "a connection between two processes breaks"
    REPORTS_DELAYED = "the reports of a TaskManager take long"
    REPORTS_REPEATED = "a TaskManager reports the same again"
    DISK_FULL = "the disk of a TaskManager is nearly full, for a time"
    HOST_FREEZES = "the host of a TaskManager freezes; what ran there goes on too late"
    JOBMANAGER_STOPS = "the JobManager is told to end, and a successor takes over"
    TASKMANAGER_STOPS = "a TaskManager is told to end, and another one comes"
    CANCELLED = "a user cancels the job"


@dataclass(frozen=True, slots=True)
class Trigger:
    """When a fault happens: the ``count``-th time that ``point`` is passed, after a pause.

    Attributes:
        point: an effect of the job's machine or a report of a slot by name, or "step".
    """

    fault: Fault
    point: str
    count: int
    pause_ns: int


HANGING = (0.0, 0.0, 0.05)
"""Shares of store calls that hang, to choose from."""

_POINTS = (
    ("step", 3000),
    ("WriteManifest", 5),
    ("CheckpointStored", 5),
    ("checkpoint_acknowledged", 20),
    ("trigger_checkpoint", 20),
    ("checkpoint_completed", 12),
    ("checkpoint_aborted", 5),
    ("end_of_data", 6),
    ("splits_discovered", 3),
    ("DeployTasks", 4),
    ("AllocateSlots", 4),
    ("PrepareStart", 3),
    ("DeleteFiles", 4),
    ("CancelTasks", 3),
    ("FINISHED", 6),
    ("RUNNING", 12),
    ("commit", 8),
    ("PostLater", 2),
    ("FreeSlots", 2),
    ("replace_producer", 6),
    ("ReleasePartitions", 3),
)
"""Where faults happen, and how often each is passed in a run, about."""
OFTEN = (
    ("row", 100),
    ("RUNNING", 8),
    ("trigger_checkpoint", 6),
    ("checkpoint_acknowledged", 12),
    ("checkpoint_completed", 6),
)
"""Where most runs come to while all tasks run."""
SAVEPOINTS = (
    Fault.SAVEPOINT_REQUESTED,
    Fault.SAVEPOINT_REQUESTED,
    Fault.STOP_REQUESTED,
    Fault.DRAIN_REQUESTED,
)


@dataclass(frozen=True, slots=True)
class Faults:
    """All that goes wrong.

    Attributes:
        snapshot_pause_max_ns: how long snapshots wait for a thread at most.
        slot_store: how the store treats slots.
        jobmanager_store: the same, of the JobManager.
    """

    triggers: tuple[Trigger, ...] = ()
    snapshot_pause_max_ns: int = 5_000_000
    slot_store: StoreWeather = CALM
    jobmanager_store: StoreWeather = CALM
    counts: dict[str, int] = field(default_factory=dict)

    def passed(self, point: str) -> list[Trigger]:
        """Counts a point; returns what happens now."""
        count = self.counts[point] = self.counts.get(point, 0) + 1
        return [
            trigger
            for trigger in self.triggers
            if trigger.point == point and trigger.count == count
        ]


def draw_faults(draws: random.Random, *, may_cancel: bool = True) -> Faults:
    """Faults of one run."""
    kinds = [
        Fault.SLOT_DIES,
        Fault.SLOT_DIES,
        Fault.SLOT_DIES,
        Fault.TASKMANAGER_LOST,
        Fault.JOBMANAGER_DIES,
        Fault.JOBMANAGER_DIES_IN_STORE,
        Fault.CALL_FAILS,
        Fault.CHECKPOINT_REQUESTED,
        Fault.COMMIT_FAILS,
        Fault.TASK_RAISES,
        Fault.TASK_RAISES,
        Fault.TASKMANAGER_LOST,
        Fault.PARTITION_SERVER_DIES,
        Fault.CONNECTION_BREAKS,
        Fault.REPORTS_DELAYED,
        Fault.REPORTS_REPEATED,
        Fault.DISK_FULL,
        Fault.JOBMANAGER_STOPS,
        Fault.TASKMANAGER_STOPS,
    ]
    triggers = []
    for _ in range(draws.choice((0, 1, 1, 2, 3, 5))):
        point, often = draws.choice(_POINTS)
        pause_ns = draws.choice((0, 0, draws.randrange(3_000_000), draws.randrange(30_000_000)))
        count = draws.randint(1, often)
        triggers.append(Trigger(draws.choice(kinds), point, count, pause_ns))
        if draws.random() < 0.3:  # another one, close to it
            soon_ns = pause_ns + draws.randrange(8_000_000)
            triggers.append(Trigger(draws.choice(kinds), point, count, soon_ns))
    if may_cancel and draws.random() < 0.08:
        point, often = draws.choice(_POINTS)
        triggers.append(Trigger(Fault.CANCELLED, point, draws.randint(1, often), 0))
    has_bad_store = draws.random() < 0.3
    return Faults(
        triggers=tuple(triggers),
        snapshot_pause_max_ns=draws.choice((2_000, 5_000_000, 40_000_000)),
        slot_store=draw_weather(draws) if has_bad_store else CALM,
        jobmanager_store=draw_weather(draws) if has_bad_store else CALM,
    )


def draw_region_failures(draws: random.Random) -> tuple[Trigger, ...]:
    """Regions that fail while groups of subtasks are in any phase, in one run, none in most."""
    if draws.random() > 0.25:
        return ()
    kinds = (
        Fault.REGIONS_FAIL,
        Fault.REGIONS_FAIL,
        Fault.SLOT_DIES,
        Fault.TASK_RAISES,
        Fault.ALL_FAIL,
    )
    triggers = [Trigger(Fault.REGIONS_FAIL, "checkpoint_completed", draws.randint(1, 6), 0)]
    for phase in draws.sample(list(GroupPhase), draws.choice((2, 3, 4))):
        pause_ns = draws.choice((0, 0, draws.randrange(1_000_000)))
        point, count = group_point(phase), draws.randint(1, 4)
        triggers.append(Trigger(draws.choice(kinds), point, count, pause_ns))
    return tuple(triggers)


def draw_weather(draws: random.Random) -> StoreWeather:
    """A store that works more or less."""
    return StoreWeather(
        failures=draws.choice((0.0, 0.02, 0.1, 0.4)),
        lost_answers=draws.choice((0.0, 0.0, 0.05, 0.4)),
        hanging=draws.choice(HANGING),
        hanging_max_ms=draws.choice((100, 1_000, 5_000)),
    )


def draw_freezes(draws: random.Random) -> tuple[Trigger, ...]:
    """Hosts that freeze in one run, none in most."""
    if draws.random() > 0.15:
        return ()
    triggers = []
    for _ in range(draws.choice((1, 1, 2))):
        point, often = draws.choice(_POINTS)
        triggers.append(Trigger(Fault.HOST_FREEZES, point, draws.randint(1, often), 0))
    return tuple(triggers)


def draw_savepoints(draws: random.Random) -> tuple[Trigger, ...]:
    """What users ask for in one run, in a part of them; now and then as something else goes wrong, or twice at once."""
    if draws.random() > 0.4:
        return ()
    beside = (Fault.SLOT_DIES, Fault.JOBMANAGER_DIES, Fault.JOBMANAGER_DIES_IN_STORE, *SAVEPOINTS)
    triggers = []
    for _ in range(draws.choice((1, 1, 2, 3))):
        point, often = draws.choice((*_POINTS, *OFTEN * 4))
        count, pause_ns = draws.randint(1, often), draws.randrange(20_000_000)
        triggers.append(Trigger(draws.choice(SAVEPOINTS), point, count, pause_ns))
        if draws.random() < 0.3:
            soon_ns = pause_ns + draws.randrange(30_000_000)
            triggers.append(Trigger(draws.choice(beside), point, count, soon_ns))
    return tuple(triggers)
