"""Sends spans over HTTP to a collector that speaks OpenTelemetry's protocol (OTLP), on a thread of its own.

Whoever reports a span never waits: it is appended to a queue that drops when it is full. A collector that is not there
costs nothing but spans, and one line in the log when it goes and one when it is back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from typing_extensions import override

from common.outage_log import OutageLog
from jobmanager.installed_version import penstock_version
from jobmanager.traces.span import Span

QUEUE_SPANS_MAX: Final = 4096
_BATCH_SPANS_MAX: Final = 512
_PAUSE_MS: Final = 1000
_NS_PER_MS: Final = 1_000_000


class OtlpReporter:
    """See the module.

    Args:
        endpoint: of the collector, with its path.
        timeout_s: for one batch, all attempts to send it included.
        jobmanager_id: of this JobManager.
    """

    def __init__(
        self, endpoint: str, timeout_s: float, jobmanager_id: str, cluster_id: str
    ) -> None:
        version = penstock_version()
        resource = {
            "service.name": "penstock-jobmanager",
            "service.version": version,
            "service.instance.id": jobmanager_id,
            "penstock.cluster.id": cluster_id,
        }
        # What it has to say is said by us, once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        exporter = _TellingExporter(OTLPSpanExporter(endpoint, timeout=timeout_s), endpoint)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=QUEUE_SPANS_MAX,
                schedule_delay_millis=_PAUSE_MS,
                max_export_batch_size=_BATCH_SPANS_MAX,
            )
        )
        self._tracer = self._provider.get_tracer("penstock", version)

    def report(self, span: Span) -> None:
        """Queues a span and its parts; they are dropped where the queue is full."""
        self._report(span, Context())

    def _report(self, span: Span, context: Context) -> None:
        told = self._tracer.start_span(
            span.name,
            context,
            attributes=dict(span.attributes),
            start_time=span.start_ms * _NS_PER_MS,
        )
        for child in span.children:
            self._report(child, trace.set_span_in_context(told, Context()))
        if span.error:
            told.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        told.end(span.end_ms * _NS_PER_MS)

    def close(self) -> None:
        """Begins to send what is queued; whoever ends does not wait for it."""
        # It may wait longer for a collector than a JobManager's end, and its successor's begin, may take.
        threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True).start()


class _TellingExporter(SpanExporter):
    """Says when spans begin to be lost, and when they arrive again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        log = structlog.get_logger(__name__).bind(address=endpoint)
        self._exports = OutageLog(log, "traces.not_exported", "traces.exported_again", "warning")

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._exports.worked()
        else:
            self._exports.failed(
                reason="the collector did not take them: spans are lost until it does"
            )
        return result

    @override
    def shutdown(self) -> None:
        self._exporter.shutdown()

    @override
    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
