"""What a JobMaster hears.

The subtasks of a job may have several attempts, one after the other, and begin in groups, several of which may
be on their way at a time. ``group`` names one of them, in an effect and in the events that answer it, so that an
answer that comes too late is known as such; no two groups of a job have the same. Where subtasks begin again,
``attempt`` does as well: it is the number of their new attempts, which others do not have.
Events of the checkpoint coordinator (``jobmanager.checkpoint.messages``) pass through.
"""

from __future__ import annotations

from dataclasses import dataclass

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.graph.deployment import Endpoint
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState, SubtaskId
from jobmanager.graph.slot import Slot
from penstock.connectors.source import Split

_GOES_ON = (
    AttemptState.DEPLOYING,
    AttemptState.INITIALIZING,
    AttemptState.RUNNING,
    AttemptState.FINISHED,
)


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The job has been accepted, or found by the JobManager that took over."""


@dataclass(frozen=True, slots=True)
class StartPrepared:
    """``PrepareStart`` is done.

    Attributes:
        restored: the newest checkpoint; None = the job starts from nothing.
        retained: checkpoints that HEAD names, oldest first.
        goes_back: newer ones cannot be restored.
    """

    attempt: int
    restored: RestoredCheckpoint | None = None
    retained: tuple[CompletedCheckpoint, ...] = ()
    next_checkpoint_id: int = 1
    goes_back: bool = False


@dataclass(frozen=True, slots=True)
class StartNotPrepared:
    """``PrepareStart`` has failed."""

    attempt: int
    cause: FailureCause


@dataclass(frozen=True, slots=True)
class LocatedPartition:
    """A complete partition that a TaskManager has kept since an earlier JobManager.

    Attributes:
        endpoint: where it is read.
    """

    taskmanager_id: str
    endpoint: Endpoint
    edge_id: str
    producer: AttemptKey


@dataclass(frozen=True, slots=True)
class GivenSplits:
    """What an attempt was given of one source, as far as no completed checkpoint covers it."""

    operator_uid: str
    splits: tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class FoundAttempt:
    """An attempt that an earlier JobManager has deployed, as its TaskManager tells it.

    Attributes:
        endpoint: of the process that it is in.
        leader_epoch: of the leader under which that was started.
        failure: with FAILED only.
        last: with FINISHED only.
        restored_from: checkpoint that it went on from; 0 = none.
        reads: whose rows it reads: edge and producer.
        found: what it has discovered, as far as no completed checkpoint covers it.
        said: what else of it is true from now on.
        is_complete: all is known of it that there is to know.
        savepoint_id: the newest that it was told to take, where no checkpoint has been completed since; 0 = none.
        beside: the number of the attempt that it was to be a rival of; None = of none.
        commits: it was told to commit its output.
        sent_rows: an earlier JobManager has taken rows of it, to bring them back to a client.
    """

    key: AttemptKey
    slot: Slot
    endpoint: Endpoint
    leader_epoch: int
    state: AttemptState
    failure: FailureCause | None = None
    last: c.LastState | None = None
    restored_from: int = 0
    reads: frozenset[tuple[str, AttemptKey]] = frozenset()
    found: tuple[SplitsReported, ...] = ()
    given: tuple[GivenSplits, ...] = ()
    said: tuple[SideLoaded | EndOfDataReported, ...] = ()
    is_complete: bool = True
    savepoint_id: int = 0
    beside: int | None = None
    commits: bool = False
    sent_rows: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether it runs or has done its work, and all is known of it."""
        return self.state in _GOES_ON and self.is_complete

    @property
    def has_done_all(self) -> bool:
        """Whether it has read all that it reads, and written all that it writes: it has finished, or waits to commit."""
        waits = any(isinstance(said, EndOfDataReported) for said in self.said)
        return self.state is AttemptState.FINISHED or waits


@dataclass(frozen=True, slots=True)
class AttemptsFound:
    """``FindAttempts`` is done: what is not named is gone.

    Attributes:
        reason: why none of them can go on all the same; "" = they can.
        located: complete partitions that are there, whether or not who has written them is known.
        endpoints: TaskManagers, and where they serve what finished attempts have written.
        ended: subtasks of which TaskManagers know attempts whose processes have ended.
        is_anyone_missing: a TaskManager that had attempts of the job has not come, or knows of none.
    """

    attempt: int
    found: tuple[FoundAttempt, ...]
    reason: str = ""
    located: tuple[LocatedPartition, ...] = ()
    endpoints: tuple[tuple[str, Endpoint], ...] = ()
    ended: frozenset[SubtaskId] = frozenset()
    is_anyone_missing: bool = False


@dataclass(frozen=True, slots=True)
class RestartDue:
    """The delay before a restart is over."""

    group: int


@dataclass(frozen=True, slots=True)
class FinalCheckpointDue:
    """A final checkpoint that did not complete is to be tried again."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SlotsGranted:
    """The slot pool has given a group what it asked for."""

    slots: tuple[Slot, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class SlotsRefused:
    """No slots came in time.

    Attributes:
        taskmanagers: that offer slots.
        drained: that do not.
    """

    needed: int
    total: int
    free: int
    taskmanagers: int
    waited_ms: int
    group: int = 0
    drained: int = 0


@dataclass(frozen=True, slots=True)
class SlotsAllocated:
    """The slot processes on a TaskManager run.

    Attributes:
        call: of the ``AllocateSlots`` that this answers.
        partition_endpoint: where the partitions of its finished attempts are read.
    """

    taskmanager_id: str
    endpoints: tuple[Endpoint, ...]
    call: int
    partition_endpoint: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A TaskManager did not do what an effect asked of it."""

    taskmanager_id: str
    cause: FailureCause
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class MissingPartition:
    """What an attempt could not read."""

    edge_id: str
    producer: AttemptKey


