"""What TaskManagers tell, as they register, of attempts that an earlier JobManager has deployed (pure).

Only what a job looks for is kept, and only until it has looked.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.pb import internal_pb2

Told = tuple[str, str, internal_pb2.HeldAttempt]
"""TaskManager, its incarnation, attempt."""


class SoughtAttempts:
    """The attempts that jobs look for.

    Example: slots in which attempts of a job run that looks for them are the job's.
        >>> sought = SoughtAttempts()
        >>> sought.seek("job-1")
        >>> held = [
        ...     internal_pb2.HeldAttempt(attempt={"job_id": job}, endpoint={"slot_id": slot})
        ...     for job, slot in [("job-1", "tm-0"), ("job-2", "tm-1")]
        ... ]
        >>> sought.told("tm", "first", held)
        {'tm-0': 'job-1'}
        >>> len(sought.of("job-1")), len(sought.of("job-2"))
        (1, 0)
    """

    def __init__(self) -> None:
        self._jobs: set[str] = set()
        self._told: dict[str, list[Told]] = {}
        self._ended: dict[str, list[internal_pb2.AttemptId]] = {}

    def seek(self, job_id: str) -> None:
        """A job looks for its attempts."""
        self._jobs.add(job_id)

    def end(self, job_id: str) -> None:
        """It looks for them no longer."""
        self._jobs.discard(job_id)
        for taskmanager_id, told in self._told.items():
            self._told[taskmanager_id] = [one for one in told if one[2].attempt.job_id != job_id]
        for taskmanager_id, ended in self._ended.items():
            self._ended[taskmanager_id] = [one for one in ended if one.job_id != job_id]

    def told(
        self,
        taskmanager_id: str,
        incarnation: str,
        held: Iterable[internal_pb2.HeldAttempt],
        ended: Iterable[internal_pb2.AttemptId] = (),
    ) -> dict[str, str]:
        """A TaskManager has registered; returns the slots with what is looked for, and whose they are."""
        wanted = [one for one in held if one.attempt.job_id in self._jobs]
        self._told[taskmanager_id] = [(taskmanager_id, incarnation, one) for one in wanted]
        self._ended[taskmanager_id] = [one for one in ended if one.job_id in self._jobs]
        return {one.endpoint.slot_id: one.attempt.job_id for one in wanted}

    def lost(self, taskmanager_id: str) -> None:
        """A TaskManager is gone."""
        self._told.pop(taskmanager_id, None)
        self._ended.pop(taskmanager_id, None)

    def of(self, job_id: str) -> list[Told]:
        """What was told of a job that looks for it."""
        return [
            one for told in self._told.values() for one in told if one[2].attempt.job_id == job_id
        ]

    def ended_of(self, job_id: str) -> dict[str, list[internal_pb2.AttemptId]]:
        """TaskManager -> attempts of a job that looks for them whose processes have ended."""
        return {
            taskmanager_id: own
            for taskmanager_id, ended in self._ended.items()
            if (own := [one for one in ended if one.job_id == job_id])
        }
