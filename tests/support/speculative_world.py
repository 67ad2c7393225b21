"""The world of ``job_world`` for jobs whose slow subtasks get rivals.

Some attempts are slow: they do nothing until everything else has come to rest. Rivals are granted slots or
not, start or not, win, lose, fail and are lost, and what has lost goes on until its slot is given back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from typing_extensions import override

from jobmanager.failover.failover_strategy import FailoverStrategyName
from jobmanager.failover.restart_settings import RestartSettings
from jobmanager.graph.deployment import Endpoint, TaskPlan
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState, SubtaskId
from jobmanager.graph.job_plan import Exchange, JobPlan
from jobmanager.graph.slot import Slot
from jobmanager.job.job_options import JobOptions
from jobmanager.messages import job_effects, job_events
from jobmanager.scheduler.slow_task_detector import SlowTaskSettings
from tests.support.job_world import CAUSE, Task, World, drawn_plan

_NONE: frozenset[SubtaskId] = frozenset()
_LOOKS_IN_VAIN = 3


class SpeculativeWorld(World):
    """Everything around one job with rivals; it takes no checkpoints."""

    def __init__(self, seed: int, mishaps: float, attempts: int) -> None:
        self.look: job_events.StragglersDue | None = None
        self.looks = 0
        self.slow: set[AttemptKey] = set()
        self.starting: dict[AttemptKey, job_effects.StartRival] = {}
        self.beaten: set[AttemptKey] = set()
        self.fates: list[job_effects.RivalFate] = []
        self.ended_in: dict[AttemptKey, str] = {}
        """Finished attempts and the slots that they were in."""
        self.reserved = 0
        self.is_smooth = mishaps == 0.0
        super().__init__(seed, mishaps, attempts, checkpoints=False)

    @override
    def _drawn_plan(self) -> JobPlan:
        plan = drawn_plan(self.random)
        vertices = tuple(
            replace(vertex, allows_rivals=self.random.random() < 0.8) for vertex in plan.vertices
        )
        pipelined = self.random.choice([0.0, 0.0, 0.3])
        kept = {True: Exchange.PIPELINED, False: Exchange.BLOCKING}
        edges = tuple(
            replace(edge, exchange=kept[self.random.random() < pipelined]) for edge in plan.edges
        )
        return JobPlan(vertices, edges)

    @override
    def _options(self, restart: RestartSettings, strategy: FailoverStrategyName) -> JobOptions:
        ratio = self.random.choice([0.0, 0.3, 0.5])
        return JobOptions(restart, strategy, speculation=SlowTaskSettings(1, 0, ratio, 0.01))

    # ------------------------------------------------------------ one event after the other

    @override
    def turn(self) -> bool:
        if self.look is not None and self.random.random() < 0.1:
            self._look()
            return not self.master.ended
        if not super().turn():
            return self._go_on() and not self.master.ended
        self.looks = 0
        return True

    def _go_on(self) -> bool:
        """Everything rests: it is time to look for stragglers, or these come to life again."""
        if self.master.ended:
            return False
        if self.look is not None and self.looks < _LOOKS_IN_VAIN:
            self.looks += 1
            self._look()
            return True
        has_slow, self.slow = bool(self.slow), set()
        return has_slow

    def _look(self) -> None:
        look, self.look = self.look, None
        assert look is not None
        self.now_ms += 1
        self.deliver(look)

    @override
    def _progress(self) -> list[job_events.JobEvent]:
        return [
            event
            for event in super()._progress()
            if not isinstance(event, job_events.EndOfDataReported | job_events.AttemptReported)
            or event.key not in self.slow
        ]

    @override
    def deliver(self, event: job_events.JobEvent) -> None:
        super().deliver(event)
        if isinstance(event, job_events.RivalStarted):
            self._begin(event.key)
        self.slow &= self.tasks.keys()

    # ------------------------------------------------------------ effects

    @override
    def perform(self, effect: job_effects.JobEffect) -> None:
        match effect:
            case job_effects.PostLater(_, job_events.StragglersDue() as look):
                assert self.look is None, "one look at a time"
                self.look = look
            case job_effects.ReserveAttempts(attempt):
                if not self._mishap():
                    self.reserved = max(self.reserved, attempt + self.random.randint(1, 3))
                    self.inbox.append(job_events.AttemptsReserved(self.reserved))
            case job_effects.RequestSpareSlots(wanted):
                for subtask, avoided in wanted:
                    self._grant_spare(subtask, avoided)
            case job_effects.StartRival():
                self._start(effect)
            case job_effects.ReportRival(rival, beside, fate):
                self.fates.append(fate)
                if fate is job_effects.RivalFate.WON:
                    self.beaten.add(beside)
                elif fate is not job_effects.RivalFate.STARTED:
                    self.beaten.add(rival)
            case job_effects.ReleasePartitions(name, ()):
                self.partitions = {p: at for p, at in self.partitions.items() if at != name}
            case job_effects.CancelTasks(_, keys):
                assert self.beaten.isdisjoint(keys), "who has lost is ended with its slot"
                super().perform(effect)
            case _:
                super().perform(effect)

    @override
    def _request(self, count: int, group: int) -> None:
        """The pool lets it wait for what it has granted to rivals, and gets back."""
        for event in list(self.inbox):
            if len(self.free) < count and isinstance(event, job_events.SpareSlotGranted):
                self.inbox.remove(event)
                self.held.remove(event.slot)
                self.free.append(event.slot)
        super()._request(count, group)

    def _grant_spare(self, subtask: SubtaskId, avoided: str) -> None:
        free = [slot for slot in self.free if slot.taskmanager_id != avoided]
        if not free or self._mishap():
            return
        slot = self.random.choice(free)
        self.free.remove(slot)
        self.held.add(slot)
        self.granted.add(slot)
        self.inbox.append(job_events.SpareSlotGranted(subtask, slot))

    def _start(self, effect: job_effects.StartRival) -> None:
        task = effect.task
        assert task.beside is not None
        self._check_deployment(task, frozenset())
        if self.master.options.survives:
            assert task.attempt.attempt < self.reserved, "the number is its own"
        assert effect.taskmanager_id == task.slot_id[0]
        fails = effect.taskmanager_id in self.down or self._mishap()
        if effect.taskmanager_id not in self.down and (not fails or self.random.random() < 0.5):
            self._process_count += 1
            self.processes[task.slot_id] = self._process_count
            if not fails or self.random.random() < 0.5:  # else it ends with the process
                self.starting[task.attempt] = effect
            self.inbox.append(
                job_events.RivalStarted(task.attempt, Endpoint("", effect.taskmanager_id))
            )
        if fails:
            self.inbox.append(job_events.RivalNotStarted(task.attempt, CAUSE))

    def _begin(self, key: AttemptKey) -> None:
        """It is deployed behind the start of its process, unless its slot has been given back."""
        effect = self.starting.pop(key, None)
        if effect is None:
            return
        self._deploy(effect.task, _NONE)
        for command in effect.splits:
            self._obey(command.key, command)
        if key in self.tasks and self.random.random() < 0.2:
            self.slow.add(key)

    @override
    def _deploy(self, plan: TaskPlan, from_nothing: frozenset[SubtaskId]) -> None:
        super()._deploy(plan, from_nothing)
        if plan.attempt in self.tasks and self.random.random() < 0.3:
            self.slow.add(plan.attempt)

    @override
    def _prepare(self, effect: job_effects.PrepareStart) -> None:
        self.reserved = max(self.reserved, effect.attempt + self.random.randint(1, 3))
        super()._prepare(effect)

    @override
    def _free(self, slot: Slot) -> None:
        for key in [key for key, one in self.starting.items() if one.task.slot_id == slot.slot_id]:
            del self.starting[key]
        if self.is_smooth:
            self._check_unread(slot.slot_id)
        died = [key for key, task in self.tasks.items() if task.slot_id == slot.slot_id]
        super()._free(slot)
        # Ended with its slot, it says so.
        self.loose += [job_events.AttemptReported(key, AttemptState.CANCELED) for key in died]

    @override
    def _finish(self, key: AttemptKey) -> None:
        self.ended_in[key] = self.tasks[key].slot_id
        super()._finish(key)

    def _check_unread(self, slot_id: str) -> None:
        """Nobody still reads pipelined rows of an attempt that has finished in this slot."""
        for task in self._that_count():
            for (edge_id, _), producer in task.reads.items():
                if self.regions.exchange_of(edge_id).exchange is Exchange.PIPELINED:
                    is_there = self.ended_in.get(producer) == slot_id
                    assert task.done or not is_there, f"{task.key} reads {producer} in {slot_id}"

    @override
    def _may_begin_beside(self, task: TaskPlan, older: list[AttemptKey]) -> bool:
        counting = [key for key in older if key not in self.beaten]
        return len(counting) <= (0 if task.beside is None else 1)

    @override
    def _that_count(self) -> Iterable[Task]:
        return [task for key, task in self.tasks.items() if key not in self.beaten]
