"""What a trace tells of checkpoints and savepoints: one span each, with parts per vertex, and for storing and telling (pure).

Invariant: at most ``PENDING_MAX`` are followed at a time, the newest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.completed_checkpoint import SnapshotSummary
from jobmanager.checkpoint.pending import summarize
from jobmanager.messages import job_effects, job_events
from jobmanager.traces.span import Span, Value
from penstock.storage.checkpoint_properties import CheckpointProperties

PENDING_MAX: Final = 64


@dataclass(slots=True)
class _Vertex:
    """Acknowledgements of one vertex; ``slowest`` is the subtask of the last of them."""

    count: int = 0
    ended_ms: int = 0
    slowest: int = 0
    summary: SnapshotSummary = field(default_factory=SnapshotSummary)


@dataclass(slots=True)
class _Pending:
    """A checkpoint under way; times are 0 until they are known."""

    triggered_ms: int
    properties: CheckpointProperties
    vertices: dict[str, _Vertex] = field(default_factory=dict)
    acknowledged_ms: int = 0
    stored_ms: int = 0
    state_bytes: int = 0
    told: int = 0


class CheckpointSpans:
    """Follows the checkpoints of one job.

    Example: one that is triggered, and aborted before anybody has acknowledged it.
        >>> spans, started = CheckpointSpans(), job_events.JobStarted()
        >>> trigger = job_effects.SendCommands("tm", (c.TriggerTasks(7, 100, ()),))
        >>> spans.step(started, [trigger], 100)
        []
        >>> aborted = c.ReportAborted(7, c.AbortReason.SUBSUMED, "", 0, 0)
        >>> [(span.name, span.start_ms, span.end_ms, span.error) for span in spans.step(started, [aborted], 250)]
        [('checkpoint', 100, 250, 'a later checkpoint completed first')]
    """

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}

    def step(
        self,
        event: job_events.JobEvent,
        effects: Iterable[job_effects.JobEffect],
        now_ms: int,
    ) -> list[Span]:
        """Spans of what is over with an event and what it has led to."""
        over: list[Span] = []
        stored = 0
        match event:
            case c.AckReceived():
                self._acknowledged(event, now_ms)
            case c.CheckpointStored() if event.checkpoint_id in self._pending:
                stored = event.checkpoint_id
                self._pending[stored].stored_ms = now_ms
            case _:
                pass
        for effect in effects:
            match effect:
                case job_effects.SendCommands():
                    for command in effect.commands:
                        self._told(command)
                case job_effects.WriteManifest():
                    pending = self._pending.get(effect.stored.checkpoint_id)
                    if pending is not None:
                        pending.acknowledged_ms = now_ms
                        pending.state_bytes = effect.stored.state_bytes
                case c.ReportAborted() if effect.checkpoint_id in self._pending:
                    error = f"{effect.reason.value}: {effect.detail}".removesuffix(": ")
                    over.append(self._end(effect.checkpoint_id, now_ms, error))
                case _:
                    pass
        if stored in self._pending:
            over.append(self._end(stored, now_ms))
        return over

    def _acknowledged(self, event: c.AckReceived, now_ms: int) -> None:
        pending = self._pending.get(event.checkpoint_id)
        if pending is not None:
            vertex = pending.vertices.setdefault(event.key.vertex, _Vertex())
            vertex.count += 1
            vertex.ended_ms, vertex.slowest = now_ms, event.key.subtask_index
            vertex.summary = summarize((vertex.summary, event.summary))

    def _told(self, command: object) -> None:
        match command:
            case c.TriggerTasks() if command.checkpoint_id not in self._pending:
                self._pending[command.checkpoint_id] = _Pending(
                    command.triggered_at_ms, command.properties
                )
                if len(self._pending) > PENDING_MAX:
                    del self._pending[next(iter(self._pending))]
            case c.NotifyCompleted() | c.NotifySaved() if command.checkpoint_id in self._pending:
                self._pending[command.checkpoint_id].told += len(command.keys)
            case _:
                pass

    def _end(self, checkpoint_id: int, now_ms: int, error: str = "") -> Span:
        pending = self._pending.pop(checkpoint_id)
        total = summarize(vertex.summary for vertex in pending.vertices.values())
        parts = [
            Span(
                f"snapshot {name}",
                pending.triggered_ms,
                vertex.ended_ms,
                {
                    "penstock.vertex": name,
                    "penstock.subtasks": vertex.count,
                    "penstock.slowest_subtask": vertex.slowest,
                    **_numbers(vertex.summary),
                },
            )
            for name, vertex in pending.vertices.items()
        ]
        if pending.acknowledged_ms:
            stored_ms = pending.stored_ms or now_ms
            parts.append(Span("store", pending.acknowledged_ms, stored_ms, error=error))
        if pending.stored_ms:
            parts.append(
                Span("notify", pending.stored_ms, now_ms, {"penstock.subtasks": pending.told})
            )
        properties = pending.properties
        return Span(
            "savepoint" if properties.is_savepoint or properties.is_saved else "checkpoint",
            pending.triggered_ms,
            now_ms,
            {
                "penstock.checkpoint.id": checkpoint_id,
                "penstock.checkpoint.behind": properties.behind.name.lower(),
                "penstock.checkpoint.acknowledged": sum(v.count for v in pending.vertices.values()),
                "penstock.checkpoint.state_bytes": pending.state_bytes,
                **_numbers(total),
            },
            tuple(parts),
            error,
        )


def _numbers(summary: SnapshotSummary) -> dict[str, Value]:
    """The largest times of some subtasks, and the sums of their bytes."""
    return {
        "penstock.start_delay_ms": summary.start_delay_ms,
        "penstock.alignment_ms": summary.alignment_ms,
        "penstock.sync_ms": summary.sync_ms,
        "penstock.async_ms": summary.async_ms,
        "penstock.uploaded_bytes": summary.uploaded_bytes,
        "penstock.aligned_bytes": summary.aligned_bytes,
    }
