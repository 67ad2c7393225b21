"""The shared token: where it comes from and how it travels.

Clients, daemons and slots of a cluster share one secret. It is the content of the file named by
``security.token-file``, else the environment variable ``PENSTOCK_TOKEN``. Every gRPC call carries
it as metadata.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import ConfigurationError

TOKEN_VARIABLE = "PENSTOCK_TOKEN"
AUTHORIZATION_KEY = "authorization"

_LENGTH_MIN = 8


def load_token(token_file: str, environment: Mapping[str, str] | None = None) -> str:
    """The cluster's secret, "" where none is set.

    Args:
        token_file: value of ``security.token-file``; it wins over the environment.
        environment: ``os.environ`` where not given.

    Raises:
        ConfigurationError: the file cannot be read, or the secret is too short or not plain text.
    """
    if token_file:
        origin = f"the token file {token_file}"
        try:
            token = Path(token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{origin} cannot be read: {error}") from error
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


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call; empty without a token."""
    return ((AUTHORIZATION_KEY, f"Bearer {token}"),) if token else ()
