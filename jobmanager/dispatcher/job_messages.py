"""What a JobMaster hears (events) and what it wants done (effects)."""

from __future__ import annotations

from dataclasses import dataclass

from jobmanager.dispatcher.job_state import JobState
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState
from jobmanager.scheduler.deployment import Endpoint, TaskPlan
from jobmanager.scheduler.slots import Slot
from penstock.connectors.source import Split

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The job has been accepted."""


@dataclass(frozen=True, slots=True)
class SlotsGranted:
    """The slot pool has given the job what it asked for."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class SlotsRefused:
    """No slots came in time."""

    needed: int
    total: int
    free: int
    taskmanagers: int
    waited_ms: int


@dataclass(frozen=True, slots=True)
class SlotsAllocated:
    """The slot processes on a TaskManager run."""

    taskmanager_id: str
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A TaskManager did not do what an effect asked of it."""

    taskmanager_id: str
    cause: FailureCause


@dataclass(frozen=True, slots=True)
class AttemptReported:
    """A TaskManager reports an attempt's new state; ``failure`` with FAILED only."""

    key: AttemptKey
    state: AttemptState
    failure: FailureCause | None = None


@dataclass(frozen=True, slots=True)
class SplitsReported:
    """Subtask 0 of a source has discovered splits."""

    key: AttemptKey
    operator_uid: str
    splits: tuple[Split, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class EndOfDataReported:
    """An attempt has consumed all its input and waits for the commit."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class TaskManagerLost:
    """A TaskManager is gone, and with it whatever ran there."""

    taskmanager_id: str
    cause: FailureCause


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The user wants the job to end."""


@dataclass(frozen=True, slots=True)
class FailureRequested:
    """Somebody above the job (admission, shutdown) wants it to fail."""

    cause: FailureCause


@dataclass(frozen=True, slots=True)
class CancellationOverdue:
    """The time in which cancelled attempts had to end is over."""


JobEvent = (
    JobStarted
    | SlotsGranted
    | SlotsRefused
    | SlotsAllocated
    | CallFailed
    | AttemptReported
    | SplitsReported
    | EndOfDataReported
    | TaskManagerLost
    | CancelRequested
    | FailureRequested
    | CancellationOverdue
)


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class RequestSlots:
    """Ask the slot pool."""

    count: int


@dataclass(frozen=True, slots=True)
class WithdrawRequest:
    """Ask the slot pool no longer."""


@dataclass(frozen=True, slots=True)
class AllocateSlots:
    """Start slot processes; answered by ``SlotsAllocated`` or ``CallFailed``."""

    taskmanager_id: str
    slot_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeployTasks:
    """Start attempts in slot processes."""

    taskmanager_id: str
    tasks: tuple[TaskPlan, ...]


@dataclass(frozen=True, slots=True)
class AddSplits:
    """Part of ``SendCommands``: splits for a source subtask."""

    key: AttemptKey
    operator_uid: str
    splits: tuple[Split, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class CommitOutput:
    """Part of ``SendCommands``: make the output visible, then finish."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class SendCommands:
    """Tell running attempts something."""

    taskmanager_id: str
    commands: tuple[AddSplits | CommitOutput, ...]


@dataclass(frozen=True, slots=True)
class CancelTasks:
    """End attempts."""

    taskmanager_id: str
    keys: tuple[AttemptKey, ...]


@dataclass(frozen=True, slots=True)
class AwaitCancellation:
    """Send ``CancellationOverdue`` when cancelled attempts have had their time."""


@dataclass(frozen=True, slots=True)
class FreeSlots:
    """End slot processes and give the slots back."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class PublishState:
    """The job has a new state; with a terminal one nothing but ``FreeSlots`` follows."""

    state: JobState


JobEffect = (
    RequestSlots
    | WithdrawRequest
    | AllocateSlots
    | DeployTasks
    | SendCommands
    | CancelTasks
    | AwaitCancellation
    | FreeSlots
    | PublishState
)
