"""What the checkpoint coordinator hears (events) and what it wants done (effects).

All times are wall-clock milliseconds. A snapshot is opaque here but for the files it refers to.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.done_splits import DoneSplits
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint, SnapshotSummary
from jobmanager.graph.execution_attempt import AttemptKey
from penstock.storage.checkpoint_properties import PLAIN, CheckpointProperties
from penstock.storage.manifest import SharedIdentity, StoredRange, StoredReference


@dataclass(frozen=True, slots=True)
class SourceDone:
    """What has been read to its end of a source.

    Attributes:
        ids: of the splits that a checkpoint was the first to know as done: who goes on from it does not read them.
    """

    vertex: str
    operator_uid: str
    done: DoneSplits
    ids: tuple[str, ...] = ()


class AbortReason(Enum):
    """Why a checkpoint did not complete. ``counts``: as a failed checkpoint."""

    EXPIRED = "it took longer than execution.checkpointing.timeout"
    DECLINED = "a subtask declined it"
    COMPARING = "rows that a restarted producer sends again were still being compared"
    TASK_FINISHED = "a subtask finished before its barrier came"
    SUBSUMED = "a later checkpoint completed first"
    TASKS_STOPPED = "the job's tasks were stopped"
    STORE_FAILED = "it could not be stored"
    TOO_LARGE = "its state is larger than storage 'jobmanager' takes"
    OUTDATED = "a subtask had not heard yet of the newest completed checkpoint"

    @property
    def counts(self) -> bool:
        """True where it says something about the health of checkpoints."""
        return self not in (
            AbortReason.SUBSUMED,
            AbortReason.TASKS_STOPPED,
            AbortReason.TASK_FINISHED,
            AbortReason.COMPARING,
            AbortReason.OUTDATED,
        )


class RequestRefused(Enum):
    """Why a checkpoint on demand was not taken."""

    NOT_RUNNING = "not all tasks of the job are running"
    STARTING = "not all tasks of the job are running yet"
    LEAVING = "the job leaves a TaskManager that is drained"
    ENDING = "the job ends"
    LOADING = "tasks read a broadcast side or a history first (load_first), and checkpoints begin once it has been read"
    DISABLED = "checkpointing is off: set execution.checkpointing.interval or .dir"
    BLOCKING_EXCHANGE = "the job is in the middle of a blocking exchange"
    EXPIRED = "it waited longer than execution.checkpointing.timeout for a checkpoint under way"
    QUEUE_FULL = "too many checkpoints are waiting already"
    ABORTED = "the checkpoint was aborted"
    NO_ID = "no checkpoint id could be reserved in HEAD"
    UNSETTLED = "whether the last checkpoint was stored is not known yet"


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class LastState:
    """What a finished subtask goes on holding: lists of its functions.

    Attributes:
        snapshot: opaque; handed back in ``StoreCheckpoint``.
        references: all file ranges in it.
    """

    snapshot: object
    references: tuple[StoredReference, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskView:
    """One subtask as the coordinator sees it.

    Attributes:
        producers: current attempts that feed it; none for a source.
        finished: restored as finished, or finished meanwhile.
        last: of a finished one, None = it holds nothing.
        is_loading: it reads an input to its end before it reads on: no checkpoint begins meanwhile.
    """

    key: AttemptKey
    producers: tuple[AttemptKey, ...]
    finished: bool = False
    last: LastState | None = None
    is_loading: bool = False


@dataclass(frozen=True, slots=True)
class TasksStarted:
    """Every task of the job is RUNNING (or FINISHED): checkpoints may begin.

    Attributes:
        at_once: the first is due now, and not after an interval.
        restored_id: the checkpoint that tasks have begun from since the last of these, 0 = from nothing; None = none has.
    """

    tasks: tuple[TaskView, ...]
    now_ms: int
    at_once: bool = False
    restored_id: int | None = None


@dataclass(frozen=True, slots=True)
class TasksStopped:
    """The job fails, restarts, is cancelled or has ended: what is pending is void."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class TaskLoaded:
    """A task that was loading reads on; only a current attempt's."""

    key: AttemptKey
    now_ms: int


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """An attempt has finished."""

    key: AttemptKey
    now_ms: int
    last: LastState | None = None


