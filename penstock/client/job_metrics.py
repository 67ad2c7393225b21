"""A job's counters, summed per vertex and over the job.

``{"vertices": {"v0": {"name", "parallelism", <counters>}}, "totals": {<counters>}}`` with the counters
``records_in records_out bytes_in bytes_out busy_ms idle_ms back_pressured_ms late_records bad_records`` and
``watermark_ms`` (the lowest of the subtasks, None before there is one). In the totals ``records_in`` counts
what sources read, ``records_out`` what sinks took, and bytes what crossed exchanges.
"""

from __future__ import annotations

from typing import Any

from penstock.pb import client_pb2

_SUMMED = (
    "records_in",
    "records_out",
    "bytes_in",
    "bytes_out",
    "busy_ms",
    "idle_ms",
    "back_pressured_ms",
    "late_records",
    "bad_records",
)
_NO_WATERMARK = -(2**63)


def job_metrics(details: client_pb2.JobDetails) -> dict[str, Any]:
    """The counters of a job."""
    vertices = {vertex.id: _vertex(vertex) for vertex in details.vertices}
    totals: dict[str, Any] = {
        name: sum(vertex[name] for vertex in vertices.values()) for name in _SUMMED
    }
    totals["records_in"] = sum(
        vertices[vertex.id]["records_in"] for vertex in details.vertices if vertex.is_source
    )
    totals["records_out"] = sum(
        vertices[vertex.id]["records_out"] for vertex in details.vertices if vertex.is_sink
    )
    marks = [vertex["watermark_ms"] for vertex in vertices.values()]
    totals["watermark_ms"] = min((mark for mark in marks if mark is not None), default=None)
    return {"vertices": vertices, "totals": totals}


def _vertex(vertex: client_pb2.VertexDetails) -> dict[str, Any]:
    metrics = [subtask.metrics for subtask in vertex.subtasks]
    counters: dict[str, Any] = {
        name: sum(getattr(each, name) for each in metrics) for name in _SUMMED
    }
    marks = [each.watermark_ms for each in metrics]
    lowest = min(marks, default=_NO_WATERMARK)
    counters["watermark_ms"] = None if lowest == _NO_WATERMARK else lowest
    return {"name": vertex.name, "parallelism": vertex.parallelism, **counters}
