"""Our error classes as gRPC status, both ways: one table.

A server turns an error into the status of its class; the class itself and its fields travel as
trailing metadata, so that the caller raises the same class with the same message. A status without
that metadata comes from gRPC or from something that is not Penstock; it is mapped by its code.

Invariant: ``error_from_status(*status_of(error))`` is of the class of ``error``, for each class of
the table.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
import structlog
from typing_extensions import override

from penstock import errors
from penstock.errors import InvariantViolation, StreamError, Unrecoverable

ERROR_CLASS_KEY: Final = "penstock-error-class"
ERROR_FIELDS_KEY: Final = "penstock-error-fields-bin"

_Status = grpc.StatusCode

STATUS_BY_CLASS: Final[dict[type[StreamError], grpc.StatusCode]] = {
    errors.JobRejected: _Status.INVALID_ARGUMENT,
    errors.ConfigurationError: _Status.INVALID_ARGUMENT,
    errors.ExpressionError: _Status.INVALID_ARGUMENT,
    errors.TaskFailure: _Status.INTERNAL,
    errors.BadRecord: _Status.INTERNAL,
    errors.PartitionUnavailable: _Status.INTERNAL,
    errors.NotReproducible: _Status.INTERNAL,
    errors.TaskManagerLost: _Status.INTERNAL,
    errors.SparkFailed: _Status.INTERNAL,
    errors.NoResourceAvailable: _Status.RESOURCE_EXHAUSTED,
    errors.JobFailed: _Status.ABORTED,
    errors.JobCanceled: _Status.ABORTED,
    errors.JobNotFound: _Status.NOT_FOUND,
    errors.JobManagerUnreachable: _Status.UNAVAILABLE,
    errors.NotLeader: _Status.UNAVAILABLE,
    errors.RowsComeAgain: _Status.ABORTED,
    errors.ProtocolMismatch: _Status.FAILED_PRECONDITION,
    errors.Fenced: _Status.FAILED_PRECONDITION,
    errors.Unauthenticated: _Status.UNAUTHENTICATED,
    errors.CheckpointAborted: _Status.ABORTED,
    errors.StoreTransient: _Status.UNAVAILABLE,
    errors.StoreFull: _Status.RESOURCE_EXHAUSTED,
    errors.StoreNotFound: _Status.NOT_FOUND,
    errors.StoreCorrupt: _Status.DATA_LOSS,
    errors.Unrecoverable: _Status.INTERNAL,
    errors.StreamError: _Status.UNKNOWN,
}
"""Class -> status code. A subclass that is not listed takes its nearest base's."""

CLASS_BY_STATUS: Final[dict[grpc.StatusCode, type[StreamError]]] = {
    _Status.UNAUTHENTICATED: errors.Unauthenticated,
    _Status.UNIMPLEMENTED: errors.ProtocolMismatch,
    _Status.UNAVAILABLE: errors.StoreTransient,
    _Status.DEADLINE_EXCEEDED: errors.StoreTransient,
    _Status.CANCELLED: errors.StoreTransient,
}
"""Status code -> class where the other side named none; else ``StreamError``. A server that is told to end cancels the
calls that are under way."""

UNANSWERED: Final = frozenset({_Status.UNAVAILABLE, _Status.DEADLINE_EXCEEDED, _Status.CANCELLED})
"""Codes that gRPC itself gives to a call that got no answer."""

BROKEN: Final = "the connection broke before an answer came"
"""Why a call got no answer where somebody had let it in."""

_ENDED_HERE: Final = "Locally cancelled by application!"
"""What gRPC writes of calls that this process has ended itself."""

_REASONS: Final = (
    (("http1", "HTTP proxy"), "something that is not Penstock listens there"),
    (("refused",), "connection refused"),
    (("DNS", "name resolution", "No address", "lookup"), "its host name is not known"),
    (("No route", "unreachable"), "there is no route to its host"),
    (("ping", "keepalive", "timed out", "Timeout"), "the connection was silent for too long"),
    (
        ("Socket closed", "reset", "Broken pipe", "GOAWAY", "EOF", "shutdown"),
        BROKEN,
    ),
    (("CANCELLED", "Cancelled"), "the other side ended before it answered"),
)
"""What gRPC writes -> what has happened, the first that fits."""
_DETAILS_MAX: Final = 100

_CLASS_BY_NAME: Final = {cls.__name__: cls for cls in STATUS_BY_CLASS}
_FIELD_NAMES: Final = (
    "job_id",
    "cause",
    "vertex",
    "subtask_index",
    "operator",
    "row",
    "position",
    "checkpoint_id",
    "leader",
)
_MESSAGE_BYTES_MAX: Final = 4096
_TRACEBACK_CHARACTERS_MAX: Final = 12_000

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """A gRPC status that carries one of our errors."""

    code: grpc.StatusCode
    details: str
    metadata: Metadata


