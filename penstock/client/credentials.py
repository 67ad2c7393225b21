"""The shared token: where it comes from and how it travels.

Clients, daemons and slots of a cluster share one secret. It is the content of the file named by
``security.token-file``, else the environment variable ``PENSTOCK_TOKEN``, else what the JobManager has made for
itself in its directory; clients of the same user find that by the JobManager's address
(``penstock.client.announced_tokens``). Every gRPC call carries it as metadata.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from penstock.client.secret_files import read_secret
from penstock.errors import ConfigurationError

TOKEN_VARIABLE = "PENSTOCK_TOKEN"
AUTHORIZATION_KEY = "authorization"

_LENGTH_MIN = 8
_MADE_BYTES = 32
_OWN_FILE = "token"


def load_token(token_file: str, environment: Mapping[str, str] | None = None) -> str:
    """The cluster's secret, "" where none is set.

    Args:
        token_file: value of ``security.token-file``; it wins over the environment.
        environment: ``os.environ`` where not given.

    Raises:
        ConfigurationError: the file cannot be read, others can read it, or the secret is too short or
            not plain text.
    """
    if token_file:
        origin = f"the token file {token_file}"
        token = read_secret(Path(token_file), origin).strip()
        if not token:
            raise ConfigurationError(f"{origin} is empty: write a secret into it")
    else:
        origin = TOKEN_VARIABLE
        token = (os.environ if environment is None else environment).get(TOKEN_VARIABLE, "").strip()
    if token and (len(token) < _LENGTH_MIN or not token.isascii() or not token.isprintable()):
        raise ConfigurationError(
            f"{origin} holds no usable secret: at least {_LENGTH_MIN} printable ASCII characters "
            "on one line, for example the output of `openssl rand -hex 32`"
        )
    return token


def own_token_file(directory: Path) -> Path:
    """Where the JobManager of a directory keeps the token that it has made."""
    return directory / _OWN_FILE


def make_own_token(directory: Path) -> Path:
    """The file with the token of a directory, made where it is missing.

    Only who holds the directory's lock may call it.

    Raises:
        ConfigurationError: it cannot be written.
    """
    path = own_token_file(directory)
    temporary = path.with_name(f".{_OWN_FILE}.{os.getpid()}")
    if path.exists():
        return path
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
            file.write(secrets.token_hex(_MADE_BYTES) + "\n")
        temporary.rename(path)
    except OSError as error:
        raise ConfigurationError(f"the token file {path} cannot be written: {error}") from error
    return path


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call; empty without a token."""
    return ((AUTHORIZATION_KEY, f"Bearer {token}"),) if token else ()
