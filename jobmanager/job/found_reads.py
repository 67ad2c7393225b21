"""Whose rows the attempts read that an earlier JobManager has deployed, and whether these are those that count (pure).

A consumer on a pipelined exchange that reads another attempt than the one that counts has failed: its rows are gone. On
one that keeps its rows the consumer may only not have heard yet that its producer was replaced; it is told so where
the producer's restart spares it, and begins again where it does not. On a blocking one it reads what it has begun to
read to its end, or has done so, where another attempt writes the same.

Invariant: whoever goes on reads from those that count, or is told to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from jobmanager.graph.deployment import channels_of
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState, SubtaskId
from jobmanager.graph.job_plan import Exchange, JobPlan
from jobmanager.messages import job_events

Newest = Mapping[SubtaskId, job_events.FoundAttempt]
"""The attempt that counts of each subtask that has one."""


def newest_of(found: Collection[job_events.FoundAttempt], plan: JobPlan, below: int) -> Newest:
    """The attempt that counts of each subtask.

    Args:
        found: all that there are.
        plan: what it does not have counts for nothing.
        below: numbers that were never given out count for nothing either.

    Example: of two attempts of a subtask the newer counts, of an attempt and a rival that is not further the former.
        >>> from jobmanager.graph.deployment import Endpoint
        >>> from jobmanager.graph.job_plan import VertexPlan
        >>> from jobmanager.graph.slot import Slot
        >>> plan, slot = JobPlan((VertexPlan("v1", parallelism=1),)), Slot("s", "tm-1", "i")
        >>> older, newer = (
        ...     job_events.FoundAttempt(
        ...         AttemptKey("v1", 0, number), slot, Endpoint("s"), 1, AttemptState.RUNNING
        ...     )
        ...     for number in (2, 4)
        ... )
        >>> def counts(*found: job_events.FoundAttempt) -> list[int]:
        ...     return [one.key.attempt for one in newest_of(found, plan, below=16).values()]
        >>> from dataclasses import replace
        >>> counts(older, newer), counts(older, replace(newer, beside=2))
        ([4], [2])
        >>> counts(older, replace(newer, beside=2, state=AttemptState.FINISHED))
        [4]
    """
    parallelism = {vertex.id: vertex.parallelism for vertex in plan.vertices}
    by_subtask: dict[SubtaskId, list[job_events.FoundAttempt]] = {}
    read = frozenset(key for one in found for _, key in one.reads)
    for one in found:
        is_known = 0 <= one.key.subtask_index < parallelism.get(one.key.vertex, 0)
        if is_known and 0 <= one.key.attempt < below and one.state is not AttemptState.CREATED:
            by_subtask.setdefault(one.key.subtask, []).append(one)

    def how_far(one: job_events.FoundAttempt) -> tuple[object, ...]:
        has_finished = one.state is AttemptState.FINISHED
        done = (has_finished, one.commits, one.has_done_all)
        return one.goes_on, one.key in read, *done, -one.key.attempt

    return {
        subtask: max(_with_rivals(own), key=how_far) for subtask, own in sorted(by_subtask.items())
    }


def _with_rivals(attempts: list[job_events.FoundAttempt]) -> list[job_events.FoundAttempt]:
    """The newest of a subtask's attempts and those that do the same work beside it: what was begun again counts no more."""
    by_number = {one.key.attempt: one for one in attempts}
    first = max(by_number)
    while (one := by_number.get(first)) is not None and one.beside is not None:
        first = one.beside
    return [one for one in attempts if one.key.attempt >= first]


@dataclass(frozen=True, slots=True)
class FoundReads:
    """What is wrong with whose rows are read.

    Attributes:
        broken: subtasks that cannot go on.
        outdated: edges and producers of which some consumers read an earlier attempt, and can go on with the one that
            counts.
    """

    broken: frozenset[SubtaskId]
    outdated: frozenset[tuple[str, SubtaskId]]


def checked_reads(
    newest: Newest,
    plan: JobPlan,
    done: Collection[SubtaskId] = (),
    spares: Callable[[SubtaskId, frozenset[SubtaskId]], bool] = lambda _, _begun: False,
) -> FoundReads:
    """Compares what is read with what counts.

    Args:
        newest: attempts.
        done: what has nothing to send any more, whichever attempt of it did so.
        spares: whether a subtask goes on where others have begun again.
    """
    broken: set[SubtaskId] = set()
    outdated: set[tuple[str, SubtaskId]] = set()
    for edge_id, exchange, reader, source in _readings(newest, plan):
        counts = newest.get(source)
        if source in done or (counts is not None and (edge_id, counts.key) in reader.reads):
            continue
        if exchange is Exchange.PIPELINED:
            broken.add(reader.key.subtask)
        elif counts is not None and _is_newer_read(reader, edge_id, counts.key):
            broken.add(source)  # the attempt that counts is gone, and with it what it kept
        elif counts is not None:
            begun = {s for s, one in newest.items() if one.key.attempt > reader.key.attempt}
            if spares(reader.key.subtask, frozenset(begun)):
                outdated.add((edge_id, source))
            else:
                broken.add(reader.key.subtask)
    return FoundReads(frozenset(broken), frozenset(outdated))


def _readings(
    newest: Newest, plan: JobPlan
) -> Iterator[tuple[str, Exchange, job_events.FoundAttempt, SubtaskId]]:
    """Edge, what becomes of its rows, an attempt that reads it, and a producer; what has finished may have read
    other rows than there are now from blocking exchanges only."""
    for edge, consumer, producer, _ in channels_of(plan):
        reader = newest.get(consumer)
        has_finished = reader is not None and reader.state is AttemptState.FINISHED
        if reader is not None and not (has_finished and edge.exchange is not Exchange.BLOCKING):
            yield edge.id, edge.exchange, reader, producer


def _is_newer_read(reader: job_events.FoundAttempt, edge_id: str, counts: AttemptKey) -> bool:
    return any(
        read_edge == edge_id and key.subtask == counts.subtask and key.attempt > counts.attempt
        for read_edge, key in reader.reads
    )
