"""What is asked for, by time or by somebody, and when a checkpoint may begin for it.

Invariants: none begins while a task is loading, nobody knows whether another is stored, or behind the one that has
stopped the job; who asks for one then hears why; an id is used that HEAD has reserved (``CheckpointIds``); requests
wait only where tasks run.
"""

from __future__ import annotations

from dataclasses import replace

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_ids import CheckpointIds
from jobmanager.checkpoint.checkpoints_under_way import CheckpointsUnderWay
from jobmanager.checkpoint.coordinator_outbox import CoordinatorOutbox
from jobmanager.checkpoint.participating_tasks import ParticipatingTasks
from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.checkpoint.steady_time import SteadyTime
from jobmanager.checkpoint.trigger_policy import Request, TriggerPolicy, Turn
from penstock.storage.checkpoint_properties import CheckpointProperties


class CheckpointRequests:
    """The requests of one job.

    Args:
        settings: when checkpoints are taken.
        ids: of its checkpoints.
        under_way: what has begun.
        outbox: takes answers.
        time: of the step.

    Attributes:
        is_stopped: the newest checkpoint has stopped the job: none is to come behind it.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        ids: CheckpointIds,
        tasks: ParticipatingTasks,
        under_way: CheckpointsUnderWay,
        outbox: CoordinatorOutbox,
        time: SteadyTime,
        *,
        is_stopped: bool,
    ) -> None:
        self._settings = settings
        self.policy = TriggerPolicy(settings)
        self._ids = ids
        self._tasks = tasks
        self._under_way = under_way
        self._outbox = outbox
        self._time = time
        self.is_stopped = is_stopped

    def add(self, event: c.CheckpointRequested) -> bool:
        """Queues what somebody has asked for, or says why not; False = it is known."""
        request = Request(event.request_id, event.properties)
        if request.is_alone:
            request = replace(request, deadline_ms=self._time.now_ms + self._settings.timeout_ms)
        under_way = (pending.request for pending in self._under_way)
        if any(known.request_id == event.request_id for known in (*self.policy.queued, *under_way)):
            return False
        unsettled = self._under_way.unsettled
        if not self._tasks.are_active:
            self._outbox.refuse([request], c.RequestRefused.NOT_RUNNING)
        elif unsettled is not None:
            self._outbox.refuse([request], c.RequestRefused.UNSETTLED, unsettled.unsettled)
        elif self._tasks.are_loading:
            detail = f"{c.RequestRefused.LOADING.value}: {self._tasks.loading_named()}"
            self._outbox.refuse([request], c.RequestRefused.LOADING, detail)
        elif (refused := self.policy.add(request)) is not None:
            self._outbox.refuse([request], refused)
        return True

    def add_again(self, request: Request) -> None:
        """Queues a request whose checkpoint is to be taken again; whoever has asked is not kept waiting where none begins."""
        unsettled = self._under_way.unsettled
        if unsettled is None or request.turn is Turn.PERIODIC:
            self.policy.add_again(request)
        else:
            self._outbox.refuse([request], c.RequestRefused.UNSETTLED, unsettled.unsettled)

    def refuse_queued(self, refused: c.RequestRefused, detail: str) -> None:
        """Nothing begins for those that wait."""
        self._outbox.refuse(self.policy.stop(), refused, detail)

    def expire(self) -> None:
        """Savepoints that have waited for too long are not taken."""
        named = ", ".join(map(str, self._under_way.ids))
        detail = f"{c.RequestRefused.EXPIRED.value}: checkpoint {named}" if named else ""
        late = self.policy.expired(self._time.now_ms)
        self._outbox.refuse(late, c.RequestRefused.EXPIRED, detail)

    @property
    def _can_begin(self) -> bool:
        has_tasks = self._tasks.are_active and not self._tasks.all_have_finished
        is_free = not self._tasks.are_loading and not self.is_stopped
        return has_tasks and is_free and self._under_way.unsettled is None

    def take(self) -> Request | None:
        """The request for which a checkpoint begins now; None = for none."""
        if self._under_way.unsettled is not None:
            return None
        if not self._can_begin:
            if not self._tasks.are_loading:
                ended = "all tasks of the job have finished"
                told = "the job has been stopped" if self.is_stopped else ended
                self.refuse_queued(c.RequestRefused.ENDING, told)
            return None
        if not self._ids.are_left:
            self._reserve_ids()
            return None
        under_way = self._under_way
        return self.policy.take(self._time.now_ms, len(under_way), is_saving=under_way.is_saving)

    def _reserve_ids(self) -> None:
        due = self._ids.due_ms()
        if self._under_way.storing is None and due is not None and due <= self._time.now_ms:
            self._ids.is_asked = True
            self._outbox.add(c.ReserveIds())

    def take_ids(self, event: c.IdsReserved | c.IdsNotReserved) -> None:
        """HEAD has reserved ids, or has not."""
        if isinstance(event, c.IdsReserved):
            self._ids.reserved(event.end)
            return
        self._ids.not_reserved(self._time.now_ms)
        self.refuse_queued(c.RequestRefused.NO_ID, event.error)

    def properties(self, request: Request) -> CheckpointProperties:
        """What is taken for a request."""
        is_full = request.properties.is_full or not self._settings.is_incremental
        return replace(request.properties, is_full=is_full)

    def due_ms(self) -> list[int | None]:
        """When something is to be done about them; None = not by time alone."""
        dues = [self.policy.expires_ms()]
        if self._can_begin and self._ids.are_left:
            under_way = self._under_way
            now_ms, is_saving = self._time.now_ms, under_way.is_saving
            dues.append(self.policy.due_ms(now_ms, len(under_way), is_saving=is_saving))
        elif self._can_begin and self._under_way.storing is None:
            dues.append(self._ids.due_ms())
        return dues