def status_of(error: StreamError) -> ErrorStatus:
    """The status that carries ``error`` to the caller."""
    listed = next(cls for cls in type(error).__mro__ if cls in STATUS_BY_CLASS)
    fields = {name: getattr(error, name) for name in _FIELD_NAMES if getattr(error, name, None)}
    if isinstance(error, errors.CheckpointAborted):
        fields["reason"] = _shortened(error.reason)
    traceback = getattr(error, "user_traceback", "")
    if traceback:
        # The end of a traceback says most.
        fields["user_traceback"] = traceback[-_TRACEBACK_CHARACTERS_MAX:]
    metadata: Metadata = ((ERROR_CLASS_KEY, listed.__name__),)
    if fields:
        metadata += ((ERROR_FIELDS_KEY, json.dumps(fields).encode()),)
    return ErrorStatus(STATUS_BY_CLASS[listed], _shortened(str(error)), metadata)


def error_from_status(
    code: grpc.StatusCode, details: str, metadata: Iterable[tuple[str, str | bytes]]
) -> StreamError:
    """The error that a status carries."""
    by_key = dict(metadata)
    name = _text(by_key.get(ERROR_CLASS_KEY, ""))
    cls = _CLASS_BY_NAME.get(name)
    if cls is None:
        origin = f" ({name})" if name else ""
        fallback = CLASS_BY_STATUS.get(code, StreamError)
        if code in UNANSWERED and not name:
            return fallback(unanswered(code, details))
        return fallback(f"{code.name}{origin}: {details or 'no details'}")
    fields = json.loads(_text(by_key.get(ERROR_FIELDS_KEY, "")) or "{}")
    if issubclass(cls, errors.CheckpointAborted):
        # Its message is made of its fields.
        return cls(fields.get("checkpoint_id", 0), fields.get("reason", details))
    error = cls(details)
    for key, value in fields.items():
        if hasattr(error, key):
            setattr(error, key, value)
    return error


def error_from_rpc(error: grpc.RpcError) -> StreamError:
    """The error behind what a call of ``grpc`` or ``grpc.aio`` raised.

    Args:
        error: a ``grpc.Call`` or a ``grpc.aio.AioRpcError``.
    """
    call: Any = error
    return error_from_status(call.code(), call.details() or "", call.trailing_metadata() or ())


def is_ended_here(error: grpc.RpcError) -> bool:
    """Whether this process has ended a call itself, as it does at Ctrl-C: that says nothing of the other side."""
    call: Any = error
    return call.code() is _Status.CANCELLED and call.details() == _ENDED_HERE


def is_ours(error: grpc.RpcError) -> bool:
    """Whether the other side has answered with an error of ours."""
    call: Any = error
    return ERROR_CLASS_KEY in dict(call.trailing_metadata() or ())


def unanswered(code: grpc.StatusCode, details: str | None) -> str:
    """Why a call got no answer, in words; what gRPC says of it where there are none."""
    if code is _Status.DEADLINE_EXCEEDED:
        return "no answer within the deadline"
    text = details or ""
    found = (reason for marks, reason in _REASONS if any(mark in text for mark in marks))
    last_error = text.rpartition("last error: ")[2][:_DETAILS_MAX]
    return next(found, f"no connection ({code.name}: {last_error or 'no details'})")


def handler_like(handler: Any, call: Callable[[Any, Any], Any]) -> Any:
    """A handler of the same kind as ``handler``, with the same messages, that does something else."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(
        call,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


class ErrorServerInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls whose handler raises with the status of the error.

    What is not a ``StreamError`` is a bug of ours: it is logged with its traceback and reaches the
    caller as ``StreamError`` that says so. The server goes on.

    Args:
        admit: looks at each request before its handler does; raises for one that is not to be taken.
    """

    def __init__(self, admit: Callable[[Any], None]) -> None:
        self._admit = admit
        self._log = structlog.get_logger(__name__)

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            return handler_like(handler, self._streaming(inner, method))
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        return handler_like(handler, self._single(inner, method))

    def _single(self, inner: Any, method: str) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            try:
                return await inner(self._admitted(request), context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of a call
                await self._abort(context, error, method)

        return call

    def _streaming(self, inner: Any, method: str) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in inner(self._admitted(request), context):
                    yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of a call
                await self._abort(context, error, method)

        return call

    def _admitted(self, request: Any) -> Any:
        """The request, or the stream of requests, once it has been looked at."""
        if isinstance(request, AsyncIterator):
            return self._each_admitted(request)
        self._admit(request)
        return request

    async def _each_admitted(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            self._admit(request)
            yield request

    async def _abort(self, context: Any, error: Exception, method: str) -> NoReturn:
        if not isinstance(error, StreamError):
            self._log.error("call.crashed", method=method, exc_info=error)
            # What is wrong inside is not mended by another attempt.
            kind = Unrecoverable if isinstance(error, InvariantViolation) else StreamError
            error = kind(
                f"{method} failed inside the server: {type(error).__name__}: {error}; "
                "its log has the traceback"
            )
        status = status_of(error)
        await context.abort(status.code, status.details, status.metadata)
        raise AssertionError("abort returned")


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _shortened(message: str) -> str:
    encoded = message.encode()
    if len(encoded) <= _MESSAGE_BYTES_MAX:
        return message
    return encoded[:_MESSAGE_BYTES_MAX].decode(errors="ignore") + " ..."
