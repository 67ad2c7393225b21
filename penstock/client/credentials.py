"""The shared token: where it comes from and how it travels.

Clients, daemons and slots of a cluster share one secret. It is the content of the file named by
``security.token-file``, else the environment variable ``PENSTOCK_TOKEN``, else what the JobManager has made for
itself in its directory; clients of the same user find that by the JobManager's address
(``penstock.client.announced_tokens``). Every gRPC call carries it as metadata. While it is exchanged there are
several (``penstock.client.keyring``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from penstock.client.keyring import Keyring, Token, keyring_of, parse_tokens
from penstock.errors import ConfigurationError

TOKEN_VARIABLE = "PENSTOCK_TOKEN"
AUTHORIZATION_KEY = "authorization"
AUTHORIZATION_SCHEME = "Bearer "

_MADE_BYTES = 32
_OWN_FILE = "token"


def load_token(token_file: str, environment: Mapping[str, str] | None = None) -> Keyring:
    """The cluster's secret, false where none is set.

    Args:
        token_file: value of ``security.token-file``; it wins over the environment. It may change later.
        environment: ``os.environ`` where not given.

    Raises:
        ConfigurationError: the file cannot be read, others can read it, or the secret is too short or
            not plain text.
    """
    if token_file:
        return Keyring.read(Path(token_file))
    text = (os.environ if environment is None else environment).get(TOKEN_VARIABLE, "")
    return Keyring(parse_tokens(text, TOKEN_VARIABLE))


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


def token_metadata(token: Token) -> tuple[tuple[str, str], ...]:
    """The metadata of a call; empty without a token."""
    shown = keyring_of(token).shown
    return ((AUTHORIZATION_KEY, f"{AUTHORIZATION_SCHEME}{shown}"),) if shown else ()
