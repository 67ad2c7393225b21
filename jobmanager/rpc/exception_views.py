"""Exceptions of a job as clients see them."""

from __future__ import annotations

from collections.abc import Iterable

from jobmanager.failover.exceptions_history import ExceptionEntry
from jobmanager.rpc.graph_convert import cause_message
from penstock.pb import client_pb2


def exceptions_of(entries: Iterable[ExceptionEntry]) -> client_pb2.ListExceptionsResponse:
    """The last failures of a job, the newest first."""
    return client_pb2.ListExceptionsResponse(entries=map(_shown, entries))


def _shown(entry: ExceptionEntry) -> client_pb2.ExceptionEntry:
    return client_pb2.ExceptionEntry(
        root_cause=cause_message(entry.cause),
        labels=entry.labels,
        concurrent=map(cause_message, entry.concurrent),
        concurrent_count=entry.concurrent_count,
        restarted=entry.restarted_ranges,
        restart_number=entry.restart_number,
        delay_ms=entry.delay_ms or 0,
        ended_job=entry.ended_job,
    )
