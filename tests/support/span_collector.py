"""A collector of traces as others run it: takes OTLP over HTTP, and keeps the spans."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.processes import Deadline


@dataclass(frozen=True)
class Received:
    """One span."""

    name: str
    span_id: bytes
    parent_id: bytes
    trace_id: bytes
    start_ms: int
    end_ms: int
    attributes: dict[str, Any]
    error: str
    service: str


@dataclass
class SpanCollector:
    """What has come; ``address`` is where it is taken."""

    address: str = ""
    spans: list[Received] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, request: ExportTraceServiceRequest) -> None:
        with self.changed:
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.spans.append(
                            Received(
                                span.name,
                                span.span_id,
                                span.parent_span_id,
                                span.trace_id,
                                span.start_time_unix_nano // 1_000_000,
                                span.end_time_unix_nano // 1_000_000,
                                _values(span.attributes),
                                span.status.message if span.status.code == 2 else "",
                                service,
                            )
                        )
            self.changed.notify_all()

    def await_span(
        self, name: str, condition: Callable[[Received], bool] = lambda span: True
    ) -> Received:
        """The first span of that name for which the condition holds."""
        deadline = Deadline(f"a span {name}")
        with self.changed:
            while True:
                for span in self.spans:
                    if span.name == name and condition(span):
                        return span
                self.changed.wait(deadline.left())

    def parts_of(self, span: Received) -> dict[str, Received]:
        """Name -> part; all of one trace come in one batch or in two."""
        deadline = Deadline(f"parts of {span.name}")
        with self.changed:
            while not (
                found := {one.name: one for one in self.spans if one.parent_id == span.span_id}
            ):
                self.changed.wait(deadline.left())
            return found


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextlib.contextmanager
def span_collector() -> Iterator[SpanCollector]:
    """One that serves during the block."""
    collector = SpanCollector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.add(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="collector", daemon=True)
    thread.start()
    collector.address = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
