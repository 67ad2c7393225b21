"""What a JobMaster wants done: its shells do it in this order, and answer with events (``job_events``).

Effects of the checkpoint coordinator (``jobmanager.checkpoint.messages``) pass through.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jobmanager.checkpoint import messages as c
from jobmanager.failover.regions import KeptOutput
from jobmanager.graph.deployment import ChannelPlan, TaskPlan
from jobmanager.graph.execution_attempt import AttemptKey, SubtaskId
from jobmanager.graph.slot import Slot
from jobmanager.messages.job_events import (
    FinalCheckpointDue,
    RestartDue,
    StragglersDue,
)
from jobmanager.messages.job_state import JobState
from penstock.connectors.source import Split


@dataclass(frozen=True, slots=True)
class PrepareStart:
    """Before attempts of this number are deployed: make sure that the number is never used again, and
    find the newest checkpoint. Answered by ``StartPrepared`` or ``StartNotPrepared``.

    Attributes:
        unusable: checkpoints that tasks could not restore.
        subtasks: that begin again while others run; None = nothing of the job runs. What their dead
            attempts have uploaded for nothing is removed.
        kept: subtasks whose start is prepared, or is being, and that are not deployed: what they go on from stays.
        may_run: attempts of an earlier JobManager may run, and what they leave is not removed.
    """

    attempt: int
    unusable: tuple[int, ...] = ()
    subtasks: frozenset[SubtaskId] | None = None
    kept: frozenset[SubtaskId] = frozenset()
    may_run: bool = False

    @property
    def first_attempt(self) -> int:
        """Attempts with smaller numbers are dead."""
        return 0 if self.may_run else self.attempt


@dataclass(frozen=True, slots=True)
class FindAttempts:
    """Find what an earlier JobManager has deployed of the job and still runs, and give TaskManagers the time to come
    that had it. Answered by ``AttemptsFound``.

    Attributes:
        partitions: complete ones that are needed whatever runs: edge and producer's attempt of each.
    """

    attempt: int
    partitions: tuple[tuple[str, AttemptKey], ...] = ()


@dataclass(frozen=True, slots=True)
class PostLater:
    """Send this event after a delay."""

    delay_ms: int
    event: RestartDue | FinalCheckpointDue | StragglersDue


@dataclass(frozen=True, slots=True)
class RequestSlots:
    """Ask the slot pool.

    Attributes:
        near: TaskManagers that some of the slots had best be on, one of each time that one is named.
    """

    count: int
    group: int = 0
    near: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WithdrawRequest:
    """Ask the slot pool no longer."""

    group: int = 0


@dataclass(frozen=True, slots=True)
class AllocateSlots:
    """Start slot processes where there are none, and say where all listen; answered by
    ``SlotsAllocated`` or ``CallFailed``.

    Attributes:
        call: its number.
    """

    taskmanager_id: str
    slot_ids: tuple[str, ...]
    call: int


@dataclass(frozen=True, slots=True)
class DeployTasks:
    """Start attempts in slot processes.

    Attributes:
        from_nothing: those that start without state, whatever the checkpoint has of them.
    """

    taskmanager_id: str
    tasks: tuple[TaskPlan, ...]
    from_nothing: frozenset[SubtaskId] = frozenset()


@dataclass(frozen=True, slots=True)
class AddSplits:
    """Part of ``SendCommands``: splits for a source subtask."""

    key: AttemptKey
    operator_uid: str
    splits: tuple[Split, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class NoteCommit:
    """Keep in mind, whatever becomes of this JobManager, that output is being committed: nobody may run
    the job again. Answered by ``CommitNoted``."""


@dataclass(frozen=True, slots=True)
class CommitOutput:
    """Part of ``SendCommands``: make the output visible, then finish."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class ReplaceProducer:
    """Part of ``SendCommands``: a producer has a new attempt, whose rows are to be read on."""

    key: AttemptKey
    edge_id: str
    channel: ChannelPlan


Command = AddSplits | CommitOutput | ReplaceProducer
"""What the job tells one attempt."""


@dataclass(frozen=True, slots=True)
class SendCommands:
    """Tell running attempts of one TaskManager something; what the coordinator wants told goes on as it is."""

    taskmanager_id: str
    commands: tuple[Command | c.CheckpointCommand, ...]


@dataclass(frozen=True, slots=True)
class CancelTasks:
    """End attempts.

    Attributes:
        is_final: the job is never gone on with.
    """

    taskmanager_id: str
    keys: tuple[AttemptKey, ...]
    is_final: bool = False


def receivers(command: Command | CancelTasks | c.CheckpointCommand) -> tuple[AttemptKey, ...]:
    """Whom a command is for."""
    if isinstance(command, AddSplits | CommitOutput | ReplaceProducer):
        return (command.key,)
    return command.keys


