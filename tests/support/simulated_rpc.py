"""gRPC between simulated daemons: real stubs, servicers and interceptors, calls that take simulated time.

A call arrives some time after it was made, its answer some time after that; calls that are under way at the
same time overtake each other. Deadlines are kept by both sides. A daemon that is gone refuses, one whose
host is frozen is silent, and its connection breaks for who pings it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message

from tests.support.simulated_event_loop import OF_THREAD, SimulatedEventLoop

_Connectivity = grpc.ChannelConnectivity
_PINGS_FAIL_NS = 1_500_000_000

Call = tuple[str, Message]
"""Name of the method, request."""


class RpcHost(Protocol):
    """What calls need of the simulation."""

    def later(self, action: Callable[[], None]) -> None:
        """Runs an action at a drawn time."""

    def call_made(self, sender: str, call: Call) -> None:
        """A daemon calls another one."""

    def call_arrives(self, receiver: str, address: str, call: Call) -> str:
        """A call is about to arrive; returns "", or how it fails: "unheard", "unanswered"."""


class _Aborted(Exception):  # noqa: N818 - named after what happened
    """A servicer has ended a call with an error."""


class _Context:
    """What a servicer is told of a call."""

    def __init__(self, loop: SimulatedEventLoop, timeout_s: float | None) -> None:
        self._loop = loop
        self._ends_at = None if timeout_s is None else loop.time() + timeout_s
        self.status: tuple[Any, str, Any] = (grpc.StatusCode.OK, "", ())

    def time_remaining(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - self._loop.time())

    async def abort(self, code: Any, details: str = "", metadata: Any = ()) -> NoReturn:
        self.status = (code, details, metadata)
        raise _Aborted


class SimulatedServer:
    """A daemon's server, in place of that of ``grpc.aio``."""

    def __init__(
        self, network: SimulatedRpc, port: int, interceptors: Sequence[grpc.aio.ServerInterceptor]
    ) -> None:
        self._network = network
        self._port = port
        self.loop = running_loop()
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._interceptors = interceptors

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers += handlers

    def add_insecure_port(self, address: str) -> int:
        return self._port

    async def start(self) -> None:
        self._network.servers[self._port] = self
        self._network.changed()

    async def stop(self, grace_s: float | None) -> None:
        self.vanish()

    def vanish(self) -> None:
        """Nobody listens any more."""
        if self._network.servers.get(self._port) is self:
            del self._network.servers[self._port]
            self._network.changed()

    async def serve(self, path: str, request: Message, context: _Context) -> Any:
        """Has a call answered."""
        details: Any = SimpleNamespace(method=path, invocation_metadata=())

        async def own(_: object) -> Any:
            [handler] = self._handlers
            return handler.service(details)

        continuation: Callable[[Any], Awaitable[Any]] = own
        for interceptor in reversed(self._interceptors):
            continuation = partial(interceptor.intercept_service, continuation)
        handler = await continuation(details)
        return await handler.unary_unary(request, context)


