"""What a failed request to S3 means for a store, in words that say what to do."""

from __future__ import annotations

from typing import Any, Final

from penstock.errors import StoreTransient

_ABSENT: Final = frozenset({"NoSuchKey", "404", "NotFound"})
_RETRIED: Final = frozenset(
    {
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
    }
)
_CREDENTIALS: Final = frozenset(
    {
        "AccessDenied",
        "403",
        "Forbidden",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
    }
)
_CLOCK: Final = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_SERVER_ERROR: Final = 500
_TOO_MANY: Final = 429


def client_errors() -> tuple[type[Exception], ...]:
    """What a request may raise."""
    from botocore.exceptions import BotoCoreError, ClientError  # slow to import

    return BotoCoreError, ClientError, OSError


def code_of(error: Exception) -> str:
    """The code of the server, or the name of what happened on the way."""
    return str(_answer(error).get("Error", {}).get("Code", "")) or type(error).__name__


def status_of(error: Exception) -> int:
    """The HTTP status of the server's answer; 0 = there was none."""
    return int(_answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_absent(error: Exception) -> bool:
    """Whether the object is not there; a bucket that is not there is another matter."""
    return code_of(error) in _ABSENT


def is_retried(error: Exception) -> bool:
    """Whether the same request may succeed in a moment, without anybody doing anything."""
    from botocore.exceptions import (
        ClientError,
        ConnectionError,
        HTTPClientError,
        IncompleteReadError,
    )

    if isinstance(error, ClientError):
        status = status_of(error)
        return code_of(error) in _RETRIED or status >= _SERVER_ERROR or status == _TOO_MANY
    # A connection that fails comes as one of several, which have no common class below that of all errors.
    return isinstance(error, (ConnectionError, HTTPClientError, IncompleteReadError, OSError))


def is_refused(error: BaseException | None) -> bool:
    """Whether the server has said that it does not do what it was asked for; else it may have, or may yet: nobody has
    answered, or one who has passed the request on."""
    return isinstance(error, Exception) and 0 < status_of(error) < _SERVER_ERROR


def store_error(what: str, uri: str, error: Exception) -> StoreTransient:
    """The error to raise: the same call may succeed once somebody has acted.

    Args:
        what: what could not be done with the object: "written".
    """
    code = code_of(error)
    status = status_of(error)
    said = f"{code} (status {status})" if status else str(error)
    message = _answer(error).get("Error", {}).get("Message") or ""
    return StoreTransient(
        f"{uri} cannot be {what}: {said}{message and ': '}{message}; {_advice(code)}"
    )


def _advice(code: str) -> str:
    if code == "NoSuchBucket":
        return "make the bucket, or use another one; Penstock makes none"
    if code in _CLOCK:
        return "set the clock of this machine, or of the server: they differ too much"
    if code in _CREDENTIALS:
        return (
            "see s3.access-key and s3.secret-key, or where they are not set the environment and "
            "~/.aws of the user, and what the bucket's policy lets them do"
        )
    return "see whether the server at s3.endpoint can be reached"


def _answer(error: Exception) -> dict[str, Any]:
    return getattr(error, "response", None) or {}