@dataclass(frozen=True, slots=True)
class AttemptReported:
    """A TaskManager reports an attempt's new state.

    Attributes:
        failure: with FAILED only, as is ``missing``.
        last: with FINISHED only, as is ``written``: edge and size in bytes of each complete blocking partition.
    """

    key: AttemptKey
    state: AttemptState
    failure: FailureCause | None = None
    missing: MissingPartition | None = None
    last: c.LastState | None = None
    written: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SplitsReported:
    """Subtask 0 of a source has discovered splits."""

    key: AttemptKey
    operator_uid: str
    splits: tuple[Split, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class SideLoaded:
    """An attempt has read the side that it reads first to its end."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class EndOfDataReported:
    """An attempt has consumed all its input and waits for the commit, or for a checkpoint.

    Attributes:
        written: edge and size in bytes of each complete blocking partition.
    """

    key: AttemptKey
    written: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class KeptRowsLost:
    """The process of an attempt that has finished has ended, and what it kept for its consumers is gone."""

    key: AttemptKey
    cause: FailureCause


@dataclass(frozen=True, slots=True)
class CommitNoted:
    """``NoteCommit`` is done."""


@dataclass(frozen=True, slots=True)
class PartitionsPromoted:
    """``PromotePartitions`` is done."""


@dataclass(frozen=True, slots=True)
class PartitionsNotPromoted:
    """``PromotePartitions`` has failed, and nothing of it is left."""

    cause: FailureCause


@dataclass(frozen=True, slots=True)
class TaskManagerGone:
    """A TaskManager is gone, and with it whatever ran there.

    Attributes:
        is_planned: it was told to end, which is no failure: the restart strategy has no say in the restart for it.
    """

    taskmanager_id: str
    cause: FailureCause
    is_planned: bool = False


@dataclass(frozen=True, slots=True)
class TaskManagerDrained:
    """The job is to leave a TaskManager: with the next checkpoint for that, and with what has nothing to do there.

    Attributes:
        makes_again: what it keeps there and somebody reads yet is made again elsewhere, and not waited for; a job that
            takes no checkpoints begins again for that.
    """

    taskmanager_id: str
    makes_again: bool = False


@dataclass(frozen=True, slots=True)
class TaskManagerInUse:
    """A TaskManager takes the job's tasks again."""

    taskmanager_id: str


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The user wants the job to end.

    Attributes:
        is_noted: no JobManager will go on with it, however this one ends.
    """

    is_noted: bool = True


@dataclass(frozen=True, slots=True)
class SuspendRequested:
    """The JobManager stops: the job is to end here and go on in its successor."""


@dataclass(frozen=True, slots=True)
class FailureRequested:
    """Somebody above the job (admission, shutdown) wants it to fail."""

    cause: FailureCause


@dataclass(frozen=True, slots=True)
class CancellationOverdue:
    """The time in which the cancelled attempts of a group had to end is over."""

    group: int = 0


@dataclass(frozen=True, slots=True)
class StragglersDue:
    """Time to look for slow subtasks."""


@dataclass(frozen=True, slots=True)
class AttemptsReserved:
    """``ReserveAttempts`` is done: numbers below ``end`` will not be given out by another JobManager."""

    end: int


@dataclass(frozen=True, slots=True)
class SpareSlotGranted:
    """One of ``RequestSpareSlots`` has been granted."""

    subtask: SubtaskId
    slot: Slot


@dataclass(frozen=True, slots=True)
class RivalStarted:
    """The process of a rival runs, and the rival is being deployed there.

    Attributes:
        partition_endpoint: where the partitions of its TaskManager's finished attempts are read.
    """

    key: AttemptKey
    partition_endpoint: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class RivalNotStarted:
    """``StartRival`` has failed; nobody knows how far it has come."""

    key: AttemptKey
    cause: FailureCause


@dataclass(frozen=True, slots=True)
class OutputCommitted:
    """A task has committed all that a complete checkpoint covers of its output."""

    key: AttemptKey
    checkpoint_id: int


PromotionEvent = PartitionsPromoted | PartitionsNotPromoted

SpeculationEvent = (
    StragglersDue | AttemptsReserved | SpareSlotGranted | RivalStarted | RivalNotStarted
)
"""Events for speculative execution."""

CheckpointEvent = (
    c.TimeReached
    | c.CheckpointRequested
    | c.AckReceived
    | c.DeclineReceived
    | OutputCommitted
    | c.CheckpointStored
    | c.CheckpointNotStored
    | c.StoreOutcomeUnknown
    | c.FilesDeleted
    | c.IdsReserved
    | c.IdsNotReserved
)
"""Events for the coordinator that come from outside the job's machine."""

AttemptEvent = AttemptReported | SplitsReported | EndOfDataReported | SideLoaded | KeptRowsLost
"""What TaskManagers say of attempts, but for checkpoints."""

OwnEvent = (
    JobStarted
    | StartPrepared
    | StartNotPrepared
    | AttemptsFound
    | RestartDue
    | FinalCheckpointDue
    | SlotsGranted
    | SlotsRefused
    | SlotsAllocated
    | CallFailed
    | AttemptReported
    | SplitsReported
    | EndOfDataReported
    | SideLoaded
    | KeptRowsLost
    | CommitNoted
    | PartitionsPromoted
    | PartitionsNotPromoted
    | TaskManagerGone
    | TaskManagerDrained
    | TaskManagerInUse
    | CancelRequested
    | SuspendRequested
    | FailureRequested
    | CancellationOverdue
)
"""Events that the job's own machine decides on."""

JobEvent = OwnEvent | SpeculationEvent | CheckpointEvent