@dataclass(frozen=True, slots=True)
class SweepOutput:
    """The job is over for good, and attempts had ended before they could know: what they left hidden goes."""


@dataclass(frozen=True, slots=True)
class AwaitCancellation:
    """Send ``CancellationOverdue`` when the cancelled attempts of a group have had their time."""

    group: int = 0


@dataclass(frozen=True, slots=True)
class FreeSlots:
    """End slot processes and give the slots back."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class ReleasePartitions:
    """Drop kept partitions; none named = all of the job.

    Attributes:
        partitions: edge and producer's attempt of each.
    """

    taskmanager_id: str
    partitions: tuple[tuple[str, AttemptKey], ...] = ()


@dataclass(frozen=True, slots=True)
class ReleaseOutputs:
    """Drop what TaskManagers say they keep of these, whichever attempts have made it."""

    partitions: frozenset[KeptOutput]


@dataclass(frozen=True, slots=True)
class PersistedPartition:
    """A complete partition that is to outlive the job."""

    taskmanager_id: str
    edge_id: str
    producer: AttemptKey


@dataclass(frozen=True, slots=True)
class PromotePartitions:
    """Let partitions outlive the job, all or none. Answered by ``PartitionsPromoted`` or
    ``PartitionsNotPromoted``."""

    partitions: tuple[PersistedPartition, ...]


@dataclass(frozen=True, slots=True)
class ReserveAttempts:
    """Make sure that no other JobManager ever gives out this attempt number. Answered by
    ``AttemptsReserved``, or not at all."""

    attempt: int


@dataclass(frozen=True, slots=True)
class RequestSpareSlots:
    """Ask the slot pool for slots that are free now and that nobody waits for. Each is answered by
    ``SpareSlotGranted``, or not at all.

    Attributes:
        wanted: subtasks that they are for, each with the TaskManager that it must not be on.
    """

    wanted: tuple[tuple[SubtaskId, str], ...]


@dataclass(frozen=True, slots=True)
class StartRival:
    """Start a process in a slot and a rival in it, and tell it its splits. Answered by ``RivalStarted``,
    ``RivalNotStarted`` or both."""

    taskmanager_id: str
    task: TaskPlan
    splits: tuple[AddSplits, ...] = ()


class RivalFate(enum.Enum):
    """What has become of a rival."""

    STARTED = "started"
    WON = "won"
    LOST = "lost"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ReportRival:
    """For the log.

    Attributes:
        beside: the attempt that it ran beside.
    """

    rival: AttemptKey
    beside: AttemptKey
    fate: RivalFate
    reason: str = ""


SpeculationEffect = ReserveAttempts | RequestSpareSlots | StartRival | ReportRival
"""Effects of speculative execution."""


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Write a manifest and swap HEAD; of a savepoint, bring together its files and write the manifest.

    Attributes:
        stored: what the coordinator wants stored.
        done_splits: what source subtasks that had finished have read, so that a later discovery does
            not bring it again: (key, operator uid, split ids).
        done_before: of the sources whose done splits are kept as a set, what the checkpoint before held.
    """

    stored: c.StoreCheckpoint
    done_splits: tuple[tuple[AttemptKey, str, tuple[str, ...]], ...] = ()
    done_before: tuple[c.SourceDone, ...] = ()


@dataclass(frozen=True, slots=True)
class DiscardCheckpoints:
    """The job has ended and will not be restored: delete its checkpoints."""


@dataclass(frozen=True, slots=True)
class PublishState:
    """The job has a new state; with a terminal one only clean-up follows."""

    state: JobState


@dataclass(frozen=True, slots=True)
class ReportCommitted:
    """All output that a checkpoint covers, which somebody waits for, is committed."""

    checkpoint_id: int


CheckpointEffect = (
    c.SettleCheckpoint
    | c.ReserveIds
    | c.DeleteFiles
    | c.DiscardSavepoint
    | c.CallAt
    | c.AnswerRequest
    | c.ReportAborted
    | c.ReportCompleted
    | ReportCommitted
)
"""Effects of the coordinator that the machine hands on as they are."""

JobEffect = (
    PrepareStart
    | FindAttempts
    | PostLater
    | RequestSlots
    | WithdrawRequest
    | AllocateSlots
    | DeployTasks
    | SendCommands
    | CancelTasks
    | AwaitCancellation
    | SweepOutput
    | FreeSlots
    | ReleasePartitions
    | ReleaseOutputs
    | PromotePartitions
    | NoteCommit
    | WriteManifest
    | DiscardCheckpoints
    | PublishState
    | SpeculationEffect
    | CheckpointEffect
)
