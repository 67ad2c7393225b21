"""The last failures of a job, for people: what failed, what failed with it, and what came of it.

One entry per restart, or per end of the job. Invariants: bounded, in entries and in failures per entry; the
root cause of an entry is the first failure, unless that is a consequence (a lost connection) and a later
one is not.

Source: Flink, ExceptionHistoryEntry and RootExceptionHistoryEntry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from jobmanager.failover.failure_cause import FailureCause, more_telling
from jobmanager.graph.execution_attempt import SubtaskId

DEFAULT_SIZE = 16
_CONCURRENT_MAX = 16


@dataclass(frozen=True, slots=True)
class ExceptionEntry:
    """A failure and what came of it.

    Attributes:
        concurrent: failures that joined, the first ones.
        concurrent_count: all that joined.
        restarted: subtasks that are restarted because of it.
        restart_number: restarts of the job so far, this one included.
        delay_ms: from the failure to the restart; None = the job ended.
    """

    cause: FailureCause
    labels: Mapping[str, str]
    concurrent: tuple[FailureCause, ...] = ()
    concurrent_count: int = 0
    restarted: frozenset[SubtaskId] = frozenset()
    restart_number: int = 0
    delay_ms: int | None = None

    @property
    def ended_job(self) -> bool:
        """There was no restart."""
        return self.delay_ms is None

    @property
    def restarted_ranges(self) -> list[str]:
        """What is restarted, as people read it: "v1/0..3"."""
        return readable_subtasks(self.restarted)


class ExceptionsHistory:
    """The last failures of one job.

    Args:
        size: entries to keep, at least 1.
        entries: of an earlier JobManager, the newest first.

    Attributes:
        changes: how often something was noted.
    """

    def __init__(self, size: int = DEFAULT_SIZE, entries: Iterable[ExceptionEntry] = ()) -> None:
        assert size >= 1, "a history has room for one entry"
        self._entries: deque[ExceptionEntry] = deque(islice(entries, size), maxlen=size)
        self.changes = 0

    @property
    def entries(self) -> tuple[ExceptionEntry, ...]:
        """The newest first."""
        return tuple(self._entries)

    def failed(
        self,
        cause: FailureCause,
        *,
        joined: bool,
        restarted: Iterable[SubtaskId],
        labels: Mapping[str, str],
        restart_number: int,
        delay_ms: int | None,
    ) -> None:
        """Notes a failure.

        Args:
            joined: it belongs to the restart, or the end, that the newest entry tells of.
            restarted: subtasks that are restarted because of it.
            restart_number: restarts of the job so far, the one that follows included.
            delay_ms: from the failure to the restart; None = the job ends. Of one that joined, what is
                left of it, which is not noted.
        """
        self.changes += 1
        if not joined or not self._entries:
            self._entries.appendleft(
                ExceptionEntry(
                    cause,
                    dict(labels),
                    restarted=frozenset(restarted),
                    restart_number=restart_number,
                    delay_ms=delay_ms,
                )
            )
            return
        newest = self._entries[0]
        is_root = more_telling(newest.cause, cause) is cause
        self._entries[0] = replace(
            newest,
            cause=cause if is_root else newest.cause,
            labels=dict(labels) if is_root else newest.labels,
            concurrent=(*newest.concurrent, newest.cause if is_root else cause)[:_CONCURRENT_MAX],
            concurrent_count=newest.concurrent_count + 1,
            restarted=newest.restarted | frozenset(restarted),
            delay_ms=None if delay_ms is None else newest.delay_ms,
        )


def readable_subtasks(subtasks: Iterable[SubtaskId]) -> list[str]:
    """Subtasks in short, by vertex: "v1/0..3", "v2/5".

    Example: what a restart took with it, in short.
        >>> subtasks = [SubtaskId("v2", 5), *(SubtaskId("v1", index) for index in range(4))]
        >>> readable_subtasks(subtasks)
        ['v1/0..3', 'v2/5']
    """
    ranges: list[tuple[str, int, int]] = []
    for subtask in sorted(subtasks):
        index = subtask.subtask_index
        if ranges and ranges[-1][0] == subtask.vertex and ranges[-1][2] == index - 1:
            ranges[-1] = (subtask.vertex, ranges[-1][1], index)
        else:
            ranges.append((subtask.vertex, index, index))
    return [
        f"{vertex}/{first}" if first == last else f"{vertex}/{first}..{last}"
        for vertex, first, last in ranges
    ]


def subtasks_of(ranges: Iterable[str]) -> frozenset[SubtaskId]:
    """Inverse of ``readable_subtasks``.

    Example: what a restart took with it, as it was written down.
        >>> sorted(map(str, subtasks_of(["v1/0..1", "v2/5"])))
        ['v1/0', 'v1/1', 'v2/5']
    """
    found: set[SubtaskId] = set()
    for one in ranges:
        vertex, _, indexes = one.rpartition("/")
        first, _, last = indexes.partition("..")
        found |= {SubtaskId(vertex, index) for index in range(int(first), int(last or first) + 1)}
    return frozenset(found)
