"""Keeps the tokens of a process those of their file, in a thread of its own: a file that hangs holds nobody up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from common.log import get_logger
from penstock.client.keyring import Keyring
from penstock.errors import ConfigurationError

_LOOK_INTERVAL_S: Final = 1.0


@contextmanager
def refreshed(keyring: Keyring) -> Iterator[None]:
    """For the time of the block; a change is in force within two seconds, and logged without what is in the file."""
    is_over = threading.Event()
    _start(keyring, is_over, get_logger(__name__))
    try:
        yield
    finally:
        is_over.set()


def refresh_always(keyring: Keyring) -> None:
    """The same as long as the process lives, in silence: its daemon has the same file, and says it."""
    _start(keyring, threading.Event(), None)


def _start(keyring: Keyring, is_over: threading.Event, log: Any) -> None:
    if keyring.path is not None:
        arguments = (keyring, is_over, log)
        threading.Thread(target=_follow, args=arguments, name="token", daemon=True).start()


def _follow(keyring: Keyring, is_over: threading.Event, log: Any) -> None:
    while True:
        _look(keyring, log)
        if is_over.wait(_LOOK_INTERVAL_S):
            return


def _look(keyring: Keyring, log: Any) -> None:
    has_changed, unusable = False, ""
    try:
        has_changed = keyring.refresh()
    except ConfigurationError as error:
        unusable = f"{error}; what was read before is used"
    except Exception as error:  # noqa: BLE001 - whatever it is, the next look may go well
        unusable = f"{type(error).__name__}: {error}; what was read before is used"
    if log is None:
        return
    if unusable:
        log.error("token.file_unusable", reason=unusable)
    elif has_changed:
        log.info("token.changed", token_file=keyring.place, count=keyring.count)