class SimulatedChannel:
    """One connection of a daemon to another."""

    def __init__(self, network: SimulatedRpc, address: str) -> None:
        self._network = network
        self.address = address
        self._port = int(address.rpartition(":")[2])
        self.loop = running_loop()
        self._calls: dict[asyncio.Future[Any], None] = {}
        self._state = _Connectivity.IDLE
        self._waiting: list[asyncio.Future[None]] = []
        self._is_closed = False
        network.channels.append(self)

    # ------------------------------------------------------------ calls

    def unary_unary(self, path: str, *_: object, **__: object) -> Callable[..., Any]:
        return lambda request, timeout=None, **_: self._call(path, request, timeout)

    def unary_stream(self, path: str, *_: object, **__: object) -> Callable[..., Any]:
        def call(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(path)

        return call

    stream_unary = stream_stream = unary_stream

    def _call(self, path: str, request: Message, timeout_s: float | None) -> asyncio.Future[Any]:
        if self._is_closed:
            raise grpc.aio.UsageError("Channel is closed.")
        answer: asyncio.Future[Any] = self.loop.create_future()
        self._calls[answer] = None
        answer.add_done_callback(lambda done: self._calls.pop(done, None))
        sent = type(request)()
        sent.CopyFrom(request)
        call = (path.rpartition("/")[2], sent)
        if self.loop.is_alive:  # else it only ends
            self._network.host.call_made(self.loop.owner.name, call)
        context_of: list[asyncio.Task[Any]] = []

        def fail(code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
            if not answer.done() and self.loop.is_alive:
                found = grpc.aio.Metadata(*metadata)
                error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), found, details)
                answer.set_exception(error)
                answer.exception()  # who asked may have gone

        def expire() -> None:
            fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            for task in context_of:
                self._network.host.later(task.cancel)

        if timeout_s is not None:
            timer = self.loop.call_later(timeout_s, expire)
            answer.add_done_callback(lambda _: timer.cancel())

        def arrive() -> None:
            server = self._network.servers.get(self._port)
            if server is None:
                fail(grpc.StatusCode.UNAVAILABLE, "Connection refused")
                return
            if server.loop.is_frozen:
                self._network.when_thawed(server, arrive)
                return
            way = self._network.host.call_arrives(server.loop.owner.name, self.address, call)
            if way == "unheard":
                return
            context = _Context(server.loop, timeout_s)
            task = server.loop.create_task(server.serve(path, sent, context))
            context_of.append(task)

            def served(done: asyncio.Task[Any]) -> None:
                if way == "unanswered":
                    if not done.cancelled():
                        done.exception()
                    return
                if done.cancelled():
                    self._network.host.later(lambda: fail(grpc.StatusCode.CANCELLED, "cancelled"))
                elif isinstance(done.exception(), _Aborted):
                    self._network.host.later(lambda: fail(*context.status))
                elif done.exception() is None:
                    self._network.host.later(lambda: self._answered(answer, done.result()))

            task.add_done_callback(served)
            self._network.calls.append((server, self, fail))

        self._network.host.later(arrive)
        return answer

    def _answered(self, answer: asyncio.Future[Any], response: Message) -> None:
        if not answer.done() and self.loop.is_alive:
            copy = type(response)()
            copy.CopyFrom(response)
            answer.set_result(copy)

    async def close(self, grace_s: float | None = None) -> None:
        self._is_closed = True
        for call in list(self._calls):
            call.cancel()

    # ------------------------------------------------------------ connectivity

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        while self._state is last:
            changed: asyncio.Future[None] = self.loop.create_future()
            self._waiting.append(changed)
            await changed

    def look(self) -> None:
        """Sees whether there is anybody at the other end."""
        server = self._network.servers.get(self._port)
        state = _Connectivity.READY if server is not None else _Connectivity.TRANSIENT_FAILURE
        self._become(state)
        if server is not None and server.loop.is_frozen:
            self._network.host.later(lambda: None)

    def pings_fail(self) -> None:
        """Nobody has answered for a while."""
        self._become(_Connectivity.TRANSIENT_FAILURE)

    def _become(self, state: grpc.ChannelConnectivity) -> None:
        if state is self._state or not self.loop.is_alive:
            return
        self._state = state
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)


class SimulatedRpc:
    """All servers and channels of one simulation."""

    def __init__(self, host: RpcHost) -> None:
        self.host = host
        self.servers: dict[int, SimulatedServer] = {}
        self.channels: list[SimulatedChannel] = []
        self.calls: list[tuple[SimulatedServer, SimulatedChannel, Callable[..., None]]] = []

    def channel(self, address: str, **_: object) -> SimulatedChannel:
        """In place of ``grpc.aio.insecure_channel``."""
        made = SimulatedChannel(self, address)
        self.host.later(made.look)
        return made

    def connects(self, _: str, port: int) -> bool | None:
        """Whether a connection can be made; None = nobody says so."""
        server = self.servers.get(port)
        if server is None:
            return False
        return None if server.loop.is_frozen else True

    def changed(self) -> None:
        """Somebody listens, or does no more."""
        for channel in self.channels:
            self.host.later(channel.look)

    def process_gone(self, loop: SimulatedEventLoop) -> None:
        """A daemon has died: its connections are closed by its kernel."""
        for server in [one for one in self.servers.values() if one.loop is loop]:
            server.vanish()
        self.channels = [channel for channel in self.channels if channel.loop is not loop]
        calls, self.calls = self.calls, []
        for call in calls:
            server, channel, fail = call
            if server.loop is loop:
                self._break(fail)
            elif channel.loop is not loop:
                self.calls.append(call)

    def _break(self, fail: Callable[..., None]) -> None:
        self.host.later(lambda: fail(grpc.StatusCode.UNAVAILABLE, "Socket closed"))

    def froze(self, loop: SimulatedEventLoop) -> None:
        """A host stands still: who pings a daemon there finds out."""
        ports = [port for port, server in self.servers.items() if server.loop is loop]

        def find_out() -> None:
            for channel in self.channels:
                if loop.is_frozen and channel._port in ports:
                    channel.pings_fail()

        loop._host.loop.call_later(_PINGS_FAIL_NS, find_out)

    def when_thawed(self, server: SimulatedServer, action: Callable[[], None]) -> None:
        """Does something when the host of a daemon goes on, if it does."""

        def look() -> None:
            if server.loop.is_frozen and server.loop.is_alive:
                server.loop._host.loop.call_later(20_000_000, look)
            else:
                action()

        look()


def running_loop() -> SimulatedEventLoop:
    """The event loop of the daemon that has its turn, or whose thread has."""
    loop = getattr(OF_THREAD, "loop", None) or asyncio.get_running_loop()
    assert isinstance(loop, SimulatedEventLoop)
    return loop