@dataclass(frozen=True, slots=True)
class TimeReached:
    """The time asked for with ``CallAt`` is there."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """Somebody wants a checkpoint or a savepoint now.

    Attributes:
        request_id: chosen by who asks; answered by ``AnswerRequest``.
        properties: what is taken; one behind which the job ends goes ahead of all else.
    """

    request_id: str
    now_ms: int
    properties: CheckpointProperties = PLAIN


@dataclass(frozen=True, slots=True)
class AckReceived:
    """The snapshot of a task is safe.

    Attributes:
        snapshot: opaque; handed back in ``StoreCheckpoint``.
        references: all file ranges in it, new and old.
        leader_epoch: of the leader that has triggered it.
        has_finished: whoever restores it has done all its work, and reads nothing.
    """

    key: AttemptKey
    checkpoint_id: int
    snapshot: object
    references: tuple[StoredReference, ...]
    summary: SnapshotSummary
    now_ms: int
    leader_epoch: int = 0
    has_finished: bool = False


@dataclass(frozen=True, slots=True)
class DeclineReceived:
    """A task takes no part in a checkpoint. Named as in ``CheckpointDeclined``, which is taken over field by field.

    Attributes:
        is_comparing: rows that its producers send again are in its state, and may turn out to be others than before.
        leader_epoch: as of ``AckReceived``.
    """

    key: AttemptKey
    checkpoint_id: int
    reason: str
    now_ms: int
    is_comparing: bool = False
    leader_epoch: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointStored:
    """``StoreCheckpoint`` is done: manifest written and HEAD swapped.

    Attributes:
        done: of the sources that it says it of.
        references: the files with these splits.
    """

    checkpoint_id: int
    manifest_path: str
    now_ms: int
    done: tuple[SourceDone, ...] = ()
    references: tuple[StoredReference, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointNotStored:
    """``StoreCheckpoint`` has failed and changed nothing.

    Attributes:
        left: objects of it that may be there, that nothing names, and that could not be deleted now.
    """

    checkpoint_id: int
    error: str
    now_ms: int
    is_too_large: bool = False
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreOutcomeUnknown:
    """``StoreCheckpoint`` has ended, and nobody knows how."""

    checkpoint_id: int
    error: str
    now_ms: int


@dataclass(frozen=True, slots=True)
class FilesDeleted:
    """``DeleteFiles`` has come to an end; ``left`` could not be deleted now."""

    left: tuple[str, ...]
    now_ms: int


@dataclass(frozen=True, slots=True)
class IdsReserved:
    """``ReserveIds`` is done: ids below ``end`` are used by nobody else."""

    end: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class IdsNotReserved:
    """``ReserveIds`` has failed: no checkpoint can be taken now."""

    error: str
    now_ms: int


CoordinatorEvent = (
    TasksStarted
    | TasksStopped
    | TaskFinished
    | TaskLoaded
    | TimeReached
    | CheckpointRequested
    | AckReceived
    | DeclineReceived
    | CheckpointStored
    | CheckpointNotStored
    | StoreOutcomeUnknown
    | FilesDeleted
    | IdsReserved
    | IdsNotReserved
)


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class TriggerTasks:
    """Tell tasks to start a checkpoint: sources, and tasks whose producers have all finished."""

    checkpoint_id: int
    triggered_at_ms: int
    keys: tuple[AttemptKey, ...]
    properties: CheckpointProperties = PLAIN


@dataclass(frozen=True, slots=True)
class StoreCheckpoint:
    """All tasks have acknowledged: write the manifest, then swap HEAD; of a savepoint, bring its files
    together and write the manifest last.

    Attributes:
        snapshots: the opaque snapshots, one per task that took part.
        finished: tasks that had finished before it began.
        last: what these hold, opaque, where they hold anything.
        replaced: per shared key the location that counts, where it is another than the snapshot says:
            to be put into the snapshots before they are written.
        retained: ids HEAD is to name afterwards, this one last; manifests of others are deleted later. None of
            a savepoint.
        next_checkpoint_id: ids below it are reserved with it; 0 of a savepoint.
        properties: what it was taken as.
    """

    checkpoint_id: int
    triggered_at_ms: int
    snapshots: tuple[tuple[AttemptKey, object], ...]
    finished: tuple[AttemptKey, ...]
    replaced: tuple[tuple[SharedIdentity, StoredRange], ...]
    retained: tuple[int, ...]
    next_checkpoint_id: int
    state_bytes: int
    last: tuple[tuple[AttemptKey, object], ...] = ()
    properties: CheckpointProperties = PLAIN


@dataclass(frozen=True, slots=True)
class SettleCheckpoint:
    """Storing it is given up: find out whether it is stored, and see to it that this changes no more.

    Answered by ``CheckpointStored`` or ``CheckpointNotStored``, however long that takes.
    """

    checkpoint_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReserveIds:
    """Reserve a block of checkpoint ids in HEAD; answered by ``IdsReserved`` or ``IdsNotReserved``.

    Never wanted while a checkpoint is being stored or settled, and none is stored until it is answered.
    """


@dataclass(frozen=True, slots=True)
class NotifyCompleted:
    """Tell tasks that a checkpoint is complete.

    Attributes:
        is_awaited: each says when it has committed what that covers (``job_events.OutputCommitted``).
    """

    checkpoint_id: int
    keys: tuple[AttemptKey, ...]
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class MoveTasks:
    """A checkpoint is complete behind which tasks hold: those that are to leave their TaskManager begin elsewhere from it,
    the others are told that it is complete, and go on."""

    checkpoint_id: int
    keys: tuple[AttemptKey, ...]


@dataclass(frozen=True, slots=True)
class NotifySaved:
    """Tell tasks that a savepoint is complete: nothing is committed, and nothing builds upon it."""

    checkpoint_id: int
    keys: tuple[AttemptKey, ...]


@dataclass(frozen=True, slots=True)
class NotifyAborted:
    """Tell tasks that a checkpoint will not complete.

    Attributes:
        first_id: nor will any from this one on, of which an earlier JobManager may have completed savepoints; 0 = it
            alone.
    """

    checkpoint_id: int
    keys: tuple[AttemptKey, ...]
    first_id: int = 0


@dataclass(frozen=True, slots=True)
class DeleteFiles:
    """Delete objects that nothing refers to any more; answered by ``FilesDeleted``.

    At most one is under way; it never holds a checkpoint up.
    """

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DiscardSavepoint:
    """A savepoint will not be complete: remove what has been written to its directory.

    Attributes:
        target: the directory.
        is_complete: its manifest may be there, and goes as well.
        files: all that is removed, where a task has written them too late; () = all that is there.
    """

    checkpoint_id: int
    target: str
    is_complete: bool = False
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallAt:
    """Send ``TimeReached`` at that time; replaces what was asked for before."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """The answer to ``CheckpointRequested``: an id, or why there is none."""

    request_id: str
    checkpoint_id: int
    refused: RequestRefused | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReportAborted:
    """A checkpoint was aborted: log and count it.

    Attributes:
        failed_in_a_row: failures since the last completed checkpoint.
        at_risk_ms: time since the last completed checkpoint (or the start): the work that a failure now
            would repeat.
    """

    checkpoint_id: int
    reason: AbortReason
    detail: str
    failed_in_a_row: int
    at_risk_ms: int


@dataclass(frozen=True, slots=True)
class ReportCompleted:
    """A checkpoint is complete: log and count it.

    Attributes:
        committers: the tasks that have taken part in it and have not finished, where somebody waits until these have
            committed what it covers; () = nobody does.
    """

    checkpoint: CompletedCheckpoint
    summary: SnapshotSummary
    duration_ms: int
    committers: tuple[AttemptKey, ...] = ()


@dataclass(frozen=True, slots=True)
class FailJob:
    """More checkpoints in a row have failed than are tolerated; or the job's tasks have been changed for a stop
    that has failed.

    Attributes:
        is_free: the restart strategy is not asked.
    """

    message: str
    is_free: bool = False


CheckpointCommand = TriggerTasks | NotifyCompleted | NotifySaved | NotifyAborted
"""What tasks are told: these effects travel to the TaskManagers as they are."""

CoordinatorEffect = (
    TriggerTasks
    | StoreCheckpoint
    | SettleCheckpoint
    | ReserveIds
    | NotifyCompleted
    | MoveTasks
    | NotifySaved
    | NotifyAborted
    | DeleteFiles
    | DiscardSavepoint
    | CallAt
    | AnswerRequest
    | ReportAborted
    | ReportCompleted
    | FailJob
)
