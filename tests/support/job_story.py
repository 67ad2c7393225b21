"""Stories of a job by hand: the machine of the job, and a cluster in which all goes well.

Calls are answered, granted slots have processes, cancelled attempts end at once. Stories say more by what they do, and
other things by ``answers`` of their own.
"""

from __future__ import annotations

from jobmanager.graph.deployment import Endpoint
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState
from jobmanager.graph.job_plan import JobPlan
from jobmanager.graph.slot import Slot
from jobmanager.job.job_master import JobMaster
from jobmanager.job.job_options import JobOptions
from jobmanager.messages import job_effects, job_events
from tests.support.drawn_plans import subtask


class JobStory:
    """A job that has just been started.

    Args:
        slots_per_taskmanager: slot i is on TaskManager ``t<i / that>``.
    """

    def __init__(self, plan: JobPlan, options: JobOptions, slots_per_taskmanager: int = 1) -> None:
        self.master = JobMaster(plan, options)
        self.effects: list[job_effects.JobEffect] = []
        self.now_ms = 0
        self.per_taskmanager = slots_per_taskmanager
        self.slot_count = 0

    def do(self, event: job_events.JobEvent) -> list[job_effects.JobEffect]:
        """One event, and what the cluster answers; returns all effects."""
        done: list[job_effects.JobEffect] = []
        events = [event]
        while events:
            effects = self.master.step(events.pop(0), self.now_ms)
            self.master.check()
            done += effects
            for effect in effects:
                events += self.answers(effect)
        self.effects += done
        return done

    def answers(self, effect: job_effects.JobEffect) -> list[job_events.JobEvent]:
        """What the cluster makes of an effect."""
        match effect:
            case job_effects.PrepareStart(attempt):
                return [job_events.StartPrepared(attempt)]
            case job_effects.RequestSlots(count, group):
                return [
                    job_events.SlotsGranted(tuple(self.new_slot() for _ in range(count)), group)
                ]
            case job_effects.AllocateSlots(name, slot_ids, call):
                found = tuple(Endpoint(id, "p0") for id in slot_ids)
                return [job_events.SlotsAllocated(name, found, call, Endpoint("", name))]
            case job_effects.CancelTasks(_, keys):
                return [job_events.AttemptReported(key, AttemptState.CANCELED) for key in keys]
            case job_effects.NoteCommit():
                return [job_events.CommitNoted()]
        return []

    def new_slot(self) -> Slot:
        """One more slot of the cluster."""
        name = f"t{self.slot_count // self.per_taskmanager}"
        self.slot_count += 1
        return Slot(f"{name}-{self.slot_count - 1}", name, "1")

    def due(self) -> list[job_effects.JobEffect]:
        """The delay of the last restart is over."""
        later = [
            effect.event for effect in self.effects if isinstance(effect, job_effects.PostLater)
        ]
        return self.do([event for event in later if isinstance(event, job_events.RestartDue)][-1])

    def key(self, text: str) -> AttemptKey:
        """The current attempt of ``a0``."""
        return self.master.graph.current_of(subtask(text)).key

    def report(
        self, text: str, state: AttemptState = AttemptState.RUNNING
    ) -> list[job_effects.JobEffect]:
        """Some of ``a0 a1`` are in a state."""
        return [
            effect
            for name in text.split()
            for effect in self.do(job_events.AttemptReported(self.key(name), state))
        ]

    def attempts(self, text: str) -> list[int]:
        """Numbers of the current attempts of ``a0 a1``."""
        return [self.key(name).attempt for name in text.split()]
