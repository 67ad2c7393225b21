"""The tokens that a process takes from others, and the one that it shows them; they change while it runs.

A token is exchanged as a certificate is: the file holds several, one a line; the first one is shown, each of them lets in.
What cannot be used (a file that is empty, half of one, one that others can read) leaves in force what was read before,
and so does a file that is being written: a change counts when it is a second old, or the same at the next look.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

from typing_extensions import override

from penstock.client.secret_files import read_secret
from penstock.errors import ConfigurationError

_LENGTH_MIN: Final = 8
_COUNT_MAX: Final = 8
_SETTLED_NS: Final = 1_000_000_000
_PEM: Final = "-----BEGIN"
_State = tuple[int, int, int, int]
_NO_FILE: Final = (0, 0, 0, 0)


class Keyring:
    """See the module. May be used by several threads at once.

    Args:
        tokens: in force at first, the one to show first; none = there is no token.
        path: the file to read again, None = they stay.

    Attributes:
        older_count: how often one was accepted that is not the one to show: who still shows it, nearly (two threads may count as one).

    Example:
        >>> keyring = Keyring(["the-new-token", "the-old-token"])
        >>> keyring.shown, keyring.accepts("the-old-token"), keyring.accepts("another-token")
        ('the-new-token', True, False)
    """

    def __init__(self, tokens: Sequence[str], path: Path | None = None) -> None:
        self._tokens = _encoded(tokens)
        # Absolute, since slots work in directories of their own.
        self.path = None if path is None else path.absolute()
        self.older_count = 0
        self._state: _State | None = None
        """Of the file when it was read; None = not yet."""
        self._seen: _State | None = None
        """As of the last look."""
        self._told = ""
        self._refreshing = threading.Lock()

    @classmethod
    def read(cls, path: Path) -> Keyring:
        """What a file holds, now and later.

        Raises:
            ConfigurationError: it cannot be read, others can read it, or it holds no usable token.
        """
        keyring = cls((), path)
        keyring._take(path, _look(path))
        return keyring

    def __bool__(self) -> bool:
        """Whether there is a token at all."""
        return bool(self._tokens[0])

    @override
    def __repr__(self) -> str:
        """Without any of them."""
        return f"Keyring({self.count} tokens, {self.path})"

    @property
    def place(self) -> str:
        """Of the file, "" = they stay."""
        return "" if self.path is None else str(self.path)

    @property
    def count(self) -> int:
        """How many let in."""
        return len(self._tokens) if self else 0

    @property
    def shown(self) -> str:
        """The token to show others, "" = there is none."""
        return self._tokens[0].decode()

    @property
    def further(self) -> list[str]:
        """Those that let in besides the one to show."""
        return [token.decode() for token in self._tokens[1:]]

    @property
    def text(self) -> str:
        """All of them, as ``parse_tokens`` takes them."""
        return b"\n".join(self._tokens).decode()

    def accepts(self, given: str | bytes) -> bool:
        """Whether that is one of them; takes as long whichever it is."""
        shown, tokens = given.encode() if isinstance(given, str) else given, self._tokens
        matches = [hmac.compare_digest(shown, token) for token in tokens]
        is_known = any(matches)
        self.older_count += is_known and not matches[0]
        return is_known

    def refresh(self) -> bool:
        """Looks at the file, and reads it where it has changed and nobody is writing it.

        Returns:
            Whether other tokens are in force.

        Raises:
            ConfigurationError: it has changed and cannot be used; one reason is said once. Where it could not be read, it
                is tried again at the next look.
        """
        if self.path is None:
            return False
        with self._refreshing:
            return self._refresh(self.path)

    def _refresh(self, path: Path) -> bool:
        state, before = _look(path), self._tokens
        is_settled, self._seen = state == self._seen or _is_old(state), state
        if state == self._state:
            self._told = ""
            return False
        if not is_settled:
            return False
        try:
            self._take(path, state)
        except ConfigurationError as error:
            if str(error) == self._told:
                return False
            self._told = str(error)
            raise
        return before != self._tokens

    def _take(self, path: Path, state: _State) -> None:
        origin = f"the token file {path}"
        text = read_secret(path, origin)
        self._state = state  # what is wrong with it now stays so until it changes
        tokens = parse_tokens(text, origin)
        if not tokens:
            raise ConfigurationError(f"{origin} is empty: write a secret into it")
        self._tokens, self._told = _encoded(tokens), ""


Token: TypeAlias = str | Keyring
"""A token that stays, "" = none, or those of a file."""


def keyring_of(token: Token) -> Keyring:
    """The same as a keyring."""
    return token if isinstance(token, Keyring) else Keyring([token])


def parse_tokens(text: str, origin: str) -> tuple[str, ...]:
    """The tokens of a text, one a line; empty lines are none.

    Args:
        origin: what to call the text in an error.

    Raises:
        ConfigurationError: one of them is no usable token, or there are too many.

    Example:
        >>> parse_tokens("the-new-token\\nthe-old-token\\n", "the file")
        ('the-new-token', 'the-old-token')
    """
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    is_other_text = len(tokens) > 1 and any(map(_is_prose, tokens))
    if len(tokens) > _COUNT_MAX or is_other_text or any(map(_is_unusable, tokens)):
        raise ConfigurationError(
            f"{origin} holds no usable secret: at least {_LENGTH_MIN} printable ASCII characters "
            "on one line, for example the output of `openssl rand -hex 32`; while it is exchanged, up to "
            f"{_COUNT_MAX} of them, one a line without spaces or comments, of which the first one is shown to others"
        )
    return tokens


def _is_unusable(token: str) -> bool:
    return (
        len(token) < _LENGTH_MIN
        or not token.isascii()
        or not token.isprintable()
        or token.startswith(_PEM)
    )


def _is_prose(line: str) -> bool:
    """A comment, or a line of a file that was named by mistake; a single token may have been like that all along."""
    return line.startswith("#") or len(line.split()) > 1


def _encoded(tokens: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(token.encode() for token in tokens) or (b"",)


def _is_old(state: _State) -> bool:
    """Nobody has touched the file for a while, by the clock of its file system."""
    return state != _NO_FILE and time.time_ns() - state[-1] > _SETTLED_NS


def _look(path: Path) -> _State:
    """Tells two states of the file apart."""
    try:
        status = path.stat()
    except OSError:
        return _NO_FILE
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
