"""The tasks of a job as its checkpoints see them: who takes part, who begins, who has finished and holds what.

Invariants: each producer of a task is known; a finished task takes part in nothing that begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from jobmanager.checkpoint import messages as c
from jobmanager.graph.execution_attempt import AttemptKey
from penstock.errors import InvariantViolation
from penstock.storage.manifest import StoredReference

_NAMED_MAX: Final = 5


class ParticipatingTasks:
    """The tasks of one job.

    Attributes:
        are_active: they run, so that checkpoints may be taken. Tasks that were stopped stay known: those that go on
            hear of what is void, and of what completes yet.

    Example: who has no producers begins; behind the last of these, who was fed by it does.
        >>> reader, counter = AttemptKey("read", 0, 0), AttemptKey("count", 0, 0)
        >>> tasks = ParticipatingTasks()
        >>> tasks.start([c.TaskView(reader, ()), c.TaskView(counter, (reader,))])
        >>> [str(key) for key in tasks.beginning()]
        ['read/0 (attempt 0)']
        >>> tasks.finish(reader, None)
        True
        >>> [str(key) for key in tasks.beginning()], tasks.all_have_finished
        (['count/0 (attempt 0)'], False)
    """

    def __init__(self) -> None:
        self.are_active = False
        self._tasks: dict[AttemptKey, c.TaskView] = {}
        self._finished: set[AttemptKey] = set()
        self._last: dict[AttemptKey, c.LastState] = {}
        self._loading: set[AttemptKey] = set()

    def start(self, tasks: Iterable[c.TaskView]) -> None:
        """These run from now on, in the place of all others.

        Raises:
            InvariantViolation: one is fed by a task that is not among them.
        """
        self._tasks = {task.key: task for task in tasks}
        known = self._tasks.values()
        self._finished = {task.key for task in known if task.finished}
        self._loading = {task.key for task in known if task.is_loading and not task.finished}
        self._last = {task.key: task.last for task in known if task.finished and task.last}
        for task in known:
            for producer in task.producers:
                if producer not in self._tasks:
                    raise InvariantViolation(f"{task.key} is fed by {producer}, which is unknown")
        self.are_active = True

    def finish(self, key: AttemptKey, last: c.LastState | None) -> bool:
        """A task has done all it had to do; False = it is unknown, or had before."""
        if key not in self._tasks or key in self._finished:
            return False
        self._finished.add(key)
        self._loading.discard(key)
        if last is not None:
            self._last[key] = last
        return True

    def loaded(self, key: AttemptKey) -> None:
        """A task has its state."""
        self._loading.discard(key)

    @property
    def are_loading(self) -> bool:
        """Whether a task has not all of its state yet."""
        return bool(self._loading)

    def loading_named(self) -> str:
        """Some of those, for people."""
        return named(sorted(self._loading))

    @property
    def all_have_finished(self) -> bool:
        """Whether nobody is left to take part."""
        return len(self._finished) == len(self._tasks)

    def running(self) -> list[AttemptKey]:
        """Those that take part in what begins now."""
        return [key for key in self._tasks if key not in self._finished]

    def finished(self) -> tuple[AttemptKey, ...]:
        """Those that do not."""
        return tuple(key for key in self._tasks if key in self._finished)

    def running_of(self, keys: Iterable[AttemptKey]) -> tuple[AttemptKey, ...]:
        """Those of these that can be told something."""
        return tuple(key for key in keys if key in self._tasks and key not in self._finished)

    def unfinished_of(self, keys: Iterable[AttemptKey]) -> tuple[AttemptKey, ...]:
        """Those of these that had not finished, whether they go on or are begun again."""
        return tuple(key for key in keys if key not in self._finished)

    def beginning(self) -> tuple[AttemptKey, ...]:
        """Those that no barrier reaches, since nobody runs who would send it."""
        return tuple(
            key for key in self.running() if self._finished.issuperset(self._tasks[key].producers)
        )

    def beginning_behind(
        self, finished: AttemptKey, waits_for: Callable[[AttemptKey], bool]
    ) -> tuple[AttemptKey, ...]:
        """Those of the tasks that are waited for which this one was the last to feed."""
        return tuple(
            key
            for key, task in self._tasks.items()
            if finished in task.producers
            and waits_for(key)
            and self._finished.issuperset(task.producers)
        )

    def last_states(self, keys: Iterable[AttemptKey]) -> tuple[tuple[AttemptKey, object], ...]:
        """What these go on holding, as they reported it."""
        return tuple((key, self._last[key].snapshot) for key in keys if key in self._last)

    def last_references(self, keys: Iterable[AttemptKey] | None = None) -> list[StoredReference]:
        """Files in which these, or all that have finished, go on holding something."""
        held = self._last if keys is None else [key for key in keys if key in self._last]
        return [file for key in held for file in self._last[key].references]


def named(keys: list[AttemptKey]) -> str:
    """The first of these tasks, for people."""
    more = ", ..." if len(keys) > _NAMED_MAX else ""
    return ", ".join(map(str, keys[:_NAMED_MAX])) + more
