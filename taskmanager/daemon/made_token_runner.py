"""Waits for the token that a JobManager of the same user makes for itself when it starts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

from common.log import get_logger
from penstock.client.announced_tokens import find_token
from penstock.client.credentials import load_token, own_token_file
from penstock.client.keyring import Keyring

_LOOK_INTERVAL_S = 0.1
_LOOKS_BEFORE_WARNING = 50
_LOOKS_PER_WARNING = 600


async def await_made_token(jobmanagers: Sequence[str], directory: Path) -> Keyring:
    """The token of the JobManager, as soon as it has one.

    A TaskManager waits for its JobManager as long as it runs, and so for this.

    Args:
        jobmanagers: where the JobManager is, or will be.
        directory: of this daemon; where the JobManager uses the same, its token lies there.

    Raises:
        ConfigurationError: a token's file cannot be used.
    """
    log = get_logger(__name__)
    for look in itertools.count():
        token = await asyncio.to_thread(_look, jobmanagers, directory)
        if token is not None:
            return token
        if look % _LOOKS_PER_WARNING == _LOOKS_BEFORE_WARNING:
            log.warning(
                "token.awaited",
                jobmanagers=list(jobmanagers),
                reason="no JobManager of this user has made a token for this address: start it, or give both "
                "daemons the same security.token-file (or PENSTOCK_TOKEN), or, where the JobManager was told "
                "so, set security.open-loopback",
            )
        await asyncio.sleep(_LOOK_INTERVAL_S)
    raise AssertionError("counting has no end")


def _look(jobmanagers: Sequence[str], directory: Path) -> Keyring | None:
    for address in jobmanagers:
        found = find_token(address)
        if found is not None:
            return found.token
    own = own_token_file(directory)
    return load_token(str(own)) if own.exists() else None
