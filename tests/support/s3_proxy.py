"""Stands between a client and an S3 server: counts what goes by, and loses, delays or replaces answers as told."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

_TIMEOUT_S = 30
_PRECONDITION_FAILED = 412


@dataclass(frozen=True)
class Request:
    """What a client asked for."""

    method: str
    path: str
    conditional: bool

    @property
    def kind(self) -> str:
        """What S3 calls it, as far as tests tell requests apart."""
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        is_bucket = parts.path.strip("/").count("/") == 0
        if is_bucket:
            return "LIST" if self.method == "GET" else "DELETE"
        if "uploadId" in query or "uploads" in query:
            return "PART"
        return "CAS" if self.conditional else self.method


@dataclass
class Fault:
    """What becomes of requests.

    Attributes:
        concerns: which.
        times: so many of them.
        forwards: the server gets the request.
        status: answered in place of the server's; 0 = the connection is reset.
        delay_s: before that.
        is_over: whether the test has seen enough; ends a delay.
        has_come: the server has answered what was forwarded.
    """

    concerns: Callable[[Request], bool]
    times: int = 1
    forwards: bool = False
    status: int = 0
    code: str = "InternalError"
    delay_s: float = 0.0
    is_over: threading.Event = field(default_factory=threading.Event)
    has_come: threading.Event = field(default_factory=threading.Event)


class S3Proxy:
    """The proxy.

    Args:
        port: of the server on 127.0.0.1.

    Attributes:
        requests: all that came, in order.
        faults: the first that concerns a request counts.
        ignores_conditions: a write that the server refuses seems to have been made.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.ignores_conditions = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[S3Proxy]:
        """The proxy for the time of the block."""
        proxy = self

        class Handler(_Handler):
            owner = proxy

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            for fault in self.faults:
                fault.is_over.set()
            server.shutdown()
            thread.join()
            server.socket.close()

    @property
    def endpoint(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    def kinds(self) -> Counter[str]:
        """How many requests of each kind have come."""
        with self._lock:
            return Counter(request.kind for request in self.requests)

    def forget(self) -> None:
        """Counts from here on."""
        with self._lock:
            self.requests.clear()

    def came(self, request: Request) -> Fault | None:
        """Notes a request; returns what becomes of it."""
        with self._lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times and fault.concerns(request):
                    fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    owner: S3Proxy
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S

    def _serve(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        conditional = "If-Match" in self.headers or "If-None-Match" in self.headers
        fault = self.owner.came(Request(self.command, self.path, conditional))
        if fault is None:
            self._answer(*self._forward(body))
            return
        if fault.delay_s:
            fault.is_over.wait(fault.delay_s)
        answer = self._forward(body) if fault.forwards else None
        fault.has_come.set()
        if fault.status:
            text = f"<Error><Code>{fault.code}</Code><Message>told so</Message></Error>".encode()
            self._answer(fault.status, [], b"" if self.command == "HEAD" else text)
        elif fault.delay_s and answer is not None:
            with contextlib.suppress(ConnectionError):  # the client waits no longer
                self._answer(*answer)
        else:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        server = http.client.HTTPConnection("127.0.0.1", self.owner.target, timeout=_TIMEOUT_S)
        try:
            headers = {key: value for key, value in self.headers.items() if key != "Expect"}
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for key, value in headers.items():
                server.putheader(key, value)
            server.endheaders(body)
            answer = server.getresponse()
            if answer.status == _PRECONDITION_FAILED and self.owner.ignores_conditions:
                return 200, [("ETag", '"0"')], b""
            return answer.status, answer.getheaders(), answer.read()
        except OSError:
            return 503, [], b"<Error><Code>ServiceUnavailable</Code></Error>"
        finally:
            server.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        passed = [
            (key, value)
            for key, value in headers
            if key.lower() not in ("connection", "transfer-encoding", "content-length")
        ]
        own = {key.lower(): value for key, value in headers}
        for key, value in passed:
            self.send_header(key, value)
        length = own.get("content-length", "0") if self.command == "HEAD" else str(len(body))
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests look at ``S3Proxy.requests``."""
