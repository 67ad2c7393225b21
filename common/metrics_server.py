"""A daemon's HTTP endpoint: ``/metrics`` for Prometheus, ``/health`` for whoever restarts daemons.

One thread serves it, whatever comes. Invariants: at most ``CONNECTIONS_MAX`` connections are open, and one that comes
beyond that waits in the kernel's backlog or is closed; each ends by a deadline, and with its first answer; at most
``REQUEST_MAX_BYTES`` of a request are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import CollectorRegistry

from common.metrics_text import CONTENT_TYPE, text_of
from penstock.client.addresses import format_address
from penstock.errors import ConfigurationError

METRICS_OFF = -1
"""The port that means: no endpoint."""

CONNECTIONS_MAX = 32
REQUEST_MAX_BYTES = 16 * 1024
DEADLINE_S = 5.0
"""For a request to come, and for its answer to be taken."""

_START_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Pages:
    """What the endpoint shows, on its thread.

    Attributes:
        registry: what ``/metrics`` shows.
        why_not_serving: asked for ``/health``; "" = the daemon serves.
        status: what ``/health`` says of one that serves.
    """

    registry: CollectorRegistry
    why_not_serving: Callable[[], str] = lambda: ""
    status: Callable[[], str] = lambda: "serving"


class MetricsServer:
    """The endpoint, on a thread of its own.

    Args:
        pages: what it shows at first.
        host: where to listen.
        port: 0 = a free one, ``METRICS_OFF`` = no endpoint.
        setting: what names the port, for messages.
        deadline_s: of a connection.
    """

    def __init__(
        self,
        pages: Pages,
        host: str,
        port: int,
        setting: str = "metrics port",
        *,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.pages = pages
        """What it shows; may be replaced while it serves."""
        self._host = host
        self._port = port
        self._setting = setting
        self._deadline_s = deadline_s
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._connections = 0

    def start(self) -> int:
        """Starts serving.

        Returns:
            The bound port, or ``METRICS_OFF`` when the endpoint is off.

        Raises:
            ConfigurationError: the port cannot be bound.
        """
        if self._port == METRICS_OFF:
            return METRICS_OFF
        started = threading.Event()
        bound: list[int | OSError] = []

        def run() -> None:
            asyncio.run(self._serve(bound, started))

        self._thread = threading.Thread(target=run, name="metrics", daemon=True)
        self._thread.start()
        if not started.wait(_START_TIMEOUT_S) or not bound:
            raise ConfigurationError("the thread of the metrics endpoint does not start")
        (result,) = bound
        if isinstance(result, OSError):
            self._join()
            raise ConfigurationError(
                f"the metrics endpoint cannot listen on {format_address(self._host, self._port)}: "
                f"{result.strerror or result}; choose another {self._setting}, 0 for any free one "
                "or -1 to switch it off"
            ) from result
        return result

    def stop(self) -> None:
        """Stops serving and ends the thread; harmless when it never started."""
        if self._loop is not None and self._stopping is not None:
            # The loop may have ended by itself.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread = self._loop = self._stopping = None

    # ------------------------------------------------------------ on the thread

    async def _serve(self, bound: list[int | OSError], started: threading.Event) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        try:
            server = await asyncio.start_server(
                self._accepted, self._host, self._port, limit=REQUEST_MAX_BYTES
            )
        except OSError as error:
            bound.append(error)
            started.set()
            return
        async with server:
            bound.append(server.sockets[0].getsockname()[1])
            started.set()
            await self._stopping.wait()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= CONNECTIONS_MAX:
                async with asyncio.timeout(self._deadline_s):
                    await self._answer(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the peer said nothing, too much, or takes no answer: it is closed
        finally:
            self._connections -= 1
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        head = request.decode("latin-1").partition("\r\n")[0]
        method, _, rest = head.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        status, kind, body = self._page(method, path)
        text = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(text.encode() + (b"" if method == "HEAD" else body))
        await writer.drain()
        writer.write_eof()
        # Closed by the peer, or at the deadline: an abort at once could take the answer along.
        while await reader.read(REQUEST_MAX_BYTES):
            continue

    def _page(self, method: str, path: str) -> tuple[HTTPStatus, str, bytes]:
        plain, pages = "text/plain; charset=utf-8", self.pages
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, plain, b"GET /metrics or /health\n"
        if path in ("/metrics", "/"):
            return HTTPStatus.OK, CONTENT_TYPE, text_of(pages.registry.collect()).encode()
        if path == "/health":
            reason = pages.why_not_serving()
            if reason:
                return HTTPStatus.SERVICE_UNAVAILABLE, plain, f"{reason}\n".encode()
            return HTTPStatus.OK, plain, f"{pages.status()}\n".encode()
        return HTTPStatus.NOT_FOUND, plain, b"there are /metrics and /health\n"
